"""Files of `PredictionRigidity`: the same answers for the same regressor, and a refusal else."""

import pytest
import torch
from torch import nn

import rigidities as rg
from rigidities.calibration.methods import Paper
from tests.support import rigidity_cases as cases
from tests.support.refusals import refused
from tests.support.rigidity_cases import X1
from tests.support.rigidity_oracle import F64
from tests.support.tampering import damage, rewrite

pytestmark = pytest.mark.filterwarnings("ignore:The parameters are not a minimum")

FORMS = {
    "dense": {"form": "dense", "ridge": 0.1},
    "dual": {"form": "dual", "ridge": 0.1},
    "exact": {"hessian": "exact", "ridge": 5.0},
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "pr.safetensors"


def line(w, x):
    return w["offset"] + w["slope"] * x


PARAMS = {"offset": torch.tensor(1.0, dtype=F64), "slope": torch.tensor(2.0, dtype=F64)}
Y = line(PARAMS, X1) + 0.1 * X1.sin()


def fitted(**options):
    return rg.PredictionRigidity(line, PARAMS, **options).fit(X1, Y)


def load(path, f=line, params=PARAMS, **options):
    return rg.PredictionRigidity.load(path, f, params, **options)


@pytest.mark.parametrize("id", sorted(cases.CASES))
@pytest.mark.parametrize("form", FORMS)
def test_a_reloaded_rigidity_answers_alike(id, form, path):
    s = cases.solved(id)
    made = (s.case.f,) if isinstance(s.case.f, nn.Module) else (s.case.f, s.case.params)
    pr = rg.PredictionRigidity(*made, **FORMS[form])
    pr.fit(*cases.handed(s.case.train, s.target))
    data, (new,) = cases.handed(s.case.train, s.target), cases.handed(s.case.new)
    pr.calibrate(*data, method=Paper(noise="constant"))
    pr.save(path)
    again = rg.PredictionRigidity.load(path, *made)
    before, after = pr.predict(new), again.predict(new)
    for name in ("mean", "epistemic", "noise", "rigidity"):
        torch.testing.assert_close(getattr(after, name), getattr(before, name))
    assert (again.ridge, again.scale, again.form) == (pr.ridge, pr.scale, pr.form)
    assert str(again.calibration_report) == str(pr.calibration_report)
    torch.testing.assert_close(again.covariance(new), pr.covariance(new))
    assert again.gradient_norm == pr.gradient_norm
    assert again.calibrate(*data, method="paper").calibration_report.ridge == pytest.approx(
        pr.calibrate(*data, method="paper").calibration_report.ridge
    )


def test_a_scale_that_was_set_is_kept(path):
    pr = fitted()
    pr.set_scale(pr.residual_scale).save(path)
    again = load(path)
    assert again.scale == pr.scale == again.residual_scale and again.calibration_report is None
    drawn = [one.sample(3, torch.Generator().manual_seed(0))["slope"] for one in (pr, again)]
    torch.testing.assert_close(*drawn)


def test_a_matrix_free_form_is_not_saved(path):
    with pytest.raises(ValueError, match=r"matrix-free.*training data.*form='dense' or 'dual'"):
        fitted(form="matrix-free", ridge=0.1).save(path)
    assert not path.exists()


def test_another_regressor_or_other_parameters_are_refused(path):
    fitted().save(path)
    with pytest.raises(ValueError, match=r"buffers differ.*with the same parameters, or fit again"):
        load(path, params={**PARAMS, "slope": torch.tensor(2.5, dtype=F64)})
    with pytest.raises(ValueError, match="parameter 'slope', which this regressor does not have"):
        load(path, params={"offset": PARAMS["offset"]})


def test_held_parameters_and_buffers_count_too(path):
    net = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double().eval()
    rg.PredictionRigidity(net, ridge=0.1, subset="2").fit(X1[:, None], Y[:, None]).save(path)
    for changed in (net[0].weight, net[1].running_var):
        changed.data += 1
        refused("or buffers differ", rg.PredictionRigidity.load, path, net, subset="2")
        changed.data -= 1
    rg.PredictionRigidity.load(path, net, subset="2")


class Masked(nn.Module):
    """A net that keeps a mask for the size of the batch in a buffer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 1, dtype=F64)
        self.register_buffer("mask", None)

    def forward(self, x):
        self.mask = torch.ones_like(x)
        return self.linear(x * self.mask)


def test_a_buffer_that_a_pass_fills_may_be_filled_or_not(path):
    net, again = Masked(), Masked()
    again.load_state_dict(net.state_dict())
    x = X1[:, None]
    pr = rg.PredictionRigidity(net, ridge=0.1).fit(x, net.linear(x).detach()).set_scale(1.0)
    expected = pr.variance(x[:3])
    assert net.mask is None
    pr.save(path)
    for _ in range(2):
        loaded = rg.PredictionRigidity.load(path, again)
        torch.testing.assert_close(loaded.variance(x[:3]), expected)
        again(x[:5])


def test_a_loaded_rigidity_reads_an_iterator_once_and_knows_its_outputs(path):
    pr = fitted()
    pr.save(path)
    found = load(path).predict(x for x in X1.split(5))
    torch.testing.assert_close(found.epistemic, pr.predict(X1).epistemic)
    twice = load(path, f=lambda w, x: torch.stack([line(w, x)] * 2, 1))
    refused(r"outputs of shape \(2,\).*gave \(\) in the fit", twice.predict, X1)


def test_a_file_of_the_other_facade_is_refused_by_both(path):
    fitted().save(path)
    model = nn.Linear(1, 1)
    refused("another kind: expected 'fit'", rg.LastLayerRigidity.load, path, model)
    rg.LastLayerRigidity(model).fit((torch.ones(4, 1), torch.ones(4, 1))).save(path)
    refused("another kind: expected 'regressor'.* says 'fit'", load, path)


DAMAGE = {
    "no matrix": (lambda t, h: t.pop("dense.matrix"), "lacks the tensor 'dense.matrix'.*Save it"),
    "no square": (
        lambda t, h: t.update({"dense.matrix": torch.ones(2, 3, dtype=F64)}),
        r"'dense.matrix' must be float64 \(2, 2\), got float64 \(2, 3\)",
    ),
    "a short matrix": (
        lambda t, h: t.update({"dense.matrix": torch.eye(2)}),
        r"'dense.matrix' must be float64 \(2, 2\), got float32 \(2, 2\)",
    ),
    "another scale": (
        lambda t, h: t.update({"calibration.scale": 2 * t["calibration.scale"]}),
        "checksum",
    ),
    "another ridge": (lambda t, h: h["calibration"].update(ridge=torch.inf), "checksum"),
    "no regressor": (lambda t, h: h.update(regressor=[]), "checksum"),
}


@pytest.mark.parametrize(("change", "match"), DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("reported", [False, True])
def test_contents_other_than_those_that_were_saved_are_refused(change, match, reported, path):
    pr = fitted()
    if reported:
        pr.calibrate(X1, Y, method="paper")
    pr.save(path)
    damage(path, change)
    refused(rf"pr\.safetensors.*{match}", load, path)


FROM_ANOTHER_VERSION = {
    "other settings": (
        lambda t, h: h["calibration"]["distribution"].update(settings={"df": 3}),
        "other settings here.*df",
    ),
    "no shape": (lambda t, h: h["regressor"].pop("shape"), "lacks 'shape'.*pip install"),
    "no regressor": (lambda t, h: h.pop("regressor"), "lacks 'regressor'.*pip install"),
    "no matrix": (lambda t, h: t.pop("dense.matrix"), "lacks 'matrix'.*pip install"),
    "no scale": (lambda t, h: t.pop("calibration.scale"), "lacks 'scale'.*pip install"),
    "an earlier format": (lambda t, h: h.update(format=1), "an earlier version.*Fit again"),
}


@pytest.mark.parametrize(
    ("change", "match"), FROM_ANOTHER_VERSION.values(), ids=FROM_ANOTHER_VERSION
)
@pytest.mark.parametrize("reported", [False, True])
def test_whole_files_of_other_versions_are_refused_by_what_differs(change, match, reported, path):
    pr = fitted()
    if reported:
        pr.calibrate(X1, Y, method="paper")
    pr.save(path)
    rewrite(path, change)
    refused(rf"pr\.safetensors.*{match}", load, path)
