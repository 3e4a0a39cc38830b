"""Small seeded models with every kind of readout, for the tests of readout discovery.

`build(id)` makes a fresh `Case`; `IDS` and `OUTCOMES` serve parametrisation. The weights depend on
the case alone, the data on `draw`, so that two draws are two batches for the same model. Everything
is float64 unless the case is about a dtype.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune

from tests.support import oracle
from tests.support.nets import Net

Outcome = Literal["plain", "linear", "part", "local", "refused"]

WARNINGS: dict[Outcome, str] = {"local": "not linear", "part": "left out of the readout"}

ROWS = 12  # samples in a batch
STEPS = 5  # time steps, or atoms in a padded sample
INPUTS = 3
WIDTH = 8


@dataclass(frozen=True)
class Case:
    """A model, one batch for it, and what readout discovery should make of it.

    Attributes:
        model: the trained regressor.
        args, kwargs: inputs of the model's forward.
        target: shaped like the selected output, unless the case is about a misfit.
        head_names: module paths of the readout heads in call order; "" is the model itself;
            None where there is none.
        outcome: "plain" if the output is a linear layer's output, at most reshaped; "linear" if it
            is linear in the heads' weights; "part" if others are left out, with a warning; "local"
            if it is not linear, so that the derivative at the trained weights is used, with a
            warning; "refused" if there must be an error.
        options: keyword arguments for `LastLayerRigidity`.
        note: why the case is here.
        match: a pattern that the error or the warning must contain.
        select: picks the predicted tensor from what forward returns.
        batch: what a loader would give, if that is not (*args, target) or a dict of the inputs.
        raw_parameters: names of the readout parameters where no module holds them.
        differentiable: whether autograd can see through forward.
    """

    model: nn.Module
    args: tuple[Any, ...]
    target: Tensor
    head_names: tuple[str, ...] | None
    outcome: Outcome
    id: str = ""
    kwargs: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    match: str = ""
    select: Callable[[Any], Tensor] = lambda output: output
    batch: Any = None
    raw_parameters: tuple[str, ...] = ()
    differentiable: bool = True

    @property
    def data(self) -> Any:
        """The batch, as a loader would give it."""
        if self.batch is not None:
            return self.batch
        if self.kwargs:
            return {**self.kwargs, "labels": self.target}
        return (*self.args, self.target)

    @property
    def parameters(self) -> list[str]:
        """Names of the readout's weights and biases."""
        if self.raw_parameters:
            return list(self.raw_parameters)
        plain = oracle.float64_copy(self.model)
        return oracle.head_parameters(plain, self.head_names or ())

    def call(self, model: nn.Module) -> Tensor:
        """The predicted tensor of a copy of the model, whatever the copy's dtype."""
        dtype = next(model.parameters()).dtype
        cast = [a.to(dtype) if _is_real(a) else a for a in self.args]
        return self.select(model(*cast, **self.kwargs))


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


# --- building -----------------------------------------------------------------------------------

_DATA = torch.Generator()


@contextlib.contextmanager
def seeded(draw: int) -> Iterator[None]:
    """Weights from the global stream with a fixed seed, data from a stream of their own."""
    before = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        _DATA.manual_seed(1000 + draw)
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def build(id: str, draw: int = 0) -> Case:
    """A fresh model and the batch number `draw` for it."""
    with seeded(draw):
        return replace(FACTORIES[id](), id=id)


def normal(*shape: int) -> Tensor:
    """Standard normal data."""
    return torch.randn(*shape, generator=_DATA)


def integers(high: int, *shape: int) -> Tensor:
    """Integers in [0, high)."""
    return torch.randint(high, shape, generator=_DATA)


def trunk(inputs: int = INPUTS) -> nn.Module:
    """Two hidden layers of SiLU with features of order one."""
    net = nn.Sequential(nn.Linear(inputs, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.SiLU())
    for parameter in net.parameters():
        parameter.data *= 3.0
    return net


def linear(outputs: int = 1, inputs: int = WIDTH, bias: bool = True) -> nn.Linear:
    """A head."""
    return nn.Linear(inputs, outputs, bias=bias)


def linears(number: int, bias: bool = True) -> nn.ModuleList:
    """Several heads of one output each."""
    return nn.ModuleList(linear(bias=bias) for _ in range(number))


def buffer(*values: float) -> Tensor:
    """A constant of the model."""
    return torch.tensor(values)


def on_rows(
    outcome: Outcome,
    run: Callable[..., Any],
    targets: int = 1,
    shape: tuple[int, ...] | None = None,
    heads: tuple[str, ...] | None = ("head",),
    parts: dict[str, Any] | None = None,
    **more: Any,
) -> Case:
    """A case with inputs (N, 3), a trunk, a head of `targets` outputs and perhaps more parts."""
    more = {"match": WARNINGS.get(outcome, "")} | more
    net = Net(run, trunk=trunk(), head=linear(targets), **(parts or {}))
    target = normal(*(shape or (ROWS, targets)))
    return Case(net, (normal(ROWS, INPUTS),), target, heads, outcome, **more)


def on_steps(outcome: Outcome, run: Callable[..., Any], **more: Any) -> Case:
    """The same with inputs (N, T, 3)."""
    return replace(on_rows(outcome, run, **more), args=(normal(ROWS, STEPS, INPUTS),))


def on_pairs(outcome: Outcome, run: Callable[..., Any], **more: Any) -> Case:
    """The same with two inputs (N, 3)."""
    return replace(on_rows(outcome, run, **more), args=(normal(ROWS, INPUTS), normal(ROWS, INPUTS)))


def on_net(outcome: Outcome, net: nn.Module, head: str, target: Tensor, **more: Any) -> Case:
    """A case with inputs (N, 3) for any net with one head."""
    return Case(net, (normal(ROWS, INPUTS),), target, (head,), outcome, **more)


# --- plain heads --------------------------------------------------------------------------------


def plain(m: Net, x: Tensor) -> Tensor:
    """The usual forward."""
    return m.head(m.trunk(x))


def dropout_and_batch_norm_in_train_mode() -> Case:
    net = nn.Sequential(
        linear(WIDTH, INPUTS), nn.BatchNorm1d(WIDTH), nn.SiLU(), nn.Dropout(), linear()
    )
    note = "always evaluated in eval mode, then restored"
    return on_net("plain", net.train(), "4", normal(ROWS, 1), note=note)


def head_deep_inside() -> Case:
    readout = nn.ModuleDict({"out": linear(), "unused": linear()})
    net = Net(lambda m, x: m.readout["out"](m.trunk(x)), trunk=trunk(), readout=readout)
    note = "a linear layer that is never called stands after the head"
    return on_net("plain", net, "readout.out", normal(ROWS, 1), note=note)


def frozen_trunk() -> Case:
    built = on_rows("plain", plain)
    built.model.trunk.requires_grad_(False)
    return built


def frozen_model_with_a_scaled_output() -> Case:
    built = on_rows("linear", lambda m, x: 3.0 * m.head(m.trunk(x)))
    built.model.requires_grad_(False)
    return replace(built, note="nothing requires a gradient, not even the head")


def transformer_with_a_head_on_the_first_token() -> Case:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True, dropout=0.1)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    body = nn.Sequential(linear(WIDTH, INPUTS), encoder)
    net = Net(lambda m, x: m.head(m.body(x)[:, 0]), body=body, head=linear())
    note = "in eval mode the encoder takes a fused path that never calls its linear layers"
    built = on_net("plain", net, "head", normal(ROWS, 1), note=note)
    return replace(built, args=(normal(ROWS, STEPS, INPUTS),))


PLAIN: dict[str, Callable[[], Case]] = {
    "mlp_with_a_column_output": lambda: on_rows("plain", plain),
    "mlp_with_a_squeezed_output": lambda: on_rows(
        "plain", lambda m, x: plain(m, x).squeeze(-1), shape=(ROWS,)
    ),
    "mlp_with_several_targets": lambda: on_rows("plain", plain, targets=3),
    "mlp_without_a_bias": lambda: on_net(
        "plain", nn.Sequential(trunk(), linear(bias=False)), "1", normal(ROWS, 1)
    ),
    "bare_linear_model": lambda: on_net("plain", linear(1, INPUTS), "", normal(ROWS, 1)),
    "bare_linear_model_in_a_sequential": lambda: on_net(
        "plain", nn.Sequential(linear(2, INPUTS)), "0", normal(ROWS, 2)
    ),
    "two_linear_layers_in_a_row": lambda: on_net(
        "plain", nn.Sequential(trunk(), linear(4), linear(2, 4)), "2", normal(ROWS, 2)
    ),
    "head_named_by_layer": lambda: on_rows("plain", plain, options={"layer": "head"}),
    "unknown_layer_name": lambda: on_rows(
        "refused", plain, options={"layer": "haed"}, match="haed"
    ),
    "reshaped_output": lambda: on_rows(
        "plain", lambda m, x: plain(m, x).reshape(-1, 2, 3), targets=6, shape=(ROWS, 2, 3)
    ),
    "several_time_steps_out": lambda: on_steps("plain", plain, shape=(ROWS, STEPS, 1)),
    "several_squeezed_time_steps_out": lambda: on_steps(
        "plain", lambda m, x: plain(m, x).squeeze(-1), shape=(ROWS, STEPS)
    ),
    "several_time_steps_and_targets_out": lambda: on_steps(
        "plain", plain, targets=2, shape=(ROWS, STEPS, 2)
    ),
    "head_deep_inside": head_deep_inside,
    "dropout_and_batch_norm_in_train_mode": dropout_and_batch_norm_in_train_mode,
    "frozen_trunk": frozen_trunk,
    "frozen_model_with_a_scaled_output": frozen_model_with_a_scaled_output,
    "transformer_with_a_head_on_the_first_token": transformer_with_a_head_on_the_first_token,
}


# --- linear tails -------------------------------------------------------------------------------


def standardised(m: Net, x: Tensor) -> Tensor:
    """Undoes the standardisation of the targets."""
    return plain(m, x) * m.std + m.mean


def batch_norm_after_the_head() -> Case:
    norm = nn.BatchNorm1d(2)
    norm.running_mean.copy_(buffer(1.0, -2.0))
    norm.running_var.copy_(buffer(4.0, 0.25))
    run = lambda m, x: m.norm(plain(m, x))  # noqa: E731
    note = "affine in eval mode, and its own weights are no readout weights"
    left = "past 'head' are left out of the readout: 'norm' .4 parameters that scale or shift"
    return on_rows("part", run, targets=2, parts={"norm": norm}, note=note, match=left)


def sum_over_padded_atoms() -> Case:
    built = on_steps("linear", lambda m, x, mask: (plain(m, x) * mask.unsqueeze(-1)).sum(1))
    mask = (torch.arange(STEPS) < 1 + integers(STEPS, ROWS, 1)).double()
    return replace(built, args=(*built.args, mask), note="the bias counts the atoms")


def masked_in_place(m: Net, x: Tensor, lengths: Tensor) -> Tensor:
    """A sum over atoms whose padding is overwritten in the head's own output."""
    atomic = plain(m, x)
    atomic[torch.arange(STEPS) >= lengths] = 0.0
    return atomic.sum(1)


def sum_over_atoms_masked_in_place() -> Case:
    built = on_steps("linear", masked_in_place)
    return replace(built, args=(*built.args, 1 + integers(STEPS, ROWS, 1)))


def gather_of_one_row_after_the_head() -> Case:
    built = on_steps("linear", lambda m, x, i: plain(m, x)[torch.arange(len(x)), i])
    return replace(built, args=(*built.args, integers(STEPS, ROWS)))


def neighbours(m: Net, x: Tensor) -> Tensor:
    """A kernel-weighted sum over all other rows."""
    distance = (x[:, None] - x[None]).square().sum(-1)
    return (-distance).exp() @ plain(m, x)


def raw_pooling(m: Net, x: Tensor) -> Tensor:
    """Attention over time whose score is no linear layer."""
    h = m.trunk(x)
    return ((h @ m.query).softmax(1).unsqueeze(-1) * m.head(h)).sum(1)


def pooling(m: Net, x: Tensor) -> Tensor:
    """Attention over time whose score is a linear layer."""
    h = m.trunk(x)
    return (m.score(h).softmax(1) * m.head(h)).sum(1)


LINEAR: dict[str, Callable[[], Case]] = {
    "scaled_and_shifted_output": lambda: on_rows("linear", lambda m, x: plain(m, x) * 2.5 - 1.0),
    "scaled_and_shifted_squeezed_output": lambda: on_rows(
        "linear",
        lambda m, x: standardised(m, x).squeeze(-1),
        shape=(ROWS,),
        parts={"std": buffer(4.0), "mean": buffer(-7.0)},
    ),
    "each_target_scaled_by_its_own_std": lambda: on_rows(
        "linear",
        standardised,
        targets=3,
        parts={"std": buffer(0.1, 1.0, 3.0), "mean": buffer(0.5, 0.0, -0.5)},
    ),
    "output_scaled_in_place": lambda: on_rows(
        "linear",
        lambda m, x: plain(m, x).mul_(m.std).add_(m.mean),
        targets=2,
        parts={"std": buffer(4.0, 0.5), "mean": buffer(-7.0, 1.0)},
        note="the output is the very tensor that the head returned, with other values in it",
    ),
    "output_written_into_a_new_tensor": lambda: on_rows(
        "plain", lambda m, x: x.new_empty(len(x), 1).copy_(plain(m, x))
    ),
    "several_targets_scaled_by_one_number": lambda: on_rows(
        "linear", lambda m, x: 0.2 * plain(m, x) + 1.0, targets=3
    ),
    "each_sample_scaled_by_an_input": lambda: on_rows(
        "linear", lambda m, x: plain(m, x) * x[:, :1].exp(), targets=2
    ),
    "batch_norm_after_the_head": batch_norm_after_the_head,
    "residual_skip_of_an_input": lambda: on_rows(
        "linear",
        lambda m, x: x[:, :1] + plain(m, x),
        note="an offset that the weights do not reach",
    ),
    "residual_skip_of_a_hidden_feature": lambda: on_rows(
        "linear",
        lambda m, x: m.trunk(x)[:, :1] + plain(m, x),
        note="a trunk layer reaches the output past the head too, and is no readout for that",
    ),
    "sum_over_padded_atoms": sum_over_padded_atoms,
    "sum_over_atoms_masked_in_place": sum_over_atoms_masked_in_place,
    "mean_over_time_steps": lambda: on_steps("linear", lambda m, x: plain(m, x).mean(1), targets=2),
    "last_time_step_after_the_head": lambda: on_steps("linear", lambda m, x: plain(m, x)[:, -1]),
    "gather_of_one_row_after_the_head": gather_of_one_row_after_the_head,
    "cumulative_sum_over_time": lambda: on_steps(
        "linear",
        lambda m, x: plain(m, x).cumsum(1),
        shape=(ROWS, STEPS, 1),
        note="one head row feeds several outputs of its sample",
    ),
    "forecast_by_a_head_over_time": lambda: on_steps(
        "linear",
        lambda m, x: m.over_time(m.trunk(x)[..., :3].mT).mT,
        parts={"over_time": linear(7, STEPS)},
        heads=("over_time",),
        shape=(ROWS, 7, 3),
    ),
    "forecast_by_a_trend_and_a_season": lambda: on_steps(
        "linear",
        lambda m, x: (m.trend(x.mean(1, keepdim=True).expand_as(x).mT) + m.season(x.mT)).mT,
        parts={"trend": linear(7, STEPS), "season": linear(7, STEPS)},
        heads=("trend", "season"),
        shape=(ROWS, 7, INPUTS),
        note="two heads over time, summed: each acts on every output",
    ),
    "transposed_time_steps_and_targets": lambda: on_steps(
        "linear", lambda m, x: plain(m, x).transpose(1, 2), targets=2, shape=(ROWS, 2, STEPS)
    ),
    "targets_mixed_by_a_fixed_matrix": lambda: on_rows(
        "linear",
        lambda m, x: plain(m, x) @ m.matrix,
        targets=3,
        parts={"matrix": torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, -1.0], [3.0, 0.0, 1.0]])},
        note="each target depends on several rows of the head's weight",
    ),
    "fewer_targets_than_head_outputs": lambda: on_rows(
        "linear",
        lambda m, x: plain(m, x) @ m.matrix,
        targets=3,
        shape=(ROWS, 2),
        parts={"matrix": torch.tensor([[1.0, 2.0], [0.5, 1.0], [3.0, 0.0]])},
    ),
    "one_of_several_head_outputs": lambda: on_rows(
        "linear", lambda m, x: plain(m, x)[:, 1], targets=3, shape=(ROWS,)
    ),
    "targets_reordered_after_the_head": lambda: on_rows(
        "linear", lambda m, x: plain(m, x).flip(-1), targets=3
    ),
    "targets_rolled_and_scaled_by_their_own_std": lambda: on_rows(
        "linear",
        lambda m, x: plain(m, x).roll(1, -1) * m.std + x[:, :1],
        targets=3,
        parts={"std": buffer(0.1, 1.0, 3.0)},
    ),
    "head_outputs_as_a_transposed_table": lambda: on_rows(
        "linear",
        lambda m, x: plain(m, x).reshape(-1, 2, 3).mT,
        targets=6,
        shape=(ROWS, 3, 2),
    ),
    "time_steps_and_targets_in_one_reordered_row": lambda: on_steps(
        "linear",
        lambda m, x: 2 * plain(m, x).mT.flatten(1)[:, [3, 0, 6, 1, 9, 2, 7, 8, 5, 4]],
        targets=2,
        shape=(ROWS, 2 * STEPS),
    ),
    "mean_over_time_steps_with_targets_reordered": lambda: on_steps(
        "linear", lambda m, x: plain(m, x).mean(1)[:, [2, 0, 1]], targets=3
    ),
    "two_calls_of_one_head_side_by_side": lambda: on_rows(
        "linear",
        lambda m, x: torch.cat([plain(m, x), plain(m, 2 * x).flip(-1)], -1),
        targets=2,
        shape=(ROWS, 4),
    ),
    "every_other_head_output": lambda: on_rows(
        "linear", lambda m, x: plain(m, x)[:, ::2], targets=3, shape=(ROWS, 2)
    ),
    "attention_pooling_by_a_constant_query": lambda: on_steps(
        "linear", raw_pooling, parts={"query": torch.randn(WIDTH)}
    ),
    "attention_pooling_by_a_raw_query": lambda: on_steps(
        "linear",
        raw_pooling,
        parts={"query": nn.Parameter(torch.randn(WIDTH))},
        note="the query is a parameter that acts after the trunk, beside the head",
    ),
    "attention_pooling_by_a_linear_score_with_the_head_named": lambda: on_steps(
        "linear", pooling, parts={"score": linear()}, options={"layer": "head"}
    ),
    "weighted_sum_over_neighbours_after_the_head": lambda: on_rows(
        "linear", neighbours, note="every head row feeds every output: one output per node"
    ),
}


# --- graphs -------------------------------------------------------------------------------------


@dataclass
class Graph:
    """A batch of molecules as one disconnected graph."""

    x: Tensor  # (atoms, 3)
    species: Tensor  # (atoms,)
    molecule: Tensor  # (atoms,), the molecule each atom belongs to
    molecules: int
    energy: Tensor  # (molecules, 1)


def graph() -> Graph:
    """Molecules of one to five atoms of three species."""
    molecule = torch.repeat_interleave(torch.arange(ROWS), 1 + integers(STEPS, ROWS))
    atoms = len(molecule)
    return Graph(normal(atoms, INPUTS), integers(3, atoms), molecule, ROWS, normal(ROWS, 1))


def on_graphs(
    net: nn.Module,
    heads: tuple[str, ...],
    note: str = "",
    raw_parameters: tuple[str, ...] = (),
    **named: Any,
) -> Case:
    """A case whose batches are `Graph` objects, taken apart by `forward=` and `target=`."""
    g = graph()
    inputs = (g.x, g.species, g.molecule, g.molecules)
    options = {
        "forward": lambda m, b: m(b.x, b.species, b.molecule, b.molecules),
        "target": lambda b: b.energy,
        **named,
    }
    known = {"note": note, "raw_parameters": raw_parameters}
    return Case(net, inputs, g.energy, heads, "linear", batch=g, options=options, **known)


def add_up(atomic: Tensor, molecule: Tensor, molecules: int) -> Tensor:
    """Sums over the atoms of each molecule."""
    return atomic.new_zeros(molecules, atomic.shape[1]).index_add(0, molecule, atomic)


def sum_over_atoms(m: Net, x: Tensor, z: Tensor, i: Tensor, n: int) -> Tensor:
    return add_up(m.head(m.trunk(x)), i, n)


def shifted_sum_over_atoms(m: Net, x: Tensor, z: Tensor, i: Tensor, n: int) -> Tensor:
    return add_up(m.head(m.trunk(x)) * m.std + m.shift[z], i, n)


def behler_parrinello(m: Net, x: Tensor, z: Tensor, i: Tensor, n: int) -> Tensor:
    total = x.new_zeros(n, 1)
    for species, (body, head) in enumerate(zip(m.bodies, m.heads, strict=True)):
        mine = z == species
        total = total.index_add(0, i[mine], head(body(x[mine])))
    return total


def species_nets() -> Net:
    return Net(behler_parrinello, bodies=nn.ModuleList(trunk() for _ in range(3)), heads=linears(3))


def mean_over_atoms(m: Net, x: Tensor, z: Tensor, i: Tensor, n: int) -> Tensor:
    h = m.trunk(x)
    atomic = torch.stack([head(h) for head in m.heads], 1)[torch.arange(len(z)), z]
    return add_up(atomic, i, n) / add_up(torch.ones_like(atomic), i, n)


class Blocks(nn.Module):
    """Two linear maps of parts of the input by one flat parameter, as in e3nn."""

    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH * outputs))
        self.bias = nn.Parameter(torch.zeros(0))
        self.register_buffer("mask", torch.ones(outputs))

    def forward(self, h: Tensor) -> Tensor:
        first, second = self.weight.reshape(2, WIDTH // 2, -1)
        return (h[..., : WIDTH // 2] @ first + 0.5 * h[..., WIDTH // 2 :] @ second) * self.mask


class Members(nn.Module):
    """A linear map for each member of an ensemble, as in TabM."""

    def __init__(self, members: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(members, WIDTH, 2))
        self.bias = nn.Parameter(torch.randn(members, 2))

    def forward(self, h: Tensor) -> Tensor:
        return torch.einsum("nd,mdk->nmk", h, self.weight) + self.bias


class Convolved(nn.Module):
    """A linear map of the neighbours' sum, as in PyG: the bias is the module's, the weight not."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = Blocks()
        self.bias = nn.Parameter(torch.randn(1))

    def forward(self, h: Tensor, edges: Tensor) -> Tensor:
        rows = self.lin(h)
        return rows + rows.new_zeros(rows.shape).index_add(0, edges[1], rows[edges[0]]) + self.bias


def readouts() -> nn.ModuleList:
    """A linear and a nonlinear one, as in MACE."""
    last = nn.Sequential(Blocks(WIDTH), nn.SiLU(), Blocks())
    return nn.ModuleList([Blocks(), last])


def two_layers_of_readouts(m: Net, x: Tensor, z: Tensor, i: Tensor, n: int) -> Tensor:
    h = m.trunk(x)
    return add_up(m.readouts[0](h) + m.readouts[1](m.trunk(h[:, :INPUTS])), i, n)


def message_passing(m: Net, x: Tensor, z: Tensor, i: Tensor, n: int) -> Tensor:
    atoms = torch.arange(len(x))
    edges = torch.stack([atoms, atoms.roll(1)])
    return add_up(m.conv(m.trunk(x), edges), i, n)


SPECIES = ("heads.0", "heads.1", "heads.2")

GRAPHS: dict[str, Callable[[], Case]] = {
    "sum_over_atoms_by_index_add": lambda: on_graphs(
        Net(sum_over_atoms, trunk=trunk(), head=linear()), ("head",)
    ),
    "sum_over_atoms_with_species_shifts": lambda: on_graphs(
        Net(
            shifted_sum_over_atoms,
            trunk=trunk(),
            head=linear(),
            std=buffer(0.3),
            shift=torch.randn(3, 1),
        ),
        ("head",),
    ),
    "one_head_for_each_species": lambda: on_graphs(
        species_nets(),
        SPECIES,
        "Behler-Parrinello: ragged, summed, one weight vector for each species",
    ),
    "one_named_head_for_each_species": lambda: on_graphs(
        species_nets(),
        SPECIES,
        layer=list(SPECIES),
    ),
    "mean_over_atoms_of_the_head_of_their_species": lambda: on_graphs(
        Net(mean_over_atoms, trunk=trunk(), heads=linears(3, bias=False)),
        SPECIES,
        "all heads see all atoms, a gather keeps one of them",
    ),
    "sum_over_two_readouts_of_which_one_is_nonlinear": lambda: on_graphs(
        Net(two_layers_of_readouts, trunk=trunk(), readouts=readouts()),
        (),
        "what lies before the last of the nonlinear one is no part of it",
        ("readouts.0.weight", "readouts.1.2.weight"),
        layer="readouts",
    ),
    "graph_convolution": lambda: on_graphs(
        Net(message_passing, trunk=trunk(), conv=Convolved()),
        (),
        raw_parameters=("conv.bias", "conv.lin.weight"),
        layer="conv",
    ),
}


# --- several heads ------------------------------------------------------------------------------


def two_targets(m: Net, x: Tensor) -> Tensor:
    h = m.trunk(x)
    return torch.cat([m.head(h), m.second(h[:, :4])], -1)


def two_steps(m: Net, x: Tensor) -> Tensor:
    h = m.trunk(x)
    return torch.stack([m.head(h), m.second(h)], 1)


def average_of_several_heads() -> Case:
    run = lambda m, x: sum(head(m.trunk(x)) for head in m.heads) / 3  # noqa: E731
    note = "the three blocks of features are equal: singular without a ridge"
    net = Net(run, trunk=trunk(), heads=linears(3))
    return Case(net, (normal(ROWS, INPUTS),), normal(ROWS, 1), SPECIES, "linear", note=note)


def fields(m: Net, x: Tensor) -> dict[str, Tensor]:
    h = m.trunk(x)
    return {"dipole": m.second(h), "energy": m.head(h)}


def on_fields(outcome: Outcome, options: dict[str, Any], match: str = "") -> Case:
    """A dict output, whose other field's head must not join in."""
    parts = {"second": linear(3)}
    pick = lambda output: output["energy"]  # noqa: E731
    return on_rows(outcome, fields, parts=parts, options=options, select=pick, match=match)


def difference_of_halves(m: Net, a: Tensor, b: Tensor) -> Tensor:
    first, second = m.head(m.trunk(torch.cat([a, b]))).chunk(2)
    return first - second


def two_layers_that_share_one_weight() -> Case:
    run = lambda m, x: m.head(m.trunk(x)) + m.second(m.other(x))  # noqa: E731
    parts = {"other": trunk(), "second": linear()}
    built = on_rows("linear", run, parts=parts, heads=("head", "second"))
    built.model.second.weight = built.model.head.weight
    return replace(built, note="one weight, two biases")


SEVERAL: dict[str, Callable[[], Case]] = {
    "two_heads_as_two_targets": lambda: on_rows(
        "linear",
        two_targets,
        shape=(ROWS, 2),
        parts={"second": linear(1, 4)},
        heads=("head", "second"),
    ),
    "two_heads_as_two_time_steps": lambda: on_rows(
        "linear",
        two_steps,
        targets=2,
        shape=(ROWS, 2, 2),
        parts={"second": linear(2)},
        heads=("head", "second"),
    ),
    "average_of_several_heads": average_of_several_heads,
    "wide_and_deep": lambda: on_rows(
        "linear",
        lambda m, x: m.wide(x) + plain(m, x),
        parts={"wide": linear(1, INPUTS)},
        heads=("wide", "head"),
    ),
    "dict_output_with_two_heads": lambda: on_fields("plain", {"output": "energy"}),
    "dict_output_without_a_choice": lambda: on_fields("refused", {}, match="output="),
    "dict_output_with_an_unknown_field": lambda: on_fields(
        "refused", {"output": "enregy"}, match="enregy"
    ),
    "head_called_twice_for_a_difference": lambda: on_pairs(
        "linear",
        lambda m, a, b: plain(m, a) - plain(m, b),
        note="the bias cancels: its column is zero",
    ),
    "head_called_twice_for_two_targets": lambda: on_pairs(
        "linear",
        lambda m, a, b: torch.cat([plain(m, a), plain(m, b)], -1),
        shape=(ROWS, 2),
        note="both targets hang on the same weights",
    ),
    "difference_of_two_halves_of_one_call": lambda: on_pairs(
        "linear", difference_of_halves, targets=2
    ),
    "two_layers_that_share_one_weight": two_layers_that_share_one_weight,
}


# --- readouts of which a part is no linear layer ------------------------------------------------


def on_maps(
    outcome: Outcome, run: Callable[..., Any], names: tuple[str, ...], **parts: Any
) -> Case:
    """A case with images of 3 x 2 pixels, a convolution and other parts."""
    body = nn.Sequential(nn.Conv2d(INPUTS, WIDTH, 3, padding=1), nn.SiLU())
    net, match = Net(run, body=body, **parts), WARNINGS.get(outcome, "")
    data, target = (normal(ROWS, INPUTS, 3, 2),), normal(ROWS, 2, 3, 2)
    return Case(net, data, target, None, outcome, raw_parameters=names, match=match)


def residual_block(m: Net, x: Tensor) -> Tensor:
    return m.conv(m.body(x)) + m.shortcut(x)


def on_numbers(run: Callable[..., Any], names: tuple[str, ...], **parts: Any) -> Case:
    """A case with inputs (N, 3) and two integers below 7 a row."""
    built = on_rows("linear", run, heads=None, raw_parameters=names, parts=parts)
    return replace(built, args=(*built.args, integers(7, ROWS, 2)))


def deep_fm(m: Net, x: Tensor, fields: Tensor) -> Tensor:
    """First order, products of pairs, and a net of the same embeddings."""
    factors = m.factors(fields)
    pairs = factors.sum(1).square() - factors.square().sum(1)
    return (
        m.first(fields).sum(1)
        + pairs.sum(-1, keepdim=True) / 2
        + m.head(m.deep(factors) + m.trunk(x))
    )


class NodeLinear(nn.Module):
    """A linear map that is no nn.Linear, as PyG's own."""

    def __init__(self, outputs: int = 1, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, WIDTH))
        self.bias = nn.Parameter(torch.randn(outputs)) if bias else None

    def forward(self, h: Tensor) -> Tensor:
        return functional.linear(h, self.weight, self.bias)


class SageConvolution(nn.Module):
    """A map of the node and one of its neighbours' mean, as PyG's SAGEConv."""

    def __init__(self) -> None:
        super().__init__()
        self.lin_l, self.lin_r = NodeLinear(), NodeLinear(bias=False)

    def forward(self, h: Tensor) -> Tensor:
        return self.lin_l((h.roll(1, 0) + h.roll(-1, 0)) / 2) + self.lin_r(h)


class AttentionConvolution(nn.Module):
    """Neighbours weighed by attention, as PyG's GATConv."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.bias = NodeLinear(bias=False), nn.Parameter(torch.randn(1))
        self.source, self.target = nn.Parameter(torch.randn(1)), nn.Parameter(torch.randn(1))

    def forward(self, h: Tensor) -> Tensor:
        z = self.lin(h)
        scores = functional.leaky_relu(z * self.target + (z * self.source).mT, 0.2)
        return scores.softmax(1) @ z + self.bias


def on_nodes(outcome: Outcome, convolution: nn.Module, names: tuple[str, ...]) -> Case:
    run = lambda m, x: m.conv((x @ m.body).sin()) + m.skip(x)  # noqa: E731
    parts = {"conv": convolution, "skip": linear(1, INPUTS), "body": torch.randn(INPUTS, WIDTH)}
    return on_rows(outcome, run, heads=None, raw_parameters=names, parts=parts)


def bottleneck(
    run: Callable[..., Any],
    names: tuple[str, ...],
    outcome: Outcome = "linear",
    match: str = "",
    **parts: Any,
) -> Case:
    """A case with a linear layer of four outputs before the readout."""
    known = {"parts": {"low": linear(4)} | parts, "raw_parameters": names, "heads": None}
    return on_rows(outcome, run, **known, **({"match": match} if match else {}))


def outside_the_modules(hide: Callable[[Net, nn.Module], None], frozen: bool, match: str) -> Case:
    """A net whose last layer no module knows."""
    run = lambda m, x: m.readout(m.low(m.trunk(x)))  # noqa: E731
    net, last = Net(run, trunk=trunk(), low=linear(4)), linear(1, 4)
    last.requires_grad_(not frozen)
    hide(net, last)
    match = f"does not register: .*{match}.*ModuleList.*features="
    return on_net("refused", net, "low", normal(ROWS, 1), match=match)


def in_a_list(net: Net, last: nn.Module) -> None:
    net.layers, net.run = [last], lambda m, x: m.layers[0](m.low(m.trunk(x)))


def in_a_closure(net: Net, last: nn.Module) -> None:
    net.readout = lambda h: last(h)


def in_an_attribute(net: Net, last: nn.Module) -> None:
    weight = last.weight.detach().mT.clone().requires_grad_()
    net.plain, net.run = weight, lambda m, x: m.low(m.trunk(x)) @ m.plain


def closed_over_itself() -> Case:
    net = Net(lambda m, x: m.readout(m.low(m.trunk(x))), trunk=trunk(), low=linear(4))
    net.last = linear(1, 4)
    net.readout = lambda h: net.last(h)
    return on_net(
        "refused", net, "low", normal(ROWS, 1), match="'last.bias' through a function that"
    )


SUM = ("shortcut.weight", "shortcut.bias", "conv.weight", "conv.bias")
SKIP = ("skip.weight", "skip.bias")
DEEP = ("head.weight", "head.bias")

IN_PART: dict[str, Callable[[], Case]] = {
    "wide_convolution_beside_a_shortcut": lambda: on_maps(
        "linear",
        residual_block,
        SUM,
        conv=nn.Conv2d(WIDTH, 2, 3, padding=1),
        shortcut=nn.Conv2d(INPUTS, 2, 1),
    ),
    "weight_normed_convolution_beside_a_shortcut": lambda: replace(
        on_maps(
            "part",
            residual_block,
            ("shortcut.weight", "shortcut.bias", "conv.bias"),
            conv=parametrizations.weight_norm(nn.Conv2d(WIDTH, 2, 3, padding=1)),
            shortcut=nn.Conv2d(INPUTS, 2, 1),
        ),
        match="left out of the readout: 'conv.weight' .not a parameter before remove_param",
    ),
    "wide_embedding_and_deep": lambda: on_numbers(
        lambda m, x, fields: m.wide(fields).sum(1) + plain(m, x),
        (*DEEP, "wide.weight"),
        wide=nn.Embedding(7, 1),
    ),
    "deep_fm": lambda: on_numbers(
        deep_fm,
        (*DEEP, "first.weight"),
        first=nn.Embedding(7, 1),
        factors=nn.Embedding(7, 3),
        deep=nn.Sequential(nn.Flatten(), linear(WIDTH, 6), nn.SiLU()),
    ),
    "graph_convolution_beside_a_linear_skip": lambda: on_nodes(
        "linear",
        SageConvolution(),
        (*SKIP, "conv.lin_l.weight", "conv.lin_l.bias", "conv.lin_r.weight"),
    ),
    "attention_convolution_beside_a_linear_skip": lambda: replace(
        on_nodes("part", AttentionConvolution(), (*SKIP, "conv.bias")),
        match="left out of the readout: 'conv.lin' .not linear",
    ),
    "learned_offset_after_the_head": lambda: on_rows(
        "linear",
        lambda m, x: plain(m, x) + m.offset,
        heads=None,
        raw_parameters=(*DEEP, "offset"),
        parts={"offset": nn.Parameter(torch.randn(1))},
    ),
    "learned_scale_of_each_species": lambda: replace(
        on_numbers(
            lambda m, x, kinds: m.scale(kinds[:, 0]) * plain(m, x),
            DEEP,
            scale=nn.Embedding(7, 1),
        ),
        outcome="part",
        match="left out of the readout: 'scale' .7 parameters that scale or shift",
    ),
    "linear_bottleneck_before_a_raw_weight": lambda: bottleneck(
        lambda m, x: m.low(m.trunk(x)) @ m.weight,
        ("weight",),
        weight=nn.Parameter(torch.randn(4, 1)),
    ),
    "linear_bottleneck_before_a_bilinear_map": lambda: bottleneck(
        lambda m, x: m.both(m.low(m.trunk(x)), x),
        ("both.weight", "both.bias"),
        both=nn.Bilinear(4, INPUTS, 1),
    ),
    "linear_bottleneck_before_a_raw_weight_and_a_skip": lambda: bottleneck(
        lambda m, x: m.low(m.trunk(x)) @ m.weight + m.skip(x),
        (*SKIP, "weight"),
        weight=nn.Parameter(torch.randn(4, 1)),
        skip=linear(1, INPUTS),
    ),
    "linear_bottleneck_before_a_raw_weight_beside_another": lambda: bottleneck(
        lambda m, x: m.low(m.trunk(x + m.shift)) @ m.weight,
        ("weight",),
        weight=nn.Parameter(torch.randn(4, 1)),
        shift=nn.Parameter(torch.randn(INPUTS)),
    ),
    "weight_used_again_after_its_layer": lambda: bottleneck(
        lambda m, x: functional.linear(m.low(m.trunk(x)), m.low.weight.mT).sum(-1, keepdim=True),
        ("low.weight", "low.bias"),
        "local",
    ),
    "last_layer_in_a_plain_list": lambda: outside_the_modules(in_a_list, False, r"layers\[0\]"),
    "frozen_last_layer_in_a_plain_list": lambda: outside_the_modules(
        in_a_list, True, r"layers\[0\].weight \(1, 4\)"
    ),
    "last_layer_in_a_closure": lambda: outside_the_modules(in_a_closure, False, "last.weight"),
    "frozen_last_layer_in_a_closure": lambda: outside_the_modules(
        in_a_closure, True, "last.weight"
    ),
    "last_weight_in_a_plain_attribute": lambda: outside_the_modules(
        in_an_attribute, False, r"plain \(4, 1\)"
    ),
    "last_layer_of_a_closure_over_the_model": closed_over_itself,
}


# --- reparametrised and unusual heads -----------------------------------------------------------


def reparametrised(
    norm: Callable[[nn.Module], Any], run: Callable[..., Tensor] = plain, **more: Any
) -> Case:
    """The derivative is by the head's effective weight, not by the parameters behind it."""
    built = on_rows(more.pop("outcome", "plain"), run, **more)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        norm(built.model.head)
    return built


def weight_normed_trunk() -> Case:
    built = on_rows("plain", plain)
    parametrizations.weight_norm(built.model.trunk[0])
    return built


def on_images(target: Tensor, *tail: nn.Module) -> Case:
    """A 1 x 1 convolution, a linear layer on channels, on images of 2 x 3 pixels."""
    head = nn.Conv2d(WIDTH, target.shape[1], 1)
    net = nn.Sequential(nn.Conv2d(INPUTS, WIDTH, 3), nn.SiLU(), head, *tail)
    return Case(net, (normal(len(target), INPUTS, 4, 5),), target, ("2",), "linear")


def pointwise_convolution_in_one_dimension() -> Case:
    net = nn.Sequential(nn.Conv1d(INPUTS, WIDTH, 3), nn.SiLU(), nn.Conv1d(WIDTH, 2, 1))
    data = (normal(ROWS, INPUTS, STEPS),)
    note = "the output is (N, targets, steps)"
    return Case(net, data, normal(ROWS, 2, STEPS - 2), ("2",), "linear", note=note)


def raw_parameter_head(outcome: Outcome, **more: Any) -> Case:
    """No module holds the readout weights."""
    weight = nn.Parameter(torch.randn(WIDTH, 1))
    net = Net(lambda m, x: m.trunk(x) @ m.weight, trunk=trunk(), weight=weight)
    return Case(net, (normal(ROWS, INPUTS),), normal(ROWS, 1), None, outcome, **more)


def cubic_of_raw_parameters() -> Case:
    net = Net(
        lambda m, x: x[:, :1] * m.a + x[:, :1] ** 3 * m.b,
        a=nn.Parameter(torch.ones(1)),
        b=nn.Parameter(torch.ones(1)),
    )
    return Case(
        net,
        (normal(ROWS, INPUTS),),
        normal(ROWS, 1),
        None,
        "refused",
        match=r'layer=\["a", "b"\].*features=',
    )


def recurrent_net_without_a_head() -> Case:
    net = Net(lambda m, x: m.lstm(x)[0][:, -1, :1], lstm=nn.LSTM(INPUTS, WIDTH, batch_first=True))
    data = (normal(ROWS, STEPS, INPUTS),)
    return Case(net, data, normal(ROWS, 1), None, "refused", match='layer="lstm".*features=')


UNUSUAL: dict[str, Callable[[], Case]] = {
    "weight_normed_head": lambda: reparametrised(parametrizations.weight_norm, targets=2),
    "weight_normed_head_of_the_old_kind": lambda: reparametrised(
        nn.utils.weight_norm, note="its effective weight is a non-leaf tensor: deepcopy refuses it"
    ),
    "weight_normed_head_with_a_scaled_output": lambda: reparametrised(
        parametrizations.weight_norm, lambda m, x: plain(m, x) * 2.0, outcome="linear"
    ),
    "spectral_normed_head": lambda: reparametrised(
        parametrizations.spectral_norm,
        targets=2,
        note="a forward pass in train mode would move its buffers",
    ),
    "weight_normed_trunk": weight_normed_trunk,
    "pointwise_convolution_in_one_dimension": pointwise_convolution_in_one_dimension,
    "pointwise_convolution_in_two_dimensions": lambda: on_images(normal(ROWS, 1, 2, 3)),
    "pointwise_convolution_then_mean_over_pixels": lambda: on_images(
        normal(ROWS, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    ),
    "raw_parameter_head": lambda: raw_parameter_head("refused", match='layer="weight".*features='),
    "raw_parameter_head_with_its_features": lambda: raw_parameter_head(
        "plain", options={"features": lambda m, x: m.trunk(x)}, raw_parameters=("weight",)
    ),
    "linear_layer_used_as_a_function": lambda: on_rows(
        "refused",
        lambda m, x: functional.linear(m.trunk(x), m.head.weight, m.head.bias),
        heads=None,
        match='layer="head".*features=',
        note="the head's forward is never called",
    ),
    "cubic_of_raw_parameters": cubic_of_raw_parameters,
    "recurrent_net_without_a_head": recurrent_net_without_a_head,
}


# --- readouts that are no linear layers ---------------------------------------------------------


def by_parameters(
    run: Callable[..., Any],
    layer: str,
    names: tuple[str, ...],
    outcome: Outcome = "linear",
    **more: Any,
) -> Case:
    """A case with inputs (N, 3) whose readout's layer is named."""
    options = {"options": {"layer": layer}, "raw_parameters": names, "heads": None}
    return on_rows(outcome, run, **options, **more)


def flattened(m: Net, x: Tensor) -> Tensor:
    return m.conv(m.trunk(x)[:, None]).mean(-1)


PARAMETERS: dict[str, Callable[[], Case]] = {
    "equivariant_linear_map": lambda: by_parameters(
        lambda m, x: 2 * m.blocks(m.trunk(x)),
        "blocks",
        ("blocks.weight",),
        parts={"blocks": Blocks(2)},
        targets=2,
    ),
    "mean_over_members": lambda: by_parameters(
        lambda m, x: m.members(m.trunk(x)).mean(1),
        "members",
        ("members.weight", "members.bias"),
        parts={"members": Members()},
        targets=2,
    ),
    "convolution_with_a_wide_kernel": lambda: by_parameters(
        flattened,
        "conv",
        ("conv.weight", "conv.bias"),
        parts={"conv": nn.Conv1d(1, 2, 3)},
        targets=2,
    ),
    "convolution_with_a_wide_kernel_and_all_its_places": lambda: by_parameters(
        lambda m, x: m.conv(m.trunk(x)[:, None]),
        "conv",
        ("conv.weight", "conv.bias"),
        parts={"conv": nn.Conv1d(1, 2, 3, stride=2)},
        shape=(ROWS, 2, 3),
    ),
    "bilinear_map": lambda: by_parameters(
        lambda m, x: m.both(m.trunk(x), x),
        "both",
        ("both.weight", "both.bias"),
        parts={"both": nn.Bilinear(WIDTH, INPUTS, 1)},
    ),
    "raw_parameter_of_the_model": lambda: by_parameters(
        lambda m, x: functional.linear(m.trunk(x), m.weight),
        "",
        ("weight",),
        parts={"weight": nn.Parameter(torch.randn(1, WIDTH))},
    ),
    "named_linear_layer_used_as_a_function": lambda: by_parameters(
        lambda m, x: functional.linear(m.trunk(x), m.head.weight, m.head.bias).squeeze(-1),
        "head",
        ("head.weight", "head.bias"),
        shape=(ROWS,),
    ),
    "block_whose_last_layer_is_linear": lambda: by_parameters(
        lambda m, x: m.block(x),
        "block",
        ("block.1.weight", "block.1.bias"),
        "plain",
        parts={"block": nn.Sequential(trunk(), linear())},
    ),
    "softplus_after_a_convolution": lambda: by_parameters(
        lambda m, x: functional.softplus(flattened(m, x)),
        "conv",
        ("conv.weight", "conv.bias"),
        "local",
        parts={"conv": nn.Conv1d(1, 2, 3)},
        targets=2,
    ),
    "all_of_a_cubic": lambda: replace(
        cubic_of_raw_parameters(),
        outcome="linear",
        options={"layer": ""},
        raw_parameters=("a", "b"),
        match="",
    ),
}


# --- nonlinear tails ----------------------------------------------------------------------------


def gated(m: Net, x: Tensor) -> Tensor:
    h = m.trunk(x)
    return m.head(h) * m.gate(h).sigmoid()


def forecast(m: Net, x: Tensor) -> Tensor:
    y = x.new_zeros(len(x), 1)
    for _ in range(3):
        y = m.head(m.trunk(torch.cat([x[:, 1:], y], -1)))
    return y


LOCAL: dict[str, Callable[[], Case]] = {
    "softplus_after_the_head": lambda: on_rows(
        "local", lambda m, x: functional.softplus(plain(m, x))
    ),
    "exponential_after_the_head": lambda: on_rows(
        "local", lambda m, x: plain(m, x).exp().squeeze(-1), shape=(ROWS,)
    ),
    "layer_norm_after_the_head": lambda: on_rows(
        "local",
        lambda m, x: m.norm(plain(m, x)),
        targets=3,
        parts={"norm": nn.LayerNorm(3, elementwise_affine=False)},
        note="mixes the targets",
    ),
    "layer_norm_with_weights_after_the_named_head": lambda: on_rows(
        "local",
        lambda m, x: m.norm(plain(m, x)),
        targets=3,
        parts={"norm": nn.LayerNorm(3)},
        options={"layer": "head"},
    ),
    "norm_over_atoms_after_the_head": lambda: on_steps(
        "local", lambda m, x: plain(m, x).square().sum(1).sqrt()
    ),
    "product_of_two_heads": lambda: on_rows(
        "local",
        gated,
        parts={"gate": linear()},
        heads=("head", "gate"),
        note="linear in the first head alone, but both are last linear maps",
    ),
    "product_of_two_heads_with_one_named": lambda: on_rows(
        "linear", gated, parts={"gate": linear()}, options={"layer": "head"}
    ),
    "attention_pooling_by_a_linear_score": lambda: on_steps(
        "local",
        pooling,
        parts={"score": linear()},
        heads=("score", "head"),
        note="the score is a last linear map too, and the output is not linear in it",
    ),
    "head_output_fed_back_into_the_trunk": lambda: on_rows(
        "local", forecast, note="an unrolled forecast: the tail of the first call holds the trunk"
    ),
}


# --- inputs and outputs of other shapes ---------------------------------------------------------


def two_inputs() -> Case:
    def run(m: Net, x: Tensor, station: Tensor) -> Tensor:
        return m.head(m.trunk(torch.cat([x, m.embedding(station)], -1)))

    net = Net(run, embedding=nn.Embedding(4, 2), trunk=trunk(INPUTS + 2), head=linear())
    built = on_net("plain", net, "head", normal(ROWS, 1))
    return replace(built, args=(*built.args, integers(4, ROWS)))


@dataclass
class ModelOutput:
    """What a Hugging Face model returns, in short."""

    logits: Tensor
    loss: Tensor | None = None


class TextRegressor(nn.Module):
    """Takes keywords, computes its own loss when labels come along, may return an object."""

    def __init__(self, wrap: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.body = linear(WIDTH)
        self.classifier = linear()
        self.wrap = wrap

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
    ) -> Tensor | ModelOutput:
        weight = attention_mask.unsqueeze(-1).to(self.body.weight.dtype)
        pooled = (self.embedding(input_ids) * weight).sum(1) / weight.sum(1)
        logits = self.classifier(torch.tanh(self.body(pooled)))
        loss = None if labels is None else functional.mse_loss(logits, labels)
        return ModelOutput(logits, loss) if self.wrap else logits


def on_text(wrap: bool, **more: Any) -> Case:
    """Batches that are dicts of the model's keywords and the labels."""
    mask = (torch.arange(STEPS) < 1 + integers(STEPS, ROWS, 1)).long()
    tokens = {"input_ids": integers(11, ROWS, STEPS), "attention_mask": mask}
    target = normal(ROWS, 1)
    return Case(TextRegressor(wrap), (), target, ("classifier",), "plain", kwargs=tokens, **more)


def recurrent(outcome: Outcome, **more: Any) -> Case:
    """Returns the output and the hidden state."""

    def run(m: Net, x: Tensor) -> tuple[Tensor, Any]:
        h, state = m.lstm(x)
        return m.head(h[:, -1]), state

    net = Net(run, lstm=nn.LSTM(INPUTS, WIDTH, batch_first=True), head=linear())
    pick = lambda output: output[0]  # noqa: E731
    built = on_net(outcome, net, "head", normal(ROWS, 1), select=pick, **more)
    return replace(built, args=(normal(ROWS, STEPS, INPUTS),))


SHAPES: dict[str, Callable[[], Case]] = {
    "two_inputs": two_inputs,
    "dict_batches_with_labels": lambda: on_text(wrap=False),
    "output_object_with_logits": lambda: on_text(wrap=True, select=lambda output: output.logits),
    "output_and_hidden_state_without_a_choice": lambda: recurrent("refused", match="output="),
    "output_and_hidden_state_with_a_choice": lambda: recurrent("plain", options={"output": 0}),
    "mean_and_variance_output": lambda: on_net(
        "refused",
        nn.Sequential(trunk(), linear(2)),
        "1",
        normal(ROWS),
        match="shape",
        note="two outputs, one target: the second output is no prediction",
    ),
    "mean_and_log_variance_in_a_tuple": lambda: on_rows(
        "plain",
        lambda m, x: (plain(m, x), m.log_variance(m.trunk(x))),
        parts={"log_variance": linear()},
        options={"output": 0},
        select=lambda output: output[0],
    ),
}


# --- autograd inside and around forward ---------------------------------------------------------


class WithoutGradients(nn.Module):
    """A model whose author put inference's decorator on forward."""

    def __init__(self, scale: float | None = None) -> None:
        super().__init__()
        self.trunk, self.head, self.scale = trunk(), linear(), scale

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        y = self.head(self.trunk(x))
        return y if self.scale is None else y * self.scale


def with_a_one(model: nn.Module, x: Tensor) -> Tensor:
    h = model.trunk(x)
    return torch.cat([h, torch.ones_like(h[:, :1])], 1)


class Potential(nn.Module):
    """Energies by a sum over atoms, and forces by differentiating them inside forward."""

    def __init__(self, create_graph: bool, enable_grad: bool) -> None:
        super().__init__()
        self.trunk, self.head = trunk(), linear()
        self.register_buffer("std", buffer(2.0))
        self.create_graph, self.enable_grad = create_graph, enable_grad

    def forward(self, positions: Tensor) -> dict[str, Tensor]:
        with torch.enable_grad() if self.enable_grad else contextlib.nullcontext():
            positions = positions.detach().requires_grad_(True)
            energy = (self.head(self.trunk(positions)) * self.std).sum(1)
            (slope,) = torch.autograd.grad(energy.sum(), positions, create_graph=self.create_graph)
        return {"energy": energy, "forces": -slope}


def potential(outcome: Outcome, create_graph: bool, enable_grad: bool, **more: Any) -> Case:
    """A case that asks for the energy's error bar."""
    net, pick = Potential(create_graph, enable_grad), lambda output: output["energy"]
    options = {"output": "energy"}
    built = on_net(outcome, net, "head", normal(ROWS, 1), options=options, select=pick, **more)
    return replace(built, args=(normal(ROWS, STEPS, INPUTS),))


AUTOGRAD: dict[str, Callable[[], Case]] = {
    "forward_without_gradients": lambda: on_net(
        "refused", WithoutGradients(), "head", normal(ROWS, 1), match="no_grad"
    ),
    "forward_without_gradients_with_its_features": lambda: on_net(
        "plain",
        WithoutGradients(),
        "head",
        normal(ROWS, 1),
        options={"features": with_a_one},
        differentiable=False,
    ),
    "scaled_forward_without_gradients": lambda: on_net(
        "refused",
        WithoutGradients(2.0),
        "head",
        normal(ROWS, 1),
        options={"layer": "head"},
        match="no_grad|features=",
        note="the tail cannot be differentiated, and 2 must not be taken for 1",
    ),
    "forces_computed_inside_forward": lambda: potential(
        "linear", create_graph=True, enable_grad=True
    ),
    "forces_computed_in_the_callers_grad_mode": lambda: potential(
        "linear", create_graph=True, enable_grad=False, note="fails when run under no_grad"
    ),
    "forces_that_free_the_graph": lambda: potential(
        "linear",
        create_graph=False,
        enable_grad=True,
        differentiable=False,
        note="the energy's own graph would be gone when forward returns",
    ),
}


# --- heads that only look linear ----------------------------------------------------------------


class Positive(nn.Linear):
    """With an activation inside."""

    def forward(self, h: Tensor) -> Tensor:
        return functional.softplus(super().forward(h))


class Normalised(nn.Linear):
    """Of the input's direction."""

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(functional.normalize(h, dim=-1))


class EqualLinear(nn.Linear):
    """With scaled weights, as in StyleGAN."""

    def forward(self, h: Tensor) -> Tensor:
        return functional.linear(h, self.weight * 0.3, self.bias * 0.5)


class Masked(nn.Linear):
    """With half of its weights masked, as in MADE."""

    def forward(self, h: Tensor) -> Tensor:
        mask = (torch.arange(self.weight.numel()) % 2).reshape(self.weight.shape)
        return functional.linear(h, self.weight * mask, self.bias)


class UnitScaled(nn.Linear):
    """With an output divided by the width, as unit_scaling's readout."""

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h) / self.in_features


class Adapted(nn.Linear):
    """With a low-rank adapter inside."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.down, self.up = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h) + self.up(self.down(h))


class Logged(nn.Linear):
    """With a forward of its own that computes what it should."""

    def forward(self, h: Tensor) -> Tensor:
        self.last = h.detach()
        return functional.linear(h, self.weight, self.bias)


class Decomposed(nn.Module):
    """Direction and size of the adapted weight apart (DoRA), around a linear layer."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.base = linear(outputs)
        self.down, self.up = linear(2, bias=False), linear(outputs, 2, bias=False)
        self.size = nn.Parameter(1.5 * self.base.weight.detach().norm(dim=1))

    def forward(self, h: Tensor) -> Tensor:
        weight = self.base.weight
        gain = self.size / (weight + self.up.weight @ self.down.weight).norm(dim=1).detach()
        result = self.base(h)
        return result + (gain - 1) * functional.linear(h, weight) + gain * self.up(self.down(h))


class Doubled(nn.Module):
    """A parametrisation by half of the weight."""

    def forward(self, half: Tensor) -> Tensor:
        return 2 * half


def impostor(
    head: nn.Module, outcome: Outcome = "linear", names: tuple[str, ...] = (), **more: Any
) -> Case:
    """A head that is an nn.Linear, in the usual place."""
    names = names or ("head.weight", "head.bias")
    built = on_rows(outcome, plain, targets=2, heads=None, raw_parameters=names, **more)
    built.model.head = head
    return built


def hooked(register: str, hook: Callable[..., Any], outcome: Outcome = "linear") -> Case:
    """A usual head with a hook on it."""
    built = impostor(linear(2), outcome)
    getattr(built.model.head, register)(hook)
    return built


def pruned() -> Case:
    head = linear(2)
    prune.random_unstructured(head, "weight", 0.4)
    head.weight = head.weight.detach()  # as after a pass without gradients, so that it is copied
    return impostor(head, names=("head.bias", "head.weight_orig"))


def parametrised() -> Case:
    head = linear(2)
    parametrize.register_parametrization(head, "weight", Doubled())
    names = ("head.bias", "head.parametrizations.weight.original")
    return impostor(head, names=names)


def slopes(m: Net, x: Tensor) -> Tensor:
    """The residual of a differential equation, u'' + u' + u, along the first input."""
    with torch.enable_grad():
        x = x if x.requires_grad else x.detach().requires_grad_()
        u = m.head(m.trunk(x))
        (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
    return u + first[:, 1:2] + second[:, :1]


IMPOSTORS: dict[str, Callable[[], Case]] = {
    "activation_inside_the_head": lambda: impostor(Positive(WIDTH, 2), "local", match="not linear"),
    "head_of_the_normalised_input": lambda: impostor(Normalised(WIDTH, 2)),
    "head_with_scaled_weights": lambda: impostor(EqualLinear(WIDTH, 2)),
    "head_with_masked_weights": lambda: impostor(Masked(WIDTH, 2)),
    "head_with_a_scaled_output_inside": lambda: impostor(UnitScaled(WIDTH, 2)),
    "head_with_an_adapter_inside": lambda: impostor(
        Adapted(WIDTH, 2),
        "local",
        ("head.weight", "head.bias", "head.down.weight", "head.up.weight"),
        match="not linear",
    ),
    "head_with_a_forward_of_its_own": lambda: impostor(Logged(WIDTH, 2), "plain"),
    "hook_that_changes_the_heads_output": lambda: hooked(
        "register_forward_hook", lambda head, args, out: 3 * out + args[0][:, :1]
    ),
    "hook_that_changes_the_heads_input": lambda: hooked(
        "register_forward_pre_hook", lambda head, args: (args[0].square(),)
    ),
    "hook_that_only_looks_at_the_head": lambda: hooked(
        "register_forward_hook", lambda head, args, out: None, "plain"
    ),
    "pruned_head": pruned,
    "parametrised_head": parametrised,
    "head_whose_weight_is_used_beside_it_without_a_graph": lambda: impostor(
        Decomposed(2),
        "refused",
        ("head.base.weight", "head.base.bias"),
        options={"layer": "head.base"},
        match="do not predict how the output changes.*features=",
        note="the norm is detached: the derivative is not what a small step of the weight does",
    ),
    "derivatives_of_the_head_inside_forward": lambda: on_rows(
        "linear",
        slopes,
        options={"layer": "head"},
        note="the weights act on the derivatives too, which the head's output does not show",
    ),
    "targets_mixed_in_very_different_units": lambda: on_rows(
        "linear",
        lambda m, x: plain(m, x) @ m.mixing,
        targets=3,
        parts={"mixing": torch.tensor([[100.0, 0.3, 0.2], [0.0, 1.0, 0.4], [0.0, 0.0, 1.0]])},
    ),
    "pixel_shuffle_after_the_head": lambda: replace(
        on_images(normal(ROWS, 4, 2, 3), nn.PixelShuffle(2)), target=normal(ROWS, 1, 4, 6)
    ),
}


# --- precision ----------------------------------------------------------------------------------


def in_precision(dtype: torch.dtype) -> Case:
    built = on_rows("plain", plain)
    data = tuple(a.to(dtype) for a in built.args)
    return replace(built, model=built.model.to(dtype), args=data, target=built.target.to(dtype))


def bfloat16_head() -> Case:
    """Under a tail in float32, as Accelerate's autocast leaves it."""
    built = on_rows("linear", lambda m, x: plain(m, x).float() * 2 + 1, targets=2)
    data = tuple(a.to(torch.bfloat16) for a in built.args)
    model, target = built.model.to(torch.bfloat16), built.target.float()
    return replace(built, model=model, args=data, target=target)


PRECISION: dict[str, Callable[[], Case]] = {
    "bfloat16_head_with_a_float32_tail": bfloat16_head,
    "bfloat16_model": lambda: in_precision(torch.bfloat16),
    "float32_model": lambda: in_precision(torch.float32),
}


FACTORIES = PLAIN | LINEAR | GRAPHS | SEVERAL | IN_PART | UNUSUAL | PARAMETERS
FACTORIES |= LOCAL | SHAPES | AUTOGRAD | IMPOSTORS | PRECISION
IDS = tuple(FACTORIES)
OUTCOMES: dict[str, Outcome] = {id: build(id).outcome for id in IDS}
