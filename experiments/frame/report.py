"""An outcome as files: ``<name>.json``, ``<name>.md`` and one PNG a picture."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.frame.figures import LARGEST, png
from experiments.frame.files import replace
from experiments.frame.outcome import Outcome, Picture, Table, plain


def write(name: str, outcome: Outcome, where: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write everything, each file whole or not at all.

    All are made in memory first: an outcome that cannot be written leaves the folder as it was.

    Args:
        name: of the experiment.
        outcome: its result.
        where: the circumstances, as `benchmarks.provenance` tells them, and ``minutes``.
        folder: made if need be.

    Returns:
        The files.
    """
    files = {
        f"{name}.json": rendered_numbers(outcome),
        f"{name}.md": rendered_page(name, outcome, where).encode(),
    }
    for picture in outcome.pictures:
        files[picture_file(name, picture)] = checked_png(picture)
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        replace(folder / file, content)
    return [folder / file for file in files]


def rendered_numbers(outcome: Outcome) -> bytes:
    """The JSON file: the numbers and nothing else, lists of numbers on one line."""
    return (_indented(plain(outcome.numbers)) + "\n").encode()


def rendered_page(name: str, outcome: Outcome, where: Mapping[str, Any]) -> str:
    """The Markdown page."""
    blocks = [f"# {outcome.title}", *(_block(name, block) for block in outcome.page)]
    return "\n\n".join([*blocks, footer(name, where)]) + "\n"


def footer(name: str, where: Mapping[str, Any]) -> str:
    """Command, hardware and time."""
    found = _found(where.get("earlier", ()))
    gpu = f", {where['gpu']}" if "gpu" in where else ""
    return (
        f"Every number above and in the figures is in [{name}.json]({name}.json).\n\n"
        f"Made by `{where['command']}` in {where['minutes']:.1f} minutes{found}, {where['date']}, "
        f"{where['cpu']}, {where['cores']} cores, {where['threads']} threads{gpu}, "
        f"torch {where['torch']}, Python {where['python']}."
    )


def _found(earlier: Sequence[Any]) -> str:
    """What was there already, and on what it was computed."""
    if not earlier:
        return ""
    machines = Counter(part.machine for part in earlier)
    listed = "; ".join(f"{name}: {count}" for name, count in machines.items())
    minutes = sum(part.seconds for part in earlier) / 60
    return f", after {minutes:.1f} minutes of parts found from earlier runs ({listed})"


def picture_file(name: str, picture: Picture) -> str:
    """The file of a picture."""
    return f"{name}-{picture.name}.png"


def checked_png(picture: Picture) -> bytes:
    """The picture's file, refused where it would weigh down the repository."""
    content = png(picture.figure)
    if len(content) > LARGEST:
        raise ValueError(
            f"Expected a picture of at most {LARGEST // 1000} kB, got {picture.name!r} with "
            f"{len(content) // 1000} kB. Draw fewer points, or fewer panels."
        )
    return content


def _block(name: str, block: str | Table | Picture) -> str:
    if isinstance(block, Picture):
        alternative = block.caption.replace("[", "(").replace("]", ")")
        return f"![{alternative}]({picture_file(name, block)})\n\n*{block.caption}*"
    return str(block).strip()


def _indented(value: Any, depth: int = 0) -> str:
    """JSON with one entry of a mapping a line, and lists of plain values on one line."""
    inner, outer = "\n" + "  " * (depth + 1), "\n" + "  " * depth
    if isinstance(value, dict) and value:
        entries = (f"{json.dumps(key)}: {_indented(v, depth + 1)}" for key, v in value.items())
        return "{" + inner + ("," + inner).join(entries) + outer + "}"
    if isinstance(value, list) and any(isinstance(entry, (dict, list)) for entry in value):
        return (
            "[" + inner + ("," + inner).join(_indented(v, depth + 1) for v in value) + outer + "]"
        )
    return json.dumps(value, allow_nan=False, ensure_ascii=False)
