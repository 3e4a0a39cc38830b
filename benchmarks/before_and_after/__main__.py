"""`write FILE` computes the results of the library on the path; `compare` compares two files."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.before_and_after.comparison import compared, described, report
from benchmarks.before_and_after.results import Results


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or compare; the exit status is 1 if a number differs."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.before_and_after", description=__doc__
    )
    commands = parser.add_subparsers(dest="command", required=True)
    write_parser = commands.add_parser("write", help="compute all results and store them")
    write_parser.add_argument("file", type=Path)
    write_parser.add_argument("--only", default="", help="only cases whose name contains this")
    compare_parser = commands.add_parser("compare", help="compare two stored files")
    compare_parser.add_argument("before", type=Path)
    compare_parser.add_argument("after", type=Path)
    options = parser.parse_args(arguments)
    if options.command == "write":
        return write(options.file, options.only)
    before, after = Results.load(options.before), Results.load(options.after)
    comparison = compared(before, after)
    print(report(before, after, comparison))
    return int(comparison.failed)


def write(path: Path, only: str = "") -> int:
    """Compute all results of the library that is imported, on one thread."""
    # Only here: to compare files, no library is needed.
    from benchmarks.before_and_after.everything import all_results

    torch.set_num_threads(1)
    start = time.process_time()
    results = all_results(only)
    results.save(path)
    print(f"{described(results)}; {time.process_time() - start:.0f} s of a core")
    return 0


if __name__ == "__main__":
    sys.exit(main())
