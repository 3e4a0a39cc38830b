r"""Local and component-wise rigidities of models that sum local terms.

Atoms in a structure, pixels in an image, tokens in a text, steps in time: where a model adds up
terms that are linear in shared weights, $y_A = \sum_{i \in A} w \cdot f_i$, only the sums are
observed and the Gram is made of group sums $f_A = \sum_{i \in A} f_i$ with loss weights $c_A$,

$$ H = \sum_A c_A f_A f_A^\top + \varsigma^2 I, \qquad
   \mathrm{LPR}_i = \frac{1}{f_i^\top H^{-1} f_i}, \qquad
   C_{ij} = f_i^\top H^{-1} f_j, \qquad
   \sum_{i,j \in A} C_{ij} = q_A = \frac{1}{R_A}. $$

The local rigidity measures how firmly the data determine a single term. A component c is a set of
feature columns (a species, a body order, a length scale): with f zero elsewhere, $f_{A,c}$ gives
the component-wise rigidity and $f_{i,c}$ the local component-wise one, each $q_c = f_c^\top
(H^{-1})_{cc} f_c$. All are unscaled: the variance is $\alpha^2 q$.

Rows are the terms in any order, and `groups` names the owner of each. From a list of one array per
structure: `features = torch.cat(arrays)` and
`groups = torch.repeat_interleave(torch.arange(len(arrays)), torch.tensor(sizes))`.

A term, a component or a group that is absent (all of its features are zero, or it has no rows) adds
nothing to the prediction, so nothing is uncertain: its rigidity is infinite.

**Coming from scikit-matter**: it averages over a structure's $n_A$ atoms and divides by a global
factor, which is the same as `weights=sizes.double() ** -2` in the Gram and a ridge of
`alpha * features.square().sum(1).mean()` over the training atoms. Local rigidities then agree; its
component-wise rigidities of whole structures are $n_A^2$ times those of the sums. Where a component
is absent it stops with a division by zero.

`sums` makes the rows of the Gram. `rigidity`, `component_rigidity` and `shares` accept a posterior
of that Gram and the features of the terms.

References:
    Local rigidities: Chong et al., "Robustness of local predictions in atomistic machine learning
        models", JCTC 2023.
    Component-wise: Chong et al., "Prediction rigidities for data-driven chemistry", Faraday
        Discussions 2025.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from .posterior.posterior import Posterior
from .posterior.quadratic import QuadraticForm

__all__ = [
    "Columns",
    "Components",
    "component_rigidity",
    "marginal",
    "rigidity",
    "shares",
    "sums",
]


def __dir__() -> list[str]:
    return sorted(__all__)


Columns = slice | Tensor | Sequence[int]
"""One component: a slice, column indices, or a Boolean mask over all columns."""

Components = Tensor | Sequence[int] | Sequence[Columns]
"""Sizes of consecutive blocks that fill all columns, or one `Columns` per component."""

_ROWS = 4096
"""Number of rows per chunk: ten megabytes at 320 features; larger products are no faster."""


def sums(features: Tensor, groups: Tensor, count: int | None = None) -> Tensor:
    r"""$f_A = \sum_{i \in A} f_i$ in float64: the rows that the Gram is made of.

    Args:
        features: (N, D), one row per term.
        groups: (N,) integers, the group that owns each row; rows of a group need not be adjacent.
        count: Number of groups A; by default the largest index plus one. A group without rows sums
            to zero.

    Returns:
        (A, D) in float64.

    Raises:
        ValueError: Features are empty or not finite, or the groups do not fit them.

    Examples:
        >>> sums(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), torch.tensor([0, 1, 0]))
        tensor([[6., 8.],
                [3., 4.]], dtype=torch.float64)
    """
    features = _checked_rows(features)
    owners, count = _checked_groups(groups, features, count)
    total = features.new_zeros(count, features.shape[1], dtype=torch.float64)
    owner_chunks = torch.split(owners, _ROWS)
    feature_chunks = torch.split(features, _ROWS)
    for chunk_owners, rows in zip(owner_chunks, feature_chunks, strict=True):
        total.index_add_(0, chunk_owners, rows.to(torch.float64))
    return _checked_finite(total)


def rigidity(
    posterior: Posterior, features: Tensor, *, dtype: torch.dtype = torch.float64
) -> Tensor:
    r"""Local prediction rigidity $1 / (f_i^\top H^{-1} f_i)$ of every term.

    The result is that of `Posterior.rigidity`, computed for very many rows: a triangular product
    halves the work, and chunks limit the memory.

    Args:
        posterior: The posterior from the Gram of the group sums.
        features: (N, D), one row per term.
        dtype: Precision of the product. `torch.float32` takes about half the time and is used
            only where its rounding bound allows (`posterior.quadratic`: below 1e-3).

    Returns:
        (N,) in float64, or (N, T) for one Gram per target.

    Raises:
        ValueError: Features are empty or not finite, or have another width.

    Examples:
        >>> from rigidities import Gram
        >>> gram = Gram(1)
        >>> gram.update(sums(torch.tensor([[1.0], [2.0]]), torch.tensor([0, 0])))
        >>> posterior = Posterior.from_gram(gram, ridge=1.0)
        >>> rigidity(posterior, torch.tensor([[1.0], [2.0]])).round(decimals=6).tolist()
        [10.0, 2.5]
    """
    features = _checked_rows(features, posterior)
    return 1 / _quadratic([slice(None)], [posterior], features, dtype)[:, 0]


def component_rigidity(
    posterior: Posterior,
    features: Tensor,
    components: Components,
    groups: Tensor | None = None,
    count: int | None = None,
    *,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    r"""Component-wise rigidity $1 / (f_c^\top (H^{-1})_{cc} f_c)$, of terms or of groups.

    A component costs a product with a block of its own size: C equal blocks of a partition cost
    1/C of the whole form.

    Args:
        posterior: The posterior from the Gram of the group sums.
        features: (N, D), one row per term.
        components: Sizes of consecutive blocks of columns that add up to D, or one slice, index
            tensor or Boolean mask per component (any subsets; they may overlap).
        groups: (N,), the owner of each row. With it the rigidities are those of the groups' sums;
            by default those of the terms.
        count: Number of groups, as in `sums`.
        dtype: Precision of the product, as in `rigidity`.

    Returns:
        (N, C), or (A, C) with groups, in float64; for one Gram per target (..., C, T).

    Raises:
        ValueError: Features, components or groups do not fit each other.

    Examples:
        >>> from rigidities import Gram
        >>> gram = Gram(2)
        >>> gram.update(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
        >>> posterior = Posterior.from_gram(gram, ridge=1.0)
        >>> rows = torch.tensor([[1.0, 1.0], [0.0, 0.5]])
        >>> component_rigidity(posterior, rows, [1, 1]).round(decimals=6).tolist()
        [[2.0, 5.0], [inf, 20.0]]
    """
    features = _checked_rows(features, posterior)
    columns = _columns(components, posterior.width)
    if groups is not None:
        features = sums(features, groups, count)
    marginals = [marginal(posterior, component) for component in columns]
    return 1 / _quadratic(columns, marginals, features, dtype)


def shares(
    posterior: Posterior,
    features: Tensor,
    groups: Tensor,
    components: Components | None = None,
    count: int | None = None,
) -> Tensor:
    r"""What each term contributes to its group's q: $\sum_{j \in A} C_{ij} = f_i^\top H^{-1} f_A$.

    The shares are exact and additive: those of a group's terms sum to its $q_A = 1/R_A$. A share is
    negative if the error of a term cancels that of others. With components,
    $f_{i,c}^\top (H^{-1} f_A)_c$ sums over terms and components. It costs one product per *group*.

    Args:
        posterior: The posterior from the Gram of the group sums.
        features: (N, D), one row per term, with all terms of each group.
        groups: (N,), the owner of each row.
        components: A partition of the columns, given as in `component_rigidity`.
        count: Number of groups, as in `sums`.

    Returns:
        (N,), or (N, C) with components, in float64; for one Gram per target a last dimension T.

    Raises:
        ValueError: Features, components or groups do not fit each other.

    Examples:
        >>> from rigidities import Gram
        >>> gram = Gram(1)
        >>> gram.update(torch.tensor([[3.0]]))
        >>> posterior = Posterior.from_gram(gram, ridge=1.0)
        >>> shares(posterior, torch.tensor([[1.0], [2.0]]), torch.tensor([0, 0]))
        tensor([0.3000, 0.6000], dtype=torch.float64)
    """
    features = _checked_rows(features, posterior)
    columns = None if components is None else _partition(components, posterior.width)
    total = sums(features, groups, count)
    owners, _ = _checked_groups(groups, features, count)
    solved = _solved(posterior, total)  # (A, D) or (A, T, D)
    owner_chunks = torch.split(owners.to(solved.device), _ROWS)
    feature_chunks = torch.split(features, _ROWS)
    share_chunks = []
    for chunk_owners, chunk_features in zip(owner_chunks, feature_chunks, strict=True):
        rows = chunk_features.to(solved)
        if solved.ndim == 3:
            rows = rows[:, None]
        products = solved[chunk_owners] * rows
        if columns is None:
            share_chunks.append(products.sum(-1))
        else:
            by_component = [products[..., component].sum(-1) for component in columns]
            share_chunks.append(torch.stack(by_component, dim=1))
    return torch.cat(share_chunks)


def marginal(posterior: Posterior, columns: Columns) -> Posterior:
    r"""The posterior of some weights alone, $N(0, \alpha^2 (H^{-1})_{cc})$.

    Its ridge is zero, because the ridge of the whole posterior is part of $H$. It comes from the
    singular values of the whitened columns, so that rounding errors grow only with the root of the
    condition number.

    Args:
        posterior: The posterior of all D weights.
        columns: A slice, index tensor or Boolean mask.

    Raises:
        ValueError: The columns are empty, out of range or not distinct.

    Examples:
        >>> from rigidities import Gram
        >>> gram = Gram(2)
        >>> gram.update(torch.tensor([[2.0, 1.0], [1.0, 2.0]]))
        >>> first_weight = marginal(Posterior.from_gram(gram, ridge=0.0), [0])
        >>> round(first_weight.rigidity(torch.tensor([[1.0]])).item(), 6)
        1.8
    """
    (component,) = _columns([columns], posterior.width)
    rows = _whitener(posterior)[..., component, :]
    roots, singular, _ = torch.linalg.svd(rows, full_matrices=False)
    values = singular.square().reciprocal()
    return replace(posterior, eigenvalues=values, eigenvectors=roots, ridge=0.0, complement=False)


def _whitener(posterior: Posterior) -> Tensor:
    r"""Z with $Z Z^\top = H^{-1}$: (D, k), (D, k + D) for a complement, or (T, D, k)."""
    identity = torch.eye(posterior.width, dtype=torch.float64, device=posterior.eigenvectors.device)
    rows = posterior.whitened(identity)
    return rows.movedim(-2, 0) if rows.ndim == 3 else rows


def _solved(posterior: Posterior, features: Tensor) -> Tensor:
    r"""$H^{-1} f$ of rows: (A, D) -> (A, D), or (A, T, D) for one Gram per target."""
    whitened = posterior.whitened(features)
    whitener = _whitener(posterior)
    if whitener.ndim == 2:
        return whitened @ whitener.mT
    return torch.einsum("atk,tdk->atd", whitened, whitener)


def _quadratic(
    columns: Sequence[slice | Tensor],
    posteriors: Sequence[Posterior],
    features: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """The quadratic form q of each component, chunk by chunk.

    Args:
        columns: The columns of each of C components.
        posteriors: The posterior of each component's weights.
        features: (N, D).
        dtype: Precision of the product where its rounding allows.

    Returns:
        (N, C), or (N, C, T) for one Gram per target, in float64.
    """
    forms: list[Callable[[Tensor], Tensor]] = []
    for posterior in posteriors:
        if posterior.rank == posterior.width:
            forms.append(QuadraticForm.of(posterior, dtype))
        else:  # a truncated posterior has no triangular factor, but is small already
            forms.append(posterior.quadratic)
    device = posteriors[0].eigenvectors.device
    chunks = []
    for chunk_features in torch.split(features, _ROWS):
        rows = chunk_features.to(device)
        by_component = []
        for component, form in zip(columns, forms, strict=True):
            by_component.append(form(rows[:, component]))
        chunks.append(torch.stack(by_component, dim=1))
    return _checked_finite(torch.cat(chunks).to(torch.float64))


def _checked_rows(features: Tensor, posterior: Posterior | None = None) -> Tensor:
    """Features (N, D) as a tensor, of the posterior's width where one is given."""
    features = torch.as_tensor(features)
    shape = tuple(features.shape)
    if posterior is None:
        if len(shape) != 2:
            raise ValueError(f"features must be (N, D), one row per term, got {shape}.")
    elif len(shape) != 2 or shape[1] != posterior.width:
        raise ValueError(f"features must be (N, {posterior.width}), one row per term, got {shape}.")
    if features.numel() == 0:
        raise ValueError(
            f"features are empty, {shape}: expected at least one row and column. Leave out empty "
            "batches."
        )
    return features


def _checked_groups(groups: Tensor, features: Tensor, count: int | None) -> tuple[Tensor, int]:
    """The owners as int64 on the features' device, and the number of groups."""
    groups = torch.as_tensor(groups, device=features.device)
    if groups.dtype.is_floating_point or groups.dtype.is_complex or groups.dtype == torch.bool:
        raise ValueError(
            f"groups must be integers, the owner of each row, got {groups.dtype}. Pass "
            "groups.long() if they are indices."
        )
    rows = features.shape[0]
    if tuple(groups.shape) != (rows,):
        raise ValueError(
            f"groups must be ({rows},), one owner for each row of features, got "
            f"{tuple(groups.shape)}. From sizes: "
            "torch.repeat_interleave(torch.arange(len(sizes)), sizes)."
        )
    smallest = int(groups.min())
    largest = int(groups.max())
    if smallest < 0:
        raise ValueError(
            f"groups must not be negative, got {smallest}. Drop rows that belong to no group."
        )
    if count is None:
        count = largest + 1
    elif largest >= count:
        raise ValueError(
            f"groups must be below count={count}, got {largest}. Pass count={largest + 1} or leave "
            "it out."
        )
    return groups.long(), count


def _columns(components: Components, width: int) -> list[slice | Tensor]:
    """Every component as a slice or as int64 indices."""
    if isinstance(components, Tensor) or hasattr(components, "tolist"):
        components = components.tolist()
    if len(components) == 0:
        raise ValueError("components are empty: pass at least one, e.g. the sizes of the blocks.")
    sizes = [entry for entry in components if isinstance(entry, int)]
    if len(sizes) == len(components):
        if min(sizes) < 1 or sum(sizes) != width:
            raise ValueError(
                f"sizes of components must be positive and add up to the posterior's {width} "
                f"columns, got {sizes}, which add up to {sum(sizes)}. For other subsets pass "
                "slices or index tensors."
            )
        blocks: list[slice | Tensor] = []
        for size, end in zip(sizes, accumulate(sizes), strict=True):
            blocks.append(slice(end - size, end))
        return blocks
    return [_indices(entry, number, width) for number, entry in enumerate(components)]


def _indices(entry: Columns, number: int, width: int) -> slice | Tensor:
    """One component as a slice or as int64 indices.

    Args:
        entry: The component as the user gave it.
        number: Its number, for messages.
        width: Number of columns D.
    """
    if isinstance(entry, slice):
        indices: Tensor = torch.arange(width)[entry]
        out_of_range = max(entry.start or 0, entry.stop or 0) > width
    else:
        indices = torch.as_tensor(entry)
        if indices.dtype == torch.bool and tuple(indices.shape) == (width,):
            indices = indices.nonzero()[:, 0]
        out_of_range = bool((indices < 0).any() or (indices >= width).any())
    if indices.numel() == 0:
        raise ValueError(f"component {number} is empty, got {entry}: name at least one column.")
    if indices.dtype.is_floating_point or indices.dtype == torch.bool or indices.ndim != 1:
        raise ValueError(
            f"component {number} must be a slice, column indices (n,) or a mask ({width},), got "
            f"{indices.dtype} {tuple(indices.shape)}."
        )
    if out_of_range:
        raise ValueError(
            f"component {number} is out of range: columns are 0..{width - 1}, got {entry}."
        )
    if len(set(indices.tolist())) < len(indices):
        raise ValueError(f"component {number} names a column twice, got {entry}.")
    return entry if isinstance(entry, slice) else indices.long()


def _partition(components: Components, width: int) -> list[slice | Tensor]:
    """The components, if every column is in exactly one of them.

    Raises:
        ValueError: A column is in none or in several.
    """
    columns = _columns(components, width)
    all_columns = torch.arange(width)
    named_columns = torch.cat([all_columns[component] for component in columns])
    times = named_columns.bincount(minlength=width)
    if bool((times != 1).any()):
        column = int((times != 1).nonzero()[0])
        raise ValueError(
            "components must be a partition here, each column in exactly one, but column "
            f"{column} is in {int(times[column])}. Pass the sizes of the blocks, or disjoint "
            f"subsets that contain all {width} columns."
        )
    return columns


def _checked_finite(values: Tensor) -> Tensor:
    """Sums or products of features, if they are finite.

    A NaN or infinity in a row also appears in its sums and products, where it is cheaper to find.
    """
    if not bool(torch.isfinite(values).all()):
        row = int((~torch.isfinite(values)).nonzero()[0, 0])
        raise ValueError(
            f"features contain NaN or infinity (first in row or group {row}). Drop these rows, or "
            "fix the model that computed them."
        )
    return values
