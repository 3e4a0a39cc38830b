"""What the first rows, or the present weights, do not show of a readout."""

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import rigidities as rg
from tests.support.nets import Net
from tests.support.readouts import features_of

ROWS = 60


def rows(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, 3, generator=generator, dtype=torch.float64)
    return x, torch.rand(ROWS, 1, generator=generator, dtype=torch.float64)


def positive_net(width: int, *, bias: bool = True) -> nn.Sequential:
    """A net that ends in a ReLU, which does nothing to the first rows."""
    torch.manual_seed(width)
    head = nn.Linear(width, 1, bias=bias)
    net = nn.Sequential(nn.Linear(3, width), nn.Sigmoid(), head, nn.ReLU()).double()
    with torch.no_grad():
        if bias:
            head.bias += 0.05 - net[:3](rows()[0][:8]).min()
        else:
            head.weight.abs_()
    return net


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("width", [4, 9, 16, 24, 39])
def test_a_relu_that_does_nothing_to_the_first_rows_is_told(width, bias):
    with pytest.warns(UserWarning, match="not linear in the weights"):
        uq = rg.LastLayerRigidity(positive_net(width, bias=bias)).fit(*rows())
    assert not uq.readout.linear


def test_a_mean_of_nets_that_end_in_a_relu_is_told_and_not_frozen():
    model = rg.MeanOf([positive_net(16), positive_net(9)])
    with pytest.warns(UserWarning, match="not linear in the weights"):
        uq = rg.LastLayerRigidity(model).fit(*rows())
    with pytest.raises(ValueError, match="cannot be frozen"):
        uq.calibrate(*rows(1), method="paper").freeze()


class Potential(nn.Module):
    """An energy and its derivative, which is taken inside the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 5)
        self.head = nn.Linear(5, 1)
        self.double()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = x.detach().requires_grad_()
        energy = self.head(self.trunk(x).tanh())
        (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return {"energy": energy, "forces": -slope}


@pytest.mark.parametrize("grad", [True, False])
def test_potentials_and_their_mean_are_fitted_in_any_mode_of_gradients(grad):
    x, y = rows()
    torch.manual_seed(0)
    models = [Potential(), Potential()]
    features = [model.trunk(x).tanh().detach() for model in models]
    ones = torch.ones(ROWS, 1, dtype=torch.float64)
    mean = torch.cat([features[0], ones, features[1], ones], 1) / 2
    with torch.set_grad_enabled(grad):
        one = rg.LastLayerRigidity(models[0], output="energy").fit([(x, y)])
        both = rg.LastLayerRigidity(rg.MeanOf(models, output="energy")).fit([(x, y)])
        torch.testing.assert_close(features_of(one, x), torch.cat([features[0], ones], 1))
        torch.testing.assert_close(features_of(both, x), mean)


class ClampedHead(nn.Linear):
    """A linear layer that clamps what enters it."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x.clamp(-1, 1), self.weight, self.bias)


def test_a_clamp_inside_the_head_that_the_first_rows_do_not_reach_is_seen():
    x, y = rows()
    x[8:] *= 20
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), ClampedHead(5, 1)).double()
    with torch.no_grad():
        x[:8] *= 0.5 / model[0](x[:8]).abs().max()
        h = model[0](x).clamp(-1, 1)
    uq = rg.LastLayerRigidity(model).fit([(x, y)])
    h = torch.cat([h, torch.ones(ROWS, 1, dtype=torch.float64)], 1)
    torch.testing.assert_close(uq.gram.matrix, h.mT @ h)


@pytest.mark.parametrize("least", [0, 8])
def test_a_weight_that_is_used_again_after_the_head_counts_with_both_uses(least):
    """Also where only batches of more than eight rows, which the search looks at, use it again."""

    def run(m, x):
        y = 2 * m.head(x)
        return y + x.square() @ m.head.weight.mT if len(x) > least else y

    x, y = rows()
    uq = rg.LastLayerRigidity(Net(run, head=nn.Linear(3, 1)).double()).fit([(x, y)])
    features = torch.cat([2 * x + x.square(), 2 * torch.ones_like(y)], 1)
    torch.testing.assert_close(uq.gram.matrix, features.mT @ features)


def test_an_offset_of_all_outputs_leaves_the_readout_linear():
    x, y = rows()
    model = Net(lambda m, x: m.head(x) + 1e12, head=nn.Linear(3, 1)).double()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rg.LastLayerRigidity(model).fit([(x, y + 1e12)]).readout.linear


UNCHANGED = {
    "clone": lambda y: y.clone(),
    "cast": lambda y: y.double(),
    "cat of one": lambda y: torch.cat([y], 1),
    "unbind of one": lambda y: y.unbind(1)[0],
    "chunk of one": lambda y: y.chunk(1, 1)[0],
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_what_only_copies_the_output_needs_no_derivatives(name):
    tail = UNCHANGED[name]
    model = Net(
        lambda m, x: tail(m.head(m.trunk(x).tanh())), trunk=nn.Linear(3, 4), head=nn.Linear(4, 1)
    )
    x, y = (tensor.float() for tensor in rows())
    uq = rg.LastLayerRigidity(model).fit([(x, y.reshape(model(x).shape))])
    assert uq.readout.kind == "plain"


def test_a_mask_of_ones_in_the_first_batch_is_a_tail_all_the_same():
    model = Net(lambda m, x, mask: m.head(x) * mask, head=nn.Linear(3, 1)).double()
    x, y = rows()
    uq = rg.LastLayerRigidity(model).fit([(x, torch.ones_like(y), y)])
    uq.calibrate([(x + 0.1, torch.ones_like(y), y)], method="paper")
    mask = (y > 0.5).double()
    expected = uq.predict([(x, mask, y)]).std
    torch.testing.assert_close(uq.freeze()(x, mask)[1], expected)


def test_fits_to_sequences_of_other_lengths_are_merged():
    model = Net(lambda m, x: m.head(x).permute(0, 2, 1).flatten(1), head=nn.Linear(3, 4)).double()
    fits = []
    grams = []
    for length in (3, 4):
        x = torch.randn(20, length, 3, dtype=torch.float64)
        fits.append(rg.LastLayerRigidity(model).fit([(x, model(x).detach())]))
        grams.append(fits[-1].gram.matrix)
    fits[0].merge(fits[1])
    torch.testing.assert_close(fits[0].gram.matrix, grams[0] + grams[1])


def test_warnings_of_the_model_in_its_first_batch_are_shown():
    def run(m, x):
        if len(x) > 8:
            warnings.warn("many rows", stacklevel=1)
        return m.head(x)

    with pytest.warns(UserWarning, match="many rows"):
        rg.LastLayerRigidity(Net(run, head=nn.Linear(3, 1)).double()).fit([rows()])


def test_a_row_that_is_not_finite_is_named_alone_under_a_tail():
    x, y = rows()
    x[2] = torch.nan
    model = Net(lambda m, x: 3 * m.head(x), head=nn.Linear(3, 1)).double()
    with pytest.raises(ValueError, match=r"1 of 60 rows \(2\)"):
        rg.LastLayerRigidity(model).fit([(x, y)])


def twice(m, x):
    return m.head(x) + 0.5 * functional.linear(x.roll(1, -1), m.head.weight)


def scaled_by_its_weight(m, x):
    return m.head(x) * (1 + m.head.weight.square().sum())


REUSED = [
    (twice, nn.utils.parametrizations.weight_norm),
    (twice, nn.utils.parametrizations.spectral_norm),
    # The spectral norm of a single row of weights is its length: it would not change.
    (scaled_by_its_weight, nn.utils.parametrizations.weight_norm),
]


@pytest.mark.parametrize(("run", "norm"), REUSED)
def test_a_normalised_weight_that_is_used_again_is_not_taken_for_the_readout(run, norm):
    torch.manual_seed(0)
    model = Net(run, head=norm(nn.Linear(3, 1))).double()
    with pytest.raises(ValueError, match="act after the last linear layer"):
        rg.LastLayerRigidity(model).fit(*rows())


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.filterwarnings("ignore:The output is not linear")
def test_a_weight_of_the_old_norm_that_is_used_again_is_read_by_its_parameters():
    torch.manual_seed(0)
    model = Net(twice, head=nn.utils.weight_norm(nn.Linear(3, 1))).double()
    x, y = rows()
    uq = rg.LastLayerRigidity(model).fit(x, y)
    jacobian = []
    for row in x:
        gradients = torch.autograd.grad(model(row[None]).sum(), list(model.parameters()))
        jacobian.append(torch.cat([gradient.flatten() for gradient in gradients]))
    expected = torch.stack(jacobian).detach()
    torch.testing.assert_close(uq.gram.matrix, expected.mT @ expected)


def test_a_later_batch_without_a_graph_is_refused_by_name():
    def run(m, x):
        y = 3 * m.head(x)
        return y.detach() if len(x) < ROWS else y

    model = Net(run, head=nn.Linear(3, 1)).double()
    x, y = rows()
    with pytest.raises(ValueError, match=r"Batch 1: .*does not depend on 'head'.*detach"):
        rg.LastLayerRigidity(model).fit([(x, y), (x[:7], y[:7])])


class PenaltyWhenAsked(nn.Module):
    """A network that differentiates itself if its input requires it, and frees its graph."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(3, 5)
        self.head = nn.Linear(5, 1)
        self.factor = factor
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.trunk(x))
        if x.requires_grad:
            torch.autograd.grad(h.sum(), x)
        y = self.head(h)
        return y if self.factor == 1 else self.factor * y


@pytest.mark.filterwarnings("ignore:The error bars are not calibrated")
def test_derivatives_behind_a_tail_of_a_model_that_frees_its_graph():
    x, y = rows()
    plain = rg.LastLayerRigidity(PenaltyWhenAsked(1)).fit(x, y).gradient(x)
    scaled = rg.LastLayerRigidity(PenaltyWhenAsked(2)).fit(x, y).gradient(x)
    torch.testing.assert_close(scaled.mean, 2 * plain.mean)


def test_forces_of_convolutions_are_told_to_wrap_the_energy():
    def forces(m, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = m.last(torch.tanh(m.first(x))).square().sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0].flatten(1)

    parts = {"first": nn.Conv1d(1, 4, 3), "last": nn.Conv1d(4, 1, 3)}
    x = torch.randn(ROWS, 1, 9, dtype=torch.float64)
    with pytest.raises(ValueError, match="Wrap the network that it differentiates, the energy"):
        rg.LastLayerRigidity(Net(forces, **parts).double()).fit(x, x.flatten(1))


def test_noise_variances_that_are_negative_are_told_what_variances_may_be():
    x, y = rows()
    uq = rg.LastLayerRigidity(Net(lambda m, x: m.head(x), head=nn.Linear(3, 1)).double()).fit(x, y)
    noise = rg.Paper(noise=lambda batch: -torch.ones(ROWS))
    with pytest.raises(ValueError, match=r"noise variances must be .*Give every row a variance"):
        uq.calibrate(x + 1, y, method=noise)


WEIGHTS = {
    "random": lambda weight: None,
    "constant": lambda weight: weight.fill_(0.3),
    "of mean zero": lambda weight: weight.sub_(weight.mean()),
}


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
@pytest.mark.parametrize(("weights", "width"), [*((name, 8) for name in WEIGHTS), ("random", 1)])
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_a_norm_that_hides_a_direction_of_the_weights_is_still_a_tail(norm, weights, width):
    torch.manual_seed(0)
    head = nn.Linear(width, 1)
    WEIGHTS[weights](head.weight.data)
    trunk = nn.Linear(1, width)
    model = Net(
        lambda m, x: m.head(torch.tanh(m.trunk(x[..., None]))).sum(1),
        trunk=trunk,
        head=norm(head),
    )
    x, y = rows()
    uq = rg.LastLayerRigidity(model).fit(x.float(), y.float())
    assert uq.readout.kind == "tail"
    assert uq.readout.linear


def test_a_parameter_beside_weight_and_bias_of_the_head_does_not_matter():
    torch.manual_seed(0)
    model = Net(lambda m, x: 2 * m.head(x), head=nn.Linear(3, 1))
    model.head.log_noise = nn.Parameter(torch.zeros(1))
    x, y = rows()
    uq = rg.LastLayerRigidity(model.double(), layer="head").fit(x, y)
    torch.testing.assert_close(features_of(uq, x), 2 * torch.cat([x, torch.ones(ROWS, 1)], 1))


def test_a_parameter_of_the_head_that_scales_its_input_leaves_a_tail():
    torch.manual_seed(0)
    model = Net(lambda m, x: 2 * m.head(x * m.head.scale), head=nn.Linear(3, 1))
    model.head.scale = nn.Parameter(torch.full((1,), 1.5))
    x, y = rows()
    uq = rg.LastLayerRigidity(model.double()).fit(x, y)
    assert uq.readout.kind == "tail"
    torch.testing.assert_close(features_of(uq, x), 2 * torch.cat([1.5 * x, torch.ones(ROWS, 1)], 1))
