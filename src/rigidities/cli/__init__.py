"""The command line: `rigidities <command>`, or `python -m rigidities <command>`.

Each command has two functions: `_add_<command>` says which options it has, `_<command>` runs it and
returns what `--json` prints. `main` parses the arguments, runs the command, and turns errors that
are to be expected into one line and an exit code.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._version import __version__
from ..last_layer.fit import merge_files
from ..last_layer.rigidity import LastLayerRigidity
from ..report.document import checked_place
from ..report.files import from_file
from . import demo, tabular

__all__ = ["main"]


def __dir__() -> list[str]:
    return sorted(__all__)


if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_EXPECTED_ERRORS = (ModuleNotFoundError, OSError, ValueError, KeyboardInterrupt)
"""A missing extra, a folder that cannot be written, a damaged file: their texts say what to do."""

_INPUT_ERRORS = (
    ValueError,
    FileNotFoundError,
    FileExistsError,
    NotADirectoryError,
    IsADirectoryError,
)
"""Errors about the user's input; others are about the machine."""

_EXIT_CODES = """\
exit codes:
  0  done, whatever the verdict on the error bars is
  1  something failed: a missing package, a full disk, an interruption
  2  wrong usage, or input that cannot be used; nothing was written
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        arguments: What follows the program's name; by default the arguments of the shell.

    Returns:
        0 if it is done, 1 if something failed, 2 if the input cannot be used.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A folder's name may contain characters that the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    options = vars(_parser().parse_args(arguments))
    run = options.pop("run")
    prints_json = options.pop("json")
    try:
        say = partial(print, file=sys.stderr if prints_json else sys.stdout, flush=True)
        result = run(say=say, **options)
        if prints_json:
            print(json.dumps(result))
    except _EXPECTED_ERRORS as error:
        message = " ".join(str(error).split()) or "Interrupted; nothing was written."
        print(f"rigidities: {message}", file=sys.stderr)
        return 2 if isinstance(error, _INPUT_ERRORS) else 1
    return 0


def _parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="rigidities",
        description="Calibrated error bars for trained regressors.",
        epilog=f"{_EXIT_CODES}\n`rigidities COMMAND --help` shows examples.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="command", required=True)
    _add_tabular(commands)
    _add_report(commands)
    _add_merge(commands)
    _add_demo(commands)
    return parser


def _add_command(
    commands: Commands,
    name: str,
    run: Callable[..., dict[str, Any]],
    summary: str,
    examples: Sequence[str],
) -> argparse.ArgumentParser:
    """Add a command with its examples and the options that all commands have.

    Args:
        commands: Where it is added.
        name: Of the command.
        run: Takes `say` and the options of the command; returns what `--json` prints.
        summary: What the command does, in words.
        examples: Arguments that may follow its name.

    Returns:
        The command's parser, for options of its own.
    """
    lines = [f"  rigidities {name} {example}\n" for example in examples]
    parser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=f"examples:\n{''.join(lines)}\n{_EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the results as JSON on stdout, and everything else on stderr",
    )
    parser.set_defaults(run=run)
    return parser


# Types of options. argparse calls them by the names of these functions.


def seed(text: str) -> int:
    """A whole number that torch accepts as a seed."""
    value = int(text)
    if not -(2**63) <= value < 2**64:
        raise argparse.ArgumentTypeError(f"expected a seed from -2**63 to 2**64 - 1, got {text}")
    return value


def level(text: str) -> float:
    """A probability."""
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"expected a level between 0 and 1, got {text}")
    return value


def share(text: str) -> float:
    """A share of the rows."""
    value = float(text)
    if not 0 < value <= 0.5:
        raise argparse.ArgumentTypeError(
            f"expected a share of the rows above 0 and up to 0.5, such as 0.15, got {text}"
        )
    return value


def bounds(text: str) -> tabular.Bounds:
    """Two numbers with a comma between them; either may be left out."""
    remedy = (
        "expected LOW,HIGH: `0,100`, or `0,` for a lower bound only. If LOW is negative, write "
        "--support=-40,60"
    )
    low_text, comma, high_text = text.partition(",")
    try:
        low = float(low_text) if low_text.strip() else None
        high = float(high_text) if high_text.strip() else None
    except ValueError:
        raise argparse.ArgumentTypeError(f"{remedy}, got {text}") from None
    finite = [bound for bound in (low, high) if bound is not None and math.isfinite(bound)]
    given = [bound for bound in (low, high) if bound is not None]
    if not comma or not given or len(finite) < len(given):
        raise argparse.ArgumentTypeError(f"{remedy}, got {text}")
    if low is not None and high is not None and low >= high:
        raise argparse.ArgumentTypeError(f"expected the lower bound first, got {text}")
    return low, high


def _add_tabular(commands: Commands) -> None:
    """Add the command `tabular`."""
    parser = _add_command(
        commands,
        "tabular",
        _tabular,
        "train a model for one column of a table, and predict new rows with error bars",
        [
            "data.csv --target price",
            "data.csv --target price --id customer --drop comment",
            "data.csv --target price --support 0, --conformal 0.15 --group customer",
            "--apply rigidities-data/model.safetensors new.csv --out predictions.csv",
        ],
    )
    add = parser.add_argument
    # Options have no defaults here, so that those which do not go with --apply are noticed.
    add("file", type=Path, help="the table: .csv, .tsv, .csv.gz or .parquet")
    add("--target", metavar="COLUMN", help="the column to predict")
    add(
        "--apply",
        type=Path,
        metavar="MODEL",
        help="predict with this model.safetensors instead of training",
    )
    add(
        "--out",
        type=Path,
        help="folder of the results (default: rigidities-FILE); with --apply, the file of the "
        "predictions (default: predictions.csv)",
    )
    models = ("auto", "tree", "linear", "net")
    add(
        "--model",
        choices=models,
        help="the learner: auto (default) chooses the better of tree and linear",
    )
    add("--level", type=level, help="level of the intervals (default: 0.9)")
    add("--seed", type=seed, help="seed of splits and models (default: 0)")
    add(
        "--support",
        type=bounds,
        metavar="LOW,HIGH",
        help="bounds of the target; `0,` sets a lower bound only",
    )
    add(
        "--log",
        action=argparse.BooleanOptionalAction,
        help="learn the logarithm of the target (default: if that predicts better)",
    )
    add(
        "--conformal",
        type=share,
        metavar="SHARE",
        help="share of the labelled rows to set apart for guaranteed intervals",
    )
    add(
        "--group",
        metavar="COLUMN",
        help="keep rows with the same value here together when rows are split",
    )
    add(
        "--time-split",
        metavar="COLUMN",
        help="split by this time: train on the oldest rows, test on the newest",
    )
    _add_columns(parser, "--id", "columns to copy to the predictions; they are not inputs")
    _add_columns(parser, "--drop", "columns to leave out of the inputs")
    _add_columns(
        parser, "--keep", "columns to use even if they look like row numbers or like the target"
    )


def _add_columns(parser: argparse.ArgumentParser, option: str, help: str) -> None:
    """Add an option that takes one column or more, and may come several times."""
    parser.add_argument(option, nargs="+", action="extend", metavar="COLUMN", help=help)


def _tabular(
    say: tabular.Say,
    file: Path,
    target: str | None,
    apply: Path | None,
    out: Path | None,
    model: str | None,
    level: float | None,
    seed: int | None,
    support: tabular.Bounds | None,
    log: bool | None,
    conformal: float | None,
    group: str | None,
    time_split: str | None,
    id: Sequence[str] | None,
    drop: Sequence[str] | None,
    keep: Sequence[str] | None,
) -> dict[str, Any]:
    """Train on a table, or predict one."""
    if apply is not None:
        training_options = {
            "conformal": conformal,
            "drop": drop,
            "group": group,
            "id": id,
            "keep": keep,
            "log": log,
            "model": model,
            "seed": seed,
            "support": support,
            "target": target,
            "time-split": time_split,
        }
        for name, value in training_options.items():
            if value is not None:
                raise ValueError(
                    f"--{name} is an option for training, not for --apply. Leave it out."
                )
        return tabular.apply(apply, file, out or Path("predictions.csv"), level=level, say=say)

    if target is None:
        raise ValueError(
            "Expected --target COLUMN to train a model, or --apply MODEL to predict with one."
        )
    return tabular.train(
        file,
        target,
        out or Path(f"rigidities-{file.name.partition('.')[0]}"),
        model=model or "auto",
        level=level or 0.9,
        seed=seed or 0,
        support=support,
        logarithm=log,
        conformal=conformal,
        group=group,
        time_split=time_split,
        id=id or (),
        drop=drop or (),
        keep=keep or (),
        say=say,
    )


def _add_report(commands: Commands) -> None:
    """Add the command `report`."""
    parser = _add_command(
        commands,
        "report",
        _report,
        "write one HTML page that shows how far you can trust error bars",
        [
            "predictions.csv",
            "rigidities-data --out again.html",
            "uq.safetensors --model my_module:build --data test.npz",
        ],
    )
    add = parser.add_argument
    files = "predictions (.csv), a saved fit (.safetensors), or the folder that tabular wrote"
    add("file", type=Path, help=files)
    add("--out", type=Path, default=Path("report.html"), help="the page (default: %(default)s)")
    add("--title", help="heading of the page (default: the name of the file)")
    contents = {"mean": "predictions", "std": "error bars", "target": "true values"}
    for name, content in contents.items():
        text = f"columns of the {content}, one per target (default: {name})"
        add(f"--{name}", nargs="+", metavar="COLUMN", help=text)
    add(
        "--model",
        metavar="MODULE:FUNCTION",
        help="function that returns the trained model of a saved fit",
    )
    text = "labelled test data for a saved fit (.npz or .csv), or the moved table of a folder"
    add("--data", type=Path, help=text)


def _report(
    say: tabular.Say,
    file: Path,
    out: Path,
    title: str | None,
    mean: Sequence[str] | None,
    std: Sequence[str] | None,
    target: Sequence[str] | None,
    model: str | None,
    data: Path | None,
) -> dict[str, Any]:
    """Write the report of a file, or that of a folder again."""
    folder = None
    if model is None and mean is None and std is None and target is None:
        folder = _folder_of_tabular(say, file, data)
    if folder is not None:
        page, verdict = tabular.page_again(folder, out, data=data, title=title)
    else:
        page, verdict = from_file(
            file,
            out,
            load=LastLayerRigidity.load,
            title=title,
            mean=mean,
            std=std,
            target=target,
            model=model,
            data=data,
        )
    say(str(verdict))
    say(f"Wrote {page}")
    return {"out": str(page), "verdict": verdict.plain()}


def _folder_of_tabular(say: tabular.Say, file: Path, data: Path | None) -> Path | None:
    """The folder that `tabular` wrote, by itself or by one of its files; None for other files.

    Predictions without their training table are a file like any other, which is said.
    """
    if file.is_dir():
        return file
    if file.name not in tabular.FILES_OF_REPORT:
        return None
    table = tabular.training_table(file.parent)
    if table is None:
        return None
    if file.name == "predictions.csv" and data is None and not table.is_file():
        say(
            f"The training table {table} is no longer there. The report uses {file} alone. For "
            "the full report, pass the new path of the table with --data."
        )
        return None
    return file.parent


def _add_merge(commands: Commands) -> None:
    """Add the command `merge`."""
    parser = _add_command(
        commands,
        "merge",
        _merge,
        "merge saved fits to different rows into one fit, without their model",
        ["mon.safetensors tue.safetensors --out both.safetensors"],
    )
    add = parser.add_argument
    add("files", type=Path, nargs="+", help="two or more files that save() wrote")
    add("--out", type=Path, required=True, help="the file to write")
    add("--force", action="store_true", help="replace that file if it exists")
    add("--allow-overlap", action="store_true", help="accept shared rows, which then count twice")


def _merge(
    say: tabular.Say, files: Sequence[Path], out: Path, force: bool, allow_overlap: bool
) -> dict[str, Any]:
    """Merge files of fits into another file."""
    checked_place(out)
    places = [path.resolve() for path in (*files, out)]
    if len(files) < 2 or len(set(places)) < len(places):
        raise ValueError(
            f"Expected two or more different files, and an --out other than these, got {out}."
        )
    if out.exists() and not force:
        raise ValueError(f"{out} exists. Choose another --out, or pass --force to replace it.")
    merge_files(files, out, say, check=not allow_overlap)
    return {"out": str(out), "files": [str(path) for path in files]}


def _add_demo(commands: Commands) -> None:
    """Add the command `demo`."""
    parser = _add_command(
        commands,
        "demo",
        _demo,
        "train two small networks, add error bars, print how good the bars are, and plot them",
        ["--out figures --seed 1"],
    )
    add = parser.add_argument
    folder = Path("rigidities-demo")
    add("--out", type=Path, default=folder, help="folder for the figures (default: %(default)s)")
    add(
        "--seed",
        type=seed,
        default=0,
        help="seed of splits, noise and networks (default: %(default)s)",
    )


def _demo(say: tabular.Say, out: Path, seed: int) -> dict[str, Any]:
    """Run the demonstration."""
    figures = demo.run(out, seed=seed, echo=say)
    return {"figures": [str(figure) for figure in figures]}
