"""Parameters of any shape as one flat vector, and back.

A leaf is a floating-point tensor inside nested mappings, lists and tuples. Its name is the path
that leads to it, joined by dots (`"layers.0.weight"`). A tensor that occurs in two places is one
leaf. Everything else in the containers is left unchanged.

`Parameters.of` walks through a container and concatenates the selected leaves; `restore` puts other
values in their places.
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
        tree: A copy of the container.
        names: Names of the selected leaves, in the order of the flat vector.
        shapes: Shapes of the selected leaves.
        flat: The selected leaves, flattened and concatenated, (P,).

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
    _slots: dict[str, int] = field(repr=False)  # path -> number of the selected leaf

    @classmethod
    def of(cls, tree: Any, subset: Subset | None = None) -> Parameters:
        """Flatten nested containers.

        Args:
            tree: A tensor, or nested mappings, lists and tuples of tensors.
            subset: Which leaves to select, as in `PredictionRigidity`; None for all.

        Raises:
            ValueError: Two leaves have the same path, the subset selects none, or a value is not
                finite.
        """
        tree = _mapped(tree, lambda _, leaf: leaf.detach())
        names = [name for name, _ in _leaves(tree)]
        repeated = [name for name, count in Counter(names).items() if count > 1]
        if repeated:
            raise ValueError(
                f"Two parameters have the same path {', '.join(repeated)}: keys must not contain "
                "dots that make their paths equal."
            )
        is_selected = _selector(subset, names)
        selected: dict[str, Tensor] = {}
        slots: dict[str, int] = {}
        slot_by_identity: dict[object, int] = {}
        for name, leaf in _leaves(tree):
            if not is_selected(name):
                continue
            # Leaves that share their memory and shape are the same parameter.
            identity = (leaf.data_ptr(), leaf.shape, leaf.stride())
            if identity not in slot_by_identity:
                slot_by_identity[identity] = len(selected)
                selected[name] = leaf
            slots[name] = slot_by_identity[identity]
        if not selected:
            raise ValueError(
                "There are no parameters: expected a floating-point tensor, or mappings, lists "
                f"and tuples of them, got {type(tree).__name__}. Convert numbers and arrays with "
                "torch.as_tensor."
            )
        flat = torch.cat([leaf.reshape(-1) for leaf in selected.values()])
        if not bool(torch.isfinite(flat).all()):
            raise ValueError(
                "The parameters contain NaN or infinity: the fit that they come from failed."
            )
        shapes = tuple(leaf.shape for leaf in selected.values())
        # The tree becomes a copy: fixed leaves are cloned, selected ones are views of `flat`.
        fixed_copied = _mapped(tree, lambda name, leaf: leaf if name in slots else leaf.clone())
        parameters = cls(fixed_copied, tuple(selected), shapes, flat, slots)
        return replace(parameters, tree=parameters.restore(flat))

    @property
    def sizes(self) -> list[int]:
        """Number of entries of each leaf."""
        return [shape.numel() for shape in self.shapes]

    @property
    def leaves(self) -> list[tuple[str, Tensor]]:
        """All leaves by name, selected or not."""
        return list(_leaves(self.tree))

    def __len__(self) -> int:
        return self.flat.numel()

    def restore(self, flat: Tensor) -> Any:
        """The container with the selected leaves read from a flat vector.

        With several vectors, (n, P), every tensor gains a leading dimension n.
        """
        return self.filled(flat.split_with_sizes(self.sizes, dim=-1))

    def filled(self, pieces: Sequence[Tensor]) -> Any:
        """The container with each selected leaf read from its flat piece, (size,) or (n, size)."""
        leading = pieces[0].shape[:-1]  # () or (n,)

        def leaf_for(name: str, leaf: Tensor) -> Tensor:
            """The new leaf in place of one of the tree."""
            if name in self._slots:
                slot = self._slots[name]
                return pieces[slot].reshape(leading + self.shapes[slot]).to(leaf.dtype)
            return leaf.expand(leading + leaf.shape) if leading else leaf

        return _mapped(self.tree, leaf_for)

    def double(self) -> Parameters:
        """The same in float64."""
        tree = _mapped(self.tree, lambda _, leaf: doubled(leaf))
        return replace(self, tree=tree, flat=self.flat.double())

    def deviations(self, flat: Tensor) -> Any:
        """The container with deviations of the selected leaves, and zero for all others."""
        zeros = _mapped(self.tree, lambda _, leaf: leaf * 0)
        return replace(self, tree=zeros).restore(flat)

    def without(self, names: Iterable[str]) -> Parameters:
        """The same container without these leaves in the selection."""
        remaining = set(self._slots) - set(names)
        return Parameters.of(self.tree, lambda name: name in remaining)


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Path and tensor of each floating-point leaf."""
    if isinstance(tree, Tensor):
        path = path or BARE
        if tree.is_complex():
            raise TypeError(f"Parameter {path!r} is complex; pass its real and imaginary parts.")
        if tree.is_floating_point():
            yield path, tree
        return
    for _, member_path, member in _members(tree, path):
        yield from _leaves(member, member_path)


def _mapped(tree: Any, change: Callable[[str, Tensor], Tensor], path: str = "") -> Any:
    """The same containers with every tensor changed by a function of its path and itself."""
    if isinstance(tree, Tensor):
        return change(path or BARE, tree)
    changed = {
        key: _mapped(member, change, member_path)
        for key, member_path, member in _members(tree, path)
    }
    if isinstance(tree, Mapping):
        return changed
    if isinstance(tree, tuple):
        is_named = hasattr(tree, "_fields")
        return type(tree)(*changed.values()) if is_named else tuple(changed.values())
    if isinstance(tree, list):
        return list(changed.values())
    return tree


def _members(tree: Any, path: str) -> list[tuple[Any, str, Any]]:
    """Key, path and value of each member of a container; none of anything else."""
    pairs: Iterable[tuple[Any, Any]]
    if isinstance(tree, Mapping):
        pairs = tree.items()
    elif isinstance(tree, (list, tuple)):
        pairs = enumerate(tree)
    else:
        return []
    prefix = f"{path}." if path else ""
    return [(key, f"{prefix}{key}", member) for key, member in pairs]


def _selector(subset: Subset | None, names: list[str]) -> Callable[[str], bool]:
    """A function that says whether a name is in the subset.

    Raises:
        ValueError: The subset selects nothing, or names a parameter that does not exist.
    """
    if subset is None:
        return lambda name: True
    listed = ", ".join(names[:20])
    if len(names) > 20:
        listed += ", ..."
    if callable(subset):
        if not any(subset(name) for name in names):
            raise ValueError(f"subset selects no parameter. There are: {listed}.")
        return subset
    prefixes = [subset] if isinstance(subset, str) else list(subset)
    missing = [prefix for prefix in prefixes if not any(_is_under(name, prefix) for name in names)]
    if missing or not prefixes:
        quoted = ", ".join(repr(prefix) for prefix in missing)
        raise ValueError(f"subset names no parameter {quoted}. There are: {listed}.")
    return lambda name: any(_is_under(name, prefix) for prefix in prefixes)


def _is_under(name: str, prefix: str) -> bool:
    """Whether a path is the prefix, or continues it after a dot."""
    return name == prefix or name.startswith(prefix + ".")
