"""What a message suggests as `layer=` works, and is the whole readout by brute force."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

import rigidities as rg
from tests.support import layer_lines, oracle
from tests.support.layer_lines import ROWS_OF_TABLE, Layer, Row, built
from tests.support.readouts import layers_of
from tests.support.suggestions import Answer, answer, deviation, followed, quadratic

TRAIN, TEST = (0, 1, 2), 3  # draws
TOLERANCE = 1e-6
"""Of q, relative."""


def batches(row: Row) -> list[tuple[Tensor, ...]]:
    return [built(row, draw).data for draw in TRAIN]


def brute_force(row: Row, whole: Iterable[str], ridge: float) -> Tensor:
    """q of the test batch by autograd, for one set of weights."""
    names = tuple(whole)

    def jacobian(draw: int) -> Tensor:
        batch = built(row, draw)
        return oracle.readout_jacobian(batch.model, batch.call, names)

    train = torch.cat([oracle.rows(jacobian(draw)) for draw in TRAIN])
    return oracle.quadratic(train, jacobian(TEST), ridge)


def assert_whole(row: Row, final: Answer) -> None:
    """The fit asks for nothing more, and its q is that of a whole readout."""
    assert final.objections(bent=row.bent) == [], f"layer={final.layer!r}"
    assert final.uq is not None
    q = quadratic(final.uq, [built(row, TEST).data])
    references = [brute_force(row, whole, final.uq.ridge) for whole in row.wholes]
    off = deviation(q, references)
    assert off <= TOLERANCE, f"layer={final.layer!r} takes {layers_of(final.uq)}"


def cases(field: str) -> list[object]:
    """Every model with each of its values of `layer=` of one kind."""
    found = []
    for row in ROWS_OF_TABLE:
        for layer in getattr(row, field):
            name = layer if isinstance(layer, str) else "+".join(layer)
            found.append(pytest.param(row, layer, id=f"{row.id}-{name or 'the_model_itself'}"))
    return found


def rows(chosen: Iterable[Row]) -> list[object]:
    return [pytest.param(row, id=row.id) for row in chosen]


@pytest.mark.parametrize("row", rows(ROWS_OF_TABLE))
def test_the_plain_line_or_what_its_message_suggests_is_the_whole_readout(row: Row) -> None:
    assert_whole(row, followed(built(row).model, batches(row), None))


@pytest.mark.parametrize("row", rows(row for row in ROWS_OF_TABLE if row.silent))
def test_the_plain_line_finds_the_whole_readout_without_a_message(row: Row) -> None:
    assert_whole(row, answer(built(row).model, batches(row), None))


@pytest.mark.parametrize(("row", "layer"), cases("parts"))
def test_a_part_of_the_readout_is_answered_with_the_whole(row: Row, layer: Layer) -> None:
    train = batches(row)
    first = answer(built(row).model, train, layer)
    assert first.suggestion is not None, first.messages
    assert_whole(row, answer(built(row).model, train, first.suggestion))


@pytest.mark.parametrize("row", rows(ROWS_OF_TABLE))
def test_the_line_of_the_documentation_is_the_whole_readout(row: Row) -> None:
    assert_whole(row, answer(built(row).model, batches(row), row.line))


@pytest.mark.parametrize(("row", "layer"), cases("also"))
def test_other_names_of_the_whole_readout_are_taken_without_a_message(
    row: Row, layer: Layer
) -> None:
    assert_whole(row, answer(built(row).model, batches(row), layer))


@pytest.mark.parametrize(("row", "layer"), cases("around"))
def test_the_readout_is_taken_out_of_more_than_it_or_named(row: Row, layer: Layer) -> None:
    assert_whole(row, followed(built(row).model, batches(row), layer))


def test_complex_weights_are_refused_with_features() -> None:
    head = nn.Linear(4, 1, dtype=torch.complex128)
    model = layer_lines.Net(lambda m, x: m.head(x.cdouble()).real, head=head)
    x, y = torch.randn(20, 4).double(), torch.randn(20, 1).double()
    with pytest.raises(ValueError, match="features="):
        rg.LastLayerRigidity(model).fit(x, y)
