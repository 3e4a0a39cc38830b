"""One weight vector behind several targets: each target counts in its own unit.

The oracle divides every target, and the model's output of it, by the spread of its training rows,
sums the outer products of these standardised rows, and brings the result back to the units.
"""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import rigidities as rg
from rigidities.losses import GaussianNLL
from rigidities.statistics import gram_sums
from tests.support import jobs, oracle
from tests.support.refusals import refused
from tests.support.tampering import damage
from tests.support.tensors import close, normal

pytestmark = [
    pytest.mark.filterwarnings("ignore:The error bars are not calibrated"),
    pytest.mark.xdist_group("jobs"),
]

NAMES = ["head.weight", "head.bias"]
FAR = 8 * torch.ones(3, 3, dtype=torch.float64)


class TwoOutputs(nn.Module):
    """One linear map to a number, called on two sets of features and mixed: one weight vector.

    Args:
        scale: The unit of the second output.
        shift: What is added to both outputs, in their units.
    """

    def __init__(self, scale: float = 1.0, shift: float = 0.0) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(3, 12), nn.Linear(3, 12), nn.Linear(12, 1)
        for seed, parameter in enumerate(self.parameters()):
            parameter.data = normal(*parameter.shape, seed=seed)
        self.units = torch.tensor([1.0, scale], dtype=torch.float64)
        self.shift = shift

    def forward(self, x: Tensor) -> Tensor:
        first = self.head(self.first(0.3 * x).tanh())
        second = self.head(0.2 * self.second(0.3 * x))
        return (torch.cat([first, second + 0.1 * first], 1) + self.shift) * self.units


def data(model: TwoOutputs, rows: int = 60, seed: int = 20) -> tuple[Tensor, Tensor]:
    """Inputs, and targets that scatter about the model's outputs, in the same units."""
    x = normal(rows, 3, seed=seed)
    noise = torch.tensor([0.3, 0.1], dtype=torch.float64) * normal(rows, 2, seed=seed + 1)
    return x, (model(x) + noise * model.units).detach()


def fitted(model: TwoOutputs, rows=None, **options) -> rg.LastLayerRigidity:
    return rg.LastLayerRigidity(model).fit(data(model) if rows is None else rows, **options)


def half_square(prediction: Tensor, target: Tensor) -> Tensor:
    return (prediction - target).square() / 2


def quadratic(uq: rg.LastLayerRigidity, x: Tensor) -> Tensor:
    return 1 / uq.predict(x).rigidity


def features(model: nn.Module, x: Tensor) -> Tensor:
    """(N, 2, P) by automatic differentiation."""
    return oracle.readout_jacobian(model, lambda m: m(x), NAMES)


def standardised_quadratic(
    model: nn.Module, x: Tensor, spread: Tensor, at: Tensor, ridge: float
) -> Tensor:
    """q of the readout that predicts every target divided by its spread, in the targets' units."""
    mean = spread.log().mean().exp()  # the unit in which the ridge is meant
    rows = oracle.rows(features(model, x) / spread[:, None])
    there = features(model, at) / spread[:, None]
    q = oracle.quadratic(rows, there, ridge / float(mean) ** 2)
    return q * (spread / mean).square()


def assert_same(found: rg.LastLayerRigidity, expected: rg.LastLayerRigidity, rtol=1e-11) -> None:
    for name in ("matrix", "cross", "square"):
        close(getattr(found.gram, name), getattr(expected.gram, name), rtol)
    assert found.gram.count == expected.gram.count
    close(quadratic(found, FAR), quadratic(expected, FAR), 1e-9)


# --- what it is for -----------------------------------------------------------------------------


def far_over_usual(uq: rg.LastLayerRigidity) -> Tensor:
    """The bars at a far input over the usual bars, for each target."""
    x, _ = data(uq.model)
    return (quadratic(uq, FAR).mean(0) / quadratic(uq, x).median(0).values).sqrt()


@pytest.mark.parametrize("scale", [100.0, 1e4])
def test_the_unit_of_one_target_does_not_move_the_bars_of_another(scale):
    alike, mixed = fitted(TwoOutputs()), fitted(TwoOutputs(scale))
    torch.testing.assert_close(far_over_usual(mixed), far_over_usual(alike), rtol=1e-8, atol=0)
    literal = far_over_usual(fitted(TwoOutputs(scale), loss=half_square))[0]
    assert float(literal) < 0.5 * float(far_over_usual(alike)[0])


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_q_is_that_of_standardised_targets(scale):
    model = TwoOutputs(scale)
    x, y = data(model)
    uq = fitted(model)
    uq.calibrate(*data(model, seed=30), method=rg.Paper(ridge=0.1 * scale))
    spread = y.std(0, correction=0)
    close(quadratic(uq, FAR), standardised_quadratic(model, x, spread, FAR, uq.ridge))
    close(quadratic(uq, x), standardised_quadratic(model, x, spread, x, uq.ridge))


def test_features_of_a_function_count_in_their_targets_units_too():
    model = TwoOutputs(100.0)
    x, y = data(model)

    def by_hand(model, x):
        return features(model, x)

    uq = rg.LastLayerRigidity(model, features=by_hand).fit(x, y)
    ridge = 1e-3 * float(uq.gram.diagonal.mean())
    uq.calibrate(*data(model, seed=30), method=rg.Paper(ridge=ridge))
    expected = standardised_quadratic(model, x, y.std(0, correction=0), FAR, ridge)
    close(quadratic(uq, FAR), expected)


METHODS = {
    "full": rg.Full(),
    "nll": rg.Paper(noise="constant"),
    "evidence": rg.Paper(criterion="evidence", noise="bayes"),
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_calibrated_bars_scale_with_their_own_target(method):
    found = []
    for scale in (1.0, 1e4):
        model = TwoOutputs(scale)
        uq = fitted(model, data(model, 300))
        uq.calibrate(*data(model, 200, seed=30), method=method)
        x, _ = data(model, 4, seed=40)
        covariance = uq.covariance(x).reshape(4, 2, 4, 2)
        between = torch.outer(model.units, model.units)[:, None]
        found.append((uq.predict(x).std / model.units, covariance / between))
    close(found[1][0], found[0][0], 1e-5)
    close(found[1][1], found[0][1], 1e-5)


def test_rows_left_out_and_the_refitted_readout_know_the_units():
    found = []
    for scale in (1.0, 1e4):
        model = TwoOutputs(scale)
        uq = fitted(model)
        x, _ = data(model, 4, seed=40)
        new = uq.refit()
        uq.calibrate(train=data(model), method=rg.Paper(criterion="loo"))
        means = (new.model(x) / model.units, new.refitted.after / model.units)
        found.append((uq.predict(x).std / model.units, *means))
    for large, small in zip(found[1], found[0], strict=True):
        close(large.detach(), small.detach(), 1e-5)


def test_the_frozen_module_has_the_same_bars():
    model = TwoOutputs(1e4)
    uq = fitted(model)
    uq.calibrate(*data(model, seed=30), method="paper")
    for found, expected in zip(uq.freeze()(FAR), uq(FAR), strict=True):
        close(found, expected)


# --- what it does not depend on -----------------------------------------------------------------


def test_batches_order_parts_and_rows_that_left_do_not_matter(tmp_path):
    model = TwoOutputs(1e4)
    x, y = data(model)
    fit = partial(fitted, model)
    whole = fit()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    assert_same(fit([(x[i], y[i]) for i in order.split(7)]), whole)
    first, second = fit((x[:13], y[:13])), fit((x[13:], y[13:]))
    first.save(tmp_path / "first", rows=True)
    assert_same(fit((x[:13], y[:13])).merge(second), whole)
    loaded = rg.LastLayerRigidity.load(tmp_path / "first", model)
    assert_same(loaded, first)
    assert_same(loaded.partial_fit(x[13:], y[13:]), whole)
    other = normal(9, 3, seed=50), 3 * y[:9]
    assert_same(fit().partial_fit(*other).forget(*other), whole, 1e-8)
    copied = rg.LastLayerRigidity(model)
    copied.load_state_dict(whole.state_dict())
    assert_same(copied, whole)


def test_a_fit_from_a_file_goes_on_with_its_units(tmp_path):
    model = TwoOutputs(1e4)
    x, y = data(model, 400)
    fitted(model, (x[:300], y[:300])).save(tmp_path / "fit", rows=True)
    uq = rg.LastLayerRigidity.load(tmp_path / "fit", model).partial_fit(x[300:], y[300:])
    assert_same(uq, fitted(model, (x, y)))


def of_processes(rank: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    model = TwoOutputs(1e4)
    x, y = data(model)
    own = slice(0, 13) if rank == 0 else slice(13, None)
    uq = rg.LastLayerRigidity(model).fit([(x[own], y[own])])
    uq.calibrate([tuple(part[rank::size] for part in data(model, seed=30))], method="paper")
    return uq.gram.matrix, uq.gram.cross, quadratic(uq, FAR)


def test_two_processes_end_with_the_fit_of_one():
    first, second = jobs.values(of_processes, 2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    model = TwoOutputs(1e4)
    uq = fitted(model)
    uq.calibrate(*data(model, seed=30), method="paper")
    for found, expected in zip(
        first, (uq.gram.matrix, uq.gram.cross, quadratic(uq, FAR)), strict=True
    ):
        close(found, expected, 1e-8)


@pytest.mark.parametrize("size", [60, 7])
def test_large_offsets_of_the_targets_change_nothing(size):
    plain, shifted = TwoOutputs(1e4), TwoOutputs(1e4, shift=1e6)
    x, y = data(plain)
    moved = y + 1e6 * plain.units
    batches = list(zip(x.split(size), moved.split(size), strict=True))
    close(fitted(shifted, batches).gram.matrix, fitted(plain).gram.matrix, 1e-8)


# --- which unit ---------------------------------------------------------------------------------


def whole_numbers(model, x):
    """Features (N, 2, 3) whose products are exact."""
    return torch.stack([x, x.flip(1) + 1], 1)


class Sums(nn.Module):
    """The sum of the features of `whole_numbers`, for each of two targets."""

    def forward(self, x):
        return whole_numbers(self, x).sum(-1)


def test_equal_spreads_give_the_literal_sum_to_the_bit():
    x = torch.randint(-5, 6, (40, 3), generator=torch.Generator().manual_seed(0)).double()
    y = x.sum(1)[:, None] + torch.tensor([0.5, 1000.25], dtype=torch.float64)
    fits = [
        rg.LastLayerRigidity(Sums(), features=whole_numbers).fit(x, y, loss=loss)
        for loss in ("mse", half_square)
    ]
    rows = oracle.rows(whole_numbers(None, x))
    for uq in fits:
        assert torch.equal(uq.gram.matrix, rows.T @ rows)
    assert torch.equal(fits[0].gram.cross, fits[1].gram.cross)
    assert torch.equal(fits[0].gram.square, fits[1].gram.square)
    assert torch.equal(quadratic(fits[0], x), quadratic(fits[1], x))
    for offset in (0.1, 0.7, 1e3 / 3):  # spreads that differ by rounding are equal
        other = torch.stack([y[:, 0], y[:, 0].flip(0) + offset], 1)
        uq = rg.LastLayerRigidity(Sums(), features=whole_numbers).fit(x, other)
        assert torch.equal(uq.gram.matrix, rows.T @ rows)


@pytest.mark.parametrize(
    "loss", [half_square, GaussianNLL(1.0), GaussianNLL(torch.tensor([4.0, 9.0]))]
)
def test_a_loss_with_a_curvature_of_its_own_counts_literally(loss):
    model = TwoOutputs(100.0)
    x, _ = data(model)
    uq = fitted(model, loss=loss)
    variance = torch.as_tensor(getattr(loss, "variance", 1.0), dtype=torch.float64)
    rows = uq.features(x) / variance.sqrt().reshape(-1, 1)
    close(uq.gram.matrix, oracle.gram(oracle.rows(rows)))
    assert "each as it is, by its loss" in uq.summary()
    assert "each in its own unit" in fitted(model).summary()
    assert "each in its own unit" in fitted(model, loss="huber").summary()


def test_without_targets_the_outputs_give_the_units():
    model = TwoOutputs(100.0)
    x, _ = data(model)
    uq = rg.LastLayerRigidity(model).fit(x)
    rows = uq.features(x)
    units = oracle.own_units(model(x).detach())
    close(uq.gram.matrix, oracle.gram(oracle.rows(rows), units.repeat(len(x))))
    # Targets decide as soon as any row has one, whichever came first.
    uq.partial_fit(*data(model, 30, seed=60))
    both = torch.cat([rows, uq.features(data(model, 30, seed=60)[0])])
    units = oracle.own_units(data(model, 30, seed=60)[1])
    close(uq.gram.matrix, oracle.gram(oracle.rows(both), units.repeat(len(both))))


@pytest.mark.parametrize("constant", [0.0, 0.1, 1e6 + 0.1])
@pytest.mark.parametrize("size", [60, 7, 1])
def test_a_target_that_does_not_vary_counts_as_it_is(constant, size):
    model = TwoOutputs(100.0)
    x, y = data(model)
    y[:, 1] = constant
    y[::3, 1] = y[::3, 1].nextafter(y[:1, 0])  # rounding is no spread
    batches = list(zip(x.split(size), y.split(size), strict=True))
    weight = lambda batch: 1 + batch[0][:, 0].square()  # noqa: E731
    uq = fitted(model, batches, sample_weight=weight)
    # The other target is the only one with a unit, which is then the unit of all.
    weights = weight([x]).repeat_interleave(2)
    close(uq.gram.matrix, oracle.gram(oracle.rows(uq.features(x)), weights))


@pytest.mark.parametrize("constant", [0.0, 0.1, 1e6 + 0.1])
def test_a_target_that_varied_in_forgotten_rows_alone_counts_as_it_is(constant):
    model = TwoOutputs(100.0)
    x, y = data(model)
    y[:, 1] = constant
    for draw in range(5):
        y[:5, 1] = constant + 3 * normal(5, seed=80 + draw)
        uq = fitted(model, (x, y)).forget(x[:5], y[:5])
        close(uq.gram.matrix, oracle.gram(oracle.rows(uq.features(x[5:]))))


def test_rows_count_in_the_unit_with_their_sample_weights():
    model = TwoOutputs(100.0)
    x, y = data(model)
    weights = normal(60, 2, seed=70).exp()
    weights[::4] = 0.0
    weights[1::5, 1] = 0.0
    y = torch.where(weights > 0, y, torch.nan)
    lookup = {tuple(row.tolist()): weight for row, weight in zip(x, weights, strict=True)}

    def sample_weight(batch):
        return torch.stack([lookup[tuple(row.tolist())] for row in batch[0]])

    uq = fitted(model, list(zip(x.split(7), y.split(7), strict=True)), sample_weight=sample_weight)
    total = weights.sum(0)
    mean = (weights * y.nan_to_num()).sum(0) / total
    spread = ((weights * (y.nan_to_num() - mean).square()).sum(0) / total).sqrt()
    units = (spread.log().mean().exp() / spread).square()
    rows = oracle.rows(uq.features(x))
    close(uq.gram.matrix, oracle.gram(rows, (units * weights).flatten()))


# --- what cannot have units ---------------------------------------------------------------------


def test_sums_that_would_take_too_much_memory_stay_literal(monkeypatch):
    model = TwoOutputs(100.0)
    x, _ = data(model)
    monkeypatch.setattr(gram_sums, "MOST_BYTES", 2 * 8 * 13**2 - 1)
    uq = fitted(model)
    close(uq.gram.matrix, oracle.gram(oracle.rows(uq.features(x))))
    assert "a Gram for each would exceed" in uq.summary()


def test_batches_with_other_numbers_of_targets_stay_literal():
    x = normal(30, 4)

    class Steps(nn.Module):
        def forward(self, x):
            return x

    def of_steps(model, x):
        return torch.stack([x, x.square(), torch.ones_like(x)], -1)

    parts = [x[:10], x[10:20, :3], x[20:]]
    expected = oracle.gram(torch.cat([oracle.rows(of_steps(None, part)) for part in parts]))
    for order in ((0, 1, 2), (0, 2, 1)):
        uq = rg.LastLayerRigidity(Steps(), features=of_steps)
        uq.fit([(parts[i], 10.0**i * parts[i]) for i in order])
        close(uq.gram.matrix, expected)
        assert "batches differ in their number of targets" in uq.summary()


def test_files_of_sums_without_units_are_refused(tmp_path):
    model = TwoOutputs(100.0)
    path = tmp_path / "fit"
    fitted(model).save(path)

    def without_moments(tensors, header):
        for name in [name for name in tensors if ".units." in name]:
            del tensors[name]

    damage(path, without_moments)
    refused("lacks the tensor 'gram.units.mean'", rg.LastLayerRigidity.load, path, model)
