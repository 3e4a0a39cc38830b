"""Parameters of any shape as one flat vector, and back.

A leaf is a floating-point tensor inside nested mappings, lists and tuples; it is named by the path
that leads to it, joined by dots (`"layers.0.weight"`). A tensor that stands in two places is one
leaf. Everything else in the containers is left as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...data.samples import doubled

BARE = "params"
"""Name of a tensor that stands alone."""

Subset = str | Iterable[str] | Callable[[str], bool]


@dataclass(frozen=True)
class Parameters:
    """The selected leaves of a container as a flat vector.

    Attributes:
        tree: the container as it was given, a copy.
        names: of the selected leaves, in the order of the flat vector.
        shapes: of the selected leaves.

    Examples:
        >>> p = Parameters.of({"a": torch.tensor([1.0, 2.0]), "b": [torch.tensor(3.0)]})
        >>> p.names, p.flat.tolist()
        (('a', 'b.0'), [1.0, 2.0, 3.0])
        >>> p.restore(p.flat * 10)
        {'a': tensor([10., 20.]), 'b': [tensor(30.)]}
    """

    tree: Any
    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    flat: Tensor
    _slots: dict[str, int] = field(repr=False)

    @classmethod
    def of(cls, tree: Any, subset: Subset | None = None) -> Parameters:
        """Flatten nested containers; `subset` as in `PredictionRigidity`."""
        tree = _mapped(tree, lambda _, leaf: leaf.detach())
        selected, slots, seen = dict[str, Tensor](), dict[str, int](), dict[object, int]()
        names = [name for name, _ in _leaves(tree)]
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise ValueError(
                f"Two parameters have the same path {', '.join(twice)}: keys must not hold dots "
                "that make them look like others."
            )
        chosen = _chooser(subset, names)
        for name, leaf in _leaves(tree):
            if chosen(name):  # leaves that share their memory and shape are the same parameter
                identity = leaf.data_ptr(), leaf.shape, leaf.stride()
                slots[name] = seen.setdefault(identity, len(selected))
                if slots[name] == len(selected):
                    selected[name] = leaf
        if not selected:
            raise ValueError(
                "There are no parameters: expected a floating-point tensor, or mappings, lists and "
                f"tuples of them, got {type(tree).__name__}. Turn numbers and arrays into tensors "
                "by torch.as_tensor."
            )
        flat = torch.cat([leaf.reshape(-1) for leaf in selected.values()])
        if not bool(torch.isfinite(flat).all()):
            raise ValueError("The parameters hold NaN or infinity: the fit they come from failed.")
        shapes = tuple(leaf.shape for leaf in selected.values())
        view = cls(tree, tuple(selected), shapes, flat, slots)
        copied = _mapped(tree, lambda name, leaf: leaf if name in slots else leaf.clone())
        return replace(view, tree=replace(view, tree=copied).restore(flat))

    @property
    def sizes(self) -> list[int]:
        """Number of entries of each leaf."""
        return [shape.numel() for shape in self.shapes]

    @property
    def leaves(self) -> list[tuple[str, Tensor]]:
        """All leaves by name, the selected and the others."""
        return list(_leaves(self.tree))

    def __len__(self) -> int:
        return self.flat.numel()

    def restore(self, flat: Tensor) -> Any:
        """The container with the selected leaves taken from a flat vector.

        From several, (n, P), every tensor gains a leading n.
        """
        return self.filled(flat.split_with_sizes(self.sizes, dim=-1))

    def filled(self, pieces: Sequence[Tensor]) -> Any:
        """The container with the selected leaves taken from one flat piece each."""
        several = pieces[0].shape[:-1]

        def leaf_for(name: str, leaf: Tensor) -> Tensor:
            if name not in self._slots:
                return leaf.expand(several + leaf.shape) if several else leaf
            slot = self._slots[name]
            return pieces[slot].reshape(several + self.shapes[slot]).to(leaf.dtype)

        return _mapped(self.tree, leaf_for)

    def double(self) -> Parameters:
        """The same in float64."""
        tree = _mapped(self.tree, lambda _, leaf: doubled(leaf))
        return replace(self, tree=tree, flat=self.flat.double())

    def deviations(self, flat: Tensor) -> Any:
        """The container with deviations of the selected leaves, and zero for all others."""
        return replace(self, tree=_mapped(self.tree, lambda _, leaf: leaf * 0)).restore(flat)

    def without(self, names: Iterable[str]) -> Parameters:
        """The same container with fewer leaves selected."""
        left = set(self._slots) - set(names)
        return Parameters.of(self.tree, lambda name: name in left)


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(tree, Tensor):
        path = path or BARE
        if tree.is_complex():
            raise TypeError(f"Parameter {path!r} is complex; pass its real and imaginary parts.")
        if tree.is_floating_point():
            yield path, tree
        return
    for _, below, member in _members(tree, path):
        yield from _leaves(member, below)


def _mapped(tree: Any, change: Callable[[str, Tensor], Tensor], path: str = "") -> Any:
    """The same containers with every tensor leaf changed."""
    if isinstance(tree, Tensor):
        return change(path or BARE, tree)
    new = {key: _mapped(member, change, below) for key, below, member in _members(tree, path)}
    if isinstance(tree, Mapping):
        return new
    if isinstance(tree, tuple):
        return type(tree)(*new.values()) if hasattr(tree, "_fields") else tuple(new.values())
    return list(new.values()) if isinstance(tree, list) else tree


def _members(tree: Any, path: str) -> list[tuple[Any, str, Any]]:
    """Key, path and value of each member of a container."""
    listed = enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    held = tree.items() if isinstance(tree, Mapping) else listed
    return [(key, f"{path}.{key}" if path else str(key), member) for key, member in held]


def _chooser(subset: Subset | None, names: list[str]) -> Callable[[str], bool]:
    if subset is None:
        return lambda name: True
    listed = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    if callable(subset):
        if not any(map(subset, names)):
            raise ValueError(f"subset selects no parameter. There are: {listed}.")
        return subset
    wanted = [subset] if isinstance(subset, str) else list(subset)

    def under(name: str, prefix: str) -> bool:
        return name == prefix or name.startswith(prefix + ".")

    missing = [w for w in wanted if not any(under(name, w) for name in names)]
    if missing or not wanted:
        lacking = ", ".join(map(repr, missing))
        raise ValueError(f"subset names no parameter {lacking}. There are: {listed}.")
    return lambda name: any(under(name, prefix) for prefix in wanted)
