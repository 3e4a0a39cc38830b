"""What every room says alike: warnings that point at the user's own line, common refusals."""

from __future__ import annotations

import sys
import traceback
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

_LIBRARY = str(Path(__file__).parent)
_TORCH = ("torch/nn/modules", "torch/_dynamo", "torch/_compile.py")
_BETWEEN = (*(str(Path(part)) for part in _TORCH), "contextlib.py")

NO_FIT = "There is no fit yet. Call {} first."


class NotFittedError(ValueError, RuntimeError):
    """Something was asked that only a fit can answer."""


def notify(message: str) -> None:
    """Warn at the first line outside the library (and outside torch's calls of modules)."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and (
        (path := frame.f_code.co_filename).startswith(_LIBRARY)
        or any(part in path for part in _BETWEEN)
    ):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def require_level(level: float, what: str) -> None:
    """Refuse a probability outside (0, 1); `what` begins the sentence, as "An interval's"."""
    if not 0 < level < 1:
        raise ValueError(f"{what} level must lie between 0 and 1, got {level}.")


def extra(name: str) -> str:
    """How an extra is installed, from an index or in a checkout."""
    return f'pip install "rigidities[{name}]" (in a checkout: pip install ".[{name}]")'


def missing(error: ModuleNotFoundError, install: str, *packages: str) -> NoReturn:
    """Say what to install, unless it is something else that a package of the host needs."""
    if (error.name or "").partition(".")[0] in packages:
        error.msg = f"Here rigidities needs {packages[0]}: {install}."
    raise error


def needed(package: str, install: str = "") -> Any:
    """A package that not everyone has."""
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        missing(error, install or f"pip install {package}", package.partition(".")[0])


def is_own(error: BaseException) -> bool:
    """Whether an error is a refusal of the library itself."""
    *_, (last, _) = traceback.walk_tb(error.__traceback__)
    return isinstance(error, ValueError) and last.f_code.co_filename.startswith(_LIBRARY)
