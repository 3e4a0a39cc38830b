"""The browser that tests of the HTML report and of the site drive: where it lies, how it starts."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
PATIENCE = 300_000
"""Milliseconds that a page may take: a machine that many share can stand still for a minute."""
MISSING = (
    "no Chromium was found. Install chromium (`make browser` does so on Debian as root), or set "
    "CHROMIUM=/path/to/it."
)


def executable() -> str | None:
    """The browser: the one that CHROMIUM names, or the first of the usual names that runs."""
    named = os.environ.get("CHROMIUM")
    if named:
        return shutil.which(named)
    return next(filter(_runs, filter(None, map(shutil.which, NAMES))), None)


@contextmanager
def launched() -> Iterator[Any]:
    """The browser, running; the test fails where there is none."""
    program = executable()
    if program is None:
        pytest.fail(f"Browser tests need a browser: {MISSING}")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield running
        running.close()


def required() -> bool:
    """Whether tests fail without a browser instead of being left out."""
    return os.environ.get("CI", "").lower() in ("1", "true")


@cache
def _runs(program: str) -> bool:
    """Whether it is a browser, and not a script that asks for one to be installed."""
    try:
        done = subprocess.run([program, "--version"], capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
