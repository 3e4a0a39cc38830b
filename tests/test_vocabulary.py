"""The public names: those that `dir` shows, and one word for one thing in all signatures."""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest

import rigidities as rg

WORDS = {
    "inputs": ("x", {"pool", "xs", "x_train", "inputs_", "candidates"}),
    "targets of new data": ("y", {"Y", "ys", "labels", "truth"}),
    "targets beside predictions": ("target", {"y_true", "true", "observed"}),
    "how many": ("n", {"num", "number", "size", "n_samples", "n_members", "num_samples"}),
    "a function of predictions": ("fn", {"func", "callback"}),
    "a probability": ("level", {"alpha", "confidence", "prob", "coverage"}),
    "standard deviation": ("std", {"stddev", "sd", "uncertainty"}),
    "rows per batch": ("batch_size", {"batchsize", "bs", "chunk", "chunk_size"}),
    "a bar": ("progress", {"verbose", "show", "show_progress"}),
    "of draws": ("generator", {"rng", "random_generator"}),
    "weights of samples": ("sample_weight", {"sample_weights"}),
    "the number added to the diagonal": ("ridge", {"varsigma", "regularisation", "jitter"}),
    "of a file": ("path", {"file", "filename", "fname"}),
}
"""The word for a thing, and those that nobody is to use for it."""

FACADES = (rg.LastLayerRigidity, rg.PredictionRigidity)
FIRST = {"merge": "others", "load": "path", "save": "path", "propagate": "fn"}
FIRST |= {"covariance": "x1", "sample": "n", "ensemble": "n", "freeze": "outputs"}
FIRST |= {"set_scale": "scale", "forward": "inputs"}
"""The first parameter of a façade's methods, where it is not x."""


def signatures(owner: Any, name: str) -> Iterator[tuple[str, inspect.Signature]]:
    """Of a function, of a class and its own methods, of what a module lists."""
    if inspect.ismodule(owner):
        for one in getattr(owner, "__all__", ()):
            yield from signatures(getattr(owner, one), f"{name}.{one}")
    elif callable(owner):
        yield name, inspect.signature(owner)
        if inspect.isclass(owner):
            for one, method in vars(owner).items():
                method = getattr(method, "__func__", method)
                if inspect.isfunction(method) and not one.startswith("_"):
                    yield f"{name}.{one}", inspect.signature(method)


PUBLIC = dict(pair for name in rg.__all__ for pair in signatures(getattr(rg, name), name))


def test_dir_shows_the_public_names_alone_and_each_is_documented():
    assert sorted(dir(rg)) == sorted(rg.__all__) and len(set(rg.__all__)) == len(rg.__all__)
    for name in dir(rg):
        assert (getattr(rg, name).__doc__ or "").strip(), name
    assert rg._version.__version__ == rg.__version__ and rg.notices and rg.calibration


def test_both_facades_take_x_and_y():
    for facade in FACADES:
        for name in ("fit", "calibrate", "partial_fit", "forget", "refit"):
            if hasattr(facade, name):
                names = list(PUBLIC[f"{facade.__name__}.{name}"].parameters)[1:3]
                assert names == [FIRST.get(name, "x"), "y"]


def test_the_first_argument_of_a_facade_is_x_or_as_the_table_says():
    for facade in FACADES:
        for name, method in vars(facade).items():
            key = f"{facade.__name__}.{name}"
            names = [one for one in getattr(PUBLIC.get(key), "parameters", ()) if one != "self"]
            if inspect.isroutine(method) and names and names[0] not in ("cls", "memo"):
                assert names[0] == FIRST.get(name, "x"), key


def test_the_facades_have_no_other_word_for_inputs():
    for facade in FACADES:
        for name, one in signatures(facade, facade.__name__):
            assert not {"data", "pool", "samples", "batches"} & set(one.parameters), name


@pytest.mark.parametrize("thing", WORDS)
def test_one_thing_has_one_word(thing):
    word, others = WORDS[thing]
    used = {name: set(one.parameters) for name, one in PUBLIC.items()}
    assert any(word in names for names in used.values())
    wrong = {name: names & others for name, names in used.items() if names & others}
    assert not wrong


def test_the_names_are_those_that_a_user_types():
    modules = "export fits local losses metrics plots report selection theory"
    classes = (
        "Ensemble Full GradientLoss Gram LastLayerRigidity LLPR MeanOf Paper Posterior Prediction"
    )
    values = "Posterior Prediction PredictionRigidity"
    names = {*modules.split(), *classes.split(), *values.split(), "__version__"}
    assert set(dir(rg)) == names
    assert rg.LLPR is rg.LastLayerRigidity
