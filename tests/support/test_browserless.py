"""Where there is no browser its tests are left out aloud, and in CI they stay and fail."""

import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest
from tests.support import browser


class Item:
    """A test, with or without the mark."""

    def __init__(self, mark: str | None) -> None:
        self.mark = mark

    def get_closest_marker(self, name: str) -> bool:
        return name == self.mark


def selected(config: Any) -> list[str | None]:
    items: list[Any] = [Item("browser"), Item(None), Item("browser")]
    conftest.pytest_collection_modifyitems(config, items)
    return [item.mark for item in items]


def config() -> Any:
    gone: list[Any] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: gone.extend(items))
    options = {"--part": None}
    return SimpleNamespace(stash=pytest.Stash(), hook=hook, gone=gone, getoption=options.get)


def summary(chosen: Any) -> str:
    lines: list[str] = []
    reporter = SimpleNamespace(section=lines.append, line=lines.append)
    conftest.pytest_terminal_summary(reporter, chosen)
    return "\n".join(lines)


@pytest.fixture
def none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHROMIUM", "/nowhere/chromium")
    monkeypatch.delenv("CI", raising=False)


@pytest.mark.usefixtures("none")
def test_without_a_browser_its_tests_are_left_out_and_counted() -> None:
    chosen = config()
    assert selected(chosen) == [None]
    assert len(chosen.gone) == 2
    assert "2 tests left out: no Chromium was found. Install chromium" in summary(chosen)


@pytest.mark.usefixtures("none")
def test_a_worker_tells_the_main_process() -> None:
    worker, main = config(), config()
    worker.workeroutput = {}
    selected(worker)
    conftest.pytest_sessionfinish(SimpleNamespace(config=worker))
    conftest.pytest_testnodedown(SimpleNamespace(config=main, workeroutput=worker.workeroutput))
    assert "2 tests left out" in summary(main)


@pytest.mark.usefixtures("none")
def test_in_ci_they_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    chosen = config()
    assert selected(chosen) == ["browser", None, "browser"]
    assert summary(chosen) == ""


def test_a_browser_is_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "chromium-browser"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.delenv("CHROMIUM", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert browser.executable() == str(program)
    monkeypatch.setenv("CHROMIUM", "/nowhere")
    assert browser.executable() is None
    monkeypatch.setenv("CI", "")
    assert selected(config()) == [None]


def test_a_name_that_does_not_run_is_no_browser(tmp_path, monkeypatch) -> None:
    for name, status in (("chromium", 1), ("google-chrome", 0)):
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {status}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.delenv("CHROMIUM", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert browser.executable() == str(tmp_path / "google-chrome")


def test_the_script_tells_what_apt_said(tmp_path: Path) -> None:
    stubs = {
        "id": "echo 0",
        "chromium": "exit 1",
        "grep": "exit 0",
        "apt-get": "echo no space; exit 1",
    }
    for name, line in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "tail").symlink_to(shutil.which("tail") or "")
    script = Path(__file__).with_name("get_browser.sh")
    done = subprocess.run(
        ["/bin/sh", script], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    assert "no space" in done.stdout
    assert "No Chromium found" in done.stdout


def test_the_script_never_fails(tmp_path: Path) -> None:
    script = Path(__file__).with_name("get_browser.sh")
    for name in ("id", "sh"):
        (tmp_path / name).write_text("#!/bin/sh\necho 1000\n")
        (tmp_path / name).chmod(0o755)
    none = {"PATH": str(tmp_path)}
    named = {"PATH": str(tmp_path), "CHROMIUM": "/nowhere/chromium"}
    for environment, words in ((none, "No Chromium found"), (named, "is not a program that runs")):
        done = subprocess.run(
            ["/bin/sh", script], env=environment, capture_output=True, text=True, check=True
        )
        assert words in done.stdout
