"""Each specimen: fit, calibrate, predict by the line of the table, against brute force."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import rigidities as rg
from rigidities.last_layer.doors import feed_of
from tests.foreign import zoo
from tests.foreign.brute_force import Reference
from tests.foreign.specimen import Given, Specimen
from tests.foreign.table import Row
from tests.support import oracle
from tests.support.nets import derivative_scale
from tests.support.readouts import has_one_weight_vector

TOLERANCE = 1e-5
"""Of variances, relative."""
HALF_TOLERANCE = 1e-4
"""The same for models that compute in half precision: their features round on their own."""
FEW_ROWS = "The bars were calibrated on only"
"""How a warning begins that is right for the few rows of these tests."""


def quietly(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What other libraries warn of is not ours to judge."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **options)


def used(one: Specimen, given: Given) -> tuple[rg.LastLayerRigidity, list[str]]:
    """The line of the table with fit and calibrate, and what was warned of."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        uq = one.wrapped(given).fit(given.train)
        uq.calibrate(given.valid, method="paper")
        uq.predict(given.test)
    messages = [str(w.message) for w in seen if w.filename == __file__]
    return uq, [message for message in messages if not message.startswith(FEW_ROWS)]


def units(uq: rg.LastLayerRigidity, given: Given) -> torch.Tensor | None:
    """Weights of all training outputs where targets with one weight vector have their own units."""
    if not has_one_weight_vector(uq):
        return None
    batches = feed_of(uq)(given.train, "fit")
    targets = torch.cat([batch.target.reshape(-1, len(uq.scale)).cpu() for batch in batches])
    return oracle.own_units(targets).repeat(len(targets))


def off(uq: rg.LastLayerRigidity, given: Given, wrt: str) -> Iterator[float]:
    """Relative deviations from brute force, at the ridge chosen and at one where the Gram rules."""
    weights = units(uq, given)
    outputs = quietly(Reference, given, weights)
    slopes = quietly(Reference, given, weights, slope=True) if wrt else None
    for ridge in (None, 1e-3 * float(outputs.gram.diagonal().mean())):
        quietly(uq.calibrate, given.valid, method=rg.Full(ridge=ridge))
        found = [(quietly(uq.predict, given.test).epistemic, outputs.variance(uq.ridge, uq.scale))]
        if slopes is not None:
            std = quietly(uq.gradient, given.test, wrt).std
            found.append((std.square(), slopes.variance(uq.ridge, derivative_scale(uq))))
        for variance, expected in found:
            yield float((variance.double() / expected - 1).abs().max())


def called(uq: rg.LastLayerRigidity, given: Given) -> tuple[torch.Tensor, torch.Tensor]:
    """`uq(x)` for every test batch."""
    found = [quietly(uq, *b.args, **b.kwargs) for b in feed_of(uq)(given.test, "call")]
    means, stds = zip(*found, strict=True)
    return torch.cat(means).detach(), torch.cat(stds).detach()


def joined(function: Callable[..., torch.Tensor], given: Given) -> torch.Tensor:
    return torch.cat([quietly(function, given.model, batch).detach() for batch in given.test])


@pytest.mark.parametrize("one", zoo.SPECIMENS, ids=lambda one: one.id)
def test_the_variance_is_that_of_brute_force(one: Specimen, table: list[Row], tmp_path) -> None:
    given = quietly(one.build)
    given.model.eval()
    uq, warned = used(one, given)
    assert warned == []
    deviation = max(off(uq, given, one.wrt))
    assert deviation <= (HALF_TOLERANCE if one.package == "accelerate" else TOLERANCE)
    predicted = quietly(uq.predict, given.test)
    means = joined(given.output, given)
    torch.testing.assert_close(predicted.mean, means, rtol=1e-5, atol=1e-6)
    uq.save(tmp_path / "uq.safetensors")
    for each in (uq, quietly(one.loaded, given, tmp_path / "uq.safetensors")):
        mean, std = called(each, given)
        torch.testing.assert_close(mean, means, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(std, predicted.std, rtol=1e-5, atol=0)
    if given.slope is not None:
        slopes = quietly(uq.gradient, given.test, one.wrt).mean
        torch.testing.assert_close(slopes, joined(given.slope, given))
    table.append(Row(one, uq.gram.matrix.shape[-1], deviation))
