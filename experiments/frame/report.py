"""Writes an outcome to files: ``<name>.json``, ``<name>.md`` and one PNG for each picture."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.frame.figures import LARGEST, png
from experiments.frame.files import replace
from experiments.frame.jobs import Part
from experiments.frame.outcome import Entry, Outcome, Picture, plain
from experiments.frame.sources import OTHER_CODE


def write(name: str, outcome: Outcome, where: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write everything, each file whole or not at all.

    All contents are made in memory first: an outcome that cannot be written leaves the folder as it
    was.

    Args:
        name: The name of the experiment.
        outcome: Its result.
        where: The circumstances, as `footer` reads them.
        folder: The folder of the files. It is made if need be.

    Returns:
        The files.
    """
    contents = {
        f"{name}.json": rendered_numbers(outcome),
        f"{name}.md": rendered_page(name, outcome, where).encode(),
    }
    for picture in outcome.pictures:
        contents[picture_file(name, picture)] = checked_png(picture)
    folder.mkdir(parents=True, exist_ok=True)
    for file_name, content in contents.items():
        replace(folder / file_name, content)
    return [folder / file_name for file_name in contents]


def rendered_numbers(outcome: Outcome) -> bytes:
    """The JSON file: the numbers and nothing else, with lists of numbers on one line."""
    return (_indented(plain(outcome.numbers)) + "\n").encode()


def rendered_page(name: str, outcome: Outcome, where: Mapping[str, Any]) -> str:
    """The Markdown page: title, entries and footer."""
    blocks = [f"# {outcome.title}"]
    blocks += [_rendered_entry(name, entry) for entry in outcome.page]
    blocks.append(footer(name, where))
    return "\n\n".join(blocks) + "\n"


def footer(name: str, where: Mapping[str, Any]) -> str:
    """The end of a page: the command, the time it took, the hardware and the versions.

    Args:
        name: The name of the experiment.
        where: What `benchmarks.frame.provenance` tells, and ``minutes``; ``earlier``, the parts
            that were read from disk, and ``gpu``, where there are any.
    """
    earlier_parts = _earlier_parts(where.get("earlier", ()))
    gpu = f", {where['gpu']}" if "gpu" in where else ""
    return (
        f"Every number above and in the figures is in [{name}.json]({name}.json).\n\n"
        f"Made by `{where['command']}` in {where['minutes']:.1f} minutes{earlier_parts}, "
        f"{where['date']}, {where['cpu']}, {where['cores']} cores, {where['threads']} threads"
        f"{gpu}, torch {where['torch']}, Python {where['python']}."
    )


def _earlier_parts(parts: Sequence[Part]) -> str:
    """How long the parts took that were read from disk, on what, and whether by other code."""
    if not parts:
        return ""
    counts = Counter(
        f"{part.machine}, {OTHER_CODE}" if part.other_code else part.machine for part in parts
    )
    origins = "; ".join(f"{origin}: {count}" for origin, count in counts.items())
    minutes = sum(part.seconds for part in parts) / 60
    clause = f", after {minutes:.1f} minutes of parts found from earlier runs ({origins})"
    if any(part.other_code for part in parts):
        clause += (
            f" (*{OTHER_CODE}*: the library or the study has changed since; `--fresh` recomputes)"
        )
    return clause


def picture_file(name: str, picture: Picture) -> str:
    """The file name of a picture."""
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


def _rendered_entry(name: str, entry: Entry) -> str:
    """An entry of the page as Markdown."""
    if isinstance(entry, Picture):
        # Brackets would end the alternative text of a Markdown picture.
        alternative = entry.caption.replace("[", "(").replace("]", ")")
        return f"![{alternative}]({picture_file(name, entry)})\n\n*{entry.caption}*"
    return str(entry).strip()


def _indented(value: Any, depth: int = 0) -> str:
    """JSON with one entry of a mapping a line, and lists of plain values on one line."""
    line_break = "\n" + "  " * (depth + 1)
    last_line_break = "\n" + "  " * depth
    separator = "," + line_break
    if isinstance(value, dict) and value:
        entries = [f"{json.dumps(k)}: {_indented(v, depth + 1)}" for k, v in value.items()]
        return "{" + line_break + separator.join(entries) + last_line_break + "}"
    if isinstance(value, list) and any(isinstance(entry, (dict, list)) for entry in value):
        entries = [_indented(entry, depth + 1) for entry in value]
        return "[" + line_break + separator.join(entries) + last_line_break + "]"
    return json.dumps(value, allow_nan=False, ensure_ascii=False)
