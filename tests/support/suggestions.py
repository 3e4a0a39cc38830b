"""What the library says about a readout, and the `layer=` that its message suggests."""

import ast
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

import rigidities as rg
from tests.support.layer_lines import Layer

LITERAL = re.compile(r"""layer=("[^"]*"|'[^']*'|\[\s*["'][^\]]*\])""")
FIRST_ORDER = re.compile("not linear")
"""The warning that derivatives at the trained weights are used, which asks for no other layer."""


@dataclass(frozen=True)
class Answer:
    """What a fit came to.

    Attributes:
        uq: The fitted object; None where the fit was refused.
        messages: What the library warned of, and its refusal.
        layer: What was passed as `layer=`.
    """

    uq: rg.LastLayerRigidity | None
    messages: list[str]
    layer: Layer

    @property
    def suggestion(self) -> Layer:
        """The first `layer=` in the messages that was not passed; None where there is none."""
        for literal in LITERAL.findall(" ".join(self.messages)):
            layer = ast.literal_eval(literal)
            if self.layer is None or _names(layer) != _names(self.layer):
                return layer
        return None

    def objections(self, *, bent: bool) -> list[str]:
        """Messages that ask the user for something.

        Args:
            bent: Whether a nonlinearity may follow the readout, of which it is right to warn.
        """
        if self.uq is not None and bent and self.suggestion is None:
            return [text for text in self.messages if not FIRST_ORDER.search(text)]
        return self.messages


def _names(layer: str | list[str]) -> set[str]:
    return {layer} if isinstance(layer, str) else set(layer)


def half_squared_error(prediction: Tensor, target: Tensor) -> Tensor:
    """A loss that is a function counts targets with one weight vector as they are, not in units."""
    return (prediction - target).square() / 2


def answer(model: nn.Module, train: Any, layer: Layer, **options: Any) -> Answer:
    """What `fit` says to a user who passes this `layer=`."""
    uq = rg.LastLayerRigidity(model, layer=layer, **options)
    refusal = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            uq.fit(train, loss=half_squared_error)
        except ValueError as error:
            refusal = [str(error)]
    # Other libraries warn too, but not in the name of this file.
    warned = [str(warning.message) for warning in caught if warning.filename == __file__]
    return Answer(None if refusal else uq, warned + refusal, layer)


def followed(model: nn.Module, train: Any, layer: Layer, **options: Any) -> Answer:
    """The same for a user who then does what the message suggests."""
    first = answer(model, train, layer, **options)
    if first.suggestion is None:
        return first
    return answer(model, train, first.suggestion, **options)


def quadratic(uq: rg.LastLayerRigidity, test: Any) -> Tensor:
    """q = f^T (F^T F + ridge)^-1 f of every output, as the library has it, without calibration."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The error bars are not calibrated")
        return 1 / uq.predict(test).rigidity.double()


def deviation(q: Tensor, references: Sequence[Tensor]) -> float:
    """The largest relative deviation from the nearest of several references."""
    return min(float((q / reference - 1).abs().max()) for reference in references)
