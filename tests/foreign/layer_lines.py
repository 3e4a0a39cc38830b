"""Models of other libraries whose readout is more than one linear layer, each with the whole of it.

What the whole is, `tests.support.layer_lines` says. Every builder imports its library itself.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from tests.foreign.graphs import graphs
from tests.foreign.specimen import Given, thirds
from tests.support.layer_lines import Layer, weights

Forward = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class Row:
    """One model.

    Attributes:
        id: The package and the name of the model.
        build: Makes the model.
        data: Makes the batches to train, validate and test with.
        wholes: Sets of parameters that are the whole readout; any of them is right.
        forward: What a user passes as `forward=`; None for nothing.
        target: What a user passes as `target=` beside it.
        silent: Whether the plain line must find the readout without a message.
        bent: Whether a warning is right that derivatives of first order are used.
        parts: Values of `layer=` that are only a part: the library names the whole.
    """

    id: str
    build: Callable[[], nn.Module]
    data: Callable[[], dict[str, Any]]
    wholes: tuple[tuple[str, ...], ...]
    forward: Forward | None = None
    target: Callable[[Any], Tensor] = lambda b: b[-1]
    silent: bool = False
    bent: bool = False
    parts: tuple[Layer, ...] = ()

    @property
    def options(self) -> dict[str, Any]:
        """How a user says what the batches are."""
        if self.forward is None:
            return {}
        return {"forward": self.forward, "target": self.target}

    def given(self) -> Given:
        """The model in float64, its batches, and how to differentiate it by hand."""
        model = self.build().double().eval()
        output = self.forward or (lambda m, b: m(*b[:-1]))
        return Given(model, **self.data(), readout=list(self.wholes[0]), output=output)


def batches(inputs: Callable[[], tuple[Any, ...]], outputs: tuple[int, ...] = ()) -> dict[str, Any]:
    """Batches (*inputs, target) in float64."""

    def batch() -> tuple[Any, ...]:
        first, *others = inputs()
        return first, *others, torch.randn(len(first), *outputs, dtype=torch.float64)

    return thirds(batch() for _ in range(16))


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


# --- graph convolutions -------------------------------------------------------------------------


class Nodes(nn.Module):
    """A value for each node, given by a convolution of PyTorch Geometric."""

    def __init__(self, name: str, **options: Any) -> None:
        from torch_geometric import nn as geometric

        super().__init__()
        self.first = nn.Linear(4, 6)
        self.conv = getattr(geometric, name)(6, 1, **options)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(self.first(x).tanh(), edge_index)


def convolution(name: str, wholes: tuple[tuple[str, ...], ...], **more: Any) -> Row:
    """A row of `Nodes`; names of parameters are those inside the convolution."""
    options = more.pop("options", {})
    parts = tuple(f"conv.{part}" for part in more.pop("parts", ()))
    return Row(
        f"torch_geometric-{name}",
        lambda: Nodes(name, **options),
        lambda: graphs(per_node=True),
        tuple(tuple(f"conv.{parameter}" for parameter in whole) for whole in wholes),
        forward=lambda m, b: m(b.x, b.edge_index),
        target=lambda b: b.y,
        parts=parts,
        **more,
    )


LINS = ("lins.0.weight", "lins.1.weight", "lins.2.weight", "bias")
VALUE_AND_SKIP = weights("lin_value", "lin_skip")

GRAPHS = [
    convolution(
        "SAGEConv",
        (("lin_l.weight", "lin_l.bias", "lin_r.weight"),),
        parts=("lin_l", "lin_r"),
    ),
    convolution(
        "GraphConv",
        (("lin_rel.weight", "lin_rel.bias", "lin_root.weight"),),
        parts=("lin_rel", "lin_root"),
    ),
    convolution("ChebConv", (LINS,), options={"K": 3}, parts=("lins", "lins.2")),
    convolution("TAGConv", (LINS,), options={"K": 2}, parts=("lins", "lins.2")),
    convolution(
        "TransformerConv",
        (VALUE_AND_SKIP, (*weights("lin_query", "lin_key"), *VALUE_AND_SKIP)),
        bent=True,
        parts=("lin_value", "lin_skip"),
    ),
    convolution(
        "GATConv",
        (("lin.weight", "bias"), ("lin.weight", "att_src", "att_dst", "bias")),
        bent=True,
    ),
]


# --- categories ---------------------------------------------------------------------------------

FIELDS = [3, 4]


def categories() -> dict[str, Any]:
    return batches(lambda: (torch.stack([torch.randint(0, n, (12,)) for n in FIELDS], 1),))


def wide_and_deep() -> nn.Module:
    from torchfm.model.wd import WideAndDeepModel

    return WideAndDeepModel(FIELDS, 2, [8], 0.1)


def deep_cross() -> nn.Module:
    from torchfm.model.dcn import DeepCrossNetworkModel

    return DeepCrossNetworkModel(FIELDS, 2, 2, [8], 0.1)


def factorization_machine() -> nn.Module:
    from torchfm.model.fm import FactorizationMachineModel

    return FactorizationMachineModel(FIELDS, 2)


CATEGORIES = [
    Row(
        "torchfm-WideAndDeepModel",
        wide_and_deep,
        categories,
        (
            ("linear.fc.weight", "linear.bias", *weights("mlp.mlp.4")),
            ("linear.fc.weight", *weights("mlp.mlp.4")),  # whose bias is as good
        ),
        bent=True,
        parts=("mlp.mlp.4", "linear.fc"),
    ),
    Row(
        "torchfm-DeepCrossNetworkModel",
        deep_cross,
        categories,
        (weights("linear"),),
        silent=True,
        bent=True,
    ),
    Row(
        "torchfm-FactorizationMachineModel",
        factorization_machine,
        categories,
        # The products of pairs of factors are not linear in the factors.
        (
            ("linear.fc.weight", "linear.bias"),
            ("linear.fc.weight", "linear.bias", "embedding.embedding.weight"),
        ),
        bent=True,
        parts=("linear.bias",),
    ),
]


# --- splines and operators ----------------------------------------------------------------------


def kolmogorov_arnold() -> nn.Module:
    from kan import KAN

    return KAN(width=[3, 4, 1], grid=3, k=3, seed=0, auto_save=False, device="cpu")


def splines() -> tuple[tuple[str, ...], ...]:
    """The last layer's coefficients, with or without what scales and shifts them."""
    last = {name: f"act_fun.1.{name}" for name in ("coef", "scale_base", "scale_sp", "mask")}
    cores = [
        (last["coef"], last["scale_base"]),
        (last["scale_base"], last["scale_sp"]),
        (last["coef"], last["scale_base"], last["scale_sp"]),
        (*last.values(), "act_fun.1.grid"),
    ]
    shifts = [(), ("node_bias_1",), ("subnode_bias_1",), ("node_bias_1", "subnode_bias_1")]
    return tuple(core + shift for core, shift in product(cores, shifts))


def operator(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        os.environ["DDE_BACKEND"] = "pytorch"
        from deepxde import nn as networks

        return getattr(networks, name)([5, 8, 4], [2, 8, 4], "tanh", "Glorot normal")

    return build


def operator_row(name: str, data: Callable[[], dict[str, Any]]) -> Row:
    last = "branch.linears.1"  # the trunk ends with an activation
    return Row(
        f"deepxde-{name}",
        operator(name),
        data,
        ((*weights(last), "b.0"),),
        forward=lambda m, b: m((b[0], b[1])),
        parts=(last, "b.0"),
    )


POINTS = torch.linspace(-3, 3, 14, dtype=torch.float64).reshape(7, 2)

FUNCTIONS = [
    Row(
        "pykan-KAN",
        kolmogorov_arnold,
        lambda: batches(lambda: (normal(8, 3),), (1,)),
        splines(),
        bent=True,
    ),
    operator_row("DeepONet", lambda: batches(lambda: (normal(8, 5), normal(8, 2)), (1,))),
    operator_row(
        "DeepONetCartesianProd", lambda: batches(lambda: (normal(8, 5), POINTS), (len(POINTS),))
    ),
]


# --- forecasts ----------------------------------------------------------------------------------


def of_darts(name: str, **options: Any) -> Callable[[], nn.Module]:
    """The module inside a model of darts, after an epoch on a short series."""

    def build() -> nn.Module:
        import darts.models
        import numpy as np
        from darts import TimeSeries

        quiet = ("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "logger")
        forecaster = getattr(darts.models, name)(
            input_chunk_length=6,
            output_chunk_length=4,
            n_epochs=1,
            random_state=0,
            pl_trainer_kwargs={"accelerator": "cpu"} | dict.fromkeys(quiet, False),
            **options,
        )
        forecaster.fit(TimeSeries.from_values(np.sin(np.arange(40.0))))
        return forecaster.model

    return build


def forecast(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    from darts.utils.data.torch_datasets.utils import PLModuleInput

    return m(PLModuleInput(past_target=batch[0])).prediction[:, :, 0, 0]


def series() -> dict[str, Any]:
    return batches(lambda: (normal(8, 6, 1),), (4,))


BLOCKS = [f"stacks.{i}.blocks.0" for i in range(3)]
SMALL = {"num_blocks": 1, "num_layers": 1, "layer_widths": 8}

FORECASTS = [
    Row(
        "darts-NBEATSModel",
        of_darts("NBEATSModel", num_stacks=3, expansion_coefficient_dim=3, **SMALL),
        series,
        (weights(*(f"{block}.forecast_g" for block in BLOCKS)),),
        forward=forecast,
        silent=True,
        parts=(f"{BLOCKS[2]}.forecast_g",),
    ),
    Row(
        "darts-NBEATSModel-interpretable",
        of_darts(
            "NBEATSModel",
            generic_architecture=False,
            num_blocks=1,
            num_layers=1,
            layer_widths=8,
            trend_polynomial_degree=2,
        ),
        series,
        # The bases are parameters that are not trained: powers of the time, sines and cosines.
        # In each of the two products, either factor will do.
        (
            weights(*(f"{block}.forecast_linear_layer" for block in BLOCKS[:2])),
            tuple(f"{block}.forecast_g.basis" for block in BLOCKS[:2]),
            (*weights(f"{BLOCKS[1]}.forecast_linear_layer"), f"{BLOCKS[0]}.forecast_g.basis"),
            (*weights(f"{BLOCKS[0]}.forecast_linear_layer"), f"{BLOCKS[1]}.forecast_g.basis"),
        ),
        forward=forecast,
        parts=(f"{BLOCKS[1]}.forecast_linear_layer",),
    ),
    Row(
        "darts-NHiTSModel",
        of_darts("NHiTSModel", num_stacks=3, **SMALL),
        series,
        (weights(*(f"{block}.forecast_linear_layer" for block in BLOCKS)),),
        forward=forecast,
        silent=True,
        parts=(f"{BLOCKS[2]}.forecast_linear_layer",),
    ),
    Row(
        "darts-TFTModel",
        of_darts(
            "TFTModel",
            hidden_size=8,
            lstm_layers=1,
            add_relative_index=True,
            likelihood=None,
            loss_fn=nn.MSELoss(),
        ),
        series,
        (weights("output_layer"),),
        forward=forecast,
        silent=True,
    ),
]

ROWS_OF_TABLE = [*GRAPHS, *CATEGORIES, *FUNCTIONS, *FORECASTS]
