"""Scripts that start a cluster, run as a newcomer would, and the page that shows them."""

import os
import re
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how_to" / "clusters.md"
DIFFERENCES = re.compile(r"Gram (\S+), bars (\S+)$", flags=re.MULTILINE)
SHARE = re.compile(r"cover (\d+)% of")


def shown(script: str, language: str) -> list[str]:
    """The blocks of a language that the page shows of a script."""
    block = re.compile(
        rf'^```{language} title="examples/{script}"\n(.*?)^```', flags=re.DOTALL | re.MULTILINE
    )
    return block.findall(PAGE.read_text(encoding="utf-8"))


def lines_not_in_the_script(script: str) -> list[str]:
    """Lines of code that the page shows and the script does not have."""
    lines = (ROOT / "examples" / script).read_text(encoding="utf-8").splitlines()
    blocks = shown(script, "python")
    assert blocks, f"The page shows nothing of {script}."
    return [line for block in blocks for line in block.splitlines() if line not in lines]


def printed_by(script: str, folder: Path) -> str:
    """What a script prints when it is run with a file to write; no process of it stays behind.

    The folder is the home of that run: Ray keeps a token of its cluster there.
    """
    mark = uuid.uuid4().hex  # in the environment of all processes that the script starts
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / script), str(folder / "uq.safetensors")],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HOME": str(folder), "SCRIPT_MARK": mark},
    )
    assert done.returncode == 0, done.stderr
    assert (folder / "uq.safetensors").is_file()
    deadline = time.monotonic() + 60
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(1)
    assert marked(mark) == []
    return done.stdout


def marked(mark: str) -> list[str]:
    """The names of running processes that have the mark in their environment."""
    processes = psutil.process_iter(["name", "environ"])  # no environment: of another user
    environments = [(process.info["name"], process.info["environ"] or {}) for process in processes]
    return [name for name, variables in environments if variables.get("SCRIPT_MARK") == mark]


def assert_as_shown_and_as_one_process(script: str, printed: str) -> None:
    """The lines of the page, rows included; the Gram of one process to 1e-12, its bars to 1e-6."""
    (block,) = shown(script, "text")
    assert without_measured(printed) == without_measured(block)
    differences = DIFFERENCES.findall(printed)
    assert differences
    for gram, bars in differences:
        assert float(gram) < 1e-12
        assert float(bars) < 1e-6
    (share,) = SHARE.findall(printed)
    assert 84 <= int(share) <= 95


def without_measured(text: str) -> str:
    """The text without what rounding moves."""
    return SHARE.sub("cover", DIFFERENCES.sub("", text))
