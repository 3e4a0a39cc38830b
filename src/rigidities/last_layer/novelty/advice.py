r"""Where q is blind: readouts for which a report suggests `fit(novelty=True)`.

q measures how far the readout's input lies from that of training. It says little of unfamiliar
inputs of the model where the readout's input cannot move far: behind an activation that saturates,
a norm, or the gates of a recurrent layer, and where it consists of few numbers.

Measured for nets with ReLU and SiLU, trained on eight inputs: of the inputs at four times the usual
distance, 60 % have a q above that of 90 % of the training rows with 2 features, 94 % with 4, and
99 % or more from 8 on.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ...data.batches import Batch
from ...models.calling import Inputs
from ...readout.readout import AnyReadout

__all__ = ["suggestion"]

NARROW = 8
"""Number of features below which q overlooks unfamiliar inputs."""

_SUGGESTION = (
    "{}, so an unfamiliar input may look familiar there. fit(x, y, novelty=True) also watches what "
    "enters the other layers."
)
_SATURATING = (
    *("tanh", "sigmoid", "softmax", "log_softmax", "softsign", "hardtanh", "hardsigmoid"),
    *("relu6", "clamp", "clip", "erf"),
)
_NORMALISING = ("layer_norm", "rms_norm", "group_norm", "instance_norm", "normalize")
_RECURRENT = ("lstm", "gru", "rnn_tanh", "lstm_cell", "gru_cell", "rnn_tanh_cell")
_ORIGINS = {
    **dict.fromkeys(_SATURATING, "follows an activation that saturates ({})"),
    **dict.fromkeys(_NORMALISING, "follows a normalising layer ({})"),
    **dict.fromkeys(_RECURRENT, "follows a recurrent layer ({})"),
}
"""Functions of torch whose results are bounded, by name, and what that means for a readout."""
_KEEPING = frozenset(
    (
        *("reshape", "view", "flatten", "unflatten", "squeeze", "unsqueeze", "expand", "get"),
        *("transpose", "permute", "movedim", "select", "narrow", "getitem", "contiguous"),
        *("to", "float", "double", "half", "clone", "detach", "dropout", "cat", "concat", "stack"),
        *("mean", "amax", "max", "chunk", "split", "unbind"),
    )
)
"""Functions whose results are bounded if all tensors of their first argument are."""
_INPUT = "is the input"


class _Origins(TorchFunctionMode):
    """A mode that notes which tensors are bounded by the function that they come from.

    Attributes:
        origins: What made a tensor, by its id, as words.
    """

    def __init__(self, inputs: Any) -> None:
        super().__init__()
        self.origins: dict[int, str] = {}
        self._kept: list[Tensor] = []  # so that no id is used again
        self._note(inputs, _INPUT)

    def of(self, tensor: Any) -> str:
        """What made a tensor; empty where nothing bounds it."""
        return self.origins.get(id(tensor), "")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "").strip("_")
        if name in _ORIGINS:
            self._note(result, _ORIGINS[name].format(name))
        elif name in _KEEPING or name == "mul":  # a product of bounded tensors, as in gates
            leaves = tree_leaves(args if name == "mul" else args[:1])
            origins = [self.of(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
            self._note(result, origins[0] if origins and all(origins) else "")
        else:
            self._note(result, "")
        return result

    def _note(self, values: Any, origin: str) -> None:
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor):
                self.origins[id(leaf)] = origin
                self._kept.append(leaf)


def suggestion(readout: AnyReadout, probe: Inputs | None) -> str:
    """A sentence that suggests `fit(novelty=True)`; empty where q sees unfamiliar inputs.

    Args:
        readout: The readout.
        probe: Inputs to see by what comes before the readout; None if there are none.
    """
    if probe is None or readout.kind == "parameters":
        return ""
    entered: list[str] = []
    width = 0
    # A model that cannot run in a mode of torch gets no suggestion.
    with suppress(Exception):
        origins = _Origins(probe)

        def called(_: nn.Module, args: Any, kwargs: Any) -> None:
            entered.append(origins.of(args[0] if args else next(iter(kwargs.values()))))

        hooks = []
        try:
            for name in readout.heads:
                head = readout.running.get_submodule(name)
                hooks.append(head.register_forward_pre_hook(called, with_kwargs=True))
            args, kwargs = probe
            with origins, torch.no_grad():
                reading = readout(Batch(args, kwargs, None, None))
        finally:
            for hook in hooks:
                hook.remove()
        if not readout.heads:  # a user's function gives the features
            entered.append(origins.of(reading.features))
        width = reading.width
        if readout.biases is not None:
            width -= len(readout.biases)
    if not width or not entered or _INPUT in entered:
        return ""
    if all(entered):
        return _SUGGESTION.format(f"The readout {entered[0]}")
    if width < NARROW:
        return _SUGGESTION.format(f"The readout has only {width} features")
    return ""
