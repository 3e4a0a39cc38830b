"""The code that a result depends on: what it does, whatever its words and places.

A digest is of statements, not of files: those that the work of a part reaches through the names it
uses, and, where one of these names is the library's, all of the library that computes. It sees
every change of their code: an operation, a constant, a default, a field, a name that means another
definition or another library's function.

It does not see docstrings, comments, the layout, annotations of functions, what an error says, and
in which file and order definitions stand; nor, as ever, other versions of other libraries and code
reached at run time alone (named by a string, or imported for what its import does).
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

import rigidities

HERE = Path(__file__).parents[1]
LIBRARY = Path(rigidities.__file__).parent
OURS = {"experiments": HERE, "rigidities": LIBRARY, "benchmarks": HERE.parent / "benchmarks"}
KEEPING = ("files.py", "jobs.py", "keys.py", "machine.py", "progress.py", "sources.py")
APART = {LIBRARY, OURS["benchmarks"], *(HERE / "frame" / name for name in KEEPING)}
"""Not followed: the library counts as a whole; measuring, keeping and showing not at all."""
SHOWS_ONLY = ("__init__.py", "_version.py", "ase", "cli", "plots.py", "report")
"""Parts of the library that list or show and change no result."""
DEPTH = 5
"""So many steps apart may definitions of one text and name differ, to be told from each other."""


@cache
def digest(*works: str, library: bool | None = None) -> str:
    """Of pieces of work, what they reach in the experiments, and the library that computes.

    Args:
        works: functions, ``module:name``, or modules with all that they define.
        library: whether the results depend on it; by default whether anything of it is used.
    """
    library = leans(*works) if library is None else library
    counted = reached(*works).union(*(_parsed(file)[0] for file in computing() if library))
    marks = dict.fromkeys(counted, "")
    for _ in range(DEPTH):  # a statement is told by its text and by the statements it uses
        marks = {
            one: _hash([one.text, *sorted({marks.get(used, "") for used in one.uses()})])
            for one in counted
        }
    return _hash([*(work.partition(":")[2] for work in works), *sorted(marks.values())])


def leans(*works: str) -> bool:
    """Whether pieces of work use anything of the library."""
    used = (file for one in reached(*works) for file, _ in one.used)
    return any(LIBRARY in file.parents for file in used)


def reached(*works: str) -> set[Statement]:
    """What pieces of work use, outside the library, and the effects in the files where it stands.

    Raises:
        ImportError: no module defines one of them.
    """
    found: set[Statement] = set()
    waiting = [one for work in works for one in _work(*work.partition(":")[::2])]
    while waiting:
        one = waiting.pop()
        if one not in found and APART.isdisjoint({one.file, *one.file.parents}):
            found.add(one)
            waiting += [*one.uses(), *(other for other in _parsed(one.file)[0] if not other.names)]
    return found


def computing() -> list[Path]:
    """The files of the library that computes."""
    files = sorted(LIBRARY.rglob("*.py"))
    return [file for file in files if file.relative_to(LIBRARY).parts[0] not in SHOWS_ONLY]


@dataclass(frozen=True, eq=False)
class Statement:
    """A definition or an effect.

    Attributes:
        file: where it stands.
        names: that it defines; none for an effect.
        text: its code, without words and places.
        used: names of ours in it and the files they are taken from; no name for a whole module.
    """

    file: Path
    names: frozenset[str]
    text: str
    used: frozenset[tuple[Path, str]]

    def uses(self) -> set[Statement]:
        """The statements that define what is used."""
        return {one for file, name in self.used for one in _meant(file, name)}


def _work(module: str, name: str) -> set[Statement]:
    if found := _meant(Path(str(import_module(module).__file__)), name):
        return found
    raise ImportError(f"Expected a function that {module} defines, got {name!r}. Write it there.")


@cache
def _meant(file: Path, name: str) -> set[Statement]:
    """What defines a name of a file, which may have it from elsewhere; everything for no name."""
    statements, imports = _parsed(file)
    here = {one for one in statements if not name or name in one.names}
    origin, path = _located(*imports[name]) if name in imports and not here else (None, "")
    return _meant(origin, path.split(".")[0]) if origin else here


@cache
def _parsed(file: Path) -> tuple[list[Statement], dict[str, tuple[Path, str]]]:
    """The statements of a file, and where the names come from that it imports."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    imports = dict(_imports(tree, file))
    own = {one: frozenset(_bound(one)) for one in tree.body}
    found = []
    for one, names in own.items():
        bare = _Bare(file, frozenset().union(*own.values()), imports)
        kept = bare.visit(one)
        if kept is not None and "__all__" not in names:
            found.append(Statement(file, names, _text(kept), frozenset(bare.used)))
    return found, imports


def _imports(tree: ast.Module, file: Path) -> Iterator[tuple[str, tuple[Path, str]]]:
    """Names, and the folder and dotted path that each stands for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            folder = file.parents[node.level - 1] if node.level else Path()
            for alias in node.names:
                path = f"{node.module}.{alias.name}" if node.module else alias.name
                yield alias.asname or alias.name, (folder, path)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                yield alias.asname or first, (Path(), alias.name if alias.asname else first)


def _bound(statement: ast.AST) -> Iterator[str]:
    """Names that a statement gives a meaning."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield statement.name
        return
    if isinstance(statement, ast.Name) and isinstance(statement.ctx, ast.Store):
        yield statement.id
    for inner in ast.iter_child_nodes(statement):
        yield from _bound(inner)


def _located(folder: Path, path: str) -> tuple[Path | None, str]:
    """The file of one of our modules at the beginning of a dotted path, and the rest of it."""
    first, *rest = path.split(".")
    place, rest = (OURS.get(first), rest) if folder == Path() else (folder, [first, *rest])
    if place is None:
        return None, path
    while rest and ((place / rest[0]).is_dir() or (place / f"{rest[0]}.py").exists()):
        place /= rest.pop(0)
    return (place / "__init__.py" if place.is_dir() else place.with_suffix(".py")), ".".join(rest)


class _Bare(ast.NodeTransformer):
    """Takes words and places out of a statement and notes what of ours it uses.

    A name from elsewhere becomes the one that it has there: of ours without the module, of other
    libraries with it.
    """

    def __init__(
        self, file: Path, own: frozenset[str], imports: dict[str, tuple[Path, str]]
    ) -> None:
        self.file, self.own, self.imports = file, own, imports
        self.used: set[tuple[Path, str]] = set()

    def visit_Name(self, node: ast.Name | ast.Attribute) -> ast.AST:
        file, path = self.file, _dotted(node)
        first, *rest = path.split(".")
        if first not in self.own and first not in self.imports:
            return self.generic_visit(node)
        if first not in self.own:
            folder, start = self.imports[first]
            file, path = _located(folder, ".".join([start, *rest]))
        if file is not None:
            self.used.add((file, path.split(".")[0]))
        return ast.Name(path, node.ctx)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(node.arg)

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST | None:
        return None if _dotted(node.test).endswith("TYPE_CHECKING") else self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        if isinstance(node.exc, ast.Call):
            node.exc = node.exc.func
        return self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        node.values = [part for part in node.values if getattr(part, "value", None) != ""]
        return self.generic_visit(node)  # without the empty texts that some versions of Python add

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        return None

    visit_Attribute, visit_ImportFrom = visit_Name, visit_Import


def _dotted(node: ast.AST) -> str:
    """``a.b.c``; empty for any other expression."""
    if isinstance(node, ast.Attribute):
        inner = _dotted(node.value)
        return inner and f"{inner}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _text(node: object) -> str:
    """The same in every version of Python, whose own dumps differ in what they leave out."""
    if isinstance(node, ast.AST):
        held = (f"{k}={_text(v)}" for k, v in ast.iter_fields(node) if v is not None and v != [])
        return f"{type(node).__name__}({','.join(held)})"
    return f"[{','.join(map(_text, node))}]" if isinstance(node, list) else repr(node)


def _hash(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
