"""Numbers in words, as the pages of the experiments have them."""

import math

import pytest

from experiments.frame import wording


def test_a_list_ends_with_and() -> None:
    assert wording.listed(["a", "b", "c", "d"]) == "a, b, c and d"
    assert wording.listed(["only"]) == "only"
    with pytest.raises(ValueError, match="at least one"):
        wording.listed([])


def test_a_score_that_is_not_defined_is_a_dash() -> None:
    assert wording.measured([math.nan, math.nan]) == "-"
    assert wording.measured([1.25, math.nan], 1) == "1.2"
    assert wording.measured([-0.0504, 0.02]) == "-0.050 ± 0.020"


@pytest.mark.parametrize("sign", [1, -1])
def test_a_difference_is_called_one_beyond_two_standard_errors(sign: int) -> None:
    assert wording.direction([0.21 * sign, 0.1]) == sign
    assert wording.direction([0.2 * sign, 0.1]) == 0
    assert wording.direction([0.1 * sign, 0.0]) == sign


def test_one_repetition_and_equal_ones_decide_nothing() -> None:
    for pair in ([5.0, math.nan], [math.nan, 0.1], [0.0, 0.0]):
        assert wording.direction(pair) == 0
        assert wording.compared(pair) == "does not clearly differ from"
        assert wording.changed(pair).startswith("does not clearly change")


def test_words_have_the_sign_of_the_mean() -> None:
    assert wording.compared([0.1, 0.01]) == "is above"
    assert wording.compared([-0.1, 0.01]) == "is below"
    assert wording.changed([0.5, 0.1], 2) == "rises (0.50 ± 0.10)"
    assert wording.changed([-0.5, 0.1]) == "falls (-0.500 ± 0.100)"
