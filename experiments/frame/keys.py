"""Names of kept files: what was asked and which code answered, ``<name>-<question>-<code>``.

Files of other code answer the same question. ``--rekey`` renames one where the user asserts that
today's code would answer the same; the file goes on to tell the code that made it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from datetime import datetime
from pathlib import Path
from typing import Any

from experiments.frame.outcome import plain

VARIABLE = "RIGIDITIES_REKEY"
WAYS = ("same", "named")
"""Only what was kept for the same question; or also a file that does not tell its question."""
MARK = ", re-keyed"
"""Of the machine in results, where other code computed them than the name of the file says."""


def path(folder: Path, name: str, question: Any, code: str, suffix: str) -> Path:
    """Where an answer lies: another question or other code is another file."""
    readable = "".join(c if c.isalnum() else "-" for c in name)
    asked = json.dumps([name, plain(question)], sort_keys=True)
    return folder / f"{readable}-{_short(asked)}-{_short(code)}{suffix}"


def rekeyed(path: Path) -> bool:
    """Rename a file of other code to this one, if the user wants it and there is none yet."""
    way = os.environ.get(VARIABLE)
    if not way or path.exists():
        return False
    name, question, _ = path.stem.rsplit("-", 2)
    pattern = re.compile(re.escape(name) + r"(-[0-9a-f]{16})?-[0-9a-f]{16}")
    kept = {f: pattern.fullmatch(f.stem) for f in path.parent.glob(f"{name}-*{path.suffix}")}
    same = [file for file, match in kept.items() if match and match[1] == f"-{question}"]
    silent = [file for file, match in kept.items() if match and match[1] is None]
    other = len([match for match in kept.values() if match]) - len(same) - len(silent)
    if not same and way == "named" and len(silent) == 1:
        same = silent
    if same:
        max(same, key=lambda file: file.stat().st_mtime).rename(path)
    elif other or silent:
        print(f"  {name}: not re-keyed. {_refusal(other, len(silent))}")
    return bool(same)


def origin(path: Path, machine: str) -> str:
    """When and on what a file was made: renaming does not change it."""
    made = datetime.fromtimestamp(path.stat().st_mtime)
    return f"{made:%Y-%m-%d} on {machine.removesuffix(MARK)}"


def mark(path: Path, code: str | None) -> str:
    """Nothing where the file's own code is that of its name."""
    return "" if code is not None and path.stem.endswith(_short(code)) else MARK


def _refusal(other: int, silent: int) -> str:
    told = [f"{other} kept with other arguments or data."] * bool(other)
    if silent:
        remedy = "--rekey named takes it" if silent == 1 else "delete all but the right one"
        told.append(f"{silent} kept that cannot tell arguments and data: {remedy}.")
    return " ".join(told)


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
