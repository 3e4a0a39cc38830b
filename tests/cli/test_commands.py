"""The command line hands on what it is given and explains what goes wrong."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import rigidities
from rigidities import cli
from rigidities.cli import demo


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, int]]:
    """What the demo was asked for, instead of running it."""
    calls: list[tuple[Path, int]] = []

    def record(out: Path, *, seed: int, echo: object) -> list[Path]:
        calls.append((out, seed))
        return [out / "toy.png"]

    monkeypatch.setattr(demo, "run", record)
    return calls


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [([], ("rigidities-demo", 0)), (["--out", "somewhere", "--seed", "3"], ("somewhere", 3))],
)
def test_demo_has_defaults_and_takes_a_folder_and_a_seed(asked, arguments, expected) -> None:
    assert cli.main(["demo", *arguments]) == 0
    assert asked == [(Path(expected[0]), expected[1])]


@pytest.mark.parametrize("seed", [2**70, 2**64, -(2**63) - 1, "one"])
def test_a_seed_that_torch_does_not_take_is_named(asked, seed, capsys) -> None:
    with pytest.raises(SystemExit):
        cli.main(["demo", f"--seed={seed}"])
    expected = "invalid seed" if seed == "one" else f"a seed from -2**63 to 2**64 - 1, got {seed}"
    assert f"argument --seed: {expected}" in capsys.readouterr().err.replace("expected ", "")
    assert not asked
    for seed in (-(2**63), 2**64 - 1):
        assert cli.main(["demo", f"--seed={seed}"]) == 0
        torch.Generator().manual_seed(asked.pop()[1])


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ModuleNotFoundError('pip install "rigidities[demo]"'), 1),
        (PermissionError("out"), 1),
        (NotADirectoryError("out"), 2),
        (ValueError("a damaged file,\n  over two lines"), 2),
        (KeyboardInterrupt("Interrupted"), 1),
    ],
)
def test_an_expected_error_is_a_line_and_a_code(error, code, monkeypatch, capsys) -> None:
    def fail(out: Path, *, seed: int, echo: object) -> None:
        raise error

    monkeypatch.setattr(demo, "run", fail)
    assert cli.main(["demo"]) == code
    assert capsys.readouterr().err == f"rigidities: {' '.join(str(error).split())}\n"


def test_results_are_json_on_stdout_and_all_else_on_stderr(monkeypatch, capsys) -> None:
    def talk(out: Path, *, seed: int, echo: Callable[[str], None]) -> list[Path]:
        echo("Training")
        return [out / "toy.png"]

    monkeypatch.setattr(demo, "run", talk)
    assert cli.main(["demo", "--json", "--out", "here"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == {"figures": [str(Path("here", "toy.png"))]}
    assert said.err == "Training\n"


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path, capsys) -> None:
    (tmp_path / "taken").touch()
    assert cli.main(["demo", "--out", str(tmp_path / "taken")]) == 2
    assert "taken" in capsys.readouterr().err


def test_a_name_that_the_terminal_cannot_show_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(demo, "run", lambda out, *, seed, echo: echo(str(out)) or [])
    assert cli.main(["demo", "--out", "größe"]) == 0
    terminal.flush()
    assert terminal.buffer.getvalue() == rb"gr\xf6\xdfe" + b"\n"


@pytest.mark.parametrize(
    ("arguments", "code", "words"), [([], 2, "usage: rigidities"), (["--help"], 0, "demo")]
)
def test_usage_and_help_are_shown(arguments: list[str], code: int, words: str, capsys) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    assert left.value.code == code
    assert words in capsys.readouterr()[1 if code else 0]


@pytest.mark.parametrize("command", ["tabular", "report", "merge", "demo"])
def test_every_command_has_examples_and_its_exit_codes(command: str, capsys) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main([command, "--help"])
    said = capsys.readouterr().out
    assert left.value.code == 0
    assert f"examples:\n  rigidities {command} " in said
    assert "exit codes:\n  0  done" in said
    assert "--json" in said


@pytest.mark.thorough
def test_it_runs_as_a_module_and_tells_its_version() -> None:
    command = [sys.executable, "-m", "rigidities", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"rigidities {rigidities.__version__}"
