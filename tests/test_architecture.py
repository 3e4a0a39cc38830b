"""The rooms of the library: what each may lean on, and what the core needs."""

import ast
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import rigidities

SOURCE = Path(rigidities.__file__).parent
GROUND = {
    "data",
    "models",
    "losses",
    "posterior",
    "prediction",
    "calibration",
    "metrics",
}
WINGS = {"last_layer", "any_regressor"}
DOORS = {"ase", "cli", "export", "lightning", "report", "sklearn", "transformers", "trees"}
FACADES = {"last_layer.rigidity", "any_regressor.rigidity", "last_layer", "any_regressor"}
TOLD = {"notices", "_version"}
"""Two leaves that every room may use."""

LAWS = {
    "notices": set(),
    "models": set(),
    "losses": {"models"},
    "posterior": set(),
    "metrics": {"prediction"},
    "prediction": set(),
    "data": {"models"},
    "readout": {"data", "models", "posterior"},
    "statistics": {"data", "posterior", "readout"},
    "calibration": {"posterior", "prediction"},
    "local": {"posterior"},
    "selection": {"posterior"},
    "any_regressor": GROUND,
    "last_layer": GROUND | {"readout", "statistics", "local", "selection"},
    "fits": GROUND | {"plots"},
    "theory": GROUND | {"readout", "fits", "any_regressor", "last_layer"},
    "plots": GROUND,
    "export": GROUND | {"readout", "last_layer"},
    "trees": set(),
    "report": GROUND | {"last_layer", "plots"},
}
"""What a room may import; a room that is not here may import every other."""

FLOORS = 7
ENTRIES = 25


def name_of(path):
    """`kernels/duals.py` is kernels.duals; a package is its `__init__.py`."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


PATHS = sorted(SOURCE.rglob("*.py"))
MODULES = {name_of(path): ast.parse(path.read_text()) for path in PATHS}
PACKAGES = {name_of(path) for path in PATHS if path.name == "__init__.py"}


def inner_imports(name, tree):
    """Modules of the library that this one names in a relative import."""
    own = name.split(".") if name != "__init__" else []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):  # by its whole name
            found |= {alias.name.partition(".")[2] for alias in node.names if "rigid" in alias.name}
        if isinstance(node, ast.ImportFrom) and node.level:
            up = node.level - (name in PACKAGES)
            base = own[: len(own) - up] + (node.module.split(".") if node.module else [])
            for alias in node.names:
                member = ".".join([*base, alias.name])
                found.add(member if member in MODULES else ".".join(base))
    return found & set(MODULES) - {name}


def room(name):
    return name.partition(".")[0]


GRAPH = {name: inner_imports(name, tree) for name, tree in MODULES.items()}
ROOMS = {
    one: {room(other) for name in GRAPH if room(name) == one for other in GRAPH[name]} - {one}
    for one in map(room, GRAPH)
}


def reach(name):
    """All modules that one imports, directly or through others."""
    reached, waiting = set(), [name]
    while waiting:
        imported = GRAPH[waiting.pop()] - reached
        reached |= imported
        waiting += imported
    return reached


def floor(one):
    return 1 + max(map(floor, ROOMS[one] - TOLD), default=0)


@pytest.mark.parametrize("graph", [GRAPH, ROOMS], ids=["modules", "rooms"])
def test_imports_have_no_cycle(graph):
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


@pytest.mark.parametrize("one", sorted(LAWS))
def test_a_room_imports_what_its_law_allows(one):
    assert ROOMS[one] <= LAWS[one] | TOLD


def test_every_room_below_the_doors_has_a_law():
    assert set(ROOMS) - set(LAWS) <= {"__init__", "__main__", "_version"} | DOORS
    assert all(not LAWS[one] & (WINGS | DOORS) for one in GROUND)
    assert all(other not in LAWS[one] for one in WINGS for other in WINGS - {one})


def test_the_house_is_low_and_its_root_short():
    assert max(map(floor, set(ROOMS) - {"__init__", "__main__"})) <= FLOORS
    entries = {path.name for path in SOURCE.iterdir() if not path.name.startswith("__")}
    assert len(entries - {"_version.py", "py.typed"}) <= ENTRIES


def test_a_prediction_looks_up_its_plots_and_no_other_room_is_found_by_name():
    looked_up = {}
    for name, tree in MODULES.items():
        for node in ast.walk(tree):
            text = str(node.value) if isinstance(node, ast.Constant) else ""
            if text.startswith("rigidities.") and text.partition(".")[2] in MODULES:
                looked_up[name] = text
    assert looked_up == {"prediction.prediction": "rigidities.plots"}


DIFFERENTIATING = {"grad", "vjp", "jvp", "jacrev", "jacfwd", "hessian", "linearize", "make_dual"}
OWN_GRAPHS = {
    "readout.checks",
    "readout.linearity",
    "readout.tail",
    "any_regressor.derivatives.linear_layers",
    "any_regressor.derivatives.regressor",
}
"""They ask which tensors a graph that they have recorded uses, and how its layers' outputs act."""


def test_one_module_differentiates():
    users = {
        name
        for name, tree in MODULES.items()
        for node in ast.walk(tree)
        if (
            (isinstance(node, ast.Attribute) and node.attr in DIFFERENTIATING)
            and ast.unparse(node.value) in {"torch.func", "torch.autograd", "forward_ad"}
        )
        or (
            (isinstance(node, ast.ImportFrom) and node.module in {"torch.func", "torch.autograd"})
            and DIFFERENTIATING & {alias.name for alias in node.names}
        )
    }
    assert users - OWN_GRAPHS == {"models.derivatives"}
    assert users >= OWN_GRAPHS


def test_statistics_and_readouts_know_nothing_of_novelty():
    users = {name for name in GRAPH if any("last_layer.novelty" in other for other in GRAPH[name])}
    verbs = {"accumulation", "fit", "distributed", "calibration_rows"}
    inside = {name for name in users if name.startswith("last_layer.novelty")}
    assert users - inside == {f"last_layer.{verb}" for verb in verbs}


def test_only_doors_import_the_facades():
    users = {room(name) for name in GRAPH if room(name) not in WINGS and FACADES & GRAPH[name]}
    assert users <= DOORS | {"__init__"}


def test_doors_use_public_names_only():
    for name in GRAPH:
        if room(name) in DOORS:
            tree = MODULES[name]
            own = {node.name for node in ast.walk(tree) if hasattr(node, "name")}
            reached = {
                node.attr
                for node in ast.walk(tree)
                if isinstance(node, ast.Attribute)
                and node.attr.startswith("_")
                and not node.attr.startswith("__")
                and not (isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"})
            }
            hosts = {"_SubParsersAction", "_preprocess_X", "_preprocessor", "_bin_mapper"}
            assert reached <= own | hosts, name


def test_the_core_imports_torch_safetensors_and_tqdm_only():
    allowed = {"torch", "safetensors", "tqdm", "rigidities", *sys.stdlib_module_names}
    for name in reach("__init__") | {"__init__"}:
        for node in MODULES[name].body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            assert {n.partition(".")[0] for n in names} <= allowed, name


def test_no_module_is_named_for_what_it_is_not():
    last = {name.rpartition(".")[2] for name in MODULES}
    assert not {"utils", "helpers", "common", "misc"} & last
