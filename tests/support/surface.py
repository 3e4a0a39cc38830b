"""The public surface of the library as one text: `python -m tests.support.surface` prints it.

Every public module is listed with the names in its `__all__`; of a function the signature, of a
class the constructor, the public methods with their signatures, and the public attributes that the
class itself defines. A change of the API then shows in a diff of `docs/reference/surface.txt`.
"""

import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

MODULES = (
    "rigidities",
    "rigidities.ase",
    "rigidities.calibration",
    "rigidities.cli",
    "rigidities.export",
    "rigidities.fits",
    "rigidities.last_layer",
    "rigidities.lightning",
    "rigidities.local",
    "rigidities.losses",
    "rigidities.metrics",
    "rigidities.plots",
    "rigidities.prediction",
    "rigidities.prediction.distribution",
    "rigidities.prediction.noise",
    "rigidities.report",
    "rigidities.selection",
    "rigidities.sklearn",
    "rigidities.theory",
    "rigidities.theory.closed_forms",
    "rigidities.theory.constrained",
    "rigidities.theory.kernels",
    "rigidities.transformers",
    "rigidities.trees",
)
"""The modules that a user may import from."""


def surface() -> str:
    """One block of lines for every public module."""
    blocks = []
    for name in MODULES:
        module = importlib.import_module(name)
        blocks.append("\n".join([name, *module_lines(module)]))
    return "\n\n".join(blocks) + "\n"


def module_lines(module: ModuleType) -> Iterator[str]:
    for name in sorted(module.__all__):
        public = getattr(module, name)
        if inspect.ismodule(public):
            yield f"    {name}  (module)"
        elif inspect.isclass(public) and public.__name__ != name:
            yield f"    {name} = {public.__name__}"
        elif inspect.isclass(public):
            yield from class_lines(name, public)
        elif callable(public):
            yield f"    {name}{signature(public)}"
        elif isinstance(public, str | int | float | tuple | list | dict):
            yield f"    {name}: {type(public).__name__}"
        else:
            yield f"    {name}  (type)"


def class_lines(name: str, cls: type) -> Iterator[str]:
    yield f"    class {name}{signature(cls)}"
    members = {
        member: kind
        for base in reversed(cls.__mro__)
        if base.__module__.startswith("rigidities")
        for member, kind in vars(base).items()
    }
    for member in sorted(members):
        if member.startswith("_"):
            continue
        value = members[member]
        if isinstance(value, staticmethod | classmethod):
            yield f"        {member}{signature(getattr(cls, member))}"
        elif inspect.isfunction(value):
            yield f"        {member}{signature(value)}"
        else:
            yield f"        {member}"


def signature(function: Any) -> str:
    """The parameters with their defaults; types are left out, Python versions differ in them."""
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError):  # built in, or made by its metaclass
        return "(...)"
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty, default=default(parameter))
        for parameter in found.parameters.values()
    ]
    bare = found.replace(parameters=parameters, return_annotation=inspect.Signature.empty)
    return str(bare)


class Shown:
    """Stands for a default in a signature, by a text that is the same in every process."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def default(parameter: inspect.Parameter) -> Any:
    value = parameter.default
    if value is inspect.Parameter.empty or isinstance(value, int | float | str | tuple | None):
        return value
    if type(value).__name__ == "_HAS_DEFAULT_FACTORY_CLASS":  # a field of a dataclass
        return Shown("<made anew>")
    name = getattr(value, "__name__", type(value).__name__)
    return Shown(f"<{name}>")


if __name__ == "__main__":
    print(surface(), end="")
