"""A folded head, with its guard, equals its plain formulas."""

import pytest
import torch

from rigidities.prediction.distribution import StudentT, Tilted
from rigidities.prediction.guards import Guard
from rigidities.prediction.head import Head, HeadForm, Inputs, column_spread
from tests.support.tensors import close, normal

F64 = torch.float64
TARGETS, WIDTH, TERMS = 2, 5, 8


def made(*, shared: bool, rows: int = 60) -> tuple[Head, list[Inputs], torch.Tensor]:
    """A head of random weights on features of which the third is constant, and the features."""
    features = 3 + 2 * normal(rows, TARGETS, WIDTH)
    features[..., 2] = 7.0
    if shared:
        features = features[:, :1].expand(-1, TARGETS, -1)
    q, mean = 0.1 + normal(rows, seed=2).square(), 5 + normal(rows, TARGETS, seed=3)
    inputs = [Inputs.of(q, mean[:, k], features[:, k]) for k in range(TARGETS)]
    weight = 0.3 * normal(TARGETS, 3 + WIDTH, 1 + TERMS, seed=4)
    constant, scale2 = 0.2 * normal(TARGETS, 1 + TERMS, seed=5), torch.ones(TARGETS, dtype=F64)
    bounds = torch.tensor([[-1.0, 1.2], [-0.7, 0.9]], dtype=F64)
    parts = (list(weight), list(constant), list(bounds), list(scale2))
    return Head.of(inputs, *parts, shared=shared), inputs, features


def plain(head, k, q, mean, features):
    """h and tilt of one target by the formulas."""
    f = features[:, k]
    log_q = (q.log() - head.rigidity[k, 0]) / head.rigidity[k, 1]
    low, high, centre, spread, square = head.output[k]
    m = (mean[:, k].clamp(low, high) - centre) / spread
    c, s = (t.expand(TARGETS, -1)[k] for t in (head.centre, head.spread))
    z = ((f - c) / s).clamp(-6, 6)
    phi = torch.cat([log_q.clamp(-4, 4)[:, None], m[:, None], (m**2 - square)[:, None], z], 1)
    both = head.constant[k] + phi @ head.weight[k]
    return both[:, 0].clamp(*head.bounds[k]), both[:, 1:].clamp(-3, 3)


def pair(first: float, second: float) -> torch.Tensor:
    return torch.tensor([first, second], dtype=F64)


def guards() -> dict[str, Guard | None]:
    """Of two targets: none, one, and that of a readout that sums."""
    ignorant = {
        "reference": pair(0.5, 0.1),
        "variance": pair(40.0, 70.0),
        "factor": pair(0.8, 1.0),
        "centre": pair(4.0, 6.0),
    }
    sums = {
        "by_feature": normal(TARGETS, WIDTH, seed=11),
        "extent_weight": 0.1 * normal(TARGETS, WIDTH, seed=12),
    }
    return {
        "none": None,
        "guard": Guard(**ignorant),
        "sums": Guard(**ignorant, **sums),
    }


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("dtype", [F64, torch.float32])
@pytest.mark.parametrize(
    "df", [6.0, torch.tensor([4.0, 9.0])], ids=["one distribution", "two distributions"]
)
@pytest.mark.parametrize("kind", ["none", "guard", "sums"])
def test_a_folded_head_equals_the_formulas(shared, dtype, df, kind):
    head, inputs, _ = made(shared=shared)
    rows, guard, distribution = 50, guards()[kind], Tilted(df)
    features = 3 + 20 * normal(rows, TARGETS, WIDTH, seed=7)  # many beyond six spreads
    features = features[:, :1].expand(-1, TARGETS, -1) if shared else features
    q, mean = torch.exp(4 * normal(rows, seed=8)), 5 + 3 * normal(rows, TARGETS, seed=9)
    own = features[:, 0] if shared else features
    factor = 1 + normal(rows, 1, seed=10).square()
    form = HeadForm.of(head, guard, distribution, dtype)
    squared, second, tilt = form(q[:, None].to(dtype), mean.to(dtype), own.to(dtype), factor)
    assert squared.dtype == second.dtype == tilt.dtype == dtype
    for k in range(TARGETS):
        h, steep = plain(head, k, q, mean, features)
        rtol = 1e-10 if dtype == F64 else 3e-5
        expected, faded = h.exp() * factor[:, 0] + q, steep
        if guard is not None:
            distance = mean - guard.centre
            extent = torch.ones_like(mean)
            if kind == "sums":
                distance = distance - (features * guard.by_feature).sum(-1)
                extent = (features * guard.extent_weight).sum(-1)
            each = expected[:, None].expand(-1, TARGETS)
            expected = guard.widened(each, q[:, None], distance, extent)[:, k]
            faded = steep / guard.beyond(q[:, None], extent)[:, k, None]
        close(squared[:, k].double(), expected, rtol)
        close(tilt[:, k].double(), faded, rtol)
        degrees = df if isinstance(df, float) else float(df[k])
        close(second[:, k].double(), Tilted(degrees, faded).second, rtol)
        phi = inputs[k](q, mean[:, k], features[:, k])
        both = head.constant[k] + phi @ head.weight[k]
        close(both[:, 0].clamp(*head.bounds[k]), h)


def one_target(features: torch.Tensor) -> tuple[Head, Inputs, torch.Tensor]:
    """A head without tilts on these features, its inputs, and its weights (3 + D, 1)."""
    q, mean = normal(len(features)).exp(), 5 + normal(len(features), seed=1)
    inputs, weight = Inputs.of(q, mean, features), 0.3 * normal(3 + features.shape[1], 1, seed=4)
    parts = ([weight], [weight[0]], [torch.tensor([-1.0, 1.0], dtype=F64)], [q[0]])
    return Head.of([inputs], *parts, shared=True), inputs, weight


def test_a_last_feature_of_ones_may_be_left_out():
    q, mean, features = normal(60).exp(), 5 + normal(60, seed=1), 3 + 2 * normal(60, 3, seed=2)
    features[:, 2] = 1.0
    head, inputs, weight = one_target(features)
    form = HeadForm.of(head, None, StudentT(5.0), F64)
    whole = form(q[:, None], mean[:, None], features)
    without = form(q[:, None], mean[:, None], features[:, :2])
    assert torch.equal(whole[0], without[0]) and torch.equal(whole[1], without[1])
    h = (inputs(q, mean, features) @ weight + weight[0])[:, 0].clamp(-1, 1)
    close(whole[0][:, 0], h.exp() + head.scale2 * q)
    assert whole[1].tolist() == [pytest.approx(5 / 3)] and whole[2] is None


def test_a_row_without_rigidity_and_constant_predictions_have_the_noise_alone():
    one, features = torch.ones(20, dtype=F64), normal(20, 2)
    inputs, weight = Inputs.of(one, 3 * one, features), torch.ones(5, 1, dtype=F64)
    bounds = torch.tensor([-9.0, 9.0], dtype=F64)
    head = Head.of([inputs], [weight], [weight[0]], [bounds], [one[0]], shared=True)
    form = HeadForm.of(head, None, StudentT(5.0), F64)
    squared, _, _ = form(0 * one[:, None], 7 * one[:, None], features)
    close(squared[:, 0], (1 + inputs(one, one, features)[:, 3:].sum(1)).exp())


def test_inputs_are_standardised_on_their_own_rows():
    q, mean, features = normal(60).exp(), 5 + normal(60, seed=1), 3 + 2 * normal(60, 2, seed=2)
    phi = Inputs.of(q, mean, features)(q, mean, features)
    assert float(phi.mean(0).abs().max()) < 1e-12
    close(phi[:, [0, 1, 3, 4]].std(0, correction=0), torch.ones(4, dtype=F64))


def test_constant_predictions_and_rigidities_have_no_input():
    one = torch.ones(20, dtype=F64)
    inputs = Inputs.of(one, 3 * one, normal(20, 2))
    assert bool((inputs(7 * one, 9 * one, normal(20, 2))[:, :3] == 0).all())


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kind", ["none", "guard", "sums"])
def test_one_target_has_an_axis_of_length_one(shared, kind):
    """The first of two targets, by itself, has the numbers that it has beside the other."""
    head, _, features = made(shared=shared)
    guard = guards()[kind]
    alone = Head(
        **{
            name: t if name in ("centre", "spread") and shared else t[:1]
            for name, t in vars(head).items()
        }
    )
    guard_alone = None
    if guard is not None:
        guard_alone = Guard(**{name: t[:1] for name, t in guard.tensors().items()})
    q, mean = torch.exp(3 * normal(60, 1, seed=8)), 5 + 3 * normal(60, TARGETS, seed=9)
    both = HeadForm.of(head, guard, Tilted(pair(4.0, 9.0)), F64)
    one = HeadForm.of(alone, guard_alone, Tilted(torch.tensor([4.0])), F64)
    for name, tensor in one.tensors().items():
        assert tensor.ndim == both.tensors()[name].ndim or name in ("head_weight", "head_constant")
    given = features[:, 0] if shared else features
    values = both(q, mean, given)
    for features_of_one in (features[:, 0], features[:, :1]):
        for value, expected in zip(one(q, mean[:, :1], features_of_one), values, strict=True):
            close(value, expected[:, :1], 1e-12)


@pytest.mark.parametrize("kind", ["none", "guard", "sums"])
@pytest.mark.parametrize("tilted", [True, False])
def test_a_form_is_made_again_of_its_tensors(kind, tilted):
    head, _, features = made(shared=True)
    distribution = Tilted(5.0)
    if not tilted:
        columns = ("weight", "constant")
        kept = {name: t[..., :1] if name in columns else t for name, t in vars(head).items()}
        head, distribution = Head(**kept), StudentT(5.0)
    form = HeadForm.of(head, guards()[kind], distribution, F64)
    again = HeadForm.from_tensors(form.tensors())
    assert (again.guard is None) == (kind == "none")
    q, mean = torch.exp(3 * normal(60, 1, seed=8)), 5 + 3 * normal(60, TARGETS, seed=9)
    values, expected = (f(q, mean, features[:, 0]) for f in (again, form))
    assert torch.equal(values[0], expected[0]) and torch.equal(values[1], expected[1])
    assert (values[2] is None) == (expected[2] is None) == (not tilted)


@pytest.mark.parametrize("shape", [(5, 0), (0,), (0, 3)])
def test_columns_without_entries_are_constant_and_do_not_warn(shape):
    spread = column_spread(torch.zeros(shape, dtype=torch.float64))
    assert spread.shape == shape[1:] and bool(spread.isinf().all())
