"""Run the suite with several Pythons and releases of PyTorch; print the results as a table.

`make versions` does so for the oldest, the pinned and the newest PyTorch on every Python on PATH;
`make versions ARGS="--torch 2.4.0 --python python3.10 --tests tests/last_layer"` for some.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHONS = [f"python3.{minor}" for minor in range(10, 15)]
SUMMARY = re.compile(r"^=*\s*((?:\d+ \w+,? ?)+) in [\d.]+s", flags=re.MULTILINE)


def main(given: list[str] | None = None) -> int:
    """The number of pairs whose suite did not pass."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", nargs="+", help="releases; by default oldest, pinned, newest")
    parser.add_argument("--python", nargs="+", default=[p for p in PYTHONS if shutil.which(p)])
    parser.add_argument("--tests", nargs="+", default=["src", "tests"], help="arguments of pytest")
    parser.add_argument("--keep", action="store_true", help="keep the environments (gigabytes)")
    options = parser.parse_args(given)
    rows = []
    for python in options.python:
        for torch in dict.fromkeys(options.torch or declared(python)):
            result = tried(python, torch, options.tests, keep=options.keep)
            rows.append(f"| {number(python)} | {torch} | {result} |")
            print(rows[-1], flush=True)
    print("\n| Python | PyTorch | result |\n| --- | --- | --- |", *rows, sep="\n")
    return sum("| passed " not in row and "no build" not in row for row in rows)


def number(python: str) -> str:
    """The version of a Python."""
    return said([python, "-c", "import platform; print(platform.python_version())"]).strip()


def declared(python: str) -> list[str]:
    """The oldest release that pyproject.toml admits, the pinned one and the newest for a Python."""
    oldest = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    pinned = re.search(r"^torch==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    known = said([python, "-m", "pip", "index", "versions", "torch"])
    newest = re.search(r"^torch \(([\d.]+)", known, re.MULTILINE)
    found = [match.group(1) for match in (oldest, pinned, newest) if match]
    return [release if release.count(".") == 2 else f"{release}.0" for release in found]


def tried(python: str, torch: str, tests: list[str], *, keep: bool) -> str:
    """What the suite says in an environment of its own."""
    folder = ROOT / ".venv-versions" / f"{number(python)}-torch{torch}"
    try:
        if trouble := prepared(python, folder, torch):
            return trouble
        command = [folder / "bin/python", "-m", "pytest", "-q", "-n2", "--dist=loadgroup", *tests]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
        run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        (ROOT / ".venv-versions" / f"{folder.name}.log").write_text(run.stdout + run.stderr)
        counts = SUMMARY.findall(run.stdout)
        return ("passed" if run.returncode == 0 else "failed") + f" ({(counts or ['?'])[-1]})"
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def prepared(python: str, folder: Path, torch: str) -> str:
    """Make the environment; a word on what could not be had, or nothing.

    PyTorch comes first and brings what it needs; the pins hold for all the rest.
    """
    if (folder / "ready").exists():
        return ""
    subprocess.run([python, "-m", "venv", folder], check=True)
    pip = [folder / "bin/python", "-m", "pip", "--disable-pip-version-check"]
    if subprocess.run([*pip, "install", "-qq", f"torch=={torch}"]).returncode:
        return "no build"
    own = re.findall(r"^([\w.-]+)==", said([*pip, "freeze"]), re.MULTILINE)
    own = [re.sub("[-_.]+", "-", name).lower() for name in own]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line.split("==")[0].lower() not in own]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join([*pins, f"torch=={torch}"]))
        file.flush()
        install = [*pip, "install", "-qq", "-c", file.name]
        if subprocess.run([*install, "-e", f"{ROOT}[dev]"]).returncode:
            return "the other packages cannot be had"
        if tuple(map(int, number(python).split(".")[:2])) > (3, 10):  # as in the Makefile
            subprocess.run([*install, "--no-deps", "skmatter"])
    (folder / "ready").touch()
    return ""


def said(command: list[str | Path]) -> str:
    """What a command prints."""
    return subprocess.run(command, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
