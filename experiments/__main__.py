"""``python -m experiments <name> [--quick] [--out DIR] [--seed N]``: run one, keep its results."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from benchmarks.provenance import provenance

from experiments import figures, report
from experiments.catalogue import EXPERIMENTS, Experiment, listing
from experiments.outcome import Outcome, Table

RESULTS = Path(__file__).parent / "results"
QUICK = Path(__file__).parent / "results-quick"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the named experiment, or list them all."""
    options = parsed(arguments)
    if options.name is None:
        print(f"python -m experiments <name> [--quick] [--out DIR], with the names\n\n{listing()}")
        return 0
    experiment = EXPERIMENTS[options.name]
    if missing := experiment.missing():
        print(missing, file=sys.stderr)
        return 1
    folder = options.out or default_folder(options.name, quick=options.quick)
    print(opening(experiment, folder, quick=options.quick), flush=True)
    where, start = provenance(command(options)), time.monotonic()
    try:
        outcome = styled(experiment, quick=options.quick, seed=options.seed)
    except FileNotFoundError as error:  # data that are not here; the message says what to do
        print(error, file=sys.stderr)
        return 1
    minutes = (time.monotonic() - start) / 60
    files = report.write(options.name, outcome, {**where, "minutes": minutes}, folder)
    print(closing(outcome, files, quick=options.quick))
    return 0


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments",
        description=f"Run an experiment and keep its numbers, tables and figures.\n\n{listing()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", help="without it, the names are listed")
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it runs")
    parser.add_argument(
        "--out", type=Path, help="folder (default experiments/results[-quick if quick]/<name>)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of everything random (default 0)")
    options = parser.parse_args(arguments)
    if options.name is not None and options.name not in EXPERIMENTS:
        parser.error(f"unknown experiment {options.name!r}. There are\n\n{listing()}")
    return options


def styled(experiment: Experiment, *, quick: bool, seed: int) -> Outcome:
    """Run from the seed, in the common style of figures; both are undone afterwards."""
    import matplotlib

    with matplotlib.rc_context(figures.style()), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return experiment.run(quick=quick, seed=seed)


def default_folder(name: str, *, quick: bool) -> Path:
    """Where results go; quick ones into a folder that tells git to look away."""
    if not quick:
        return RESULTS / name
    QUICK.mkdir(exist_ok=True)
    (QUICK / ".gitignore").write_text("*\n", encoding="utf-8")
    return QUICK / name


def command(options: argparse.Namespace) -> str:
    """The command that gives the same results."""
    words = ["python -m experiments", options.name]
    words += ["--quick"] * options.quick
    words += [f"--seed {options.seed}"] * (options.seed != 0)
    return " ".join(words)


def opening(experiment: Experiment, folder: Path, *, quick: bool) -> str:
    """What will be done, how long it takes and where it goes."""
    length = "quick sizes" if quick else f"about {experiment.minutes:g} min on two cores"
    return f"{experiment.name}: {experiment.summary}\n  {length}; results go to {folder}"


def closing(outcome: Outcome, files: Sequence[Path], *, quick: bool) -> str:
    """The tables, and where everything lies."""
    tables = [str(block) for block in outcome.page if isinstance(block, Table)]
    note = "Quick sizes show that everything runs; their numbers mean little.\n" if quick else ""
    written = "\n".join(f"  {file}" for file in files)
    return "\n" + "\n\n".join(tables) + f"\n\n{note}Written:\n{written}"


if __name__ == "__main__":
    sys.exit(main())
