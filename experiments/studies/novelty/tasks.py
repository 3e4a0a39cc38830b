"""One network of each kind, with data that it knows and data that are unlike these.

`TASKS` has a function a kind, from a seed to a `Task`: an untrained network with training,
validation and test batches, and test batches that are unlike the training. `trained` trains it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

NOISE = 0.1
"""The standard deviation of the targets' noise; the targets' spread is about one."""

Inputs = tuple[Tensor, ...]
Data = list[tuple[Inputs, Tensor]]
"""Batches: positional inputs of a network, and targets (N, 1)."""


@dataclass(frozen=True)
class Task:
    """A network, and data of both sorts.

    Attributes:
        network: the network, not trained yet.
        train: batches to learn from.
        valid: batches to calibrate on.
        inside: test batches like those.
        unlike: test batches that are not, by what is unlike in them.
        rate: the learning rate of Adam.
    """

    network: nn.Module
    train: Data
    valid: Data
    inside: Data
    unlike: dict[str, Data] = field(default_factory=dict)
    rate: float = 3e-3


def trained(task: Task, steps: int) -> nn.Module:
    """Train the task's network for so many steps, batch by batch."""
    optimiser = torch.optim.Adam(task.network.parameters(), lr=task.rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for step in range(steps):
        inputs, y = task.train[step % len(task.train)]
        optimiser.zero_grad()
        loss = (task.network(*inputs) - y).square().mean()
        loss.backward()
        optimiser.step()
        schedule.step()
    return task.network.eval()


def in_batches(x: Tensor, y: Tensor, size: int = 256) -> Data:
    """Cut rows of one input tensor into batches."""
    pairs = zip(x.split(size), y.split(size), strict=True)
    return [((inputs,), targets) for inputs, targets in pairs]


# --- inputs behind a layer norm, and behind two units -------------------------------------------


def smooth(x: Tensor) -> Tensor:
    """A function of six inputs, (N, 1), whose spread is about one. The last two do not matter."""
    value = torch.sin(2 * x[:, 0]) + 0.5 * x[:, 1] * x[:, 2] + 0.5 * x[:, 3]
    return value[:, None] / 1.2


def layer_norm(seed: int) -> Task:
    """Inputs that are normalised first, so that the later layers cannot know their size."""
    torch.manual_seed(seed)
    network = nn.Sequential(
        nn.LayerNorm(6),
        nn.Linear(6, 64),
        nn.SiLU(),
        nn.Linear(64, 64),
        nn.SiLU(),
        nn.Linear(64, 1),
    )
    return smooth_task(network, {"three times as large": _tripled})


def bottleneck(seed: int) -> Task:
    """A last layer of two units."""
    torch.manual_seed(seed)
    network = nn.Sequential(
        nn.Linear(6, 64), nn.SiLU(), nn.Linear(64, 2), nn.Tanh(), nn.Linear(2, 1)
    )
    changes = {
        "three times as large": _tripled,
        "inputs that do not matter, far out": _far_where_it_does_not_matter,
    }
    return smooth_task(network, changes)


def smooth_task(network: nn.Module, changes: dict[str, Callable[[Tensor], Tensor]]) -> Task:
    """Normal inputs and targets by `smooth` for a network.

    Args:
        network: the untrained network.
        changes: what makes other normal inputs unlike these, by name.
    """
    x = torch.randn(4000, 6)
    y = smooth(x) + NOISE * torch.randn(len(x), 1)
    unlike = {}
    for name, change in changes.items():
        changed_x = change(torch.randn(500, 6))
        unlike[name] = in_batches(changed_x, smooth(changed_x))
    return Task(
        network=network,
        train=in_batches(x[:2500], y[:2500]),
        valid=in_batches(x[2500:3200], y[2500:3200]),
        inside=in_batches(x[3200:], y[3200:]),
        unlike=unlike,
    )


def _tripled(x: Tensor) -> Tensor:
    """Inputs three times as large."""
    return 3 * x


def _far_where_it_does_not_matter(x: Tensor) -> Tensor:
    """Inputs whose last two columns, which do not matter, lie far out."""
    return torch.cat([x[:, :4], 6 * torch.sign(x[:, 4:])], 1)


# --- images -------------------------------------------------------------------------------------


def convolution(seed: int) -> Task:
    """By how much images of digits were turned, learnt from zeros to fours."""
    from scipy.ndimage import rotate
    from sklearn.datasets import load_digits

    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8) / 16

    def turned(places: np.ndarray) -> tuple[Tensor, Tensor]:
        """Images (N, 1, 8, 8) turned at random, and their angles in units of 35 degrees."""
        angles = rng.uniform(-60, 60, len(places))
        turned_images = [
            rotate(images[place], angle, reshape=False, order=1)
            for place, angle in zip(places, angles, strict=True)
        ]
        x = torch.as_tensor(np.stack(turned_images), dtype=torch.float32)[:, None]
        return x, torch.as_tensor(angles / 35, dtype=torch.float32)[:, None]

    low_digits = rng.permutation(np.flatnonzero(labels < 5))
    high_digits = rng.permutation(np.flatnonzero(labels >= 5))[:300]
    # Every image of the low digits comes three times, each time turned by another angle.
    train_places, valid_places, test_places = np.split(low_digits, [550, 720])
    train_x, train_y = turned(np.tile(train_places, 3))
    valid_x, valid_y = turned(np.tile(valid_places, 3))
    test_x, test_y = turned(np.tile(test_places, 3))
    network = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 1),
    )
    high_x, high_y = turned(high_digits)
    return Task(
        network=network,
        train=in_batches(train_x, train_y, 128),
        valid=in_batches(valid_x, valid_y),
        inside=in_batches(test_x, test_y),
        unlike={
            "fives to nines": in_batches(high_x, high_y),
            "dark on light": in_batches(1 - test_x, test_y),
            "noise": in_batches(torch.rand_like(test_x), test_y),
        },
    )


# --- sequences ----------------------------------------------------------------------------------

TOKENS = 24
"""Tokens that there are."""

KNOWN = 18
"""Tokens that occur in training, the first ones."""

LENGTH = 12
"""Tokens of a sequence."""


class Sequences(nn.Module):
    """A property of token sequences: embedding, two blocks that normalise first, and the mean."""

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
        """Predict (N, 1) from token numbers (N, T)."""
        hidden = self.tokens(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        output: Tensor = self.out(hidden.mean(1))
        return output


def transformer(seed: int) -> Task:
    """A property of sequences of tokens, some of which never occur in training."""
    torch.manual_seed(seed)
    token_values = torch.randn(TOKENS)
    pair_values = 0.3 * torch.randn(TOKENS, TOKENS)

    def batches(tokens: Tensor) -> Data:
        """Sequences with noisy targets: mean values of the tokens and of neighbouring pairs."""
        of_pairs = pair_values[tokens[:, :-1], tokens[:, 1:]].mean(1)
        value = token_values[tokens].mean(1) + of_pairs
        return in_batches(tokens, 3 * value[:, None] + NOISE * torch.randn(len(tokens), 1))

    sequences = torch.randint(0, KNOWN, (4000, LENGTH))
    repeated = torch.randint(0, KNOWN, (400, 1)).expand(-1, LENGTH).clone()
    strange = torch.randint(0, KNOWN, (400, LENGTH))
    strange[:, : LENGTH // 3] = torch.randint(KNOWN, TOKENS, (400, LENGTH // 3))
    return Task(
        network=Sequences(),
        train=batches(sequences[:2800]),
        valid=batches(sequences[2800:3400]),
        inside=batches(sequences[3400:]),
        unlike={
            "a third of unseen tokens": batches(strange),
            "one token repeated": batches(repeated),
        },
        rate=2e-3,
    )


# --- graphs -------------------------------------------------------------------------------------

UNSEEN_KIND = 2
"""A kind of atoms that does not occur in training."""


class Clusters(nn.Module):
    """Energies of clusters of atoms: messages by distance, and a sum over atoms."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.Embedding(3, 16)
        self.distances = nn.Linear(12, 16)
        self.first = nn.Linear(16, 64)
        self.second = nn.Linear(64, 32)
        self.out = nn.Linear(32, 1)
        self.register_buffer("centres", torch.linspace(0.6, 3.0, 12))

    def forward(self, positions: Tensor, kinds: Tensor, cluster: Tensor, count: Tensor) -> Tensor:
        """Predict the energies of clusters, (count, 1).

        Args:
            positions: the places of all atoms, (A, 3).
            kinds: their kinds, (A,).
            cluster: the cluster of each atom, (A,).
            count: the number of clusters.
        """
        # Ordered pairs of different atoms of one cluster, (2, pairs).
        receiver, sender = (cluster[:, None] == cluster).fill_diagonal_(False).nonzero().T
        lengths = (positions[receiver] - positions[sender]).norm(dim=1)
        waves = torch.exp(-8 * (lengths[:, None] - self.centres).square())
        messages = torch.tanh(self.distances(waves)) * self.kinds(kinds[sender])
        atoms = self.kinds(kinds).index_add(0, receiver, messages)
        hidden = nn.functional.silu(self.first(atoms))
        hidden = nn.functional.silu(self.second(hidden))
        energies = self.out(hidden)
        return energies.new_zeros(int(count), 1).index_add(0, cluster, energies)


def graph(seed: int) -> Task:
    """Energies of clusters of four to eight atoms of two kinds."""
    torch.manual_seed(seed)
    return Task(
        network=Clusters(),
        train=[_cluster_batch() for _ in range(30)],
        valid=[_cluster_batch() for _ in range(8)],
        inside=[_cluster_batch() for _ in range(8)],
        unlike={
            "squeezed by a fifth": [_cluster_batch(squeeze=0.8) for _ in range(6)],
            "an atom of an unseen kind": [_cluster_batch(unseen_kind=True) for _ in range(6)],
        },
    )


def _cluster_batch(
    count: int = 64, *, squeeze: float = 1.0, unseen_kind: bool = False
) -> tuple[Inputs, Tensor]:
    """Draw clusters on a disturbed grid, with the energies of a pair potential.

    Args:
        count: the number of clusters.
        squeeze: a factor on all distances.
        unseen_kind: whether the first atom of each cluster is of the kind `UNSEEN_KIND`.
    """
    sizes = torch.randint(4, 9, (count,))
    cluster = torch.repeat_interleave(torch.arange(count), sizes)
    axis = torch.arange(3.0)
    grid = torch.cartesian_prod(axis, axis, axis)
    positions = torch.cat([grid[torch.randperm(27)[:size]] for size in sizes.tolist()])
    positions = squeeze * 1.1 * (positions + 0.12 * torch.randn_like(positions))
    kinds = torch.randint(0, 2, (len(cluster),))
    if unseen_kind:
        first_atoms = torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)[:-1]])
        kinds[first_atoms] = UNSEEN_KIND
    energies = _pair_energies(positions, kinds, cluster, count)
    return (positions, kinds, cluster, torch.tensor(count)), energies


def _pair_energies(positions: Tensor, kinds: Tensor, cluster: Tensor, count: int) -> Tensor:
    """Energies (count, 1) by r^-6 - 1.5 r^-3, half as large again between atoms of one kind."""
    first, second = (cluster[:, None] == cluster).triu(1).nonzero().T
    # Inverse distances are cut off where atoms nearly coincide.
    inverse = (1 / (positions[first] - positions[second]).norm(dim=1)).clamp(max=2)
    strength = 1.0 + 0.5 * (kinds[first] == kinds[second])
    pairs = strength * (inverse**6 - 1.5 * inverse**3)
    return pairs.new_zeros(count).index_add(0, cluster[first], pairs)[:, None]


TASKS: dict[str, Callable[[int], Task]] = {
    "layer norm": layer_norm,
    "two-unit bottleneck": bottleneck,
    "convolutions": convolution,
    "transformer": transformer,
    "graph of atoms": graph,
}
