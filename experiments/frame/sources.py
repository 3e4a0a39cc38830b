"""The text of the code that a result depends on."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import rigidities

HERE = Path(__file__).parents[1]
LIBRARY = Path(rigidities.__file__).parent
SHOWS_ONLY = ("__init__.py", "_version.py", "ase", "cli", "plots.py", "report")
"""Parts of the library that list or show and change no result."""


@cache
def digest(module: str, *, library: bool = True) -> str:
    """Of a module of the experiments, all others it imports, and the library that computes.

    Args:
        module: of ``experiments``.
        library: whether the module's results depend on the library at all.
    """
    found = hashlib.sha256()
    for file in [*sorted(imported(module)), *(computing() if library else [])]:
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


def computing() -> list[Path]:
    """The files of the library that computes."""
    files = sorted(LIBRARY.rglob("*.py"))
    return [file for file in files if file.relative_to(LIBRARY).parts[0] not in SHOWS_ONLY]


def _names(file: Path) -> Iterator[str]:
    """The modules of the experiments that a file imports.

    Raises:
        ImportError: it takes a name from a package's own file, which would not be followed.
    """
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if _ours(alias.name))
        elif isinstance(node, ast.ImportFrom) and _ours(node.module or ""):
            yield from _imported_from(str(node.module), [alias.name for alias in node.names], file)


def _imported_from(module: str, names: list[str], file: Path) -> Iterator[str]:
    """What ``from module import names`` brings: the module, or modules of the package."""
    if not _is_package(module):
        yield module
        return
    for name in names:
        if not _exists(f"{module}.{name}"):
            raise ImportError(
                f"{file} takes {name} from the package {module}, whose own file is not followed. "
                "Put it into a module of its own."
            )
        yield f"{module}.{name}"


def _ours(name: str) -> bool:
    return name.split(".")[0].startswith("experiments")


def _is_package(name: str) -> bool:
    spec = find_spec(name)
    return spec is not None and spec.submodule_search_locations is not None


def _exists(name: str) -> bool:
    return find_spec(name) is not None


def _file(name: str) -> Path | None:
    """Of a module; None for a package, of which only modules are imported."""
    spec = find_spec(name)
    if spec is None or spec.origin is None or spec.submodule_search_locations is not None:
        return None
    return Path(spec.origin)
