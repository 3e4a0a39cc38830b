"""What files and state dicts hold: one table of names, dtypes, shapes and header entries.

A file or a state dict is of one kind ("fit", "ensemble", ...), which its header names. A kind has
parts, such as the Gram or the calibration. The tensors of a part carry its name as a prefix, and
where the header says something of a part, it does so in an object of that name.

A name that ends in "?" may be missing, "matrix|root" is either of two, and a star stands for
anything. Shapes are words, one for each dimension:

| word | length |
| --- | --- |
| K | number of targets |
| D | number of features |
| T, U, S | K, or the dimension is missing: the same wherever the word stands in one file |
| other letters | any, the same wherever the word stands in one file |
| 5, F+3, G-1 | that number, or that much more or less than a letter |
| _ | any |
| ... | as an entry's only word: any shape |

A statistic that joins a fit says here, or by `declare` where it lives, what it keeps in files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

PER_TARGET = ("T", "U", "S")
"""Words for a dimension of length K that is there in all entries with the word, or in none."""


class Finite(float):
    """As the type of a header entry: a number that is neither NaN nor infinite."""


@dataclass(frozen=True)
class Array:
    """The table's entry for a tensor.

    Attributes:
        dtype: such as "float64"; "floating" for any floating-point one, "any" for all.
        shape: in words, as the module's table says.
        finite: whether a sound tensor holds neither NaN nor infinity.
    """

    dtype: str
    shape: str
    finite: bool = True

    def allows(self, tensor: Tensor) -> bool:
        """Whether the tensor's dtype is as the table says."""
        if self.dtype == "any":
            return True
        if self.dtype == "floating":
            return tensor.is_floating_point()
        return self.dtype == _dtype(tensor)


@dataclass(frozen=True)
class Part:
    """The table's entry for a part of a file.

    Attributes:
        tensors: by name, without the part's prefix.
        header: types of what the header says of the part, by name; None if it says nothing.
        needed: whether every file of this kind has the part.
    """

    tensors: Mapping[str, Array] = field(default_factory=dict)
    header: Mapping[str, Any] | None = None
    needed: bool = False


@dataclass(frozen=True)
class Kind:
    """The table for one kind of file.

    Attributes:
        header: types of entries that belong to no part, by name.
        parts: by the prefix of their tensors' names; of the empty one, the names have none.
        targets: the number of targets K, or the header entry that says it; None where tensors do.
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
            # Scales of inputs that are constant are infinite.
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
            # Of bars that grow with q alone.
            "scale2?": Array("float64", "K"),
            # Of bars that grow to those of an ignorant forecaster.
            "variance?": Array("float64", "K"),
            "factor?": Array("float64", "K"),
            "centre?": Array("float64", "K"),
            "by_feature?": Array("float64", "K _"),
            "extent_weight?": Array("float64", "K _"),
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
            "criterion": str,
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
            "remarks": list,
            "rounding": float,
            "advice": str,
            "novelty?": dict,
            "novelty_usual?": float,
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
    },
    parts={
        "gram": Part(
            needed=True,
            tensors={
                "matrix|root": Array("float64", "T D D"),
                "count": Array("int64", ""),
                "zeros": Array("int64", "T"),
                # Of K residuals, or of one where each target is a row of the Gram.
                "cross?": Array("float64", "D _"),
                "square?": Array("float64", "..."),
                "spots?": Array("float64", "5"),
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
        # Layers that are watched are numbered: products of what enters, with a column of ones.
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
        "checkpoint": Part(header={"batches": int, "first": str, "last": str, "asked": dict}),
        **_CALIBRATION,
    },
)

_ENSEMBLE = Kind(
    header={
        "drawing": str,
        "missing": Finite,
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
                "shape": list,
                "inputs": int,
                "columns": list | None,
                "gradient_norm": float,
                "dispersion": list,
            },
        ),
        # The form is one of two.
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
            },
        ),
        "model": Part(needed=True, tensors={"*": Array("any", "...", finite=False)}),
        # A fit's state, which is checked as such when it is taken up.
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

    Raises:
        ValueError: the kind has such a part already.
    """
    parts = KINDS[kind].parts
    if parts.get(prefix, part) != part:
        raise ValueError(f"A {kind} has a part {prefix!r} already. Choose another prefix.")
    parts[prefix] = part


# --- the check ----------------------------------------------------------------------------------


def check(tensors: Mapping[str, Tensor], header: Mapping[str, Any], *, finite: bool) -> None:
    """Hold tensors and header against the table of their kind.

    Args:
        tensors: by name.
        header: with its "kind".
        finite: whether to look for NaN and infinity too.

    Raises:
        ValueError: an entry is unknown, missing, or not what the table says. The message names it
            and says what was expected and what came.
    """
    if not isinstance(header.get("kind"), str) or header["kind"] not in KINDS:
        raise ValueError(f"its kind must be one of {', '.join(KINDS)}, got {header.get('kind')!r}.")
    kind = KINDS[header["kind"]]
    sections = {prefix: part for prefix, part in kind.parts.items() if part.header is not None}
    optional = {f"{prefix}?": dict | None for prefix, part in sections.items() if not part.needed}
    needed = {prefix: dict for prefix, part in sections.items() if part.needed}
    _check_header("", header, {**_COMMON, **kind.header, **needed, **optional}, header)
    for prefix, part in sections.items():
        if header.get(prefix) is not None:
            _check_header(f"{prefix}.", header[prefix], part.header or {}, header)
    sizes = _Sizes(header[kind.targets] if isinstance(kind.targets, str) else kind.targets)
    unknown = set(tensors)
    for prefix, part in kind.parts.items():
        unknown -= _check_part(prefix, part, tensors, header, sizes)
    if unknown:
        raise ValueError(
            f"it holds a tensor {min(unknown)!r}, which no {header['kind']} of this version has. "
            f"{written_by(header)}"
        )
    if finite:
        _check_finite(kind, tensors)


def written_by(header: Mapping[str, Any]) -> str:
    """Which version of the library to install for a file."""
    library = header.get("library", "?")
    return f"It was written by rigidities {library}: pip install 'rigidities>={library}'."


def _check_header(
    prefix: str, section: Mapping[str, Any], types: Mapping[str, Any], header: Mapping[str, Any]
) -> None:
    """Hold one object of the header against the types of its entries."""
    if "*" in types:
        return
    for name, expected in types.items():
        plain = name.removesuffix("?")
        if plain not in section:
            if not name.endswith("?"):
                raise ValueError(f"its header lacks {prefix + plain!r} ({_type_name(expected)}).")
        elif not _is_of_type(section[plain], expected):
            raise ValueError(
                f"{prefix + plain!r} of its header must be {_type_name(expected)}, got "
                f"{section[plain]!r:.40}."
            )
    unknown = set(section) - {name.removesuffix("?") for name in types}
    if unknown:
        raise ValueError(
            f"its header holds {prefix + min(unknown)!r}, which this version does not know. "
            f"{written_by(header)}"
        )


def _is_of_type(value: Any, expected: Any) -> bool:
    """Whether a JSON value is of a type; true and false are no numbers, and 1 is a float too."""
    if isinstance(value, bool):
        return expected in (bool, object)
    if expected in (float, Finite) and isinstance(value, int | float):
        return expected is float or math.isfinite(value)
    return isinstance(value, expected)


def _type_name(expected: Any) -> str:
    """Such as "int", "str | None", "a finite number"."""
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
    """Hold the tensors of one part against the table; their names."""
    met: set[str] = set()
    absent: list[str] = []  # entries that the part needs and has not
    for entry, array in part.tensors.items():
        names = _named(prefix, entry, tensors)
        for name in names:
            if not array.allows(tensors[name]):
                got = _dtype(tensors[name])
                raise ValueError(f"the tensor {name!r} must be {array.dtype}, got {got}.")
            sizes.agree(name, array.shape, tuple(tensors[name].shape))
        if "|" in entry and len(names) > 1:
            raise ValueError(f"it must hold one of {entry!r} in {prefix!r}, got {names}.")
        if not names and not entry.endswith("?") and "*" not in entry:
            absent.append(f"{prefix}.{entry} ({array.dtype}, {_listed(array.shape.split())})")
        met.update(names)
    if part.header is None:
        there = part.needed or bool(met)
    else:
        there = header.get(prefix) is not None
        if met and not there:
            raise ValueError(f"it holds a tensor {min(met)!r}, but its header has no {prefix!r}.")
    if there and absent:
        raise ValueError(f"it lacks the tensor {absent[0]}.")
    return met


def _named(prefix: str, entry: str, tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors that an entry of a part's table stands for."""
    start = f"{prefix}." if prefix else ""
    if "*" in entry:
        return [name for name in tensors if fnmatchcase(name, start + entry)]
    names = [start + name for name in entry.removesuffix("?").split("|")]
    return [name for name in names if name in tensors]


def _check_finite(kind: Kind, tensors: Mapping[str, Tensor]) -> None:
    """Refuse NaN and infinity where the table does not allow them."""
    for prefix, part in kind.parts.items():
        for entry, array in part.tensors.items():
            for name in _named(prefix, entry, tensors):
                if array.finite and not bool(tensors[name].isfinite().all()):
                    raise ValueError(f"the tensor {name!r} must be finite, got NaN or infinity.")


class _Sizes:
    """Lengths of the words in shapes, as the tensors of one file tell them one after the other."""

    def __init__(self, targets: int | None) -> None:
        self._lengths = {} if targets is None else {"K": targets}
        self._per_target: dict[str, bool] = {}  # whether the words of PER_TARGET are there

    def agree(self, name: str, words: str, shape: tuple[int, ...]) -> None:
        """Refuse a tensor of another shape than its words say; learn the lengths of new ones."""
        if words == "...":
            return
        whole = words.split()
        expected = []
        for word in whole:
            if word not in PER_TARGET:
                expected.append(word)
            elif self._per_target.setdefault(word, len(shape) == len(whole)):
                expected.append("K")
        fits = len(shape) == len(expected) and all(map(self._fits, expected, shape))
        if not fits:
            lengths = [str(self._length(word, word)) for word in expected]
            raise ValueError(
                f"the tensor {name!r} must have the shape {_listed(expected)} = "
                f"{_listed(lengths)}, got {shape}."
            )

    def _fits(self, word: str, length: int) -> bool:
        """Whether a dimension has the length that its word says, as far as that is known."""
        letter, offset = _split(word)
        if letter not in ("", "_"):
            self._lengths.setdefault(letter, length - offset)
        return word == "_" or self._length(word, None) == length

    def _length(self, word: str, unknown: Any) -> Any:
        """The length of a word; `unknown` where no tensor has told it yet."""
        letter, offset = _split(word)
        if not letter:
            return offset
        return self._lengths[letter] + offset if letter in self._lengths else unknown


def _split(word: str) -> tuple[str, int]:
    """A word's letter and what is added to it: "F+3" is ("F", 3), and "5" is ("", 5)."""
    letter, offset = re.fullmatch(r"([A-Z_]?)([+-]?\d*)", word).groups()  # type: ignore[union-attr]
    return letter, int(offset or 0)


def _listed(words: list[str]) -> str:
    """Like a shape: "(D, K)"."""
    return f"({', '.join(words)})"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
