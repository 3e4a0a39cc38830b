"""Digests of the code that computes the results of an experiment.

A part of an experiment that is read from disk may have been computed by an earlier state of the
code. Each part therefore records the digests of its time; where they differ from today's, the run
and the page say "other code", and ``--fresh`` computes the part again.

A digest covers whole files: every file of the library that computes, or every file of the
experiments that a study may use. Comments, layout and docstrings do not count. Nor do the versions
of other packages; the description of the machine, which a part records too, holds torch's.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import rigidities

EXPERIMENTS = Path(__file__).parents[1]
LIBRARY = Path(rigidities.__file__).parent

SHOWS_ONLY = ("__init__.py", "_version.py", "ase", "cli", "plots.py", "report")
"""Files and folders of the library that list or show, and change no result."""

SHARED = ("atoms", "baselines", "data", "judging", "training", "frame/outcome.py")
"""Folders and files of the experiments whose code any study may compute with."""

OTHER_CODE = "other code"
"""Marks a result whose recorded digests differ from today's."""


@cache
def digests(experiment: str) -> dict[str, str]:
    """Digests of the library and of what a study adds to it.

    Args:
        experiment: The name of the study.

    Returns:
        ``library`` and ``study``, each a SHA-256 in hexadecimal digits.
    """
    library_files = [
        file
        for file in LIBRARY.rglob("*.py")
        if file.relative_to(LIBRARY).parts[0] not in SHOWS_ONLY
    ]
    return {
        "library": _digest(LIBRARY, library_files),
        "study": experiments_digest(*SHARED, f"studies/{experiment}"),
    }


@cache
def experiments_digest(*places: str) -> str:
    """The digest of folders and files of the experiments, without the folders' pages.

    Args:
        places: Paths below ``experiments/``. A folder that does not exist has no files.
    """
    files: list[Path] = []
    for place in places:
        path = EXPERIMENTS / place
        if path.is_file():
            files.append(path)
        else:
            files += [file for file in path.rglob("*.py") if file.name != "page.py"]
    return _digest(EXPERIMENTS, files)


def _digest(root: Path, files: Iterable[Path]) -> str:
    """SHA-256 of the files' names below a root and of their code, in the order of the names."""
    total = hashlib.sha256()
    for file in sorted(files):
        total.update(file.relative_to(root).as_posix().encode())
        total.update(normal_form(file.read_text(encoding="utf-8")).encode())
    return total.hexdigest()


def normal_form(source: str) -> str:
    """Python source without comments and docstrings, in one layout.

    >>> normal_form('def f(x):  # a comment\\n    "A docstring."\\n    return (x)')
    'def f(x):\\n    return x'
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):  # a lambda's body is a single expression
            node.body = [child for child in body if not _is_constant(child)]
    return ast.unparse(tree)


def _is_constant(node: ast.AST) -> bool:
    """Whether a statement is a constant alone, such as a docstring: it has no effect."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
