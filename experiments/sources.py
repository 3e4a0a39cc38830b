"""The text of the code that a result depends on."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import rigidities

LIBRARY = Path(rigidities.__file__).parent
SHOWS_ONLY = ("__init__.py", "_version.py", "cli.py", "demo.py", "plots.py", "report")
"""Parts of the library that list or show and change no result."""


@cache
def digest(module: str) -> str:
    """Of a module of the experiments, all others it imports, and the library that computes."""
    found = hashlib.sha256()
    for file in [*sorted(imported(module)), *library()]:
        found.update(file.read_bytes() + b"\0")
    return found.hexdigest()


def imported(module: str) -> set[Path]:
    """The files of a module of ``experiments`` and of those it imports, directly or not."""
    files: set[Path] = set()
    waiting = [module]
    while waiting:
        file = _file(waiting.pop())
        if file is not None and file not in files:
            files.add(file)
            waiting += _names(file)
    return files


def library() -> list[Path]:
    """The files of the library that computes."""
    files = sorted(LIBRARY.rglob("*.py"))
    return [file for file in files if file.relative_to(LIBRARY).parts[0] not in SHOWS_ONLY]


def _names(file: Path) -> Iterator[str]:
    """What it imports from the experiments, as modules or as names within one."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("experiments"):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _file(name: str) -> Path | None:
    """Of a module; None for what is no module, and for packages that hold only a docstring."""
    try:
        spec = find_spec(name)
    except ModuleNotFoundError:  # a name within a module
        return None
    if spec is None or spec.origin is None or spec.submodule_search_locations is not None:
        return None
    return Path(spec.origin)
