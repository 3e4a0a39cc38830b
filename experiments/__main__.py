"""The command ``python -m experiments <name> [--quick] [--out DIR] ...``.

It runs one experiment from its seed, in the common style of figures, and writes what comes out: the
numbers, the page and the pictures. Everything that can be refused is refused before the work: an
unknown name, a missing package, a folder that cannot be written to, a device that is not there.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from benchmarks.frame.provenance import provenance

from experiments.data.files import VARIABLE as DATA
from experiments.data.files import DataError
from experiments.frame import figures, jobs, report
from experiments.frame.catalogue import EXPERIMENTS, Experiment, listing
from experiments.frame.outcome import Outcome, Table
from experiments.training.protocol import VARIABLE as DEVICE

RESULTS = Path(__file__).parent / "results"
QUICK = Path(__file__).parent / "results-quick"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the named experiment, or list them all.

    Args:
        arguments: The words of the command line after the program's name; `sys.argv` by default.

    Returns:
        The exit status: 0, 1 for an error that the message explains, 130 after Ctrl-C.
    """
    options = parsed(arguments)
    if options.name is None:
        print(f"Usage: python -m experiments <name> [--quick] [--out DIR]\n\nNames:\n\n{listing()}")
        return 0
    experiment = EXPERIMENTS[options.name]
    folder = options.out or default_folder(options.name, quick=options.quick)
    problem = experiment.missing() or unwritable(folder) or unusable(options.device)
    if problem:
        print(problem, file=sys.stderr)
        return 1

    print(opening(experiment, folder, quick=options.quick), flush=True)
    try:
        with environment({DATA: options.data, DEVICE: options.device}):
            outcome, files = run_and_write(experiment, options, folder)
    except (DataError, jobs.CacheError, jobs.WorkerError) as error:  # the message says what to do
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nInterrupted. {left_behind()}", file=sys.stderr)
        return 130
    print(closing(outcome, files, quick=options.quick))
    return 0


def run_and_write(
    experiment: Experiment, options: argparse.Namespace, folder: Path
) -> tuple[Outcome, list[Path]]:
    """Run an experiment and write its files; returns the outcome and the files."""
    jobs.earlier.clear()
    jobs.finished.clear()
    if options.fresh and not options.quick:  # a quick run neither writes nor reads parts
        jobs.forget(experiment.name)

    circumstances = provenance(command(options))
    start = time.monotonic()
    outcome = seeded_run(experiment, quick=options.quick, seed=options.seed)
    circumstances["minutes"] = (time.monotonic() - start) / 60
    circumstances["earlier"] = jobs.earlier

    files = report.write(experiment.name, outcome, circumstances, folder)
    if folder.parent == QUICK:
        (QUICK / ".gitignore").write_text("*\n", encoding="utf-8")
    return outcome, files


def seeded_run(experiment: Experiment, *, quick: bool, seed: int) -> Outcome:
    """Run from a seed, in the common style of figures; both are undone afterwards."""
    import matplotlib

    with matplotlib.rc_context(figures.style()), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return experiment.run(quick=quick, seed=seed)


@contextmanager
def environment(variables: Mapping[str, object]) -> Iterator[None]:
    """Set environment variables, which worker processes see too, and put them back afterwards.

    Args:
        variables: Values by name. A variable whose value is None stays as it is.
    """
    new_values = {name: str(value) for name, value in variables.items() if value is not None}
    old_values = {name: os.environ.get(name) for name in new_values}
    os.environ.update(new_values)
    try:
        yield
    finally:
        for name, value in old_values.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# --- the command line ----------------------------------------------------------------------------


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line; an unknown name ends the program with the list of names."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments",
        description=f"Run an experiment and keep its numbers, tables and figures.\n\n{listing()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "name", nargs="?", help="name of the experiment; without it, all names are listed"
    )
    parser.add_argument(
        "--quick", action="store_true", help="use small sizes, only to show that everything runs"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="output folder (default experiments/results[-quick if quick]/<name>)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of everything random (default 0)")
    parser.add_argument("--data", type=Path, help=f"folder of the data sets (default: ${DATA})")
    parser.add_argument("--device", help="where networks are trained: cpu (default) or cuda")
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="compute everything again; use no parts of earlier runs",
    )
    options = parser.parse_args(arguments)
    if options.name is not None and options.name not in EXPERIMENTS:
        parser.error(f"unknown experiment {options.name!r}. Choose one of these:\n\n{listing()}")
    return options


def command(options: argparse.Namespace) -> str:
    """The command that gives the same results, as the page shows it."""
    words = ["python -m experiments", options.name]
    if options.quick:
        words.append("--quick")
    if options.seed != 0:
        words.append(f"--seed {options.seed}")
    if options.device is not None:
        words.append(f"--device {options.device}")
    return " ".join(words)


def default_folder(name: str, *, quick: bool) -> Path:
    """Where results go that have no ``--out``."""
    return (QUICK if quick else RESULTS) / name


# --- what is refused before the work -------------------------------------------------------------


def unwritable(folder: Path) -> str | None:
    """Why nothing can be written to a folder; None if all is well."""
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            return None
    except OSError as error:
        return (
            f"Cannot write results to {folder}: {existing} reports {error.strerror!r}. "
            "Choose another folder with --out DIR."
        )


def unusable(device: str | None) -> str | None:
    """Why networks cannot be trained on a device; None if they can."""
    try:
        torch.empty(1, device=device or "cpu")
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        reason = str(error).splitlines()[0]
        return f"Cannot train on --device {device}: {reason}. Leave it out to train on the CPU."
    return None


# --- what is printed -----------------------------------------------------------------------------


def opening(experiment: Experiment, folder: Path, *, quick: bool) -> str:
    """What will be done, how long it takes and where it goes."""
    length = "quick sizes" if quick else f"about {experiment.minutes:g} min on two cores"
    return f"{experiment.name}: {experiment.summary}\n  {length}; results go to {folder}"


def closing(outcome: Outcome, files: Sequence[Path], *, quick: bool) -> str:
    """The tables, and where everything lies."""
    tables = [str(block) for block in outcome.page if isinstance(block, Table)]
    note = ""
    if quick:
        note = "Quick sizes only show that everything runs. Their numbers mean little.\n"
    written = "\n".join(f"  {file}" for file in files)
    return "\n" + "\n\n".join(tables) + f"\n\n{note}Written:\n{written}"


def left_behind() -> str:
    """What an interrupted run leaves behind."""
    count = len(jobs.finished)
    if count == 0:
        return "Nothing was kept or written."
    return f"Finished parts are kept ({count} so far). The same command continues from there."


if __name__ == "__main__":
    sys.exit(main())
