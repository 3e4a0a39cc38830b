"""Hashes of rows and of tensors, the same in every batch, process and on every device.

`row_hashes` are of exact values, 63 bits for each row, and `near_hashes` of values that are known
up to rounding. `row_tensors` are the inputs by which the rows of a batch are told apart.
`tensor_hashes` and `fingerprint` are of whole tensors, such as the weights of a model.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.data import default_collate

from ..models.shadow import PLAIN_TENSORS, plain_parts

NO_LIMIT = (1 << 63) - 1
"""The largest hash of a row: every hash is below it, or equal."""

_CHUNK = 4096
"""At most this many words of a row are multiplied at once."""

_PIECE = 1 << 22
"""About this many numbers of tensors are hashed at once."""

_PIECE_WIDTH = 64
"""Tensors are cut into rows of this many words to be hashed."""

# Factors of a mixing function whose products spread the bits of a word (splitmix64).
_ODD = -7046029254386353131  # 2^64 / golden ratio, as a signed number
_MIX = -4658895280553007687


# --- hashes of rows -----------------------------------------------------------------------------


def sample_hashes(inputs: Sequence[Tensor], target: Tensor | None, rows: int) -> Tensor | None:
    """One hash per sample, of its inputs and target (N,); None where inputs have no rows.

    Args:
        inputs: What `row_tensors` gives for the inputs.
        target: The target, if there is one.
        rows: The number of samples N.
    """
    if not inputs:
        return None
    if target is None:
        return row_hashes(inputs, rows)
    return row_hashes([*inputs, target], rows)


def row_hashes(values: Iterable[Any], rows: int) -> Tensor | None:
    """One hash per row over all tensors, (rows,); None if a value is no tensor of that length."""
    total: Tensor | None = None
    for position, value in enumerate(values):
        plain = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested
        if not plain or value.shape[:1] != (rows,):
            return None
        products = _products(value.detach(), position)
        total = products if total is None else total + products
    return None if total is None else _mixed(total) & NO_LIMIT


def row_tensors(inputs: Sequence[Any], rows: int, device: torch.device) -> list[Tensor]:
    """The tensors in a batch's inputs that tell its rows apart, each with one row per sample.

    Entries of a mapping come in the order of their keys. A list of mappings, one for each sample,
    is collated first. Texts, one for each sample, become numbers. What belongs to the batch as a
    whole is left out: single numbers and texts, and None.

    Args:
        inputs: The inputs of the model, each of tensors, texts and numbers in any nesting of
            mappings, tuples and lists.
        rows: The number of samples.
        device: The device of the model, for the numbers of texts.

    Returns:
        The tensors. None at all where rows cannot be told apart: there are tensors of another
        length (atoms of structures) or objects, or nothing but one tensor, which may be the
        target, is left.
    """
    found: list[Tensor] = []
    left_out = 0
    remaining = list(reversed(inputs))
    while remaining:
        entry = remaining.pop()
        if isinstance(entry, Tensor) and entry.ndim > 0:
            plain = entry.layout is torch.strided and not entry.is_nested
            if not plain or entry.shape[0] != rows:
                return []
            found.append(entry)
        elif entry is None or isinstance(entry, (str, bytes, int, float, complex, Tensor)):
            left_out += 1
        elif isinstance(entry, Mapping):
            remaining.extend(entry[key] for key in sorted(entry, key=str, reverse=True))
        elif not isinstance(entry, (tuple, list)):
            return []
        elif len(entry) == rows and all(isinstance(text, str) for text in entry):
            found.append(_numbers_of_texts(entry).to(device))
        elif len(entry) == rows and all(isinstance(sample, Mapping) for sample in entry):
            try:
                remaining.append(default_collate(list(entry)))
            except (TypeError, RuntimeError, KeyError):  # samples of different shapes or keys
                return []
        else:
            remaining.extend(reversed(entry))
    if left_out and len(found) < 2:
        return []
    return found


def _numbers_of_texts(texts: Sequence[str]) -> Tensor:
    """A number for each text, (n,), the same for equal texts in every process."""
    numbers = []
    for text in texts:
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        numbers.append(int.from_bytes(digest, "little", signed=True))
    return torch.tensor(numbers, dtype=torch.int64)


def output_hashes(hashes: Tensor, rows: int, sample_weight: Tensor | None) -> Tensor:
    """Hashes of output rows, where every input has the same number of output rows.

    Args:
        hashes: Hashes of the inputs, (n,).
        rows: Number of output rows, a multiple of n.
        sample_weight: The user's sample weight of each output row. It changes the low bits only, so
            that it hardly moves a row across a sketch's limit: rows of the row sample must all be
            in the sketch they are looked up in.

    Returns:
        One hash per output row, (rows,), made of the input's hash and the row's place within the
        input.
    """
    rows_per_input = rows // max(1, len(hashes))
    if rows_per_input > 1:
        places = torch.arange(rows_per_input, device=hashes.device).repeat(len(hashes))
        repeated = hashes.repeat_interleave(rows_per_input)
        hashes = cast("Tensor", row_hashes([repeated, places], rows))
    if sample_weight is None:
        return hashes
    weight_hashes = cast("Tensor", row_hashes([sample_weight.to(torch.float32)], rows))
    return hashes ^ (weight_hashes >> 39)


def hashed_normals(hashes: Tensor, keys: Tensor) -> Tensor:
    """A number from N(0, 1) for each pair of a row's hash and a key; a pair's never changes.

    Args:
        hashes: int64.
        keys: int64, which broadcast with the hashes.
    """
    levels = (_mixed(_mixed(hashes) + keys) & NO_LIMIT) >> 10  # 53 bits
    numbers: Tensor = torch.special.ndtri((levels.to(torch.float64) + 0.5) / 2**53)
    return numbers


def near_hashes(features: Tensor, width: float) -> Tensor:
    """One hash per row of features that are known up to rounding, (N,).

    It is a hash of the features' length and of four projections on fixed directions, rounded to
    cells that are wider than the rounding of the features. A row near the boundary of a cell may
    fall into the next one in another pass.

    Args:
        features: (N, ...).
        width: The width of a cell.
    """
    flat = features.detach().flatten(1).to(torch.float64)
    size = torch.linalg.vector_norm(flat, dim=1, keepdim=True).clamp(min=1e-300)
    index = torch.arange(1, 4 * flat.shape[1] + 1, device=flat.device).reshape(-1, 4)
    directions = _mixed(index).double() / 2**63  # (D, 4), between -1 and 1
    places = torch.cat([size.log2(), flat @ directions / size], 1)  # (N, 5)
    cells = (places / width).floor().to(torch.int64)
    return _mixed(_products(cells, 0)) & NO_LIMIT


# --- hashes of tensors --------------------------------------------------------------------------


def fingerprint(named: Iterable[tuple[str, Tensor]]) -> str:
    """Hash of tensors by name, 16 hexadecimal digits; see `tensor_hashes`."""
    names = []
    tensors = []
    for name, tensor in named:
        names.append(name)
        tensors.append(tensor)
    total = 0
    for name, tensor_hash in zip(names, tensor_hashes(tensors), strict=True):
        total += tensor_hash * (2 * zlib.crc32(name.encode()) + 1)
    return f"{total % (1 << 64):016x}"


class _Piece(NamedTuple):
    """A piece of a tensor that is being hashed.

    Attributes:
        owner: The number of the tensor.
        factor: An odd number for each plain tensor that the tensor consists of.
        values: The numbers, flat.
    """

    owner: int
    factor: int
    values: Tensor


def tensor_hashes(tensors: Sequence[Tensor]) -> list[int]:
    """One hash per tensor, of all its values; the same on every device and for lossless casts."""
    # Pieces with the same number within their tensors, on one device, are hashed together, about
    # `_PIECE` numbers at once.
    groups: dict[tuple[torch.device, int, int], list[_Piece]] = defaultdict(list)
    sizes = [0] * len(tensors)  # they enter the hash: zeros alone would not show their number
    numbers_before = 0
    for owner, tensor in enumerate(tensors):
        parts = [tensor]
        if type(tensor) not in PLAIN_TENSORS:
            parts = plain_parts(tensor)
        for plain_number, plain in enumerate(parts):
            factor = 2 * plain_number + 1
            flat = plain.detach().resolve_conj()
            if flat.is_complex():
                flat = torch.view_as_real(flat)
            flat = flat.reshape(-1)
            sizes[owner] += factor * flat.numel()
            for piece_number, values in enumerate(torch.split(flat, _PIECE)):
                key = flat.device, piece_number, numbers_before // _PIECE
                groups[key].append(_Piece(owner, factor, values))
                numbers_before += values.numel()
    totals = {device: torch.tensor(sizes).to(device) * 0 for device, _, _ in groups}
    for (device, piece_number, _), pieces in groups.items():
        owners, hashes = _piece_hashes(pieces, piece_number)
        totals[device].index_add_(0, owners, hashes)
    totals_by_device = [total.tolist() for total in totals.values()]
    return [sum(terms) % (1 << 63) for terms in zip(sizes, *totals_by_device, strict=True)]


def _piece_hashes(pieces: list[_Piece], piece_number: int) -> tuple[Tensor, Tensor]:
    """Hashes of pieces of tensors, cut into rows of 64 words.

    Args:
        pieces: Pieces on one device.
        piece_number: Their number within their tensors, the same for all.

    Returns:
        The owner and the hash of each row, which add up to the hashes of the owners.
    """
    device = pieces[0].values.device
    rows = [-(-piece.values.numel() // _PIECE_WIDTH) for piece in pieces]  # rounded up
    words = torch.zeros(sum(rows), _PIECE_WIDTH, dtype=torch.int64, device=device)
    for space, piece in zip(torch.split(words, rows), pieces, strict=True):
        dtype = torch.float64 if piece.values.is_floating_point() else torch.int64
        space.view(dtype).view(-1)[: piece.values.numel()].copy_(piece.values)
    owners = [piece.owner for piece in pieces]
    factors = [piece.factor for piece in pieces]
    rows_before = [0, *accumulate(rows[:-1])]
    # One transfer to the device for all of them, and then an entry for each row.
    table = torch.tensor([owners, factors, rows_before, rows]).to(device)
    table = table.repeat_interleave(table[3], dim=1, output_size=len(words))
    row_owners, row_factors, row_starts, _ = table
    positions = torch.arange(1, len(words) + 1, device=device) - row_starts
    hashes = _mixed(_products(words, piece_number)) * _mixed(positions * _ODD) * row_factors
    return row_owners, hashes


# --- arithmetic of hashes -----------------------------------------------------------------------


def _products(tensor: Tensor, position: int) -> Tensor:
    """Dot product of each row's words with random odd 64-bit integers, modulo 2^64.

    Sums of integers do not depend on the order, the batch or the device.

    Args:
        tensor: (n, ...).
        position: Which random integers to take, so that tensors of one row are told apart.
    """
    if not tensor.numel():  # rows of no numbers
        return torch.zeros(tensor.shape[0], dtype=torch.int64, device=tensor.device)
    words = _words(tensor.reshape(tensor.shape[0], -1))
    compiling = torch.compiler.is_compiling()
    # A compiled graph cannot look into the cache.
    multipliers_of = _multipliers.__wrapped__ if compiling else _multipliers
    sums = []
    for start in range(0, words.shape[1], _CHUNK):
        chunk = words[:, start : start + _CHUNK]
        multipliers = multipliers_of(position, start, chunk.shape[1], words.device)
        if words.device.type == "cpu" and not compiling:
            sums.append(torch.mv(chunk, multipliers))
        else:  # accelerators have no such product of integers
            sums.append((chunk * multipliers).sum(1))
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)


@lru_cache(maxsize=64)
def _multipliers(position: int, start: int, count: int, device: torch.device) -> Tensor:
    """Fixed pseudo-random odd integers, (count,)."""
    index = torch.arange(start + 1, start + count + 1)
    return (_mixed(_mixed(index) + torch.tensor(position) * _ODD) | 1).to(device)


def _words(values: Tensor) -> Tensor:
    """The bits of each row as int64 words, two 32-bit numbers in one where their count is even.

    A product modulo 2^64 keeps little of a word that ends in many zeros, as the floats of small
    whole numbers do, so the high half is mixed into the low one.
    """
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj()).flatten(1)
    if not values.is_floating_point():
        values = values.to(torch.int64)
    elif values.dtype != torch.float64:
        values = values.to(torch.float32)
    values = values.contiguous()
    if values.element_size() * values.shape[1] % 8:
        return values.view(torch.int32).to(torch.int64)
    # A view as wider words must begin at a multiple of their size; in a compiled graph it does.
    compiling = torch.compiler.is_compiling()
    if not compiling and values.storage_offset() * values.element_size() % 8:
        values = values.clone()
    pairs = values.view(torch.int64)
    return torch.add(pairs, pairs >> 32, alpha=_ODD)


def _mixed(words: Tensor) -> Tensor:
    """A bijection of int64 that spreads every bit."""
    words = (words ^ (words >> 30)) * _MIX
    words = (words ^ (words >> 27)) * _ODD
    return words ^ (words >> 31)
