"""The digest of code: blind to words and places, and to nothing that could change a result."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from experiments.frame import sources

WORK = """\
\"\"\"Work.\"\"\"

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from mine import inner, steps as stairs
from mine.inner import Slope
from torch import nn

if TYPE_CHECKING:
    from pathlib import Path

WIDTH = 3
WIDTH += 1
\"\"\"Of a net.\"\"\"


@dataclass
class Sizes:
    rows: int
    columns: int = 2


def work(n: int, rate: float = 0.1) -> float:
    \"\"\"Work.\"\"\"
    if n < 0:
        raise ValueError(f"{n} is too small")
    held = Sizes(n).columns  # a comment
    return rate * _helped(n) + stairs.height(WIDTH) + Slope()(held) + nn.functional.relu(torch.e)


def _helped(n):
    return inner.shifted(n)


def unused():
    return 1
"""
INNER = """\
from mine.steps import height


class Slope:
    def __call__(self, x):
        return 2 * _helped(x)


def shifted(n):
    return n + 1


def _helped(n):
    return n - 1
"""
STEPS = """\
TABLE = {}


def height(n):
    return TABLE.get(n, n)


TABLE[1] = 2
"""
BEFORE = {"work.py": WORK, "inner.py": INNER, "steps.py": STEPS, "__init__.py": ""}
Digest = Callable[[dict[str, str]], str]


@pytest.fixture
def digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Digest]:
    """Of the work in a package of these files, without the library."""
    package = tmp_path / "mine"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sources.OURS, "mine", package)

    def found(files: dict[str, str], work: str = "mine.work:work") -> str:
        for name, text in files.items():
            (package / name).parent.mkdir(parents=True, exist_ok=True)
            (package / name).write_text(text)
        forget()
        try:
            return sources.digest(work, library=False)
        finally:
            forget()
            for name in files:
                (package / name).unlink()

    def forget() -> None:
        for one in (sources.digest, sources._meant, sources._parsed):
            one.cache_clear()
        for name in [name for name in sys.modules if name.split(".")[0] == "mine"]:
            del sys.modules[name]
        importlib.invalidate_caches()

    yield found
    forget()


def changed(old: str, new: str, name: str = "work.py") -> dict[str, str]:
    assert old in BEFORE[name]
    return {**BEFORE, name: BEFORE[name].replace(old, new)}


def moved() -> dict[str, str]:
    """The helper in a folder of its own, under the same name."""
    work = WORK.replace("from mine import inner,", "from mine.room import inner\nfrom mine import")
    work = work.replace("from mine.inner", "from mine.room.inner")
    kept = {name: text for name, text in BEFORE.items() if name != "inner.py"}
    return {**kept, "work.py": work, "room/__init__.py": "", "room/inner.py": INNER}


def merged() -> dict[str, str]:
    """Steps inside the file of the work, beside something that nothing uses."""
    work = WORK.replace(", steps as stairs", "").replace("stairs.height", "height")
    return {**BEFORE, "work.py": work + STEPS + "\n\ndef page():\n    return 'text'\n"}


def reordered() -> dict[str, str]:
    head, tail = WORK.split("def _helped(n):")
    body = "def _helped(n):" + tail
    place = head.index("@dataclass")
    return {**BEFORE, "work.py": head[:place] + body + "\n\n" + head[place:]}


def passed_on() -> dict[str, str]:
    """The slope taken from the package, which has it from its module."""
    return {
        **changed("mine.inner import", "mine import"),
        "__init__.py": "from .inner import Slope",
    }


UNSEEN = {
    "a docstring": changed('"""Work."""', '"""Other words."""'),
    "words on a constant": changed('"""Of a net."""', '"""Of the net."""\n\n# and a comment'),
    "a comment": changed("  # a comment", ""),
    "what an error says": changed("{n} is too small", "Expected a size, got {n}"),
    "layout": changed("rate * _helped(n)", "(\n        rate * _helped(n)\n    )"),
    "annotations": changed("n: int, rate: float = 0.1) -> float", "n, rate=0.1) -> 'Path'"),
    "imports for types": changed("import Path", "import PurePath"),
    "another way to import": changed("from torch import nn", "import torch.nn as nn"),
    "a longer path": changed("nn.functional.relu", "torch.nn.functional.relu"),
    "an import more": changed("from torch", "from mine.steps import height\nfrom torch"),
    "another alias": changed("stairs", "way"),
    "what nothing uses": changed("return 1", "return 2"),
    "a list of names": changed("def unused", "__all__ = ['work']\n\n\ndef unused"),
    "a moved file": moved(),
    "merged files": merged(),
    "another order": reordered(),
    "through the package": passed_on(),
}


@pytest.mark.parametrize("files", UNSEEN.values(), ids=UNSEEN)
def test_words_places_and_what_is_not_used_do_not_count(files, digest) -> None:
    assert digest(files) == digest(BEFORE)


SEEN = {
    "a constant": changed("WIDTH = 3", "WIDTH = 4"),
    "a constant made later": changed("WIDTH += 1", "WIDTH += 2"),
    "a default": changed("rate: float = 0.1", "rate: float = 0.2"),
    "a field's default": changed("columns: int = 2", "columns: int = 3"),
    "a field": changed("rows: int\n", "lines: int\n"),
    "a condition": changed("n < 0", "n <= 0"),
    "a kind of error": changed("raise ValueError", "raise TypeError"),
    "an argument": changed("Slope()(held)", "Slope()(n)"),
    "another library": changed("from torch import nn", "from torch.ao import nn"),
    "its other function": changed("nn.functional.relu", "nn.functional.gelu"),
    "code of another file": changed("n + 1", "n + 2", "inner.py"),
    "a helper of a helper": changed("n - 1", "n - 2", "inner.py"),
    "an effect": changed("TABLE[1] = 2", "TABLE[1] = 3", "steps.py"),
    "a decorator": changed("@dataclass\n", "@dataclass(frozen=True)\n"),
    "a renamed function": changed("_helped", "_aided"),
    "a helper of elsewhere": changed(
        "def _helped(n):\n    return inner.shifted(n)", "from mine.inner import _helped"
    ),
}


@pytest.mark.parametrize("files", SEEN.values(), ids=SEEN)
def test_whatever_may_change_a_result_counts(files: dict[str, str], digest: Digest) -> None:
    assert digest(files) != digest(BEFORE)


def test_a_name_that_means_another_definition_of_the_same_name_counts(digest: Digest) -> None:
    """The same definitions are reached, and their texts are the same."""
    first = {
        "__init__.py": "",
        "a.py": "def f():\n    return 1\n",
        "b.py": "def f():\n    return 2\n",
        "work.py": "from mine.a import f\nfrom mine import b\n\n\ndef work():\n"
        "    return 3 * one(), two()\n\n\ndef one():\n    return f()\n\n\ndef two():\n"
        "    return b.f()\n",
    }
    text = first["work.py"].replace("mine.a", "mine.b").replace("import b", "import a")
    second = {**first, "work.py": text.replace("b.f", "a.f")}
    assert re.sub("[ab]", "", second["work.py"]) == re.sub("[ab]", "", first["work.py"])
    assert digest(first) != digest(second)


def test_the_work_itself_counts_where_two_use_each_other(digest: Digest) -> None:
    text = "def one(n):\n    return two(n)\n\n\ndef two(n):\n    return one(n)\n"
    files = {"__init__.py": "", "work.py": text}
    assert digest(files, "mine.work:one") != digest(files, "mine.work:two")


def test_a_moved_work_keeps_its_digest(digest: Digest) -> None:
    files = {name: text for name, text in BEFORE.items() if name != "work.py"}
    there = {**files, "place/work_of_all.py": WORK, "place/__init__.py": ""}
    assert digest(there, "mine.place.work_of_all:work") == digest(BEFORE)


def test_work_that_no_file_defines_is_refused(digest: Digest) -> None:
    with pytest.raises(ImportError, match=r"that mine.work defines, got 'absent'. Write it there"):
        digest(BEFORE, "mine.work:absent")


def test_the_library_counts_only_where_something_of_it_is_used() -> None:
    """A judge of error bars uses it; a baseline that trains and predicts by itself does not."""
    assert sources.leans("experiments.judging.error_bars:fitted")
    assert sources.leans("experiments.judging.stacks:judged")  # through another
    assert not sources.leans("experiments.baselines.deep_ensemble:trained")
    assert not sources.leans("experiments.training.descent:trained")


def test_every_name_of_ours_that_a_study_uses_is_found() -> None:
    """Otherwise a change behind the name would not be seen."""
    lost = {
        (one.file.name, file.name, name)
        for module in ("experiments.studies.uci.work", "experiments.studies.qm9.work")
        for one in sources.reached(module)
        for file, name in one.used
        if not sources._meant(file, name) and not name.startswith("__")
    }
    assert lost == set()
