"""Warnings that point at the user's own line, however deep in the library they arise."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

_LIBRARY = str(Path(__file__).parent)
_TORCH = f"{Path('torch') / 'nn' / 'modules'}"


def notify(message: str) -> None:
    """Warn at the first line outside the library (and outside torch's module calls)."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _is_inside(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def _is_inside(path: str) -> bool:
    return path.startswith(_LIBRARY) or _TORCH in path or path.endswith("contextlib.py")
