"""Models whose readout is more than one linear layer, and what to pass as `layer=` for each.

For every model the table declares the whole readout: all parameters that the output, or what enters
its last nonlinearity, is linear in together, and none upstream of another. Where the output is a
product, several sets are whole, each linear with the other factor held.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from tests.support.nets import Net
from tests.support.zoo import (
    INPUTS,
    ROWS,
    STEPS,
    WIDTH,
    NodeLinear,
    integers,
    linear,
    linears,
    normal,
    seeded,
    trunk,
)

Layer = str | list[str] | None
"""What a user passes as `layer=`; None for nothing."""

Inputs = tuple[Tensor, ...]
IDS = 7  # users, items, categories


@dataclass(frozen=True)
class Row:
    """One model of the table.

    Attributes:
        id: The name of the row in tests.
        build: Makes the model with seeded weights, and the inputs of one batch.
        wholes: Sets of parameters that are the whole readout; any of them is right.
        line: What to pass as `layer=`, as the documentation gives it.
        kind: What the documentation calls such a model; "" if it does not list this row.
        silent: Whether the plain line must find the readout without a message.
        bent: Whether a warning is right that derivatives of first order are used.
        parts: Values of `layer=` that are only a part of the readout: the library names the whole.
        also: Further values of `layer=` that are the whole readout, to be taken without a message.
        around: Values of `layer=` that hold more than the readout. The library finds the readout
            inside, or names it.
    """

    id: str
    build: Callable[[], tuple[nn.Module, Inputs]]
    wholes: tuple[tuple[str, ...], ...]
    line: Layer
    kind: str = ""
    silent: bool = False
    bent: bool = False
    parts: tuple[Layer, ...] = ()
    also: tuple[Layer, ...] = ()
    around: tuple[Layer, ...] = ()


@dataclass(frozen=True)
class Batch:
    """A model, the inputs of one batch, and targets shaped like the output."""

    model: nn.Module
    inputs: Inputs
    target: Tensor

    @property
    def data(self) -> tuple[Tensor, ...]:
        """What a loader would give."""
        return (*self.inputs, self.target)

    def call(self, model: nn.Module) -> Tensor:
        """The output of a copy of the model."""
        return model(*self.inputs)


def built(row: Row, draw: int = 0) -> Batch:
    """The model of a row, always the same, and its batch number `draw`."""
    with seeded(draw):
        model, inputs = row.build()
        with torch.no_grad():
            output = model.eval()(*inputs)
        return Batch(model, inputs, normal(*output.shape))


def net(run: Callable[..., Any], **parts: nn.Module | Tensor) -> nn.Module:
    """A net of named parts with a trunk `t` of features that are not linear in the inputs."""
    return Net(run, t=trunk(), **parts)


def on_rows(run: Callable[..., Any], **parts: nn.Module | Tensor) -> tuple[nn.Module, Inputs]:
    """Such a net and inputs (N, 3)."""
    return net(run, **parts), (normal(ROWS, INPUTS),)


def raw(*shape: int) -> nn.Parameter:
    """A parameter that no layer holds."""
    return nn.Parameter(torch.randn(shape))


def perceptron(inputs: int, outputs: int = 1) -> nn.Sequential:
    """Its last layer is called "2"."""
    return nn.Sequential(linear(WIDTH, inputs), nn.Tanh(), linear(outputs))


def weights(*layers: str) -> tuple[str, ...]:
    """The names of a weight and a bias for each layer."""
    return tuple(f"{layer}.{name}" for layer in layers for name in ("weight", "bias"))


# --- biases and weights of the model itself -----------------------------------------------------


def own_bias() -> tuple[nn.Module, Inputs]:
    return on_rows(lambda m, x: m.h(m.t(x)) + m.b, h=linear(bias=False), b=raw(1))


def own_bias_in_a_child() -> tuple[nn.Module, Inputs]:
    inner, inputs = own_bias()
    return Net(lambda m, x: 2.0 * m.net(x), net=inner), inputs


def towers() -> tuple[nn.Module, Inputs]:
    a = nn.Sequential(trunk(2), linear(bias=False))
    b = nn.Sequential(trunk(1), linear(bias=False))
    run = lambda m, x: m.a(x[:, :2]) + m.b(x[:, 2:]) + m.c  # noqa: E731
    return Net(run, a=a, b=b, c=raw(1)), (normal(ROWS, INPUTS),)


def raw_weights() -> tuple[nn.Module, Inputs]:
    run = lambda m, x: (x @ m.w1 + m.b1).tanh() @ m.w2 + m.b2  # noqa: E731
    parts = {"w1": raw(INPUTS, WIDTH), "b1": raw(WIDTH), "w2": raw(WIDTH, 1), "b2": raw(1)}
    return Net(run, **parts), (normal(ROWS, INPUTS),)


def cubic() -> tuple[nn.Module, Inputs]:
    run = lambda m, x: x[:, :1] * m.a + x[:, :1] ** 3 * m.b  # noqa: E731
    return Net(run, a=raw(1), b=raw(1)), (normal(ROWS, INPUTS),)


def listed_weights() -> tuple[nn.Module, Inputs]:
    run = lambda m, x: m.t(x) @ m.w[0] + x @ m.w[1] + m.w[2]  # noqa: E731
    return on_rows(run, w=nn.ParameterList([raw(WIDTH, 1), raw(INPUTS, 1), raw(1)]))


def keyed_weights() -> tuple[nn.Module, Inputs]:
    run = lambda m, x: m.t(x) @ m.w["deep"] + x @ m.w["wide"]  # noqa: E731
    return on_rows(run, w=nn.ParameterDict({"deep": raw(WIDTH, 1), "wide": raw(INPUTS, 1)}))


def scaled_and_shifted() -> tuple[nn.Module, Inputs]:
    run = lambda m, x: m.scale * m.head(m.t(x)) + m.shift  # noqa: E731
    return on_rows(run, head=linear(bias=False), scale=raw(1), shift=raw(1))


OWN = [
    Row(
        "bias_of_the_model_itself",
        own_bias,
        (("h.weight", "b"),),
        ["h", "b"],
        "`h(t(x)) + b`, `b` a parameter of the model",
        silent=True,
        parts=("h", "b"),
        also=(["h", ""],),
        around=("",),
    ),
    Row(
        "bias_without_a_dimension",
        lambda: on_rows(lambda m, x: m.h(m.t(x)) + m.b, h=linear(bias=False), b=raw()),
        (("h.weight", "b"),),
        ["h", "b"],
        silent=True,
        parts=("h", "b"),
    ),
    Row(
        "bias_of_a_child_of_the_model",
        own_bias_in_a_child,
        (("net.h.weight", "net.b"),),
        ["net.h", "net.b"],
        silent=True,
        parts=("net.h", "net.b"),
        also=("net",),
    ),
    Row(
        "two_towers_and_a_bias",
        towers,
        (("a.1.weight", "b.1.weight", "c"),),
        ["a.1", "b.1", "c"],
        silent=True,
        parts=(["a.1", "b.1"], ["a.1", "c"], "a"),
        also=(["a.1", "b.1", ""],),
        around=(["a.1", ""], ["a", "b", "c"]),
    ),
    Row(
        "raw_weights",
        raw_weights,
        (("w2", "b2"),),
        ["w2", "b2"],
        "`tanh(x @ w1 + b1) @ w2 + b2`, parameters of the model",
        parts=("w2", "b2"),
        around=("",),
    ),
    Row("cubic_in_x", cubic, (("a", "b"),), ["a", "b"], parts=("a", "b"), also=("",)),
    Row(
        "list_of_parameters",
        listed_weights,
        (("w.0", "w.1", "w.2"),),
        "w",
        "weights in an `nn.ParameterList` or `nn.ParameterDict`",
        parts=("w.0", ["w.0", "w.1"]),
        also=(["w.0", "w.1", "w.2"],),
    ),
    Row(
        "dictionary_of_parameters",
        keyed_weights,
        (("w.deep", "w.wide"),),
        "w",
        parts=("w.deep", "w.wide"),
        also=(["w.deep", "w.wide"],),
    ),
    Row(
        "learned_scale_and_shift",
        scaled_and_shifted,
        (("head.weight", "shift"), ("scale", "shift")),
        ["head", "shift"],
        "`scale * head(h) + shift`, all learned",
        parts=("head", "shift"),
    ),
]


# --- sums of layers -----------------------------------------------------------------------------


class OwnLinear(nn.Module):
    """A linear map that is no nn.Linear."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.matrix = raw(1, inputs)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix.T


def sum_of_two(layer: Callable[[int], nn.Module]) -> tuple[nn.Module, Inputs]:
    return on_rows(lambda m, x: m.l(m.t(x)) + m.r(x), l=layer(WIDTH), r=layer(INPUTS))


def weight_normed_sum() -> tuple[nn.Module, Inputs]:
    normed = parametrizations.weight_norm(linear())
    return on_rows(lambda m, x: m.l(m.t(x)) + m.r(x), l=normed, r=linear(1, INPUTS))


def wide_and_deep(after: Callable[[Tensor], Tensor]) -> tuple[nn.Module, Inputs]:
    run = lambda m, x, i: after(m.w(i).sum(1) + m.deep(x))  # noqa: E731
    return (
        Net(run, w=nn.Embedding(IDS, 1), deep=perceptron(INPUTS)),
        (normal(ROWS, INPUTS), integers(IDS, ROWS, 2)),
    )


class FieldSum(nn.Module):
    """A number for each category and a bias, as in the wide part of torchfm."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Embedding(IDS, 1)
        self.bias = raw(1)

    def forward(self, fields: Tensor) -> Tensor:
        return self.fc(fields).sum(1) + self.bias


def factor_wide_and_deep() -> tuple[nn.Module, Inputs]:
    """The wide part and the net see the same categories."""
    run = lambda m, i: torch.sigmoid(m.linear(i) + m.mlp(m.embedding(i).flatten(1))).squeeze(1)  # noqa: E731
    net = Net(run, linear=FieldSum(), embedding=nn.Embedding(IDS, 3), mlp=perceptron(6))
    return net, (integers(IDS, ROWS, 2),)


def crossed(m: Net, i: Tensor) -> Tensor:
    """One crossing x0 (x0 w) + b + x0 beside a net, and a linear layer of both."""
    x = m.embedding(i).flatten(1)
    cross = x * m.cross(x) + m.cross_bias + x
    return torch.sigmoid(m.linear(torch.cat([cross, m.mlp(x)], 1)).squeeze(1))


def deep_and_cross() -> tuple[nn.Module, Inputs]:
    parts = {
        "embedding": nn.Embedding(IDS, 3),
        "cross": linear(1, 6, bias=False),
        "cross_bias": raw(6),
        "mlp": nn.Sequential(linear(WIDTH, 6), nn.ReLU()),
        "linear": linear(1, 6 + WIDTH),
    }
    return Net(crossed, **parts), (integers(IDS, ROWS, 2),)


SUMS = [
    Row(
        "sum_of_own_linear_maps",
        lambda: sum_of_two(OwnLinear),
        (("l.matrix", "r.matrix"),),
        ["l", "r"],
        "`l(t(x)) + r(x)`, each linear",
        parts=("l", "r"),
        also=(["l.matrix", "r"],),
    ),
    Row(
        "sum_of_linear_layers",
        lambda: sum_of_two(lambda inputs: linear(1, inputs)),
        (weights("l", "r"),),
        ["l", "r"],
        silent=True,
        parts=("l", "r"),
    ),
    Row(
        "sum_with_a_weight_norm",
        weight_normed_sum,
        (weights("l", "r"),),
        ["l", "r"],
        silent=True,
        parts=("l", "r"),
    ),
    Row(
        "sigmoid_of_wide_and_deep",
        lambda: wide_and_deep(torch.sigmoid),
        (("w.weight", *weights("deep.2")),),
        ["w", "deep.2"],
        "`sigmoid(w(i).sum(1) + deep(x))`: wide and deep, `w` an embedding",
        bent=True,
        parts=("deep.2", "w", "deep"),
        around=(["w", "deep"],),
    ),
    Row(
        "softplus_of_wide_and_deep",
        lambda: wide_and_deep(functional.softplus),
        (("w.weight", *weights("deep.2")),),
        ["w", "deep.2"],
        bent=True,
        parts=("deep.2",),
    ),
    Row(
        "exponential_of_wide_and_deep",
        lambda: wide_and_deep(torch.exp),
        (("w.weight", *weights("deep.2")),),
        ["w", "deep.2"],
        bent=True,
        parts=("deep.2",),
    ),
    Row(
        "wide_and_deep_of_the_same_categories",
        factor_wide_and_deep,
        (
            ("linear.fc.weight", "linear.bias", *weights("mlp.2")),
            ("linear.fc.weight", *weights("mlp.2")),  # whose bias is as good
        ),
        ["linear", "mlp.2"],
        bent=True,
        parts=("mlp.2", "linear"),
    ),
    Row(
        "deep_and_cross",
        deep_and_cross,
        (weights("linear"),),
        "linear",
        silent=True,
        bent=True,
    ),
    Row(
        "exponential_of_a_head",
        lambda: on_rows(lambda m, x: m.head(m.t(x)).exp(), head=linear()),
        (weights("head"),),
        "head",
        silent=True,
        bent=True,
    ),
]


# --- graph convolutions -------------------------------------------------------------------------


def neighbours(h: Tensor) -> Tensor:
    """A dense adjacency whose rows sum to one: every node hears those that are like it."""
    return (-(h[:, None] - h[None]).square().mean(-1)).softmax(1)


class Sage(nn.Module):
    """lin_l(mean of the neighbours) + lin_r(node), as PyG's SAGEConv; neither is an nn.Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.lin_l, self.lin_r = NodeLinear(), NodeLinear(bias=False)

    def forward(self, h: Tensor, adjacency: Tensor) -> Tensor:
        return self.lin_l(adjacency @ h) + self.lin_r(h)


class GraphSum(nn.Module):
    """lin_rel(sum of the neighbours) + lin_root(node), as PyG's GraphConv."""

    def __init__(self) -> None:
        super().__init__()
        self.lin_rel, self.lin_root = linear(), linear(bias=False)

    def forward(self, h: Tensor, adjacency: Tensor) -> Tensor:
        return self.lin_rel(adjacency @ h) + self.lin_root(h)


class Chebyshev(nn.Module):
    """sum_k lins[k](T_k(A) h) + bias, as PyG's ChebConv."""

    def __init__(self) -> None:
        super().__init__()
        self.lins = nn.ModuleList(NodeLinear(bias=False) for _ in range(3))
        self.bias = raw(1)

    def forward(self, h: Tensor, adjacency: Tensor) -> Tensor:
        before, now = h, adjacency @ h
        total = self.lins[0](before) + self.lins[1](now)
        for lin in self.lins[2:]:
            before, now = now, 2 * adjacency @ now - before
            total = total + lin(now)
        return total + self.bias


class Adaptive(nn.Module):
    """sum_k lins[k](A^k h) + bias, as PyG's TAGConv."""

    def __init__(self) -> None:
        super().__init__()
        self.lins = linears(3, bias=False)
        self.bias = raw(1)

    def forward(self, h: Tensor, adjacency: Tensor) -> Tensor:
        total = self.lins[0](h)
        for lin in self.lins[1:]:
            h = adjacency @ h
            total = total + lin(h)
        return total + self.bias


class Attending(nn.Module):
    """softmax(query key^T) value + skip, as PyG's TransformerConv."""

    def __init__(self) -> None:
        super().__init__()
        self.lin_query, self.lin_key = linear(4), linear(4)
        self.lin_value, self.lin_skip = linear(), linear()

    def forward(self, h: Tensor, adjacency: Tensor) -> Tensor:
        scores = self.lin_query(h) @ self.lin_key(h).T / 2 + adjacency.log()
        return scores.softmax(1) @ self.lin_value(h) + self.lin_skip(h)


class Weighing(nn.Module):
    """Attention over the outputs of `lin` themselves, as PyG's GATConv."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = NodeLinear(bias=False)
        self.att_src, self.att_dst, self.bias = raw(1), raw(1), raw(1)

    def forward(self, h: Tensor, adjacency: Tensor) -> Tensor:
        z = self.lin(h)
        scores = functional.leaky_relu(z * self.att_dst + (z * self.att_src).T, 0.2)
        return (scores + adjacency.log()).softmax(1) @ z + self.bias


def on_nodes(convolution: Callable[[], nn.Module]) -> tuple[nn.Module, Inputs]:
    """A value for each node, given by the convolution."""

    def run(m: Net, x: Tensor) -> Tensor:
        return m.conv(m.t(x), neighbours(x))

    return on_rows(run, conv=convolution())


LINS = tuple(f"conv.lins.{k}.weight" for k in range(3))
VALUE_AND_SKIP = weights("conv.lin_value", "conv.lin_skip")

GRAPHS = [
    Row(
        "sage_convolution",
        lambda: on_nodes(Sage),
        (("conv.lin_l.weight", "conv.lin_l.bias", "conv.lin_r.weight"),),
        "conv",
        "a graph convolution last (SAGEConv, GraphConv, ChebConv, TAGConv)",
        parts=("conv.lin_l", "conv.lin_r"),
        also=(["conv.lin_l", "conv.lin_r"],),
    ),
    Row(
        "graph_convolution",
        lambda: on_nodes(GraphSum),
        (("conv.lin_rel.weight", "conv.lin_rel.bias", "conv.lin_root.weight"),),
        "conv",
        silent=True,
        parts=("conv.lin_rel", "conv.lin_root"),
    ),
    Row(
        "chebyshev_convolution",
        lambda: on_nodes(Chebyshev),
        ((*LINS, "conv.bias"),),
        "conv",
        parts=("conv.lins", "conv.lins.2", "conv.bias"),
        also=(["conv.lins", "conv.bias"],),
    ),
    Row(
        "adaptive_convolution",
        lambda: on_nodes(Adaptive),
        ((*LINS, "conv.bias"),),
        "conv",
        silent=True,
        parts=("conv.lins", "conv.lins.0"),
    ),
    Row(
        "transformer_convolution",
        lambda: on_nodes(Attending),
        (VALUE_AND_SKIP, (*weights("conv.lin_query", "conv.lin_key"), *VALUE_AND_SKIP)),
        ["conv.lin_value", "conv.lin_skip"],
        "attention: TransformerConv",
        bent=True,
        parts=("conv.lin_value", "conv.lin_skip"),
        around=("conv",),
    ),
    Row(
        "attention_convolution",
        lambda: on_nodes(Weighing),
        (
            ("conv.lin.weight", "conv.bias"),
            ("conv.lin.weight", "conv.att_src", "conv.att_dst", "conv.bias"),
        ),
        ["conv.lin", "conv.bias"],
        "attention over the layer's own outputs: GATConv",
        bent=True,
        around=("conv",),
    ),
]


# --- products -----------------------------------------------------------------------------------


def factorised(m: Net, user: Tensor, item: Tensor) -> Tensor:
    product = (m.p(user) * m.q(item)).sum(-1)
    return product + m.bu(user).squeeze(-1) + m.bv(item).squeeze(-1) + m.mean


def matrix_factorisation() -> tuple[nn.Module, Inputs]:
    parts = {"p": nn.Embedding(IDS, 2), "q": nn.Embedding(IDS, 2), "mean": raw(1)}
    biases = {"bu": nn.Embedding(IDS, 1), "bv": nn.Embedding(IDS, 1)}
    return Net(factorised, **parts, **biases), (integers(IDS, ROWS), integers(IDS, ROWS))


def deep_operator() -> tuple[nn.Module, Inputs]:
    run = lambda m, u, x: (m.branch(u) * m.trunk(x)).sum(-1) + m.b  # noqa: E731
    nets = {"branch": perceptron(5, 4), "trunk": perceptron(2, 4)}
    return Net(run, **nets, b=raw(1)), (normal(ROWS, 5), normal(ROWS, 2))


def product_of_heads() -> tuple[nn.Module, Inputs]:
    run = lambda m, x: m.one(m.t(x)) * m.two(m.t(x))  # noqa: E731
    return on_rows(run, one=linear(), two=linear())


def mixture() -> tuple[nn.Module, Inputs]:
    run = lambda m, x: (m.gate(m.t(x)).softmax(-1) * m.experts(m.t(x))).sum(-1)  # noqa: E731
    return on_rows(run, gate=linear(3), experts=linear(3))


def gated_skip() -> tuple[nn.Module, Inputs]:
    def run(m: Net, x: Tensor) -> Tensor:
        gate = m.gate(m.t(x)).sigmoid()
        return gate * m.head(m.t(x)) + (1 - gate) * m.skip(x)

    return on_rows(run, gate=linear(), head=linear(), skip=linear(1, INPUTS))


BIASES = ("bu.weight", "bv.weight", "mean")

PRODUCTS = [
    Row(
        "matrix_factorisation",
        matrix_factorisation,
        (("q.weight", *BIASES), ("p.weight", *BIASES)),
        ["q", "bu", "bv", "mean"],
        "`(p(u) * q(i)).sum(-1) + bu(u) + bv(i) + mean`: matrix factorisation",
        parts=(["q", "bu"], ["bu", "bv", "mean"], "q"),
        also=(["p", "bu", "bv", "mean"],),
    ),
    Row(
        "deep_operator_network",
        deep_operator,
        (
            (*weights("branch.2"), "b"),
            (*weights("trunk.2"), "b"),
            (*weights("branch.2", "trunk.2"), "b"),
        ),
        ["branch.2", "b"],
        "`(branch(u) * trunk(x)).sum(-1) + b`: DeepONet",
        bent=True,
        parts=("branch.2", "trunk.2"),
        also=(["trunk.2", "b"],),
    ),
    Row(
        "product_of_two_heads",
        product_of_heads,
        (weights("one"), weights("two"), weights("one", "two")),
        "one",
        bent=True,
    ),
    Row(
        "mixture_of_experts",
        mixture,
        (weights("experts"), weights("gate", "experts")),
        "experts",
        bent=True,
    ),
    Row(
        "gated_skip",
        gated_skip,
        (weights("head", "skip"), weights("gate", "head", "skip")),
        ["head", "skip"],
        bent=True,
        parts=("head", "skip"),
    ),
]


# --- layers of torch that are no linear maps ----------------------------------------------------


def on_steps(layer: nn.Module) -> tuple[nn.Module, Inputs]:
    """A recurrent layer last: (N, T, 3) -> (N, T, K)."""
    return Net(lambda m, x: m.rnn(x)[0], rnn=layer), (normal(ROWS, STEPS, INPUTS),)


def attention() -> tuple[nn.Module, Inputs]:
    run = lambda m, x: m.a(*3 * [m.low(x)], need_weights=False)[0]  # noqa: E731
    a = nn.MultiheadAttention(4, 2, batch_first=True)
    return Net(run, low=linear(4, INPUTS), a=a), (normal(ROWS, STEPS, INPUTS),)


def encoder() -> tuple[nn.Module, Inputs]:
    layer = nn.TransformerEncoderLayer(4, 2, WIDTH, batch_first=True)
    run = lambda m, x: m.encoder(m.low(x))  # noqa: E731
    return Net(run, low=linear(4, INPUTS), encoder=layer), (normal(ROWS, STEPS, INPUTS),)


def on_images(layer: nn.Module) -> tuple[nn.Module, Inputs]:
    body = nn.Sequential(nn.Conv2d(INPUTS, 4, 3, padding=1), nn.SiLU())
    return Net(lambda m, x: m.out(m.body(x)), body=body, out=layer), (normal(ROWS, INPUTS, 3, 4),)


def with_a_norm(norm: nn.Module) -> tuple[nn.Module, Inputs]:
    """A norm with weights of its own after a linear layer of three outputs."""
    for parameter in norm.parameters():
        parameter.data.normal_()
    return on_rows(lambda m, x: m.norm(m.head(m.t(x))), head=linear(3), norm=norm)


def recurrent(name: str) -> tuple[str, ...]:
    kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    return tuple(f"{name}.{kind}_l0" for kind in kinds)


def bag() -> tuple[nn.Module, Inputs]:
    run = lambda m, i: m.bag(i)  # noqa: E731
    return Net(run, bag=nn.EmbeddingBag(IDS, 1, mode="mean")), (integers(IDS, ROWS, 3),)


TORCH = [
    Row(
        "attention_last",
        attention,
        (weights("a.out_proj"),),
        "a.out_proj",
        "`nn.MultiheadAttention` last",
        around=("a",),
    ),
    Row(
        "transformer_layer_last",
        encoder,
        (
            weights("encoder.norm2"),
            weights("encoder.linear2"),
            (*weights("encoder.linear2"), "encoder.norm2.bias"),
        ),
        "encoder.norm2",
        "`nn.TransformerEncoderLayer` last, or a `nn.LayerNorm`",
        bent=True,
        around=("encoder",),
    ),
    Row(
        "layer_norm_last",
        lambda: with_a_norm(nn.LayerNorm(3)),
        (weights("norm"), weights("head"), (*weights("head"), "norm.bias")),
        "norm",
        bent=True,
    ),
    Row(
        "batch_norm_last",
        lambda: with_a_norm(nn.BatchNorm1d(3)),
        ((*weights("head"), "norm.bias"), weights("head"), weights("norm")),
        ["head", "norm.bias"],
        "`nn.BatchNorm1d` after the last linear layer",
        around=("head",),
    ),
    Row(
        "lstm_last",
        lambda: on_steps(nn.LSTM(INPUTS, 2, batch_first=True)),
        (recurrent("rnn"),),
        "rnn",
        "`nn.LSTM` or `nn.GRU` last",
        bent=True,
    ),
    Row(
        "gru_last",
        lambda: on_steps(nn.GRU(INPUTS, 2, batch_first=True)),
        (recurrent("rnn"),),
        "rnn",
        bent=True,
    ),
    Row(
        "bilinear_last",
        lambda: on_rows(lambda m, x: m.both(m.t(x), x), both=nn.Bilinear(WIDTH, INPUTS, 1)),
        (weights("both"),),
        "both",
        "`nn.Bilinear`, a wide or transposed convolution, `nn.EmbeddingBag` last",
    ),
    Row(
        "wide_convolution_last",
        lambda: on_images(nn.Conv2d(4, 1, 3, padding=1)),
        (weights("out"),),
        "out",
    ),
    Row(
        "transposed_convolution_last",
        lambda: on_images(nn.ConvTranspose2d(4, 1, 2, stride=2)),
        (weights("out"),),
        "out",
    ),
    Row("bag_of_embeddings_last", bag, (("bag.weight",),), "bag"),
]


# --- splines and forecasts ----------------------------------------------------------------------


class Spline(nn.Module):
    """scale_base silu(x) + scale_sp sum_g coef_g B_g(x) on every edge, summed, as in pykan."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.register_buffer("grid", torch.linspace(-1.0, 1.0, 5))
        self.coef = raw(inputs, outputs, 5)
        self.scale_base, self.scale_sp = raw(inputs, outputs), raw(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        bumps = (-((x[..., None] - self.grid) / 0.5).square()).exp()
        spline = torch.einsum("nig,iog->nio", bumps, self.coef)
        return (self.scale_base * functional.silu(x)[..., None] + self.scale_sp * spline).sum(1)


def kolmogorov_arnold() -> tuple[nn.Module, Inputs]:
    run = lambda m, x: m.act_fun[1](m.act_fun[0](x))  # noqa: E731
    splines = nn.ModuleList([Spline(INPUTS, 4), Spline(4, 1)])
    return Net(run, act_fun=splines), (normal(ROWS, INPUTS),)


class Block(nn.Module):
    """A block of N-BEATS: what it explains of the past, and its share of the forecast."""

    def __init__(self, knots: int, basis: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(linear(WIDTH, STEPS), nn.Tanh())
        self.backcast, self.forecast, self.basis = linear(STEPS), linear(knots), basis

    def forward(self, past: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(past)
        return self.backcast(h), self.basis(self.forecast(h))


class SharedBlock(nn.Module):
    """A block as neuralforecast has it: one layer for both, and a basis that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(linear(WIDTH, STEPS), nn.Tanh(), linear(STEPS + 2))
        powers = torch.linspace(0.0, 1.0, HORIZON) ** torch.arange(2)[:, None]
        self.forecast_basis = nn.Parameter(powers, requires_grad=False)

    def forward(self, past: Tensor) -> tuple[Tensor, Tensor]:
        theta = self.layers(past)
        return theta[:, :STEPS], theta[:, STEPS:] @ self.forecast_basis


class Interpolated(nn.Module):
    """A forecast at a few knots, interpolated between them, as in N-HiTS."""

    def forward(self, knots: Tensor) -> Tensor:
        return functional.interpolate(knots[:, None], size=HORIZON, mode="linear")[:, 0]


def stacked(m: Net, past: Tensor) -> Tensor:
    """Each block sees what those before it left over; their forecasts are summed."""
    total = past.new_zeros(len(past), HORIZON)
    for block in m.blocks:
        backcast, forecast = block(past)
        past, total = past - backcast, total + forecast
    return total


def on_series(*blocks: nn.Module) -> tuple[nn.Module, Inputs]:
    return Net(stacked, blocks=nn.ModuleList(blocks)), (normal(ROWS, STEPS),)


HORIZON = 3
FORECASTS = [f"blocks.{i}.forecast" for i in range(3)]
BASES = [f"blocks.{i}.basis" for i in range(3)]
THETAS = [f"blocks.{i}.layers.2" for i in range(3)]
FIXED = tuple(f"blocks.{i}.forecast_basis" for i in range(3))

SPLINES_AND_FORECASTS = [
    Row(
        "kolmogorov_arnold_network",
        kolmogorov_arnold,
        (
            ("act_fun.1.coef", "act_fun.1.scale_base"),
            ("act_fun.1.scale_base", "act_fun.1.scale_sp"),
            ("act_fun.1.coef", "act_fun.1.scale_base", "act_fun.1.scale_sp"),
        ),
        ["act_fun.1.coef", "act_fun.1.scale_base"],
        "splines: a Kolmogorov-Arnold network",
        bent=True,
        parts=("act_fun.1.coef",),
        around=("act_fun.1", "act_fun"),
    ),
    Row(
        "n_beats",
        lambda: on_series(*(Block(HORIZON, nn.Identity()) for _ in range(3))),
        (weights(*FORECASTS),),
        FORECASTS,
        "N-BEATS, N-HiTS: forecasts of several blocks, summed",
        silent=True,
        parts=("blocks.2", "blocks.2.forecast"),
        around=("blocks",),
    ),
    Row(
        "n_beats_with_trained_bases",
        lambda: on_series(*(Block(2, linear(HORIZON, 2)) for _ in range(3))),
        (weights(*BASES),),
        BASES,
        silent=True,
        parts=("blocks.2.basis", "blocks.2"),
    ),
    Row(
        "n_hits",
        lambda: on_series(*(Block(2, Interpolated()) for _ in range(3))),
        (weights(*FORECASTS),),
        FORECASTS,
        silent=True,
        parts=("blocks.2.forecast",),
    ),
    Row(
        "n_beats_with_one_layer_for_past_and_forecast",
        lambda: on_series(*(SharedBlock() for _ in range(3))),
        (weights(*THETAS), FIXED, (*weights(THETAS[2]), *FIXED[:2])),
        THETAS,
        bent=True,
        parts=("blocks.2.layers.2",),
    ),
]


ROWS_OF_TABLE = [*OWN, *SUMS, *GRAPHS, *PRODUCTS, *TORCH, *SPLINES_AND_FORECASTS]


# --- the table of the documentation -------------------------------------------------------------

BEGIN, END = "<!-- layers: begin -->", "<!-- layers: end -->"


def table() -> str:
    """The rows that the documentation lists, in Markdown."""
    lines = ["| the output is | pass |", "| --- | --- |"]
    for row in ROWS_OF_TABLE:
        if row.kind:
            found = "nothing, or " if row.silent else ""
            lines.append(f"| {row.kind} | {found}`layer={json.dumps(row.line)}` |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
