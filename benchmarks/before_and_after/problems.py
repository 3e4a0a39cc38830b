"""Small models with data, the same in every run: random layers below a readout in closed form.

Everything is made in float64 from a seed and then cast to the precision of the model, so that
nothing depends on how a training run rounds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.before_and_after.verbs import Derivatives, FitOptions

F64 = torch.float64
INPUTS, WIDTH = 4, 12
TRAIN, VALID, KEPT, TEST = 200, 120, 300, 24
LOWEST = -0.8
"""The lower bound of the targets of the bounded problem."""


@dataclass(frozen=True)
class Problem:
    """A trained model and its data, in any form that `fit` accepts.

    Attributes:
        model: The model.
        train: Data of the fit.
        valid: Data of the calibration.
        kept: Data of conformal intervals.
        test: Data to predict, without targets.
        test_target: Their targets, one row per prediction.
        inputs: The same as arguments of a call `uq(*inputs)`.
        few: A few rows to predict, for results with an entry per pair of rows.
        noise: A function of batches that gives noise variances.
        groups: A function of batches that gives the conformal groups.
        weight: A function of batches that gives weights.
        binding: Options of the constructor.
        fit: Options of the fit.
        wrt: The input for derivatives; None where there is only one.
    """

    model: nn.Module
    train: Any
    valid: Any
    kept: Any
    test: Any
    test_target: Tensor
    inputs: tuple[Any, ...]
    few: Any
    noise: Callable[[Any], Tensor]
    groups: Callable[[Any], Tensor]
    weight: Callable[[Any], Tensor]
    binding: dict[str, Any] = field(default_factory=dict)
    fit: FitOptions = field(default_factory=FitOptions)
    wrt: str | None = None


def problems(dtype: torch.dtype, targets: int) -> dict[str, Problem]:
    """All problems in one precision, with one number of targets."""
    return {
        "plain": plain(dtype, targets),
        "weighted": weighted(dtype, targets),
        "masked": masked(dtype, targets),
        "huber": huber(dtype, targets),
        "bounded": bounded(dtype, targets),
        "scaled": scaled(dtype, targets),
        "softplus": softplus(dtype, targets),
        "atoms": atoms(dtype, targets),
        "forces": forces(dtype, targets),
    }


# --- Rows of a table ---


class Network(nn.Module):
    """Random features, a linear readout, and a tail behind it."""

    def __init__(self, targets: int, tail: nn.Module | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(targets)
        self.trunk = nn.Sequential(nn.Linear(INPUTS, WIDTH, dtype=F64), nn.Tanh())
        self.head = nn.Linear(WIDTH, targets, dtype=F64)
        self.tail = nn.Identity() if tail is None else tail
        with torch.no_grad():
            for parameter in self.trunk.parameters():
                parameter.copy_(0.6 * torch.randn(parameter.shape, generator=generator, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.head(self.trunk(x)))


class Scale(nn.Module):
    """Undoes a standardisation of the targets."""

    def __init__(self, targets: int) -> None:
        super().__init__()
        self.register_buffer("std", 1.5 + torch.arange(targets, dtype=F64))
        self.register_buffer("mean", torch.linspace(-1, 4, targets, dtype=F64))

    def forward(self, y: Tensor) -> Tensor:
        return y * self.std + self.mean


def solve_readout(head: nn.Linear, features: Tensor, y: Tensor) -> None:
    """Set weights and bias to those of a ridge regression."""
    columns = torch.cat([features, torch.ones(len(features), 1, dtype=F64)], 1)
    gram = columns.T @ columns + 0.1 * torch.eye(columns.shape[1], dtype=F64)
    with torch.no_grad():
        solution = torch.linalg.solve(gram, columns.T @ y)  # (D + 1, K)
        head.weight.copy_(solution[:-1].T)
        head.bias.copy_(solution[-1])


def signal(x: Tensor, targets: int) -> Tensor:
    """What there is to learn, (N, K)."""
    return torch.sin(x[:, :1] + torch.arange(targets)) + 0.3 * x[:, 1:2] * x[:, 2:3]


def table(rows: int, targets: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs (N, 4), and targets (N, K) whose noise follows an input and has heavy tails."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, INPUTS, generator=generator, dtype=F64)
    noise = torch.randn(rows, targets, generator=generator, dtype=F64)
    heavy = noise * torch.rand(rows, 1, generator=generator, dtype=F64).clamp(min=0.1) ** -0.4
    return x, signal(x, targets) + (0.05 + 0.2 * x[:, 1:2].abs()) * heavy


def tables(targets: int) -> list[tuple[Tensor, Tensor]]:
    """Training, validation, conformal and test rows. The last test rows lie far away."""
    sets = [table(rows, targets, seed) for seed, rows in enumerate((TRAIN, VALID, KEPT, TEST))]
    sets[-1][0][-4:] *= 4
    return sets


def of_tables(
    model: nn.Module,
    sets: list[tuple[Tensor, Tensor]],
    dtype: torch.dtype,
    options: FitOptions | None = None,
) -> Problem:
    """A problem whose data are tensors (x, y)."""
    train, valid, kept, test = [(x.to(dtype), y.to(dtype)) for x, y in sets]
    return Problem(
        model=model.to(dtype).requires_grad_(False),
        train=train,
        valid=valid,
        kept=kept,
        test=test[0],
        test_target=test[1],
        inputs=(test[0],),
        few=test[0][-6:],
        noise=lambda batch: 0.01 + 0.1 * inputs_of(batch)[:, 1].square(),
        groups=lambda batch: (inputs_of(batch)[:, 1] > 0).long(),
        weight=row_weight,
        fit=FitOptions() if options is None else options,
    )


def inputs_of(batch: Any) -> Tensor:
    """The inputs of a batch, which comes without targets where something is predicted."""
    return batch if isinstance(batch, Tensor) else batch[0]


def row_weight(batch: Any) -> Tensor:
    """Weights of rows that follow an input."""
    return 0.5 + inputs_of(batch)[:, 2].abs()


def plain(dtype: torch.dtype, targets: int) -> Problem:
    """A network and the squared error."""
    sets = tables(targets)
    model = Network(targets)
    solve_readout(model.head, model.trunk(sets[0][0]), sets[0][1])
    return of_tables(model, sets, dtype)


def weighted(dtype: torch.dtype, targets: int) -> Problem:
    """Rows with weights."""
    sets = tables(targets)
    model = Network(targets)
    solve_readout(model.head, model.trunk(sets[0][0]), sets[0][1])
    return of_tables(model, sets, dtype, FitOptions(sample_weight=row_weight))


def masked_loss(prediction: Tensor, target: Tensor) -> Tensor:
    """Half the squared error, zero where the target is missing."""
    return torch.where(target.isnan(), 0.0, (prediction - target.nan_to_num()).square() / 2)


def masked(dtype: torch.dtype, targets: int) -> Problem:
    """Every third row lacks its last target, in training and validation data."""
    sets = tables(targets)
    model = Network(targets)
    solve_readout(model.head, model.trunk(sets[0][0]), sets[0][1])
    for _, y in sets[:2]:
        y[::3, -1] = torch.nan
    return of_tables(model, sets, dtype, FitOptions(loss=masked_loss))


def huber(dtype: torch.dtype, targets: int) -> Problem:
    """A loss whose curvature differs between rows and targets."""
    sets = tables(targets)
    model = Network(targets)
    solve_readout(model.head, model.trunk(sets[0][0]), sets[0][1])
    return of_tables(model, sets, dtype, FitOptions(loss="huber"))


def bounded(dtype: torch.dtype, targets: int) -> Problem:
    """Targets with a lower bound, which many of them reach."""
    sets = [(x, y.clamp(min=LOWEST)) for x, y in tables(targets)]
    model = Network(targets)
    solve_readout(model.head, model.trunk(sets[0][0]), sets[0][1])
    return of_tables(model, sets, dtype)


def scaled(dtype: torch.dtype, targets: int) -> Problem:
    """A linear tail: the outputs are brought to the units of the targets."""
    tail = Scale(targets)
    model = Network(targets, tail)
    sets = tables(targets)
    solve_readout(model.head, model.trunk(sets[0][0]), sets[0][1])
    return of_tables(model, [(x, tail(y)) for x, y in sets], dtype)


def softplus(dtype: torch.dtype, targets: int) -> Problem:
    """A tail that is not linear."""
    model = Network(targets, nn.Softplus())
    sets = tables(targets)
    solve_readout(model.head, model.trunk(sets[0][0]), sets[0][1])
    return of_tables(model, [(x, nn.functional.softplus(y)) for x, y in sets], dtype)


# --- Sums over atoms ---


class AtomNetwork(Network):
    """The sum of a network's outputs over the atoms of each structure."""

    def forward(self, x: Tensor, owner: Tensor) -> Tensor:
        terms = super().forward(x)
        structures = int(owner.max()) + 1
        return terms.new_zeros(structures, terms.shape[1]).index_add(0, owner, terms)


def structures(count: int, targets: int, seed: int) -> dict[str, Tensor]:
    """A batch of structures with two to five atoms each."""
    generator = torch.Generator().manual_seed(seed)
    atoms_of_each = torch.randint(2, 6, (count,), generator=generator)
    owner = torch.arange(count).repeat_interleave(atoms_of_each)
    x = torch.randn(len(owner), INPUTS, generator=generator, dtype=F64)
    sums = torch.zeros(count, targets, dtype=F64).index_add(0, owner, signal(x, targets))
    noise = 0.3 * torch.randn(count, targets, generator=generator, dtype=F64)
    return {"x": x, "owner": owner, "y": sums + noise}


def atoms(dtype: torch.dtype, targets: int) -> Problem:
    """Batches of structures, read by `forward` and `target`."""
    parts = {"train": range(8), "valid": range(10, 15), "kept": range(20, 30), "test": [40]}
    batches = {
        name: [structures(20, targets, seed) for seed in seeds] for name, seeds in parts.items()
    }
    model = AtomNetwork(targets)
    x = torch.cat([batch["x"] for batch in batches["train"]])
    solve_readout(model.head, model.trunk(x), signal(x, targets))
    for batch in itertools.chain(*batches.values()):
        batch["x"], batch["y"] = batch["x"].to(dtype), batch["y"].to(dtype)
    test = batches["test"][0]
    return Problem(
        model=model.to(dtype).requires_grad_(False),
        train=batches["train"],
        valid=batches["valid"],
        kept=batches["kept"],
        test=[test],
        test_target=test["y"],
        inputs=(test,),
        few=[test],
        noise=lambda batch: 0.05 * torch.bincount(batch["owner"]).to(dtype),
        groups=lambda batch: (torch.bincount(batch["owner"]) > 3).long(),
        weight=lambda batch: 1 / torch.bincount(batch["owner"]).to(dtype),
        binding={
            "forward": lambda model, batch: model(batch["x"], batch["owner"]),
            "target": lambda batch: batch["y"],
        },
        wrt="x",
    )


# --- Derivatives in the loss ---


def with_slopes(rows: int, targets: int, seed: int) -> dict[str, Tensor]:
    """Inputs, targets (N, K) and derivatives, (N, 4) for one target and (N, K, 4) for several."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, INPUTS, generator=generator, dtype=F64)
    jacobian = torch.func.vmap(torch.func.jacrev(lambda row: signal(row[None], targets)[0]))(x)
    slope = jacobian + 0.1 * torch.randn(jacobian.shape, generator=generator, dtype=F64)
    noise = 0.1 * torch.randn(rows, targets, generator=generator, dtype=F64)
    return {
        "x": x,
        "y": signal(x, targets) + noise,
        "slope": slope[:, 0] if targets == 1 else slope,
    }


def forces(dtype: torch.dtype, targets: int) -> Problem:
    """A loss of values and derivatives; batches are dictionaries."""
    sizes = {"train": 60, "valid": 70, "kept": 80, "test": 12}
    # Sizes serve as seeds too, so that no set repeats rows of another.
    sets = {name: with_slopes(rows, targets, seed=rows) for name, rows in sizes.items()}
    model = Network(targets)
    solve_readout(model.head, model.trunk(sets["train"]["x"]), sets["train"]["y"])
    for batch in sets.values():
        batch.update({name: tensor.to(dtype) for name, tensor in batch.items()})
    test = sets["test"]["x"]
    return Problem(
        model=model.to(dtype).requires_grad_(False),
        train=[sets["train"]],
        valid=[sets["valid"]],
        kept=[sets["kept"]],
        test={"x": test},
        test_target=sets["test"]["y"],
        inputs=(test,),
        few={"x": test[:6]},
        noise=lambda batch: 0.01 + 0.1 * batch["x"][:, 1].square(),
        groups=lambda batch: (batch["x"][:, 1] > 0).long(),
        weight=lambda batch: 0.5 + batch["x"][:, 2].abs(),
        fit=FitOptions(derivatives=Derivatives("x", weight=0.3, target="slope")),
        wrt="x",
    )
