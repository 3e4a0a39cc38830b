"""``python -m experiments <name> [--quick] [--out DIR] ...``: run one, keep its results."""

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
from experiments.frame import figures, jobs, keys, report
from experiments.frame.catalogue import EXPERIMENTS, Experiment, listing
from experiments.frame.outcome import Outcome, Table
from experiments.training.protocol import VARIABLE as DEVICE
from experiments.training.protocol import device

RESULTS = Path(__file__).parent / "results"
QUICK = Path(__file__).parent / "results-quick"
REKEY = "go on from parts that other code computed: you assert that today's computes the same"
ASSERTED = (
    "  Parts of the same arguments and data that other code computed are re-keyed, not computed: "
    "you assert\n  that today's code computes the same. Nothing checks it; the results name them."
)


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
    if problem := unwritable(folder) or unusable(options.device):
        print(problem, file=sys.stderr)
        return 1
    print(opening(experiment, folder, quick=options.quick), flush=True)
    if options.rekey:
        print(ASSERTED, flush=True)
    variables = {DATA: options.data, DEVICE: options.device, keys.VARIABLE: options.rekey}
    try:
        with surroundings(variables):
            return finished(experiment, options, folder)
    except (DataError, jobs.CacheError, jobs.WorkerError) as error:  # the message says what to do
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nInterrupted. {interrupted()}", file=sys.stderr)
        return 130


def finished(experiment: Experiment, options: argparse.Namespace, folder: Path) -> int:
    """Run, write, and say what came out."""
    jobs.earlier.clear()
    jobs.finished.clear()
    if options.fresh and not options.quick:  # a quick run keeps nothing and finds nothing
        jobs.forget(experiment.name)
    where, start = provenance(command(options)), time.monotonic()
    outcome = styled(experiment, quick=options.quick, seed=options.seed)
    where |= {"minutes": (time.monotonic() - start) / 60, "earlier": jobs.earlier}
    if device().type == "cuda":
        where["gpu"] = torch.cuda.get_device_name()
    files = report.write(experiment.name, outcome, where, folder)
    if folder.parent == QUICK:  # git looks away from it
        (QUICK / ".gitignore").write_text("*\n", encoding="utf-8")
    print(closing(outcome, files, quick=options.quick))
    return 0


def unwritable(folder: Path) -> str | None:
    """Why nothing can be written there, known before hours of work; None if all is well."""
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            return None
    except OSError as error:
        return (
            f"Cannot write results to {folder}: {existing} says {error.strerror!r}. "
            "Name another folder with --out DIR."
        )


def unusable(device: str | None) -> str | None:
    """Why nets cannot be trained there; None if they can."""
    try:
        torch.empty(1, device=device or "cpu")
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        reason = str(error).splitlines()[0]
        return f"Cannot train on --device {device}: {reason}. Leave it out to train on the CPU."
    return None


@contextmanager
def surroundings(variables: Mapping[str, object]) -> Iterator[None]:
    """Environment variables that worker processes see too; those without a value stay as they are.

    Put back afterwards.
    """
    given = {name: str(value) for name, value in variables.items() if value is not None}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def interrupted() -> str:
    """What a stopped run leaves behind."""
    parts = len(jobs.finished)
    if not parts:
        return "Nothing was kept or written."
    return f"Finished parts are kept ({parts} so far): the same command goes on from there."


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
    parser.add_argument("--data", type=Path, help=f"folder of the data sets (default: ${DATA})")
    parser.add_argument("--device", help="where nets are trained: cpu (default) or cuda")
    parser.add_argument("--fresh", action="store_true", help="do not go on from an earlier run")
    parser.add_argument("--rekey", choices=keys.WAYS, nargs="?", const=keys.WAYS[0], help=REKEY)
    options = parser.parse_args(arguments)
    if options.rekey and (options.quick or options.fresh):
        parser.error("--rekey goes on from kept parts, --quick and --fresh from none: choose")
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
    """Where results go."""
    return (QUICK if quick else RESULTS) / name


def command(options: argparse.Namespace) -> str:
    """The command that gives the same results."""
    words = ["python -m experiments", options.name]
    words += ["--quick"] * options.quick
    words += [f"--seed {options.seed}"] * (options.seed != 0)
    words += [f"--device {options.device}"] * (options.device is not None)
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
