"""Models that the plain line does not fit: the message holds the line that does."""

import re
from pathlib import Path

import pytest
import torch

import rigidities as rg
from tests.foreign import keras_models, molecules, tables
from tests.foreign.test_zoo import quietly

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"(forward|target)=(lambda (?:m, )?b: .+?)(?=,? and |, for |,? with | or, )")


def refused(given, **options) -> str:
    """The message of the plain line."""
    with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
        quietly(rg.LastLayerRigidity(given.model, **options).fit, given.train)
    return str(caught.value)


def advised(message: str) -> dict:
    """The options that a message advises, the first of each name."""
    found = {}
    for name, line in LINE.findall(message):
        found.setdefault(name, eval(line))
    return found


def bars(given, **options) -> torch.Tensor:
    uq = rg.LastLayerRigidity(given.model, **options)
    quietly(uq.fit, given.train)
    quietly(uq.calibrate, given.valid)
    return quietly(uq.predict, given.test).std


ENERGY = {"output": "energy", "target": lambda b: b["energy"]}
CASES = [
    (molecules.mpnn, "takes from 2 to 4 positional arguments", {}),
    (molecules.painn, "unexpected keyword argument '_n_atoms'", ENERGY),
    (tables.category_embedding, "unexpected keyword argument 'continuous'", {}),
    (tables.ft_numbers, "missing 1 required positional argument: 'x_cat'", {}),
]


@pytest.mark.parametrize("build", [keras_models.keras_sequential, keras_models.keras_subclass])
@pytest.mark.parametrize("options", [{}, {"layer": "head"}], ids=["found", "named"])
def test_a_keras_model_is_told_to_be_wrapped(build, options) -> None:
    message = refused(quietly(build), **options)
    assert "got a Keras model" in message
    page, heading = re.search(r'(docs/\S+\.md), under "(.+?)"', message).groups()
    assert f"### {heading}\n" in (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize(("build", "cause", "more"), CASES, ids=["mpnn", "painn", "table", "ft"])
def test_the_forward_line_of_the_message_works(build, cause, more) -> None:
    given = quietly(build)
    given.model.eval()
    message = refused(given)
    assert cause in message
    lines = advised(message)
    assert "forward" in lines
    if "'key'" in message:  # of a mapping only its owner knows which
        lines = {"forward": lines["forward"]}
    assert bool((bars(given, **{**lines, **more}) > 0).all())


def test_the_layer_line_of_the_message_works() -> None:
    given = quietly(tables.tabm)
    mean = {"forward": lambda m, b: m(b[0]).mean(1)}
    (layer,) = re.findall(r'layer="([\w.]+)"', refused(given, **mean))
    assert bool((bars(given, layer=layer, **mean) > 0).all())
