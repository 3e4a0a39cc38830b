"""Imports inside the library point one way, and the core needs torch, safetensors and tqdm only."""

import ast
import sys
from pathlib import Path

import pytest

import rigidities

SOURCE = Path(rigidities.__file__).parent

PATHS = sorted(SOURCE.rglob("*.py"))
FACADES = {"last_layer", "rigidity"}


def name_of(path):
    """`kernels/duals.py` is kernels.duals; a package is its `__init__.py`."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


MODULES = {name_of(path): ast.parse(path.read_text()) for path in PATHS}
PACKAGES = {name_of(path) for path in PATHS if path.name == "__init__.py"}


def inner_imports(name, tree):
    """Modules of the library that this one names in a relative import."""
    own = name.split(".") if name != "__init__" else []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            up = node.level - (name in PACKAGES)
            base = own[: len(own) - up] + (node.module.split(".") if node.module else [])
            for alias in node.names:
                member = ".".join([*base, alias.name])
                found.add(member if member in MODULES else ".".join(base))
    return found & set(MODULES) - {name}


GRAPH = {name: inner_imports(name, tree) for name, tree in MODULES.items()}


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
        ("draws", set()),
        ("posterior", {"draws", "gram"}),
        ("quadratic", {"draws", "gram", "posterior"}),
        ("joint", {"draws", "gram", "posterior"}),
        ("members", {"draws", "gram", "joint", "posterior"}),
        ("local", {"draws", "gram", "posterior", "quadratic"}),
        ("conditioning", set()),
        ("selection", {"conditioning", "draws", "gram", "posterior"}),
        ("criteria", set()),
        ("calibration", {"criteria", "draws", "gram", "posterior"}),
        ("derivatives.parameters", set()),
        ("derivatives.tangents", set()),
        ("curvature.memory", set()),
        ("curvature.forms", {"curvature.memory", "derivatives.tangents"}),
        ("curvature.dual_form", {"draws", "derivatives.tangents"}),
        (
            "curvature.matrix_free",
            {
                "curvature.conjugate_gradients",
                "draws",
                "derivatives.tangents",
                "curvature.dual_form",
            },
        ),
        ("curvature.dense_form", {"draws", "gram", "posterior", "derivatives.tangents"}),
        ("storage", set()),
        ("metrics", {"alignment", "ranks"}),
        ("ase.structures", set()),
        ("ase.limits", set()),
        ("report.markup", set()),
        ("report.rows", {"alignment"}),
    ],
)
def test_the_foundations_stand_alone(module, may_import):
    assert reach(module) <= may_import


def test_only_the_front_imports_the_facades():
    users = {name for name, imported in GRAPH.items() if FACADES & imported}
    assert users <= {"__init__", "demo", "cli", "ase.calculator"}


def test_the_core_imports_torch_safetensors_and_tqdm_only():
    allowed = {"torch", "safetensors", "tqdm", "rigidities", *sys.stdlib_module_names}
    for name in reach("__init__") | {"__init__"}:
        for node in MODULES[name].body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            assert {n.partition(".")[0] for n in names} <= allowed, name


def test_nothing_of_the_library_leans_on_the_calculator_for_ase():
    outside = [name for name in GRAPH if name.partition(".")[0] != "ase"]
    assert [name for name in outside if any(m.startswith("ase") for m in GRAPH[name])] == []


def test_no_module_is_named_for_what_it_is_not():
    last = {name.rpartition(".")[2] for name in MODULES}
    assert not {"utils", "helpers", "common", "misc"} & last


def test_reports_know_nothing_of_the_models_behind_them():
    inner = {name for name in MODULES if name.partition(".")[0] == "report"}
    known = set.union(*(reach(name) for name in inner)) - inner
    allowed = {"_version", "alignment", "batches", "calibrated", "confidence", "metrics", "plots"}
    assert known <= {*allowed, "ranks"}
