"""What all modules say alike: warnings that point at the user's line, and common refusals."""

from __future__ import annotations

import sys
import traceback
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

_LIBRARY = str(Path(__file__).parent)
_BETWEEN = (
    str(Path("torch/nn/modules")),
    str(Path("torch/_dynamo")),
    str(Path("torch/_compile.py")),
    "contextlib.py",
)
"""Files whose frames may lie between the user's line and the library's."""

NO_FIT = "There is no fit yet. Call {} first."


class NotFittedError(ValueError, RuntimeError):
    """Something was asked that only a fit can answer."""


def notify(message: str) -> None:
    """Warn at the first line outside the library (and outside torch's calls of modules)."""
    frame = sys._getframe(1)
    level = 2
    while frame.f_back is not None and _is_inside(frame.f_code.co_filename):
        frame = frame.f_back
        level += 1
    warnings.warn(message, stacklevel=level)


def _is_inside(path: str) -> bool:
    """Whether a file belongs to the library, or to what calls it on behalf of the user."""
    return path.startswith(_LIBRARY) or any(fragment in path for fragment in _BETWEEN)


def require_level(level: float, owner: str) -> None:
    """Refuse a probability outside (0, 1).

    Args:
        level: The probability.
        owner: Whose level it is, as the message begins: "An interval's".

    Raises:
        ValueError: The level lies outside (0, 1).
    """
    if not 0 < level < 1:
        raise ValueError(f"{owner} level must lie between 0 and 1, got {level}.")


def extra(name: str) -> str:
    """How an extra is installed, from an index or in a checkout."""
    return f'pip install "rigidities[{name}]" (in a checkout: pip install ".[{name}]")'


def missing(error: ModuleNotFoundError, install: str, *packages: str) -> NoReturn:
    """Raise the error of an import again, with words about what to install.

    The words stay as they are where the missing module is none of the packages, but something that
    one of them needs.

    Args:
        error: The error of the import.
        install: The command that installs the packages.
        *packages: Names of the packages that were to be imported; the message names the first.
    """
    if (error.name or "").partition(".")[0] in packages:
        error.msg = f"This feature of rigidities needs {packages[0]}: {install}."
    raise error


def needed(package: str, install: str = "") -> Any:
    """A package that not everyone has.

    Args:
        package: Name of the module to import.
        install: The command that installs it; pip's by default.

    Raises:
        ModuleNotFoundError: It is not installed; the message says how to install it.
    """
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        missing(error, install or f"pip install {package}", package.partition(".")[0])


def is_own(error: BaseException) -> bool:
    """Whether an error is a refusal of the library itself."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    raised_in = frames[-1].f_code.co_filename
    return isinstance(error, ValueError) and raised_in.startswith(_LIBRARY)
