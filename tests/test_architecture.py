"""Imports inside the library point one way, and the core needs torch, safetensors and tqdm only."""

import ast
import sys
from pathlib import Path

import pytest

import rigidities

SOURCE = Path(rigidities.__file__).parent
MODULES = {path.stem: ast.parse(path.read_text()) for path in SOURCE.glob("*.py")}
FACADE = "last_layer"


def inner_imports(tree):
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]
    names = {node.module or alias.name for node in nodes for alias in node.names}
    return names & set(MODULES)


GRAPH = {name: inner_imports(tree) for name, tree in MODULES.items()}


def reach(name, seen=()):
    found = set()
    for other in GRAPH[name]:
        assert other not in seen, f"import cycle: {' -> '.join([*seen, name, other])}"
        found |= {other} | reach(other, (*seen, name))
    return found


def test_imports_have_no_cycle():
    assert all(name not in reach(name) for name in GRAPH)


@pytest.mark.parametrize(
    ("module", "may_import"),
    [
        ("gram", set()),
        ("posterior", {"gram"}),
        ("quadratic", {"gram", "posterior"}),
        ("criteria", set()),
        ("calibration", {"criteria", "gram", "posterior"}),
        ("storage", set()),
        ("metrics", {"alignment", "ranks"}),
    ],
)
def test_the_foundations_stand_alone(module, may_import):
    assert reach(module) <= may_import


def test_only_the_front_imports_the_facade():
    users = {name for name, imported in GRAPH.items() if FACADE in imported}
    assert users <= {"__init__", "demo", "cli"}


def test_the_core_imports_torch_safetensors_and_tqdm_only():
    allowed = {"torch", "safetensors", "tqdm", "rigidities", *sys.stdlib_module_names}
    for name in reach("__init__") | {"__init__"}:
        for node in MODULES[name].body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            assert {n.partition(".")[0] for n in names} <= allowed, name


def test_no_module_is_named_for_what_it_is_not():
    assert not {"utils", "helpers", "common", "misc"} & set(MODULES)
