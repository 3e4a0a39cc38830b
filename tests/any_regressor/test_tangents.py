"""Per-sample derivatives of any regressor against one backward pass at a time."""

import copy

import pytest
import torch
from torch import nn

from rigidities.any_regressor.curvature import dual_form
from rigidities.any_regressor.derivatives.differentiation import Differentiation
from rigidities.any_regressor.derivatives.parameters import Parameters
from rigidities.any_regressor.derivatives.regressor import Regressor
from rigidities.any_regressor.derivatives.tangents import Explicit, Outer, Tangents
from tests.support import rigidity_cases as cases
from tests.support import rigidity_oracle as oracle

F64 = torch.float64


FACTORED = {
    "net",
    "net with several outputs",
    "layer norm and in-place ReLU",
    "weight norm",
    "batch norm",
    "convolution",
    "a layer used twice",
    "linear layers on positions",
    "a raw parameter",
    "an embedding",
}
"""Cases whose linear layers need no Jacobian of their own."""


def given(inputs):
    """Positional and keyword arguments of one call."""
    (first, *_) = inputs
    return ((), first) if isinstance(first, dict) else (inputs, {})


def tangents(regressor, *inputs, **kwargs):
    """Predictions (N, K) and tangents (N, K, P) of one batch."""
    return Differentiation.of(regressor, *inputs, **kwargs)(*inputs, **kwargs)


def computed(name, which="train"):
    case = cases.CASES[name]
    args, kwargs = given(getattr(case, which))
    return tangents(Regressor.of(case.f, case.params), *args, **kwargs)


@pytest.mark.parametrize("name", cases.CASES)
def test_the_tangents_equal_one_backward_pass_at_a_time(name):
    case = cases.CASES[name]
    model = oracle.flat(case.f, case.params)
    y, t = computed(name)
    torch.testing.assert_close(y, oracle.outputs(model, *case.train).detach())
    torch.testing.assert_close(t.matrix(), oracle.jacobian(model, *case.train))


@pytest.mark.parametrize("name", sorted(FACTORED))
def test_linear_layers_are_factored_where_their_weights_enter_through_the_call_alone(name):
    case = cases.CASES[name]
    args, kwargs = given(case.train)
    assert Differentiation.of(Regressor.of(case.f), *args, **kwargs).layers is not None


@pytest.mark.parametrize("name", ["a weight used elsewhere", "positions folded into the batch"])
def test_layers_whose_factors_are_not_the_whole_derivative_are_given_up(name):
    case = cases.CASES[name]
    assert Differentiation.of(Regressor.of(case.f), *case.train).layers is None


def test_a_second_use_of_a_weight_is_noticed_in_a_large_model():
    width = 300
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer, last = nn.Linear(width, width, bias=False), nn.Linear(width, 1)

    def call(m, x):
        h = torch.tanh(m.layer(x))
        return m.last(h + 0.5 * torch.tanh(nn.functional.linear(h, m.layer.weight)))

    model = cases.Net(call, layer=layer, last=last).double()
    x = torch.randn(2, width, generator=torch.Generator().manual_seed(0), dtype=F64)
    _, t = tangents(Regressor.of(model), x)
    flat = oracle.flat(model)
    torch.testing.assert_close(t.matrix(), oracle.jacobian(flat, x))


@pytest.mark.parametrize("name", ["net with several outputs", "linear layers on positions"])
def test_kernel_products_and_lengths_follow_from_the_matrix(name):
    (_, left), (_, right) = computed(name), computed(name, "new")
    j, k = left.matrix(), right.matrix()
    n, outputs, width = j.shape
    assert left.shape == (n, outputs, width) == (*j.shape[:2], sum(left.widths))
    torch.testing.assert_close(left.kernel(right), j.flatten(0, 1) @ k.flatten(0, 1).mT)
    torch.testing.assert_close(left.kernel(), j.flatten(0, 1) @ j.flatten(0, 1).mT)
    torch.testing.assert_close(left.squares(), (j**2).sum(-1))
    v, u = torch.randn(5, width, dtype=F64), torch.randn(5, n, outputs, dtype=F64)
    torch.testing.assert_close(left.forward(v), torch.einsum("nkp,mp->mnk", j, v))
    torch.testing.assert_close(left.backward(u), torch.einsum("nkp,mnk->mp", j, u))


def test_rows_are_mixed_within_each_sample():
    _, t = computed("net with several outputs")
    j = t.matrix()
    root = torch.randn(len(j), 2, 2, dtype=F64)
    torch.testing.assert_close(t.mixed(root).matrix(), torch.einsum("nkj,nkp->njp", root, j))
    torch.testing.assert_close(t.mixed(root[:, 0]).matrix(), root[:, 0, :, None] * j)


def test_parts_of_a_batch_join_to_the_whole():
    _, t = computed("net with several outputs")
    index = torch.tensor([0, 3, 5])
    torch.testing.assert_close(t.take(index).matrix(), t.matrix()[index])
    parts = [t.take(slice(0, 7)), t.take(slice(7, None))]
    torch.testing.assert_close(Tangents.join(parts).matrix(), t.matrix())
    assert Tangents.join(parts).numbers == t.numbers


def test_blocks_of_two_kinds_join_and_multiply():
    inputs, slopes = torch.randn(4, 3, dtype=F64), torch.randn(4, 2, 5, dtype=F64)
    outer, explicit = Outer(inputs, slopes), Explicit(torch.randn(6, 2, 15, dtype=F64))
    written = torch.einsum("nko,ni->nkoi", slopes, inputs).reshape(4, 2, 15)
    torch.testing.assert_close(outer.matrix(), written)
    joined = Tangents.join([Tangents((outer,)), Tangents((explicit,))])
    torch.testing.assert_close(joined.matrix(), torch.cat([written, explicit.rows]))
    cross = written.flatten(0, 1) @ explicit.rows.flatten(0, 1).mT
    torch.testing.assert_close(outer.kernel(explicit), cross)
    torch.testing.assert_close(explicit.kernel(outer), cross.mT)


def test_a_kernel_made_of_blocks_is_the_whole_kernel():
    (_, left), (_, right) = computed("net with several outputs"), computed("three outputs")
    for t in (left, right):
        whole, one_by_one = t.kernel(), [t.take(slice(i, i + 1)) for i in range(len(t.matrix()))]
        for samples in (1, 5, 12):
            groups = list(dual_form.grouped(one_by_one, samples))
            assert {len(group.matrix()) for group in groups[:-1]} <= {samples}
            torch.testing.assert_close(dual_form.assembled_kernel(groups), whole)
            some, form = t.take(slice(2, 9)), dual_form.DualForm.of(groups, ridge=1.0)
            torch.testing.assert_close(form.factor @ form._whitened(some), t.kernel(some))


def test_factors_of_a_wide_net_hold_far_fewer_numbers_than_its_jacobian():
    model = nn.Sequential(
        nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )
    _, t = tangents(Regressor.of(model), torch.randn(10, 3))
    assert t.numbers < 10 * 500 < 10 * 4481 == t.matrix().numel()


def test_products_of_float32_tangents_are_summed_in_float64():
    case = cases.CASES["net with several outputs"]
    model = copy.deepcopy(case.f).float()
    x = case.train[0].float()
    _, t = tangents(Regressor.of(model), x)
    assert t.matrix().dtype == torch.float32 and t.kernel().dtype == F64
    exact = oracle.jacobian(oracle.flat(model), x).flatten(0, 1)
    torch.testing.assert_close(t.kernel(), exact @ exact.mT, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_any_number_of_samples_will_do(count):
    case = cases.CASES["linear layers on positions"]
    _, t = tangents(Regressor.of(case.f), case.train[0][:count])
    expected = oracle.jacobian(oracle.flat(case.f), case.train[0][:count])
    torch.testing.assert_close(t.matrix(), expected)


def test_a_function_that_cannot_be_vectorised_is_differentiated_sample_by_sample():
    def f(w, x):
        values = [w[0] * value if value.item() > 0 else w[1] * value**2 for value in x]
        return torch.stack(values) + w[2:].sum()

    w = torch.randn(20, dtype=F64)
    with pytest.warns(UserWarning, match="One backward pass per sample"):
        _, t = tangents(Regressor.of(f, w), cases.X1)
    torch.testing.assert_close(t.matrix(), oracle.jacobian(oracle.flat(f, w), cases.X1))


def test_a_formula_with_masks_is_differentiated_in_silence(recwarn):
    def piecewise(w, x):
        y = w[0] * x
        y[x > 0] = w[1] * x[x > 0] ** 2 + w[2]
        return y

    w = torch.randn(3, dtype=F64)
    _, t = tangents(Regressor.of(piecewise, w), cases.X1)
    torch.testing.assert_close(t.matrix(), oracle.jacobian(oracle.flat(piecewise, w), cases.X1))
    assert not recwarn.list


def test_recurrent_nets_are_differentiated_with_a_warning():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        call = lambda m, x: m.o(m.r(x)[0][:, -1])  # noqa: E731
        layers = {"r": nn.GRU(2, 3, batch_first=True), "o": nn.Linear(3, 1)}
    model = cases.Net(call, **layers).double()
    with pytest.warns(UserWarning, match="One backward pass per sample"):
        _, t = tangents(Regressor.of(model), cases.X32)
    torch.testing.assert_close(t.matrix(), oracle.jacobian(oracle.flat(model), cases.X32))


def test_only_the_selected_parameters_are_columns():
    case = cases.CASES["net"]
    for subset, keep in {
        "2": lambda name: name.startswith("2."),
        "0.weight": lambda name: name == "0.weight",
        "0.bias": lambda name: name == "0.bias",
    }.items():
        _, t = tangents(Regressor.of(case.f, subset=subset), *case.train)
        expected = oracle.jacobian(oracle.flat(case.f, keep=keep), *case.train)
        torch.testing.assert_close(t.matrix(), expected)


def test_a_layer_that_a_batch_does_not_call_has_no_influence_there():
    def call(m, x, z):
        parts = [m.a(x) if (z == 0).any() else 0.0, m.b(x) if (z == 1).any() else 0.0]
        return parts[0] * (z == 0)[:, None] + parts[1] * (z == 1)[:, None]

    model = cases.Net(call, a=nn.Linear(2, 1), b=nn.Linear(2, 1)).double()
    z = torch.zeros(24, dtype=torch.long)
    d = Differentiation.of(Regressor.of(model), cases.X2, z)
    for species in (z, z + 1, torch.arange(24) % 2):
        _, t = d(cases.X2, species)
        expected = oracle.jacobian(oracle.flat(model), cases.X2, species)
        torch.testing.assert_close(t.matrix(), expected)


def test_a_batch_that_calls_no_selected_layer_has_tangents_of_zero():
    def call(m, x, z):
        return sum(n(x)[:, 0] * (z == k) for k, n in enumerate(m.nets) if bool((z == k).any()))

    model = cases.Net(call, nets=nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])).double()
    z = torch.zeros(24, dtype=torch.long)
    d = Differentiation.of(Regressor.of(model, subset="nets.0"), cases.X2, z)
    assert (d(cases.X2, z)[1].matrix() != 0).any()
    assert (d(cases.X2, z + 1)[1].matrix() == 0).all()


def test_parameters_survive_flattening_and_back():
    tree = {"a": [torch.ones(2), (torch.zeros(1, 3), 7)], "b": cases.Pair(*torch.ones(2))}
    p = Parameters.of(tree)
    assert p.names[:2] == ("a.0", "a.1.0") and len(p) == 7
    back = p.restore(torch.arange(7.0))
    assert back["a"][0].tolist() == [0, 1] and back["a"][1][0].tolist() == [[2, 3, 4]]
    assert back["a"][1][1] == 7 and isinstance(back["b"], cases.Pair)
    assert (back["b"].slope.item(), back["b"].offset.item()) == (5, 6)


def test_a_prefix_ends_at_a_dot():
    tree = {"a": {"w": torch.ones(2)}, "ab": torch.ones(3), "a2": [torch.ones(1)]}
    assert Parameters.of(tree, "a").names == ("a.w",)
    assert Parameters.of(tree, ["ab", "a2"]).names == ("ab", "a2.0")


def test_a_tensor_that_stands_in_two_places_is_one_parameter():
    shared = torch.ones(2, dtype=F64)
    p = Parameters.of({"a": shared, "b": shared})
    assert len(p) == 2
    back = p.restore(torch.tensor([3.0, 4.0], dtype=F64))
    assert back["a"].tolist() == back["b"].tolist() == [3, 4]


def test_two_parameters_of_one_name_are_never_confused():
    with pytest.raises(ValueError, match=r"a\.b"):
        Parameters.of({"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1)})
