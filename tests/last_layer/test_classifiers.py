"""Losses that are not of regression: a posterior, but no error bars of the target."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import rigidities as rg
from tests.support.refusals import refused

F64 = torch.float64
X = torch.rand(240, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
VALUES = X.sum(1, keepdim=True) + 0.1 * torch.randn(
    240, 1, generator=torch.Generator().manual_seed(1), dtype=F64
)
LABELS = (VALUES > 1.5).to(F64)
COUNTS = (3 * VALUES.abs()).round()
CLASSES = functional.one_hot((2 * VALUES[:, 0]).long().clamp(0, 2), 3).to(F64)
NAME = r"There are no error bars for the loss of this fit \({}\).*docs/classifiers.md"


def smoothed_labels(prediction: Tensor, target: Tensor) -> Tensor:
    smoothed = 0.9 * target + 0.05
    return functional.binary_cross_entropy_with_logits(prediction, smoothed, reduction="none")


def pairs(margin: Tensor, target: Tensor) -> Tensor:
    return -functional.logsigmoid(margin)


def standardised(prediction: Tensor, target: Tensor) -> Tensor:
    return (prediction - (target - 1.5) / 0.5).square()


def quantile(prediction: Tensor, target: Tensor, level: float = 0.9) -> Tensor:
    softplus = functional.softplus((target - prediction) / 0.05)
    return 0.05 * softplus + (1 - level) * (prediction - target)


COUPLING = torch.tensor([[1.0, 0, -3], [0, 1, -3], [-3, -3, 30]], dtype=F64)


def coupled(prediction: Tensor, target: Tensor) -> Tensor:
    # Its slope in two of the targets falls if all predictions rise by the same.
    error = prediction - target
    return (error @ COUPLING * error).sum(1)


def missing(prediction: Tensor, target: Tensor) -> Tensor:
    error = prediction - target.nan_to_num()
    return torch.where(target.isnan(), 0.0, error.square())


NOT_REGRESSION = {
    "binary cross entropy": (nn.BCEWithLogitsLoss(reduction="none"), LABELS, "BCEWithLogitsLoss"),
    "binary cross entropy, one label": (
        nn.BCEWithLogitsLoss(reduction="none"),
        torch.ones_like(LABELS),
        "BCEWithLogitsLoss",
    ),
    "smoothed labels": (smoothed_labels, LABELS, "smoothed_labels"),
    "labels of plus and minus one": (
        nn.SoftMarginLoss(reduction="none"),
        2 * LABELS - 1,
        "SoftMarginLoss",
    ),
    "Bradley-Terry pairs": (pairs, torch.ones_like(LABELS), "pairs"),
    "cross entropy": (nn.CrossEntropyLoss(reduction="none"), CLASSES, "CrossEntropyLoss"),
    "cross entropy, smoothed": (
        nn.CrossEntropyLoss(reduction="none", label_smoothing=0.1),
        CLASSES,
        "CrossEntropyLoss",
    ),
    "units of the loss": (standardised, VALUES, "standardised"),
    "without a name": (lambda y, t: pairs(y, t), LABELS, "a function without a name"),
}

REGRESSION = {
    "mse": ("mse", VALUES),
    "torch's mse": (nn.MSELoss(reduction="none"), VALUES),
    "huber": ("huber", VALUES),
    "torch's huber": (nn.HuberLoss(reduction="none", delta=10.0), VALUES),
    "log-cosh": ("log-cosh", VALUES),
    "gaussian": (rg.losses.GaussianNLL(0.5), VALUES),
    "poisson": ("poisson", COUNTS),
    "torch's poisson": (nn.PoissonNLLLoss(reduction="none"), COUNTS),
    "poisson of a rate": (
        nn.PoissonNLLLoss(log_input=False, reduction="none"),
        VALUES.abs() + 1,
    ),
    "quantile": (quantile, VALUES),
    "relative error": (lambda y, t: ((y - t) / t).square(), VALUES.abs() + 1),
    "coupled targets": (coupled, VALUES + torch.zeros(240, 3, dtype=F64)),
    "missing targets": (missing, torch.where(X[:, :1] < 0.6, torch.nan, VALUES)),
}


def net(targets: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        # Positive outputs, as a rate must have, in the range of the targets.
        model = nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, targets)).double()
    with torch.no_grad():
        model[2].weight.abs_()
        model[2].bias.fill_(1.0)
    return model


def fitted(loss, target: Tensor, batch_size: int | None = None) -> rg.LastLayerRigidity:
    uq = rg.LastLayerRigidity(net(target.shape[1]), batch_size=batch_size)
    return uq.fit(X[:160], target[:160], loss=loss)


@pytest.fixture
def classifier() -> rg.LastLayerRigidity:
    return fitted(*NOT_REGRESSION["binary cross entropy"][:2])


def refuses_error_bars(uq: rg.LastLayerRigidity, name: str = "BCEWithLogitsLoss") -> None:
    message = NAME.format(name)
    targets = uq.model(X).shape[1]
    refused(message, uq.calibrate, X[160:], LABELS[160:].expand(-1, targets))
    refused(message, uq.predict, X)
    refused(message, uq, X)
    refused(message, uq.predict_with_gradient, X)
    refused(message, uq.freeze)
    refused(message, uq.freeze, ("mean", "quantiles"))
    assert uq.calibration_report is None


@pytest.mark.filterwarnings("ignore:The loss couples the targets")
@pytest.mark.parametrize("case", NOT_REGRESSION)
def test_a_loss_that_is_not_smallest_at_the_target_has_no_error_bars(case):
    loss, target, name = NOT_REGRESSION[case]
    refuses_error_bars(fitted(loss, target), name)


@pytest.mark.filterwarnings("ignore:The loss couples the targets")
@pytest.mark.filterwarnings("ignore:The error bars are")
@pytest.mark.parametrize("case", REGRESSION)
def test_a_loss_that_is_smallest_at_the_target_has_error_bars(case):
    loss, target = REGRESSION[case]
    uq = fitted(loss, target)
    uq.calibrate(X[160:], target[160:], method="paper")
    assert bool(uq.predict(X).std.isfinite().all())


@pytest.mark.parametrize("size", [1, 7, 160])
def test_batches_do_not_change_the_verdict_on_a_loss(size):
    loss, target, name = NOT_REGRESSION["binary cross entropy"]
    refuses_error_bars(fitted(loss, target, batch_size=size), name)
    loss, target = REGRESSION["quantile"]
    fitted(loss, target, batch_size=size).calibrate(X[160:], target[160:], method="paper")


def test_the_posterior_of_a_classifier_is_its_laplace_approximation(classifier):
    features = classifier.features(X)
    probability = classifier.model(X).detach().sigmoid()
    weights = probability * (1 - probability)
    gram = (features[:160] * weights[:160]).mT @ features[:160]
    torch.testing.assert_close(classifier.gram.matrix, gram)
    ridge = classifier.ridge * torch.eye(len(gram), dtype=F64)
    q = (features * torch.linalg.solve(gram + ridge, features.mT).mT).sum(1)
    torch.testing.assert_close(1 / classifier.posterior.rigidity(features), q, rtol=1e-6, atol=0)
    covariance = classifier.covariance(X)
    torch.testing.assert_close(covariance.diagonal(), q, rtol=1e-6, atol=0)


def test_what_the_posterior_alone_tells_of_a_classifier_is_given_without_a_word(classifier):
    assert classifier.ensemble(8)(X).shape == (8, 240, 1)
    assert classifier.gradient(X).std.shape == X.shape
    assert classifier.propagate(lambda logits: logits.mean(), X).std > 0
    assert len(classifier.select(X, 5).indices) == 5
    assert classifier.freeze(("mean", "members"), members=8)(X)[1].shape == (8, 240, 1)


def test_more_rows_merges_and_files_keep_the_refusal(classifier, tmp_path):
    loss, target, _ = NOT_REGRESSION["binary cross entropy"]
    classifier.save(tmp_path / "uq")
    again = rg.LastLayerRigidity.load(tmp_path / "uq", classifier.model)
    refuses_error_bars(again)
    again = rg.LastLayerRigidity.load(tmp_path / "uq", classifier.model, loss=loss)
    refuses_error_bars(again)
    refuses_error_bars(again.partial_fit(X[160:200], target[160:200]))
    other = rg.LastLayerRigidity(classifier.model).fit(X[200:], target[200:], loss=loss)
    refuses_error_bars(classifier.merge(other))
    fresh = rg.LastLayerRigidity(classifier.model)
    fresh.load_state_dict(classifier.state_dict())
    refuses_error_bars(fresh)


def test_another_fit_with_a_loss_of_regression_lifts_the_refusal(classifier):
    classifier.fit(X[:160], VALUES[:160])
    classifier.calibrate(X[160:], VALUES[160:], method="paper")
    assert classifier(X)[1].shape == (240, 1)


def test_the_summary_of_a_classifier_says_why_it_has_no_error_bars(classifier):
    summary = classifier.summary()
    assert "none: BCEWithLogitsLoss is not a loss of regression; see docs/classifiers.md" in summary
    assert "calibrate(" not in summary


def test_labels_as_class_numbers_are_told_to_be_one_hot():
    loss = nn.CrossEntropyLoss(reduction="none")
    refused(
        "numbers of classes, pass them one-hot, and see docs/classifiers.md",
        rg.LastLayerRigidity(net(3)).fit,
        X,
        CLASSES.argmax(1),
        loss=loss,
    )


def test_the_rigidity_of_any_regressor_is_not_calibrated_on_labels_either():
    loss, target, _ = NOT_REGRESSION["binary cross entropy"]
    model = nn.Linear(3, 1).double()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=50, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        total = loss(model(X), target).sum()
        total.backward()
        return total

    optimizer.step(closure)
    pr = rg.PredictionRigidity(model, loss=loss, ridge=1e-6).fit(X, target)
    refused("error bars for the loss .*BCEWithLogitsLoss", pr.calibrate, X, target)
    assert bool((pr.rigidity(X) > 0).all())
