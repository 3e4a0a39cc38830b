"""One net of each kind with the data it knows and data that it does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

NOISE = 0.1
"""Of the targets, whose spread is about one."""

Inputs = tuple[Tensor, ...]
Data = list[tuple[Inputs, Tensor]]
"""Batches: positional inputs of a net, and targets (N, 1)."""


@dataclass(frozen=True)
class Case:
    """A net, and data of both sorts.

    Attributes:
        net: not trained yet.
        train: batches to learn from.
        valid: batches to calibrate on.
        inside: test batches like those.
        unlike: test batches that are not, by what is unlike in them.
        rate: of the training by Adam.
    """

    net: nn.Module
    train: Data
    valid: Data
    inside: Data
    unlike: dict[str, Data] = field(default_factory=dict)
    rate: float = 3e-3


def trained(case: Case, steps: int) -> nn.Module:
    """The case's net after so many steps, batch by batch."""
    optimiser = torch.optim.Adam(case.net.parameters(), lr=case.rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for step in range(steps):
        inputs, y = case.train[step % len(case.train)]
        optimiser.zero_grad()
        loss = (case.net(*inputs) - y).square().mean()
        loss.backward()
        optimiser.step()
        schedule.step()
    return case.net.eval()


def in_batches(x: Tensor, y: Tensor, size: int = 256) -> Data:
    """Rows of one input, in batches."""
    pairs = zip(x.split(size), y.split(size), strict=True)
    return [((inputs,), targets) for inputs, targets in pairs]


# --- inputs behind a layer norm, and behind two units -------------------------------------------


def smooth(x: Tensor) -> Tensor:
    """A function of six inputs, (N, 1), of a spread of about one."""
    value = torch.sin(2 * x[:, 0]) + 0.5 * x[:, 1] * x[:, 2] + 0.5 * x[:, 3]
    return value[:, None] / 1.2


def layer_norm(seed: int) -> Case:
    """Inputs that are normalised first: the net cannot know their size."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.LayerNorm(6), nn.Linear(6, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1)
    )
    return rows_of(net, {"three times as large": lambda x: 3 * x})


def bottleneck(seed: int) -> Case:
    """A last layer of two units."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(6, 64), nn.SiLU(), nn.Linear(64, 2), nn.Tanh(), nn.Linear(2, 1))
    return rows_of(
        net,
        {
            "three times as large": lambda x: 3 * x,
            "inputs that do not matter, far out": _with_noise,
        },
    )


def _with_noise(x: Tensor) -> Tensor:
    """Rows whose last two inputs, which do not matter, lie far out."""
    return torch.cat([x[:, :4], 6 * torch.sign(x[:, 4:])], 1)


def rows_of(net: nn.Module, unlike: dict[str, Callable[[Tensor], Tensor]]) -> Case:
    """Normal inputs of `smooth` for a net, and others made of these."""
    x = torch.randn(4000, 6)
    y = smooth(x) + NOISE * torch.randn(len(x), 1)
    far = {name: change(torch.randn(500, 6)) for name, change in unlike.items()}
    return Case(
        net,
        in_batches(x[:2500], y[:2500]),
        in_batches(x[2500:3200], y[2500:3200]),
        in_batches(x[3200:], y[3200:]),
        {name: in_batches(rows, smooth(rows)) for name, rows in far.items()},
    )


# --- images -------------------------------------------------------------------------------------


def convolution(seed: int) -> Case:
    """By how much images of digits were turned, learnt from zeros to fours."""
    from scipy.ndimage import rotate
    from sklearn.datasets import load_digits

    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8) / 16

    def turned(which: np.ndarray) -> tuple[Tensor, Tensor]:
        angles = rng.uniform(-60, 60, len(which))
        found = [
            rotate(images[i], angle, reshape=False, order=1)
            for i, angle in zip(which, angles, strict=True)
        ]
        x = torch.as_tensor(np.stack(found), dtype=torch.float32)[:, None]
        return x, torch.as_tensor(angles / 35, dtype=torch.float32)[:, None]

    known = rng.permutation(np.flatnonzero(labels < 5))
    other = rng.permutation(np.flatnonzero(labels >= 5))[:300]
    parts = [np.tile(part, 3) for part in np.split(known, [550, 720])]
    train, valid, inside = (turned(part) for part in parts)
    net = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 1)),
    )
    x, y = inside
    return Case(
        net,
        in_batches(*train, 128),
        in_batches(*valid),
        in_batches(x, y),
        {
            "fives to nines": in_batches(*turned(other)),
            "dark on light": in_batches(1 - x, y),
            "noise": in_batches(torch.rand_like(x), y),
        },
    )


# --- sequences ----------------------------------------------------------------------------------

TOKENS, KNOWN, LENGTH = 24, 18, 12


class Sequences(nn.Module):
    """Tokens, embedded, two blocks that normalise first, and their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, 32)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                32, 4, 64, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"
            )
            for _ in range(2)
        )
        self.out = nn.Linear(32, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Of token numbers (N, T)."""
        hidden = self.tokens(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        out: Tensor = self.out(hidden.mean(1))
        return out


def transformer(seed: int) -> Case:
    """A property of sequences of tokens, some of which never occur in training."""
    torch.manual_seed(seed)
    values, pairs = torch.randn(TOKENS), 0.3 * torch.randn(TOKENS, TOKENS)

    def labelled(tokens: Tensor) -> tuple[Tensor, Tensor]:
        neighbours = pairs[tokens[:, :-1], tokens[:, 1:]].mean(1)
        value = values[tokens].mean(1) + neighbours
        return tokens, 3 * value[:, None] + NOISE * torch.randn(len(tokens), 1)

    drawn = torch.randint(0, KNOWN, (4000, LENGTH))
    repeated = torch.randint(0, KNOWN, (400, 1)).expand(-1, LENGTH).clone()
    strange = torch.randint(0, KNOWN, (400, LENGTH))
    strange[:, : LENGTH // 3] = torch.randint(KNOWN, TOKENS, (400, LENGTH // 3))
    return Case(
        Sequences(),
        in_batches(*labelled(drawn[:2800])),
        in_batches(*labelled(drawn[2800:3400])),
        in_batches(*labelled(drawn[3400:])),
        {
            "a third of unseen tokens": in_batches(*labelled(strange)),
            "one token repeated": in_batches(*labelled(repeated)),
        },
        rate=2e-3,
    )


# --- graphs -------------------------------------------------------------------------------------


class Clusters(nn.Module):
    """Energies of clusters of atoms: messages by distance, a sum over atoms."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.Embedding(3, 16)
        self.distances = nn.Linear(12, 16)
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 32)
        self.out = nn.Linear(32, 1)
        self.register_buffer("centres", torch.linspace(0.6, 3.0, 12))

    def forward(self, positions: Tensor, kinds: Tensor, cluster: Tensor, count: Tensor) -> Tensor:
        """Of atoms (A, 3), their kinds (A,), and the cluster of each (A,), of so many."""
        near = (cluster[:, None] == cluster).fill_diagonal_(False).nonzero().T
        lengths = (positions[near[0]] - positions[near[1]]).norm(dim=1)
        waves = torch.exp(-8 * (lengths[:, None] - self.centres).square())
        messages = torch.tanh(self.distances(waves)) * self.kinds(kinds[near[1]])
        atoms = self.kinds(kinds).index_add(0, near[0], messages)
        hidden = nn.functional.silu(self.second(nn.functional.silu(self.first(atoms))))
        energies = self.out(hidden)
        return energies.new_zeros(int(count), 1).index_add(0, cluster, energies)


def graph(seed: int) -> Case:
    """Energies of four to eight atoms of two kinds."""
    torch.manual_seed(seed)

    def batch(
        count: int, *, size: tuple[int, int] = (4, 9), squeeze: float = 1.0, new: int = 0
    ) -> Any:
        sizes = torch.randint(*size, (count,))
        cluster = torch.repeat_interleave(torch.arange(count), sizes)
        grid = torch.cartesian_prod(*[torch.arange(3.0)] * 3)
        positions = torch.cat([grid[torch.randperm(27)[:n]] for n in sizes.tolist()])
        positions = squeeze * 1.1 * (positions + 0.12 * torch.randn_like(positions))
        kinds = torch.randint(0, 2, (len(cluster),))
        if new:  # the first atom of each is of a kind that no net has seen
            kinds[torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)[:-1]])] = 2
        near = (cluster[:, None] == cluster).triu(1).nonzero().T
        inverse = (1 / (positions[near[0]] - positions[near[1]]).norm(dim=1)).clamp(max=2)
        strength = 1.0 + 0.5 * (kinds[near[0]] == kinds[near[1]])
        each = strength * (inverse**6 - 1.5 * inverse**3)
        energy = each.new_zeros(count).index_add(0, cluster[near[0]], each)[:, None]
        return (positions, kinds, cluster, torch.tensor(count)), energy

    return Case(
        Clusters(),
        [batch(64) for _ in range(30)],
        [batch(64) for _ in range(8)],
        [batch(64) for _ in range(8)],
        {
            "squeezed by a fifth": [batch(64, squeeze=0.8) for _ in range(6)],
            "an atom of an unseen kind": [batch(64, new=1) for _ in range(6)],
        },
    )


CASES: dict[str, Callable[[int], Case]] = {
    "layer norm": layer_norm,
    "two-unit bottleneck": bottleneck,
    "convolutions": convolution,
    "transformer": transformer,
    "graph of atoms": graph,
}
