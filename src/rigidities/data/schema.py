"""What files and state dicts hold: one table of names, dtypes, shapes and header entries.

A file or a state dict is of one kind ("fit", "ensemble", ...), which its header names. A kind
consists of parts, such as the Gram or the calibration. The tensors of a part carry the part's name
as a prefix. Where the header describes a part, it does so in an object of that name.

A name that ends in "?" may be missing, and a star matches anything. A shape is a string of words,
one for each dimension:

| word | length |
| --- | --- |
| K | number of targets |
| D | number of features |
| T, U | K, or the dimension is missing; the same choice for all tensors with that word |
| S | 1 or K; the same for all tensors with that word |
| other letters | any, but the same for all tensors with that letter |
| 5, F+3, G-1 | that number, or the letter's length plus or minus a number |
| _ | any |
| ... | as an entry's only word: any shape |

A statistic that joins a fit declares what it writes to files: here, or in its own module with
`declare`.
`check` compares a file's tensors and header with the table before anything reads them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

PER_TARGET = ("T", "U")
"""Words for a dimension of length K that is there in all entries with the word, or in none."""


class Finite(float):
    """The type of a header entry that is a finite number, neither NaN nor infinite."""


@dataclass(frozen=True)
class Array:
    """The table's entry for a tensor.

    Attributes:
        dtype: A name such as "float64"; "floating" for any floating-point dtype, "any" for all.
        shape: The shape in words, as the module's table defines them.
        finite: Whether the tensor must hold neither NaN nor infinity.
    """

    dtype: str
    shape: str
    finite: bool = True

    def allows_dtype(self, tensor: Tensor) -> bool:
        """Whether the tensor has the dtype of this entry."""
        if self.dtype == "any":
            return True
        if self.dtype == "floating":
            return tensor.is_floating_point()
        return self.dtype == _dtype_name(tensor)


@dataclass(frozen=True)
class Part:
    """The table's entry for a part of a file.

    Attributes:
        tensors: The tensors' entries by name, without the part's prefix.
        header: Types of the entries in the part's header object, by name; None if the part has
            no header object.
        needed: Whether every file of this kind has the part.
    """

    tensors: Mapping[str, Array] = field(default_factory=dict)
    header: Mapping[str, Any] | None = None
    needed: bool = False


@dataclass(frozen=True)
class Kind:
    """The table for one kind of file.

    Attributes:
        header: Types of header entries that belong to no part, by name.
        parts: The parts by name, which is the prefix of their tensors' names. Tensors of the part
            named "" have no prefix.
        targets: The number of targets K, or the name of the header entry that holds it; None where
            K follows from the shapes of the tensors.
    """

    header: Mapping[str, Any]
    parts: dict[str, Part]
    targets: int | str | None = None


# --- the table ----------------------------------------------------------------------------------

_COMMON = {"format?": int, "library?": str, "kind": str}

_READOUT = Part(
    needed=True,
    header={
        "layer": list,
        "silent": list,
        "case": str,
        "layout": str,
        "linear": bool,
        "forward": bool,
        "output": str | int | None,
        "fingerprint": str,
        # Names of the weights that the fingerprint is of; all in files that do not name them.
        "weights?": list | None,
        # Layers that `novelty` watches.
        "watched?": list,
    },
)

_PROBES = Part(
    header={"inputs": object, "dtype": str, "digits": Finite, "renewed": list},
    tensors={
        "output": Array("float64", "...", finite=False),
        "*": Array("any", "...", finite=False),  # tensors of the inputs, numbered
    },
)

_CALIBRATION = {
    "calibration": Part(
        header={
            "ridge": Finite,
            "noise": str,
            "distribution": dict,
            "weight?": float | list,
            "support?": list,
        },
        tensors={
            "scale": Array("float64", "K"),
            "noise": Array("float64", "K"),
            "joint?": Array("float64", "K"),
        },
    ),
    "calibration.head": Part(
        tensors={
            # The scale of a constant input is infinite.
            "rigidity": Array("float64", "K 2", finite=False),
            "output": Array("float64", "K 5", finite=False),
            "centre": Array("float64", "S F"),
            "spread": Array("float64", "S F", finite=False),
            "weight": Array("float64", "K F+3 J"),
            "constant": Array("float64", "K J"),
            "bounds": Array("float64", "K 2"),
            "scale2": Array("float64", "K"),
        },
    ),
    "calibration.guard": Part(
        tensors={
            "reference": Array("float64", "K"),
            "variance": Array("float64", "K"),
            "factor": Array("float64", "K"),
            "centre": Array("float64", "K"),
            # For sums over atoms.
            "by_feature?": Array("float64", "K F"),
            "extent_weight?": Array("float64", "K F"),
        },
    ),
    "calibration.conformal": Part(
        tensors={
            "tails": Array("float64", "_"),
            "counts": Array("int64", "_"),
            "place": Array("int64", "K G+1"),
            "labels": Array("int64", "G"),
            "cuts?": Array("float64", "K G-1"),
        },
    ),
    "report": Part(
        header={
            "method?": str,
            "criterion": str | None,
            "value": float,
            "at_edge": str | None,
            "condition": float,
            "effective_rank": float,
            "width": int,
            "nll": float,
            "nll_constant": float,
            "gain": float,
            "gain_error": float,
            "gain_without": float,
            "rows": int,
            "fixed": bool,
            "samples": int,
            "duplicates": int,
            "zero_curvature": int,
            "stale": bool,
            "used": int,
            "seen": int,
            "ladder": dict,
            "rung": str,
            "early_stopped?": bool | None,
            "remarks": list,
            "rounding": float,
            "advice": str,
            "novelty?": dict,
            "novelty_usual?": float,
            "mismatch?": str,
        },
        tensors={
            "constant": Array("float64", "K", finite=False),
            "gradient_scale?": Array("float64", "K"),
        },
    ),
}

_FIT = Kind(
    targets="targets",
    header={
        "targets": int,
        "inputs": int,
        "batch": str | None,
        "columns?": list,
        "label_loss?": str,
        # Whether each target counts in its own unit.
        "units?": bool,
    },
    parts={
        "gram": Part(
            needed=True,
            tensors={
                "matrix": Array("float64", "T D D"),
                "count": Array("int64", ""),
                "zeros": Array("int64", "T"),
                # One column per residual: K, or 1 where each target is a row of the Gram.
                "cross?": Array("float64", "D _"),
                "square?": Array("float64", "..."),
                "spots?": Array("float64", "5"),
            },
        ),
        # Of targets with one weight vector: moments of the targets, then of the outputs.
        "gram.units": Part(
            tensors={
                "rows": Array("int64", "2 K"),
                "weight": Array("float64", "2 K"),
                "mean": Array("float64", "2 K"),
                "squares": Array("float64", "2 K"),
            },
        ),
        "sketch": Part(
            needed=True,
            tensors={
                "hashes": Array("int64", "H"),
                "counts": Array("int64", "H"),
                "limit": Array("int64", "1"),
            },
        ),
        "rows": Part(
            tensors={
                "hashes": Array("int64", "N"),
                "counts": Array("int64", "N"),
                "limit": Array("int64", "1"),
                "size": Array("int64", ""),
            },
        ),
        "rows.columns": Part(
            tensors={
                "features": Array("floating", "N U D"),
                "mean": Array("floating", "N K"),
                "residual": Array("float64", "N K", finite=False),  # NaN where masked
                "weight": Array("floating", "N K"),
                "importance?": Array("floating", "N K"),
                "counts?": Array("any", "N U _"),
            },
        ),
        # One Gram for each watched layer, numbered: of its inputs and a column of ones.
        "layers": Part(
            tensors={
                "*.matrix": Array("float64", "_ _"),
                "*.count": Array("int64", ""),
                "*.zeros": Array("int64", "..."),
            },
        ),
        "readout": _READOUT,
        "probes": _PROBES,
        "loss": Part(header={"name": str, "settings": dict, "gradients?": dict}),
        **_CALIBRATION,
    },
)

_ENSEMBLE = Kind(
    header={
        "inputs": int | None,
        "apart": str | None,
        "batch": str | None,
    },
    parts={
        "members": Part(needed=True, tensors={"deviations": Array("float64", "_ K D")}),
        "own": Part(
            tensors={"factor": Array("float64", "_ D D"), "mixing": Array("float64", "K _")}
        ),
        "readout": _READOUT,
        "probes": _PROBES,
    },
)

_REGRESSOR = Kind(
    targets=1,
    header={},
    parts={
        "regressor": Part(
            needed=True,
            header={
                "names": list,
                "fingerprint": str,
                # Names of the buffers in the fingerprint; all in files that do not name them.
                "buffers?": list,
                "shape": list,
                "inputs": int,
                "columns": list | None,
                "gradient_norm": float,
                "dispersion": list,
                "scale_origin?": str,
                "typical_weight?": float,
                "weighted?": bool,
            },
        ),
        # A file has one of these two parts: the dense or the dual form.
        "dense": Part(
            header={
                "ridge": Finite,
                "names": list,
                "rows": int,
                "flat": int,
                "exact": bool,
                "epsilon": Finite,
            },
            tensors={"matrix": Array("float64", "P P"), "data?": Array("float64", "P P")},
        ),
        "dual": Part(
            header={"ridge": Finite, "blocks": list},
            tensors={
                # Blocks are numbered: N rows of O outputs.
                "*.rows": Array("floating", "N O _"),
                "*.inputs": Array("floating", "N _"),
                "*.slopes": Array("floating", "N O _"),
            },
        ),
        # The directions of the parameters that a calibrated noise follows.
        "head": Part(tensors={"directions": Array("float64", "_ F")}),
        **_CALIBRATION,
        "calibration": replace(_CALIBRATION["calibration"], needed=True),
    },
)

_TABLE_MODEL = Kind(
    targets=1,
    header={},
    parts={
        "tabular": Part(
            needed=True,
            header={
                "target": str,
                "level": Finite,
                "identifiers": list,
                "decimal": str | None,
                "columns": list,
                "unit?": str,
                "logarithm?": bool,
                "conformal?": bool,
            },
        ),
        "model": Part(needed=True, tensors={"*": Array("any", "...", finite=False)}),
        # The state of a fit, which is checked against the table of "fit" when it is loaded.
        "fit": Part(needed=True, header={"*": object}, tensors={"*": Array("any", "...")}),
    },
)

KINDS = {
    "fit": _FIT,
    "ensemble": _ENSEMBLE,
    "regressor": _REGRESSOR,
    "table model": _TABLE_MODEL,
}


def declare(kind: str, prefix: str, part: Part) -> None:
    """Add a part to a kind of file.

    Args:
        kind: A key of `KINDS`.
        prefix: The part's name, and the prefix of its tensors' names.
        part: What the part consists of.

    Raises:
        ValueError: The kind has another part of this name already.
    """
    parts = KINDS[kind].parts
    if parts.get(prefix, part) != part:
        raise ValueError(f"A {kind} already has a part {prefix!r}. Choose another prefix.")
    parts[prefix] = part


# --- the check ----------------------------------------------------------------------------------


def check(tensors: Mapping[str, Tensor], header: Mapping[str, Any], *, finite: bool) -> None:
    """Compare tensors and header with the table of their kind.

    Args:
        tensors: The tensors by name.
        header: The header, with its "kind".
        finite: Whether to look for NaN and infinity too.

    Raises:
        ValueError: An entry is unknown, missing, or not what the table says. The message names the
            entry, what was expected, and what was found.
    """
    if not isinstance(header.get("kind"), str) or header["kind"] not in KINDS:
        raise ValueError(f"its kind must be one of {', '.join(KINDS)}, got {header.get('kind')!r}.")
    kind = KINDS[header["kind"]]
    _check_header(kind, header)
    targets = header[kind.targets] if isinstance(kind.targets, str) else kind.targets
    sizes = _Sizes(targets)
    unknown = set(tensors)
    for prefix, part in kind.parts.items():
        unknown -= _check_part(prefix, part, tensors, header, sizes)
    if unknown:
        raise ValueError(
            f"it contains a tensor {min(unknown)!r}, which no {header['kind']} of this version "
            f"has. {written_by(header)}"
        )
    if finite:
        _check_finite(kind, tensors)


def written_by(header: Mapping[str, Any]) -> str:
    """A sentence that says which version of the library wrote a file, and how to install it."""
    library = header.get("library", "?")
    return f"It was written by rigidities {library}: pip install 'rigidities>={library}'."


def _check_header(kind: Kind, header: Mapping[str, Any]) -> None:
    """Compare the header with the table: its top-level entries, then the object of each part."""
    types: dict[str, Any] = {**_COMMON, **kind.header}
    for prefix, part in kind.parts.items():
        if part.header is None:
            continue
        if part.needed:
            types[prefix] = dict
        else:
            types[f"{prefix}?"] = dict | None
    _check_section("", header, types, header)
    for prefix, part in kind.parts.items():
        if part.header is not None and header.get(prefix) is not None:
            _check_section(f"{prefix}.", header[prefix], part.header, header)


def _check_section(
    prefix: str, section: Mapping[str, Any], types: Mapping[str, Any], header: Mapping[str, Any]
) -> None:
    """Compare one object of the header with the types of its entries.

    Args:
        prefix: What messages put before the names of entries.
        section: The object.
        types: The types of its entries by name, as in the table.
        header: The whole header, for messages.
    """
    if "*" in types:
        return
    for entry, expected in types.items():
        name = entry.removesuffix("?")
        if name not in section:
            if not entry.endswith("?"):
                raise ValueError(f"its header lacks {prefix + name!r} ({_type_name(expected)}).")
        elif not _is_of_type(section[name], expected):
            raise ValueError(
                f"{prefix + name!r} of its header must be {_type_name(expected)}, got "
                f"{section[name]!r:.40}."
            )
    unknown = set(section) - {entry.removesuffix("?") for entry in types}
    if unknown:
        raise ValueError(
            f"its header contains {prefix + min(unknown)!r}, which this version does not know. "
            f"{written_by(header)}"
        )


def _is_of_type(value: Any, expected: Any) -> bool:
    """Whether a JSON value is of a type; booleans are not numbers, and an int is a float too."""
    if isinstance(value, bool):
        return expected in (bool, bool | None, object)
    if expected in (float, Finite) and isinstance(value, int | float):
        return expected is float or math.isfinite(value)
    return isinstance(value, expected)


def _type_name(expected: Any) -> str:
    """The name of a type for messages, such as "int", "str | None" or "a finite number"."""
    if expected is Finite:
        return "a finite number"
    return getattr(expected, "__name__", str(expected))


def _check_part(
    prefix: str,
    part: Part,
    tensors: Mapping[str, Tensor],
    header: Mapping[str, Any],
    sizes: _Sizes,
) -> set[str]:
    """Compare the tensors of one part with the table.

    Args:
        prefix: The part's name.
        part: The part's table.
        tensors: All tensors of the file.
        header: The file's header.
        sizes: Lengths of dimensions, learnt from the tensors so far; new ones are added.

    Returns:
        The names of the part's tensors.
    """
    part_names: set[str] = set()
    missing: list[str] = []  # entries that the part needs and does not have
    for entry, array in part.tensors.items():
        names = _names_of_entry(prefix, entry, tensors)
        for name in names:
            if not array.allows_dtype(tensors[name]):
                dtype = _dtype_name(tensors[name])
                raise ValueError(f"the tensor {name!r} must be {array.dtype}, got {dtype}.")
            sizes.check(name, array.shape, tuple(tensors[name].shape))
        optional = entry.endswith("?") or "*" in entry
        if not names and not optional:
            shape = _in_brackets(array.shape.split())
            missing.append(f"{prefix}.{entry} ({array.dtype}, {shape})")
        part_names.update(names)
    if part.header is None:
        present = part.needed or bool(part_names)
    else:
        present = header.get(prefix) is not None
        if part_names and not present:
            raise ValueError(
                f"it contains a tensor {min(part_names)!r}, but its header has no {prefix!r}."
            )
    if present and missing:
        raise ValueError(f"it lacks the tensor {missing[0]}.")
    return part_names


def _names_of_entry(prefix: str, entry: str, tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors that an entry of a part's table stands for."""
    start = f"{prefix}." if prefix else ""
    if "*" in entry:
        return [name for name in tensors if fnmatchcase(name, start + entry)]
    name = start + entry.removesuffix("?")
    return [name] if name in tensors else []


def _check_finite(kind: Kind, tensors: Mapping[str, Tensor]) -> None:
    """Refuse NaN and infinity where the table does not allow them."""
    for prefix, part in kind.parts.items():
        for entry, array in part.tensors.items():
            for name in _names_of_entry(prefix, entry, tensors):
                if array.finite and not bool(tensors[name].isfinite().all()):
                    raise ValueError(f"the tensor {name!r} must be finite, got NaN or infinity.")


class _Sizes:
    """Lengths of the words in shapes, learnt from the tensors of one file as they are checked.

    Args:
        targets: The length of K; None to take it from the first tensor with a K.
    """

    def __init__(self, targets: int | None) -> None:
        self._lengths: dict[str, int] = {}
        if targets is not None:
            self._lengths["K"] = targets
        # For each word of PER_TARGET: whether its dimension is there, or missing in every tensor.
        self._per_target: dict[str, bool] = {}

    def check(self, name: str, words: str, shape: tuple[int, ...]) -> None:
        """Refuse a tensor whose shape contradicts its words; learn the lengths of new words.

        Args:
            name: The tensor's name, for the message.
            words: The shape's words, as in the table.
            shape: The tensor's shape.
        """
        if words == "...":
            return
        all_words = words.split()
        expected = []  # the words without missing dimensions, K in place of T and U
        for word in all_words:
            if word not in PER_TARGET:
                expected.append(word)
            elif self._per_target.setdefault(word, len(shape) == len(all_words)):
                expected.append("K")
        fits = len(shape) == len(expected) and all(map(self._fits, expected, shape))
        if not fits:
            lengths = [str(self._length(word, word)) for word in expected]
            raise ValueError(
                f"the tensor {name!r} must have the shape {_in_brackets(expected)} = "
                f"{_in_brackets(lengths)}, got {shape}."
            )

    def _fits(self, word: str, length: int) -> bool:
        """Whether a dimension has the length of its word; a new letter takes its length here."""
        letter, offset = _letter_and_offset(word)
        if letter == "S" and length not in (1, self._length("K", None)):
            return False
        if letter not in ("", "_"):
            self._lengths.setdefault(letter, length - offset)
        return word == "_" or self._length(word, None) == length

    def _length(self, word: str, unknown: Any) -> Any:
        """The length of a word; the value of `unknown` where no tensor has fixed it yet."""
        letter, offset = _letter_and_offset(word)
        if not letter:
            return offset
        if letter not in self._lengths:
            return unknown
        return self._lengths[letter] + offset


def _letter_and_offset(word: str) -> tuple[str, int]:
    """A word's letter and the number added to it: "F+3" is ("F", 3), and "5" is ("", 5)."""
    letter, offset = re.fullmatch(r"([A-Z_]?)([+-]?\d*)", word).groups()  # type: ignore[union-attr]
    return letter, int(offset or 0)


def _in_brackets(words: list[str]) -> str:
    """Words written like a shape, such as "(D, K)"."""
    return f"({', '.join(words)})"


def _dtype_name(tensor: Tensor) -> str:
    """The name of a tensor's dtype, such as "float64"."""
    return str(tensor.dtype).removeprefix("torch.")
