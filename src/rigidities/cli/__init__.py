"""The command line: `rigidities <command>`, or `python -m rigidities <command>`."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from .._version import __version__
from ..last_layer.fit import merge_files
from ..last_layer.rigidity import LastLayerRigidity
from ..report.document import checked_place
from ..report.files import from_file
from . import demo

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        arguments: what follows the program's name; by default what the shell gave.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # a folder's name may hold what the terminal's encoding does not
        sys.stdout.reconfigure(errors="backslashreplace")
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except (ModuleNotFoundError, OSError, ValueError) as error:
        # a missing extra, a folder that cannot be written, a damaged file: it says what to do
        print(f"rigidities: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rigidities", description="Calibrated error bars for trained regressors."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="command", required=True)
    _add_demo(commands)
    _add_report(commands)
    _add_merge(commands)
    return parser


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "train two small nets, add error bars, print how good they are, draw them"
    parser = commands.add_parser(
        "demo",
        help=summary,
        description=f"{summary.capitalize()}. Takes seconds and needs no network connection.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--out", type=Path, default=Path("rigidities-demo"), help="folder for the figures"
    )
    parser.add_argument("--seed", type=seed, default=0, help="seed of splits, noise and nets")
    parser.set_defaults(run=_demo)


def seed(text: str) -> int:
    """A whole number that torch takes."""
    if not -(2**63) <= int(text) < 2**64:
        raise argparse.ArgumentTypeError(f"expected a seed from -2**63 to 2**64 - 1, got {text}")
    return int(text)


def _demo(options: argparse.Namespace) -> None:
    demo.run(options.out, seed=options.seed)


def _add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "one HTML page that says how far error bars can be trusted"
    parser = commands.add_parser(
        "report",
        help=summary,
        description=f"Write {summary}. Needs no network connection, nor does the page.",
    )
    parser.add_argument(
        "file",
        type=Path,
        help="predictions (.csv), an experiment's numbers (.json) or a saved fit (.safetensors)",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("report.html"), help="the page (default: %(default)s)"
    )
    parser.add_argument("--title", help="its heading (default: the name of the file)")
    for name, what in (("mean", "predictions"), ("std", "error bars"), ("target", "true values")):
        parser.add_argument(
            f"--{name}",
            nargs="+",
            metavar="COLUMN",
            help=f"columns of the {what}, one per target (default: {name})",
        )
    parser.add_argument(
        "--model", metavar="MODULE:FUNCTION", help="returns the trained model of a saved fit"
    )
    parser.add_argument("--data", type=Path, help="labelled test data for it, .npz or .csv")
    parser.set_defaults(run=_report)


def _report(options: argparse.Namespace) -> None:
    chosen = {key: value for key, value in vars(options).items() if key not in ("run", "file")}
    print(f"Wrote {from_file(options.file, load=LastLayerRigidity.load, **chosen)}")


def _add_merge(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "make one fit of saved fits to different rows, without their model"
    example = "Example: rigidities merge mon.safetensors tue.safetensors --out both.safetensors"
    parser = commands.add_parser("merge", help=summary, description=summary, epilog=example)
    parser.add_argument("files", type=Path, nargs="+", help="two or more, written by save()")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    parser.add_argument("--force", action="store_true", help="replace that file if it exists")
    parser.add_argument("--allow-overlap", action="store_true", help="count shared rows twice")
    parser.set_defaults(run=_merge)


def _merge(options: argparse.Namespace) -> None:
    files, out = options.files, checked_place(options.out)
    if not 2 < len({path.resolve() for path in (*files, out)}) == len(files) + 1:
        raise ValueError(f"Expected two files or more, each once, and another --out than {out}.")
    if out.exists() and not options.force:
        raise ValueError(f"{out} exists. Choose another --out, or pass --force to replace it.")
    merge_files(files, out, print, check=not options.allow_overlap)
