"""Run benchmarks, print their tables, store their results and write the page of all results.

``python -m benchmarks [name ...] [--quick] [--json FILE]`` measures.
``python -m benchmarks --page`` writes the page of results again from the stored files.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks import (
    accuracy,
    calibration,
    collation,
    counts,
    deep_model,
    default,
    ensembles,
    gpu,
    gradients,
    jacobians,
    local,
    many_rows,
    memory,
    novelty,
    potentials,
    propagation,
    scale,
    selection,
    small_tables,
    speed,
    stability,
    storm,
    stream,
    tabular,
    targets,
    trees,
    verdict,
    whole_net,
)
from benchmarks.frame.provenance import load, provenance
from benchmarks.frame.results import Result, Row
from benchmarks.frame.table import ascii_table, write_page
from benchmarks.rivals import laplace as rivals
from benchmarks.rivals import metatrain

BENCHMARKS: dict[str, Callable[..., list[Row]]] = {
    "speed": speed.run,
    "counts": counts.run,
    "default": default.run,
    "gpu": gpu.run,
    "rivals": rivals.run,
    "targets": targets.run,
    "tabular": tabular.run,
    "collation": collation.run,
    "calibration": calibration.run,
    "many-rows": many_rows.run,
    "memory": memory.run,
    "novelty": novelty.run,
    "scale": scale.run,
    "storm": storm.run,
    "stream": stream.run,
    "deep-model": deep_model.run,
    "accuracy": accuracy.run,
    "jacobians": jacobians.run,
    "whole-net": whole_net.run,
    "ensembles": ensembles.run,
    "propagation": propagation.run,
    "gradients": gradients.run,
    "potentials": potentials.run,
    "local": local.run,
    "selection": selection.run,
    "trees": trees.run,
    "small-tables": small_tables.run,
    "stability": stability.run,
    "verdict": verdict.run,
    "metatrain": metatrain.run,
}
RESULTS = Path(__file__).parent / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the named benchmarks; a figure that is missed is shown, not an error."""
    options = parsed(arguments)
    if options.page:
        write_page(options.results or RESULTS, BENCHMARKS)
        return 0
    torch.set_num_threads(options.threads)
    names = options.names or runnable()
    results = [measured(name, quick=options.quick) for name in names]
    if options.json:
        text = json.dumps([asdict(result) for result in results], indent=2) + "\n"
        options.json.write_text(text, encoding="utf-8")
    folder = options.results
    if folder is None and not options.quick:
        folder = RESULTS
    if folder:
        for result in results:
            result.save(folder)
        write_page(folder, BENCHMARKS)
    print(closing(results, quick=options.quick))
    return 0


def runnable() -> list[str]:
    """The names of the benchmarks that can run on this machine."""
    if torch.cuda.is_available():
        return list(BENCHMARKS)
    return [name for name in BENCHMARKS if name != "gpu"]


def closing(results: Sequence[Result], *, quick: bool) -> str:
    """The last line: which figures were missed, where the sizes allow to say so."""
    if quick:
        return "Quick sizes only show that everything runs. Their verdicts mean nothing."
    missed = [row.work for result in results for row in result.missed]
    if not missed:
        return "All limits were met."
    return "Limits not met: " + "; ".join(missed) + "."


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(BENCHMARKS))
    parser.add_argument("--json", type=Path, help="also write all results to this file")
    parser.add_argument(
        "--quick", action="store_true", help="use tiny sizes, only to show that everything runs"
    )
    parser.add_argument(
        "--threads", type=int, default=2, help="number of torch threads (default 2)"
    )
    parser.add_argument(
        "--page",
        action="store_true",
        help="measure nothing; write the page from the stored results",
    )
    parser.add_argument(
        "--results",
        type=Path,
        help="folder for results (default benchmarks/results; none with --quick)",
    )
    options = parser.parse_args(arguments)
    unknown = set(options.names) - set(BENCHMARKS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}. Choose from {', '.join(BENCHMARKS)}.")
    return options


def measured(name: str, *, quick: bool) -> Result:
    """One benchmark with its circumstances, printed as soon as it is done."""
    command = f"python -m benchmarks {name}"
    if quick:
        command += " --quick"
    circumstances = provenance(command)
    rows = BENCHMARKS[name](quick=quick)
    circumstances["load_after"] = load()
    print(f"\n{name}\n{ascii_table(rows)}\n", flush=True)
    return Result(name, rows, circumstances)


if __name__ == "__main__":
    sys.exit(main())
