"""The modes of torch in which a model can be differentiated, whatever mode the caller is in.

Decorators and contexts: outside compiled graphs, outside inference mode, with gradients, without
fused attention, without autocast. And errors for what a mode or an older PyTorch does not allow.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .threads import Common, Lock

try:  # torch's internal decorator, which does not import its compiler
    from torch._compile import _disable_dynamo
except ImportError:
    _disable_dynamo = torch.compiler.disable

P = ParamSpec("P")
R = TypeVar("R")

_ATTENTION = ("math", "flash", "mem_efficient", "cudnn")
"""Torch's kernels of scaled dot-product attention. The first one computes its formula."""
_TOO_OLD = "{} needs PyTorch {} or newer; this is {}."
_TRANSFORMED = (
    "Each call checks the model, which torch.func and torch.export do not allow. Instead of vmap, "
    "call it on all rows at once; for derivatives use uq.gradient(x) or torch.autograd.grad; to "
    "compile, export or serve use uq.freeze()."
)


if hasattr(torch.compiler, "is_exporting"):
    exporting: Callable[[], bool] = torch.compiler.is_exporting
    """Whether `torch.export` traces this call."""
else:

    def exporting() -> bool:
        """Whether `torch.export` traces this call, for which this PyTorch is too old."""
        if torch.compiler._is_compiling_flag:  # up to 2.6, only export sets it
            raise RuntimeError(_TOO_OLD.format("Export", "2.7", torch.__version__))
        return False


def outside_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """A function that looks at values: it is never compiled, and refuses to be transformed.

    It is left out of graphs as with `torch.compiler.disable`. But torch's compiler takes seconds to
    import. As long as it has not been imported, nothing can be compiled, and the function is called
    directly.

    Raises:
        ValueError: `torch.func` or `torch.export` calls the function.
    """

    @_disable_dynamo
    def disabled(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch._C._functorch.peek_interpreter_stack() is not None or exporting():
            raise ValueError(_TRANSFORMED)
        return function(*args, **kwargs)

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" in sys.modules:
            return disabled(*args, **kwargs)
        # Nothing is exported without the compiler. It must not meet this line (torch 2.4 warns).
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise ValueError(_TRANSFORMED)
        return function(*args, **kwargs)

    # Torch looks for these attributes, and shows the message where fullgraph=True was asked for.
    for wrapper in (disabled, run):
        attributes = vars(wrapper)
        attributes["_torchdynamo_disable"] = True
        attributes["_torchdynamo_disable_msg"] = "uq.freeze() can be compiled"
    return run


def outside_inference_mode(function: Callable[P, R]) -> Callable[P, R]:
    """A function that runs in normal mode, with ordinary copies of inference tensors."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False):
            ordinary_args, ordinary_kwargs = ordinary((args, kwargs))
            return function(*ordinary_args, **ordinary_kwargs)

    return run


def differentiating(method: Callable[P, R]) -> Callable[P, R]:
    """A method that runs with gradients, even under `torch.no_grad` or `torch.inference_mode`."""

    @wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.inference_mode(False), torch.enable_grad():
            return method(*args, **kwargs)

    return run


def ordinary(values: R) -> R:
    """The same values with inference tensors replaced by copies, which can be differentiated."""

    def ordinary_tensor(tensor: Tensor) -> Tensor:
        return tensor.clone() if tensor.is_inference() else tensor

    return cast("R", tree_map_only(Tensor, ordinary_tensor, values))


def _set_attention(kernels: dict[str, bool]) -> None:
    """Allow or forbid kernels of attention, by name; the flags hold on all devices."""
    for name, is_allowed in kernels.items():
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(is_allowed)


@contextmanager
def _transformable() -> Iterator[None]:
    """The setting of `transformable`, for one thread."""
    fast = torch.backends.mha.get_fastpath_enabled()
    kernels = {name: getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in _ATTENTION}
    torch.backends.mha.set_fastpath_enabled(False)
    # Not by `sdpa_kernel`, which from torch 2.15 on only the thread can leave that has entered it.
    _set_attention({name: name == "math" for name in _ATTENTION})
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
            # On first use, forward mode compiles torch's own decompositions with torch.jit.script.
            warnings.filterwarnings("ignore", ".torch.jit.script")
            yield
    finally:
        _set_attention(kernels)
        torch.backends.mha.set_fastpath_enabled(fast)


transformable = Common(_transformable)
"""A context in which torch's function transforms run quietly.

Attention is computed by its formula, since the fused kernels have no batching rule or second
derivative. Operations without a batching rule are looped over, which is slower but right.
"""


forward_mode = Lock()
"""Only one thread at a time: torch counts the levels of forward mode per process."""


def unmixed(tensor: Tensor) -> AbstractContextManager[object]:
    """A context in which products keep their precision, even under `torch.autocast`.

    Args:
        tensor: One of the factors, for its device.
    """
    device_type = tensor.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def require_torch(release: str, feature: str) -> None:
    """Refuse what an older PyTorch lacks.

    Args:
        release: The oldest release that suffices, such as "2.7".
        feature: What needs it; the beginning of the message.
    """
    required = [int(number) for number in release.split(".")]
    installed = [int(number) for number in torch.__version__.split(".")[:2]]
    if installed < required:
        raise RuntimeError(_TOO_OLD.format(feature, release, torch.__version__))
