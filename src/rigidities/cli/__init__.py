"""The command line: `rigidities <command>`, or `python -m rigidities <command>`."""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .._version import __version__
from ..last_layer.fit import merge_files
from ..last_layer.rigidity import LastLayerRigidity
from ..report.document import checked_place
from ..report.files import from_file
from . import demo, tabular

__all__ = ["main"]

Command = Callable[..., Callable[..., Any]]
UNUSABLE = (ValueError, FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError)
"""Errors about what was given; others are about the machine."""
CODES = """\
exit codes:
  0  done, whatever the verdict on the error bars is
  1  something failed: a missing package, a full disk, an interruption
  2  wrong usage, or input that cannot be used; nothing was written
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        arguments: what follows the program's name; by default what the shell gave.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # a folder's name may hold what the terminal's encoding does not
        sys.stdout.reconfigure(errors="backslashreplace")
    options = vars(_parser().parse_args(arguments))
    run, as_json = options.pop("run"), options.pop("json")
    try:
        say = partial(print, file=sys.stderr if as_json else sys.stdout, flush=True)
        found = run(say=say, **options)
        if as_json:
            print(json.dumps(found))
    except (ModuleNotFoundError, OSError, ValueError, KeyboardInterrupt) as error:
        # a missing extra, a folder that cannot be written, a damaged file: it says what to do
        said = " ".join(str(error).split()) or "Interrupted; nothing was written."
        print(f"rigidities: {said}", file=sys.stderr)
        return 2 if isinstance(error, UNUSABLE) else 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rigidities",
        description="Calibrated error bars for trained regressors.",
        epilog=f"{CODES}\n`rigidities COMMAND --help` shows examples.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="command", required=True)
    for add in (_add_tabular, _add_report, _add_merge, _add_demo):
        add(partial(_command, commands))
    return parser


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[..., dict[str, Any]],
    summary: str,
    *examples: str,
) -> Callable[..., Any]:
    """Add a command with its examples and what all commands have; adds options to it."""
    shown = "".join(f"  rigidities {name} {example}\n" for example in examples)
    parser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary.capitalize()}.",
        epilog=f"examples:\n{shown}\n{CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON, and all else on stderr")
    parser.set_defaults(run=run)
    return parser.add_argument


def seed(text: str) -> int:
    """A whole number that torch takes."""
    if not -(2**63) <= int(text) < 2**64:
        raise argparse.ArgumentTypeError(f"expected a seed from -2**63 to 2**64 - 1, got {text}")
    return int(text)


def level(text: str) -> float:
    """A probability."""
    if not 0 < float(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a level between 0 and 1, got {text}")
    return float(text)


def _add_tabular(command: Command) -> None:
    summary = "learn a column of a table, with error bars, and predict it for new rows"
    examples = ["data.csv --target price", "data.csv --target price --id customer --drop comment"]
    examples.append("--apply rigidities-data/model.safetensors new.csv --out predictions.csv")
    add = command("tabular", _tabular, summary, *examples)
    add("file", type=Path, help="the table: .csv, .tsv, .csv.gz or .parquet")
    add("--target", metavar="COLUMN", help="the column to learn")
    add("--apply", type=Path, metavar="MODEL", help="predict by this model.safetensors instead")
    add("--out", type=Path, help="folder (rigidities-FILE), or file of --apply (predictions.csv)")
    add("--model", choices=("tree", "net"), help="boosted trees (default) or a small net")
    add("--level", type=level, help="of the intervals (default: 0.9)")
    add("--seed", type=seed, help="of splits and models (default: 0)")
    several = {"nargs": "+", "action": "extend", "metavar": "COLUMN"}
    add("--id", **several, help="columns that are no inputs, but copied to the predictions")
    add("--drop", **several, help="columns that are no inputs")
    add("--keep", **several, help="inputs even if they number rows or give the target away")


def _tabular(
    say: tabular.Say, file: Path, apply: Path | None, out: Path | None, **options: Any
) -> dict[str, Any]:
    given = {key: value for key, value in options.items() if value is not None}
    if apply is not None:
        if useless := sorted(given.keys() - {"level"}):
            raise ValueError(f"--{useless[0]} goes with training, not with --apply. Leave it out.")
        return tabular.apply(apply, file, out or Path("predictions.csv"), say=say, **given)
    if "target" not in given:
        raise ValueError("Expected --target COLUMN to learn, or --apply MODEL to predict by.")
    out = out or Path(f"rigidities-{file.name.partition('.')[0]}")
    return tabular.train(file, given.pop("target"), out, say=say, **given)


def _add_report(command: Command) -> None:
    summary = "write one HTML page that says how far error bars can be trusted"
    examples = ["predictions.csv", "uq.safetensors --model my_module:build --data test.npz"]
    add = command("report", _report, summary, *examples)
    kinds = "predictions (.csv) or a saved fit (.safetensors)"
    add("file", type=Path, help=kinds)
    add("--out", type=Path, default=Path("report.html"), help="the page (default: %(default)s)")
    add("--title", help="its heading (default: the name of the file)")
    for name, what in (("mean", "predictions"), ("std", "error bars"), ("target", "true values")):
        text = f"columns of the {what}, one per target (default: {name})"
        add(f"--{name}", nargs="+", metavar="COLUMN", help=text)
    add("--model", metavar="MODULE:FUNCTION", help="returns the trained model of a saved fit")
    add("--data", type=Path, help="labelled test data for it, .npz or .csv")


def _report(say: tabular.Say, file: Path, **options: Any) -> dict[str, Any]:
    page, verdict = from_file(file, load=LastLayerRigidity.load, **options)
    say(str(verdict))
    say(f"Wrote {page}")
    return {"out": str(page), "verdict": verdict.plain()}


def _add_merge(command: Command) -> None:
    summary = "make one fit of saved fits to different rows, without their model"
    example = "mon.safetensors tue.safetensors --out both.safetensors"
    add = command("merge", _merge, summary, example)
    add("files", type=Path, nargs="+", help="two or more, written by save()")
    add("--out", type=Path, required=True, help="the file to write")
    add("--force", action="store_true", help="replace that file if it exists")
    add("--allow-overlap", action="store_true", help="count shared rows twice")


def _merge(
    say: tabular.Say, files: Sequence[Path], out: Path, force: bool, allow_overlap: bool
) -> dict[str, Any]:
    checked_place(out)
    if not 2 < len({path.resolve() for path in (*files, out)}) == len(files) + 1:
        raise ValueError(f"Expected two files or more, each once, and another --out than {out}.")
    if out.exists() and not force:
        raise ValueError(f"{out} exists. Choose another --out, or pass --force to replace it.")
    merge_files(files, out, say, check=not allow_overlap)
    return {"out": str(out), "files": [str(path) for path in files]}


def _add_demo(command: Command) -> None:
    summary = "train two small nets, add error bars, print how good they are, draw them"
    add = command("demo", _demo, summary, "--out figures --seed 1")
    folder = Path("rigidities-demo")
    add("--out", type=Path, default=folder, help="folder for the figures (default: %(default)s)")
    add("--seed", type=seed, default=0, help="of splits, noise and nets (default: %(default)s)")


def _demo(say: tabular.Say, out: Path, seed: int) -> dict[str, Any]:
    return {"figures": [str(figure) for figure in demo.run(out, seed=seed, echo=say)]}
