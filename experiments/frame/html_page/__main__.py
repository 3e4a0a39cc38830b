"""``python -m experiments.frame.html_page FILE.json [--out PAGE] [--title TITLE]``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.frame.html_page.page import experiment_page
from rigidities import report


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page of an experiment's numbers; 2 where the file cannot be used."""
    options = parsed(arguments)
    title = options.title or options.file.name
    try:
        page = experiment_page(read_numbers(options.file), title=title)
        written = report.save(options.out or options.file.with_suffix(".html"), page)
    except (ValueError, OSError, ModuleNotFoundError) as error:  # the message says what to do
        print(error, file=sys.stderr)
        return 2
    print(f"Wrote {written}")
    return 0


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.frame.html_page",
        description="Write one HTML page of an experiment's numbers.",
    )
    parser.add_argument("file", type=Path, help="the JSON file of an experiment")
    parser.add_argument("--out", type=Path, help="the page (default: beside the file)")
    parser.add_argument("--title", help="its heading (default: the name of the file)")
    return parser.parse_args(arguments)


def read_numbers(path: Path) -> Mapping[str, Any]:
    """An experiment's JSON, which is a mapping.

    Raises:
        OSError: There is no such file.
        ValueError: It is no JSON file, or holds something else.
    """
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    try:
        numbers = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged or no JSON file ({error}). Make it again.") from error
    if not isinstance(numbers, Mapping):
        raise ValueError(
            f"{path} holds a {type(numbers).__name__}. Expected an experiment's numbers: a mapping "
            "from names to numbers or further mappings."
        )
    return numbers


if __name__ == "__main__":
    sys.exit(main())
