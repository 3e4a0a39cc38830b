"""What a message suggests as `layer=` for a model of another library is its whole readout."""

from dataclasses import replace

import pytest
import torch

from tests.foreign.brute_force import Reference
from tests.foreign.layer_lines import ROWS_OF_TABLE, Row
from tests.foreign.specimen import Given
from tests.foreign.test_zoo import quietly
from tests.support.layer_lines import Layer
from tests.support.suggestions import Answer, answer, deviation, followed, quadratic

TOLERANCE = 1e-6
"""Of q, relative."""


def assert_whole(row: Row, given: Given, final: Answer) -> None:
    """The fit asks for nothing more, and its q is that of a whole readout."""
    assert final.objections(bent=row.bent) == [], f"layer={final.layer!r}"
    assert final.uq is not None
    q = quietly(quadratic, final.uq, given.test)
    references = [
        quietly(Reference, replace(given, readout=list(whole))).variance(
            final.uq.ridge, torch.ones(1)
        )
        for whole in row.wholes
    ]
    off = deviation(q, references)
    assert off <= TOLERANCE, f"layer={final.layer!r} takes {final.uq.readout.heads}"


def rows(chosen: list[Row]) -> list[object]:
    return [pytest.param(row, id=row.id) for row in chosen]


PARTS = [
    pytest.param(row, part, id=f"{row.id}-{part}") for row in ROWS_OF_TABLE for part in row.parts
]


@pytest.mark.parametrize("row", rows(ROWS_OF_TABLE))
def test_the_plain_line_or_what_its_message_suggests_is_the_whole_readout(row: Row) -> None:
    given = quietly(row.given)
    assert_whole(row, given, followed(given.model, given.train, None, **row.options))


@pytest.mark.parametrize("row", rows([row for row in ROWS_OF_TABLE if row.silent]))
def test_the_plain_line_finds_the_whole_readout_without_a_message(row: Row) -> None:
    given = quietly(row.given)
    assert_whole(row, given, answer(given.model, given.train, None, **row.options))


@pytest.mark.parametrize(("row", "layer"), PARTS)
def test_a_part_of_the_readout_is_answered_with_the_whole(row: Row, layer: Layer) -> None:
    given = quietly(row.given)
    first = answer(given.model, given.train, layer, **row.options)
    assert first.suggestion is not None, first.messages
    assert_whole(row, given, answer(given.model, given.train, first.suggestion, **row.options))


@pytest.mark.parametrize("row", rows([row for row in ROWS_OF_TABLE if row.id == "darts-TFTModel"]))
def test_a_model_that_sets_a_mask_in_each_pass_may_be_called_after_the_fit(row: Row) -> None:
    given = quietly(row.given)
    fitted = answer(given.model, given.train, None, **row.options)
    assert fitted.uq is not None
    before = quietly(fitted.uq.predict, given.test).std
    quietly(given.output, given.model, given.test[0])
    assert torch.equal(quietly(fitted.uq.predict, given.test).std, before)
    quietly(fitted.uq.partial_fit, given.train[:1])
