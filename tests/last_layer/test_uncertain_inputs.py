"""What uncertain inputs add to a prediction's variance, against explicit sums and closed forms."""

import functools
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rigidities as rg
from rigidities.last_layer.gradients import feature_derivatives
from tests.support import derivative_oracle as dense
from tests.support import oracle, zoo
from tests.support.nets import calibrated
from tests.support.refusals import refused
from tests.support.tensors import close, normal
from tests.support.zoo_fits import fitted_to

F64 = torch.float64
ROWS = 6


def covariances(rows, numbers, seed=0):
    """Random positive definite matrices, (rows, d, d)."""
    a = normal(rows, numbers, numbers, seed=seed)
    return a @ a.mT / numbers + 0.1 * torch.eye(numbers, dtype=F64)


def fitted(model, shape, targets, noise="none", **options):
    sets = [(normal(40, *shape, seed=s), normal(40, targets, seed=s + 1)) for s in (1, 3)]
    uq = rg.LastLayerRigidity(model, **options).fit(sets[0])
    uq.calibrate(sets[1], method=rg.Paper(ridge=0.1, noise=noise))
    return uq


@functools.cache
def mlp(targets=1, noise="none"):
    """A net of three inputs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, targets)).double()
    return fitted(model, (3,), targets, noise)


@functools.cache
def steps(targets=1):
    """A net of inputs (5, 3), summed over the five."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        trunk, head = nn.Sequential(nn.Linear(3, 6), nn.Tanh()), nn.Linear(6, targets)
        run = lambda m, x: m.head(m.trunk(x)).sum(1)  # noqa: E731
        model = zoo.Net(run, trunk=trunk, head=head).double()
    return fitted(model, (5, 3), targets)


X = {"flat": normal(ROWS, 3, seed=10), "shaped": normal(ROWS, 5, 3, seed=11)}
NETS = {"flat": mlp, "shaped": steps}


@functools.cache
def slopes(kind, targets):
    """dy/dx of each sample, (N, K, d), one output after the other."""
    model, x = oracle.float64_copy(NETS[kind](targets).model), X[kind]
    rows = []
    for n in range(ROWS):
        free = x[n : n + 1].clone().requires_grad_(True)
        y = model(free)[0]
        rows.append(
            torch.stack([torch.autograd.grad(k, free, retain_graph=True)[0].flatten() for k in y])
        )
    return torch.stack(rows)


# --- first order --------------------------------------------------------------------------------


def forms(kind):
    """Every form of S with the matrices (N, d, d) that it means."""
    inner = X[kind].shape[1:]
    d = inner.numel()
    eye = torch.eye(d, dtype=F64)
    variances, rows = normal(d, seed=0).exp(), normal(ROWS, d, seed=1).exp()
    one, each = covariances(1, d)[0], covariances(ROWS, d, seed=2)
    everywhere = lambda m: m.expand(ROWS, d, d)  # noqa: E731
    return {
        "number": (0.3, everywhere(0.3 * eye)),
        "tensor of one number": (torch.tensor(0.3, dtype=F64), everywhere(0.3 * eye)),
        "zero": (0.0, everywhere(0 * eye)),
        "(d,)": (variances, everywhere(torch.diag(variances))),
        "(*input,)": (variances.reshape(inner), everywhere(torch.diag(variances))),
        "(N, d)": (rows, torch.diag_embed(rows)),
        "(N, *input)": (rows.reshape(ROWS, *inner), torch.diag_embed(rows)),
        "(d, d)": (one, everywhere(one)),
        "(*input, *input)": (one.reshape(*inner, *inner), everywhere(one)),
        "(N, d, d)": (each, each),
        "(N, *input, *input)": (each.reshape(ROWS, *inner, *inner), each),
        "of rank one": (
            torch.outer(variances, variances),
            everywhere(torch.outer(variances, variances)),
        ),
        "NumPy": (each.numpy(), each),
    }


@pytest.mark.parametrize("form", forms("flat"))
@pytest.mark.parametrize("kind", ["flat", "shaped"])
def test_every_form_of_a_covariance_gives_the_explicit_sum(kind, form):
    given, matrices = forms(kind)[form]
    for targets in (1, 2):
        expected = dense.from_inputs(slopes(kind, targets), matrices)
        p = NETS[kind](targets).predict(X[kind], input_covariance=given)
        close(p.from_inputs, expected)


def test_what_the_inputs_bring_is_added_and_nothing_else_changes():
    uq = mlp(2, "constant")
    x, s = X["flat"], covariances(ROWS, 3)
    without, p = uq.predict(x), uq.predict(x, input_covariance=s)
    assert float(without.noise.min()) > 0
    assert not without.from_inputs.any()
    for name in ("mean", "epistemic", "noise", "rigidity"):
        assert torch.equal(getattr(p, name), getattr(without, name))
    assert float(p.from_inputs.min()) > 0
    close(p.variance, p.epistemic + p.noise + p.from_inputs)
    close(p.std, p.variance.sqrt())
    low, high = p.interval(0.9)
    close((high - low) / 2, 1.6448536269514722 * p.std)
    close(p.log_prob(p.mean), -0.5 * (2 * math.pi * p.variance).log())


def test_the_noise_alone_is_divided_by_the_sample_weight():
    uq, x = mlp(2, "constant"), X["flat"]
    plain = uq.predict(x, input_covariance=0.3)
    four = lambda b: torch.full((ROWS,), 4.0)  # noqa: E731
    heavy = uq.predict(x, input_covariance=0.3, sample_weight=four)
    close(heavy.noise, plain.noise / 4)
    assert torch.equal(heavy.from_inputs, plain.from_inputs)


def test_a_linear_model_is_exact_to_first_order():
    model = nn.Linear(3, 2).double()
    uq = fitted(model, (3,), 2)
    s = covariances(1, 3)[0]
    w = model.weight.detach()
    expected = (w @ s @ w.T).diagonal().expand(ROWS, 2)
    close(uq.predict(X["flat"], input_covariance=s).from_inputs, expected)


def test_batches_get_their_own_rows():
    uq, x, s = mlp(2), X["flat"], covariances(ROWS, 3)
    whole = uq.predict(x, input_covariance=s).from_inputs
    y = normal(ROWS, 2, seed=0)
    for data in ([x[:1], x[1:]], DataLoader(TensorDataset(x, y), batch_size=4), (x, y)):
        close(uq.predict(data, input_covariance=s).from_inputs, whole)
    for batch_size in (1, 4):
        uq.batch_size = batch_size
        close(uq.predict(x, input_covariance=s).from_inputs, whole)
    uq.batch_size = None
    rows = normal(ROWS, 3, seed=1).exp()
    close(
        uq.predict(x, input_covariance=rows).from_inputs,
        dense.from_inputs(slopes("flat", 2), torch.diag_embed(rows)),
    )


def test_independent_inputs_add_their_variances():
    uq, x = mlp(), X["flat"]
    parts = [uq.predict(x, input_covariance=v).from_inputs for v in torch.eye(3, dtype=F64)]
    close(sum(parts), uq.predict(x, input_covariance=1.0).from_inputs)


@pytest.mark.parametrize("kind", ["variances", "matrices"])
def test_atoms_bring_their_variance_to_their_own_structure(kind):
    id = "sum_over_atoms_with_species_shifts"
    cases = [zoo.build(id, draw) for draw in (0, 1, 2)]
    uq = rg.LastLayerRigidity(cases[0].model, **cases[0].options).fit([cases[0].data])
    uq.calibrate([cases[1].data], method="paper")
    g = cases[2].data
    atoms = len(g.x)
    s = normal(atoms, 3, seed=0).exp() if kind == "variances" else covariances(atoms, 3)
    matrices = torch.diag_embed(s) if kind == "variances" else s
    slope = dense.derivatives(uq.model, dense.case_call(cases[2]), cases[2].parameters, g.x).slope
    expected = torch.zeros(12, 1, dtype=F64)
    for atom, structure in enumerate(g.molecule.tolist()):
        expected[structure, 0] += dense.sum_of_products(slope[structure, 0, atom], matrices[atom])
    p = uq.predict([g], input_covariance=s, wrt="x")
    close(p.from_inputs, expected)
    first = g.molecule < 5
    parts = [
        zoo.Graph(g.x[m], g.species[m], g.molecule[m] - low, n, g.energy[low : low + n])
        for m, low, n in ((first, 0, 5), (~first, 5, 7))
    ]
    close(uq.predict(parts, input_covariance=s, wrt="x").from_inputs, expected)


def two_sums(m, x, structure, neighbour):
    """Over the atoms of each structure, of a nonlinear function of their positions."""
    y = m.head(m.trunk(x + 0.5 * x[neighbour].sin()))
    return y.new_zeros(int(structure.max()) + 1, 2).index_add(0, structure, y)


def structures(count, across, dtype=F64):
    """Positions, the structure of each atom (in no order) and a neighbour within it or not."""
    generator = torch.Generator().manual_seed(0)
    structure = torch.arange(count).repeat(3)
    order = torch.randperm(3 * count, generator=generator)
    neighbour = torch.roll(torch.arange(3 * count), count)  # the same structure's next atom
    if across:
        neighbour[:4] = torch.arange(1, 5)  # other structures' atoms
    inverse = order.argsort()
    return normal(3 * count, 3, seed=4).to(dtype), structure[order], inverse[neighbour[order]]


@functools.cache
def atoms(dtype=F64):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        trunk, head = nn.Sequential(nn.Linear(3, 6), nn.Tanh()), nn.Linear(6, 2)
        model = zoo.Net(two_sums, trunk=trunk, head=head).to(dtype)
    given = structures(20, False, dtype)
    uq = rg.LastLayerRigidity(model).fit([(*given, normal(20, 2, seed=5).to(dtype))])
    return (
        uq.calibrate(
            [(given[0] + 0.1, *given[1:], normal(20, 2, seed=6).to(dtype))], method="paper"
        ).calibration_report
        and uq
    )


@pytest.mark.parametrize("kind", ["number", "matrices"])
@pytest.mark.parametrize("across", [False, True])
def test_atoms_may_act_on_several_structures(monkeypatch, across, kind):
    uq, (x, structure, neighbour) = atoms(), structures(7, across)
    pulled_at_once = []
    grad = torch.autograd.grad

    def counted_grad(outputs, inputs, cotangents, **options):
        if options.get("is_grads_batched"):
            pulled_at_once.append(len(cotangents))
        return grad(outputs, inputs, cotangents, **options)

    s = covariances(len(x), 3) if kind == "matrices" else 0.3
    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd, "grad", counted_grad)
        patch.setattr(feature_derivatives, "NUMBERS_AT_ONCE", 3 * x.numel())
        p = uq.predict([(x, structure, neighbour)], input_covariance=s, wrt=0)
    matrices = covariances(len(x), 3) if kind == "matrices" else 0.3 * torch.eye(3, dtype=F64)
    call = lambda m, x: m(x, structure, neighbour)  # noqa: E731
    slope = dense.derivatives(uq.model, call, ["head.weight"], x).slope  # (N, 2, atoms, 3)
    expected = torch.einsum("nkai,aij,nkaj->nk", slope, matrices.expand(len(x), 3, 3), slope)
    close(p.from_inputs, expected)
    # With one structure alone for each atom, two passes are enough for the two outputs.
    assert sum(pulled_at_once) == (14 if across else 2)
    assert max(pulled_at_once) <= 3


@pytest.mark.parametrize(("dtype", "count"), [(F64, 1), (F64, 50), (torch.float32, 6001)])
def test_the_structure_of_each_atom_is_found(dtype, count):
    uq, (x, structure, neighbour) = atoms(dtype), structures(count, False, dtype)
    own = x.clone().requires_grad_()
    output = uq.model(own, structure, neighbour)
    expected = []
    for k in range(2):  # each atom acts on its own structure alone
        (slope,) = torch.autograd.grad(output[:, k].sum(), own, retain_graph=True)
        squares = slope.square().sum(1)
        expected.append(squares.new_zeros(count).index_add(0, structure, squares))
    p = uq.predict([(x, structure, neighbour)], input_covariance=0.3, wrt=0)
    tolerance = 1e-10 if dtype == F64 else 1e-4
    torch.testing.assert_close(
        p.from_inputs, 0.3 * torch.stack(expected, 1), rtol=tolerance, atol=1e-9
    )


def test_a_structure_that_no_atom_moves_gets_nothing():
    x, structure, neighbour = structures(9, False)
    far = lambda m, x: m(x.where(structure[:, None] != 3, 0.0), structure, neighbour)  # noqa: E731
    assert float(dense.derivatives(atoms().model, far, ["head.weight"], x).slope[3].norm()) == 0
    uq = rg.LastLayerRigidity(zoo.Net(lambda m, x: far(m.body, x), body=atoms().model))
    uq.fit([(x, normal(9, 2, seed=0))])
    uq.calibrate([(x + 0.1, normal(9, 2, seed=1))], method="paper")
    p = uq.predict([x], input_covariance=0.3)
    assert not p.from_inputs[3].any()
    slope = dense.derivatives(atoms().model, far, ["head.weight"], x).slope
    close(p.from_inputs, 0.3 * slope.square().sum((2, 3)))


SOME = (
    *("scaled_and_shifted_squeezed_output", "targets_mixed_by_a_fixed_matrix", "reshaped_output"),
    *("softplus_after_the_head", "pointwise_convolution_in_one_dimension", "two_inputs"),
    *("cumulative_sum_over_time", "transposed_time_steps_and_targets"),
)


@pytest.mark.parametrize("id", SOME)
def test_any_readout_takes_uncertain_inputs(id):
    case, test = zoo.build(id), dense.trimmed(zoo.build(id, 3), 3)
    uq = fitted_to(case, [case.data])
    uq.calibrate([zoo.build(id, 2).data], method="paper")
    d = test.args[0][0].numel()
    s = covariances(3, d)
    slope = dense.of_case(test).slope
    expected = dense.from_inputs(slope.reshape(*test.target.shape, d), s)
    close(uq.predict([test.data], input_covariance=s, wrt=0).from_inputs, expected)


def test_a_float32_model_keeps_its_dtype():
    model = oracle.float64_copy(mlp(2).model).float()
    sets = [(normal(40, 3, seed=s).float(), normal(40, 2, seed=s + 1).float()) for s in (1, 3)]
    uq = calibrated(rg.LastLayerRigidity(model).fit(sets[0]), sets[1])
    p = uq.predict(X["flat"].float(), input_covariance=covariances(ROWS, 3))
    assert p.from_inputs.dtype == p.variance.dtype == torch.float32
    close(p.from_inputs, dense.from_inputs(slopes("flat", 2), covariances(ROWS, 3)).float(), 1e-4)


# --- by draws -----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["number", "(d,)", "(N, d)", "(d, d)", "(N, d, d)"])
def test_draws_scatter_about_a_linear_models_variance_as_they_should(form):
    model = nn.Linear(3, 2).double()
    uq, (given, matrices), n = fitted(model, (3,), 2), forms("flat")[form], 2000
    generator = torch.Generator().manual_seed(0)
    p = uq.predict(X["flat"], input_covariance=given, input_samples=n, generator=generator)
    w = model.weight.detach()
    exact = torch.stack([(w @ m @ w.T).diagonal() for m in matrices])
    z = (p.from_inputs / exact - 1) / math.sqrt(2 / (n - 1))
    assert float(z.abs().max()) < 5
    assert 0.2 < float(z.square().mean().sqrt()) < 2.5


def test_draws_see_what_the_first_order_does_not():
    square = zoo.Net(lambda m, x: m.head(x.square()), head=nn.Linear(1, 1)).double()
    square.head.weight.data.fill_(1.0)  # y = x^2 + a constant
    uq = fitted(square, (1,), 1)
    x = torch.tensor([[0.0], [2.0]], dtype=F64)
    first = uq.predict(x, input_covariance=0.25).from_inputs
    close(first, torch.tensor([[0.0], [4.0]], dtype=F64))  # (2 x)^2 s
    n = 4000
    drawn = uq.predict(
        x, input_covariance=0.25, input_samples=n, generator=torch.Generator().manual_seed(0)
    ).from_inputs
    exact = torch.tensor([[0.125], [4.125]], dtype=F64)  # 4 x^2 s + 2 s^2
    torch.testing.assert_close(drawn, exact, rtol=0.15, atol=0)


def test_draws_follow_the_generator_and_are_a_sample_variance():
    uq, x = mlp(), X["flat"]

    def drawn(seed, n=2):
        generator = torch.Generator().manual_seed(seed)
        return uq.predict(x, input_covariance=0.1, input_samples=n, generator=generator).from_inputs

    assert torch.equal(drawn(0), drawn(0))
    assert not torch.allclose(drawn(0), drawn(1))
    assert bool((drawn(0) >= 0).all())
    many = torch.stack([drawn(seed) for seed in range(150)]).mean(0)
    once = drawn(1000, 4000)
    torch.testing.assert_close(many, once, rtol=0.35, atol=0)  # n - 1, not n: a factor of two


def test_draws_leave_the_rest_of_the_prediction_alone():
    uq, x = mlp(2, "constant"), X["flat"]
    without = uq.predict(x)
    p = uq.predict(x, input_covariance=0.1, input_samples=8)
    for name in ("mean", "epistemic", "noise", "rigidity"):
        assert torch.equal(getattr(p, name), getattr(without, name))
    close(p.variance, p.epistemic + p.noise + p.from_inputs)


# --- what may not matter ------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_callers_grad_mode_does_not_matter(mode):
    uq, x = mlp(2), X["flat"]
    expected = uq.predict(x, input_covariance=0.3)
    with mode():
        for inside in (x, x.clone()):
            p = uq.predict(inside, input_covariance=0.3)
            close(p.from_inputs, expected.from_inputs)
            close(p.std, expected.std)
            drawn = uq.predict(inside, input_covariance=0.3, input_samples=3)
            assert drawn.from_inputs.shape == (ROWS, 2)
    assert not expected.from_inputs.requires_grad


def test_the_input_is_left_as_it_was():
    uq = mlp()
    free = X["flat"].clone().requires_grad_(True)
    s = covariances(1, 3)[0].requires_grad_(True)
    p = uq.predict(free, input_covariance=s)
    assert free.grad is None
    assert s.grad is None
    assert not p.variance.requires_grad
    assert torch.equal(free, X["flat"])


COUPLED = [(name, X["flat"][:rows]) for name in dense.COUPLINGS for rows in (2, 3, ROWS)]
COUPLED += [("mean", X["flat"][:1].repeat(rows, 1)) for rows in (2, 4)]  # equal rows


@pytest.mark.parametrize(("coupling", "x"), COUPLED)
def test_rows_that_influence_one_another_are_right(coupling, x):
    model, rows = zoo.Net(dense.COUPLINGS[coupling], body=oracle.float64_copy(mlp().model)), len(x)
    other = normal(rows, 3, seed=3)
    uq = rg.LastLayerRigidity(model).fit((other, normal(rows, 1, seed=0)))
    uq.calibrate((normal(rows, 3, seed=1), normal(rows, 1, seed=2)), method=rg.Paper(ridge=0.1))
    names, call = ["body.2.weight", "body.2.bias"], lambda m, x: m(x)
    slope = dense.derivatives(model, call, names, x).slope[:, 0]  # (N, N, d)
    p = uq.predict(x, input_covariance=0.3)
    close(p.from_inputs[:, 0], 0.3 * slope.square().sum((1, 2)))


# --- bad input ----------------------------------------------------------------------------------

TILTED = torch.tensor([[1.0, 0.5, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
INDEFINITE = torch.tensor([[1.0, 2.0, 0.0], [2.0, 1.0, 0.0], [0.0, 0.0, 1.0]])

REFUSED = {
    "negative_variance": (-1.0, r"negative variance, -1.*squares"),
    "one_negative_variance": (torch.tensor([1.0, -0.5, 1.0]), "negative variance, -0.5"),
    "nan": (math.nan, "NaN"),
    "infinity": (torch.tensor([1.0, math.inf, 1.0]), "infinity"),
    "nan_in_a_matrix": (torch.eye(3) * math.nan, "NaN"),
    "not_symmetric": (TILTED, r"not symmetric.*\(S \+ S\.T\) / 2"),
    "one_not_symmetric": (torch.stack([torch.eye(3)] * 5 + [TILTED]), "not symmetric"),
    "indefinite": (INDEFINITE, "not positive semi-definite.*-1"),
    "one_indefinite": (torch.stack([torch.eye(3)] * 5 + [INDEFINITE]), "positive semi-definite"),
    "wrong_length": (torch.ones(4), r"shape \(4,\).*3 numbers.*\(3, 3\)"),
    "wrong_matrix": (torch.eye(4), r"shape \(4, 4\)"),
    "wrong_columns": (torch.ones(ROWS, 2), r"shape \(6, 2\)"),
    "too_few_rows": (torch.ones(5, 3), "5 rows, fewer"),
    "too_many_rows": (torch.ones(7, 3), "7 rows for 6"),
    "too_few_matrices": (torch.eye(3).repeat(5, 1, 1), "5 rows, fewer"),
    "too_many_matrices": (torch.eye(3).repeat(7, 1, 1), "7 rows for 6"),
    "a_word": ("wide", "input_covariance"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_covariance_is_refused_and_leaves_the_object_as_it_was(case):
    given, message = REFUSED[case]
    uq, x = mlp(), X["flat"]
    before = uq.predict(x).variance
    for samples in (0, 3):
        with pytest.raises((ValueError, TypeError), match=message):
            uq.predict(x, input_covariance=given, input_samples=samples)
    assert torch.equal(uq.predict(x).variance, before)


def test_rows_are_counted_over_all_batches():
    uq, batches = mlp(), list(X["flat"].split(2))
    refused("5 rows, fewer", uq.predict, batches, input_covariance=torch.ones(5, 3))
    refused("7 rows for 6", uq.predict, batches, input_covariance=torch.ones(7, 3))


@pytest.mark.parametrize("samples", [1, -1, 1.5])
def test_too_few_draws_are_refused(samples):
    with pytest.raises((ValueError, TypeError), match=f"input_samples.*got {samples}"):
        mlp().predict(X["flat"], input_covariance=0.1, input_samples=samples)


@pytest.mark.parametrize("option", [{"input_samples": 10}, {"wrt": 0}])
def test_options_of_uncertain_inputs_need_a_covariance(option):
    refused("input_covariance", mlp().predict, X["flat"], **option)


def test_the_uncertain_one_of_several_inputs_must_be_named():
    case, test = (zoo.build("head_called_twice_for_a_difference", draw) for draw in (0, 3))
    uq = calibrated(rg.LastLayerRigidity(case.model).fit([case.data]), [test.data])
    refused(r"wrt=.*0, 1", uq.predict, [test.data], input_covariance=0.1)
    refused("no input 'pos'", uq.predict, [test.data], input_covariance=0.1, wrt="pos")
    first, second = (uq.predict([test.data], input_covariance=0.1, wrt=i) for i in (0, 1))
    assert not torch.allclose(first.from_inputs, second.from_inputs)


def test_integer_inputs_cannot_be_uncertain():
    case = zoo.build("dict_batches_with_labels")
    uq = calibrated(rg.LastLayerRigidity(case.model).fit([case.data]), [zoo.build(case.id, 1).data])
    refused("floating-point", uq.predict, [case.data], input_covariance=0.1)


def test_a_model_without_a_graph_takes_draws_alone():
    id = "forward_without_gradients_with_its_features"
    case = zoo.build(id)
    uq = rg.LastLayerRigidity(case.model, **case.options).fit([case.data])
    uq.calibrate([zoo.build(id, 1).data], method="paper")
    refused("no_grad", uq.predict, [case.data], input_covariance=0.1)
    p = uq.predict([case.data], input_covariance=0.1, input_samples=50)
    assert float(p.from_inputs.min()) > 0


def test_no_data_are_refused():
    refused("nothing to predict", mlp().predict, [], input_covariance=0.1)
