"""Torch's modes in which a model can be differentiated, whatever the caller's."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map_only

from .threads import Common, Lock

try:  # as torch does within itself
    from torch._compile import _disable_dynamo
except ImportError:
    _disable_dynamo = torch.compiler.disable

P = ParamSpec("P")
R = TypeVar("R")


def outside_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Never compiled, as by `torch.compiler.disable`.

    Torch's compiler takes seconds to import: where nobody has imported it, nothing can be compiled,
    and the function is called as it is.
    """
    disabled = _disable_dynamo(function)

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" in sys.modules:
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    told = {"_torchdynamo_disable": True, "_torchdynamo_disable_msg": "uq.freeze() can be compiled"}
    for wrapper in (disabled, run):
        vars(wrapper).update(told)  # for torch's own message
    return run


def outside_inference_mode(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function in normal mode, with ordinary copies of inference tensors."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False):
            plain, named = ordinary((args, kwargs))
            return function(*plain, **named)

    return run


def ordinary(values: R) -> R:
    """The same with copies of inference tensors, which can be differentiated."""
    copied = tree_map_only(Tensor, lambda t: t.clone() if t.is_inference() else t, values)
    return cast("R", copied)


@contextmanager
def _transformable() -> Iterator[None]:
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
            # torch's own forward mode compiles its decompositions with it on first use
            warnings.filterwarnings("ignore", ".torch.jit.script")
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


transformable = Common(_transformable)
"""Where torch's function transforms run quietly.

Attention goes by its formula, since the fused kernels have no batching rule or second derivative;
operations without a batching rule are looped over, which is slower and right.
"""


forward_mode = Lock()
"""Torch counts the levels of forward mode for the process, not for a thread: one at a time."""


def unmixed(tensor: Tensor) -> AbstractContextManager[object]:
    """Where products keep the precision of what is multiplied, also under `torch.autocast`."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def exporting() -> bool:
    """Whether `torch.export` traces this call; refused where torch does not tell."""
    if hasattr(torch.compiler, "is_exporting"):
        return torch.compiler.is_exporting()
    if torch.compiler._is_compiling_flag:  # set by export alone, up to 2.6
        raise RuntimeError(_TOO_OLD.format("Export", "2.7", torch.__version__))
    return False


_TOO_OLD = "{} needs PyTorch {} or newer; this is {}."


def require_torch(release: str, what: str) -> None:
    """Refuse what an older PyTorch lacks."""
    wanted = tuple(int(number) for number in release.split("."))
    if tuple(int(number) for number in torch.__version__.split(".")[:2]) < wanted:
        raise RuntimeError(_TOO_OLD.format(what, release, torch.__version__))


def refuse_transforms() -> None:
    """Refuse `torch.func` and `torch.export` where the model's values are looked at."""
    if torch._C._functorch.peek_interpreter_stack() is not None or exporting():
        raise ValueError(
            "The model is checked in each call, which torch.func and torch.export do not allow. "
            "For vmap call it on all rows at once; for derivatives use uq.gradient(x) or "
            "torch.autograd.grad; to compile, export or serve take uq.freeze()."
        )


def differentiating(method: Callable[P, R]) -> Callable[P, R]:
    """The method with gradients on, also under `torch.no_grad` and `torch.inference_mode`."""

    @wraps(method)
    def inside(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.inference_mode(False), torch.enable_grad():
            return method(*args, **kwargs)

    return inside
