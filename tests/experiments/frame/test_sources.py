"""Digests of code: every change of code counts, other words do not; and who may import whom."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.frame import sources

WORK = """\
\"\"\"Work.\"\"\"

from torch import nn

WIDTH = 3
\"\"\"Of a network.\"\"\"


class Sizes:
    \"\"\"Sizes.\"\"\"

    columns: int = 2


def work(n: int, rate: float = 0.1) -> float:
    \"\"\"Work.\"\"\"
    if n < 0:
        raise ValueError(n)
    return rate * n + WIDTH  # a comment
"""


@pytest.fixture
def digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Digests of the experiments and the library as they stand in a folder of files."""
    monkeypatch.setattr(sources, "EXPERIMENTS", tmp_path / "experiments")
    monkeypatch.setattr(sources, "LIBRARY", tmp_path / "library")

    def digests(files: dict[str, str]) -> dict[str, str]:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        forget()
        result = sources.digests("toy")
        for name in files:
            (tmp_path / name).unlink()
        return result

    def forget() -> None:
        sources.digests.cache_clear()
        sources.experiments_digest.cache_clear()

    yield digests
    forget()


BEFORE = {
    "library/gram.py": "x = 1",
    "library/last_layer/fit.py": "x = 1",
    "library/cli/demo.py": "x = 1",
    "library/plots.py": "x = 1",
    "experiments/data/uci.py": "x = 1",
    "experiments/frame/jobs.py": "x = 1",
    "experiments/frame/outcome.py": "x = 1",
    "experiments/studies/toy/work.py": WORK,
    "experiments/studies/toy/page.py": "x = 1",
    "experiments/studies/uci/work.py": "x = 1",
}


def changed(old: str, new: str) -> dict[str, str]:
    assert old in WORK
    return BEFORE | {"experiments/studies/toy/work.py": WORK.replace(old, new)}


UNSEEN = {
    "a docstring": changed('"""Work."""', '"""Other words."""'),
    "words on a constant": changed('"""Of a network."""', '"""Of the network."""'),
    "a docstring more": changed("    columns", '    """And more."""\n    columns'),
    "a comment": changed("  # a comment", ""),
    "layout": changed("rate * n + WIDTH", "(\n        rate * n + WIDTH\n    )"),
    "the page": BEFORE | {"experiments/studies/toy/page.py": "x = 2"},
    "another study": BEFORE | {"experiments/studies/uci/work.py": "x = 2"},
    "the frame": BEFORE | {"experiments/frame/jobs.py": "x = 2"},
    "what the library shows": BEFORE | {"library/cli/demo.py": "x = 2", "library/plots.py": "x"},
}


@pytest.mark.parametrize("files", UNSEEN.values(), ids=UNSEEN)
def test_words_and_what_only_shows_do_not_count(files: dict[str, str], digest) -> None:
    assert digest(files) == digest(BEFORE)


SEEN = {
    "a constant": (changed("WIDTH = 3", "WIDTH = 4"), "study"),
    "a default": (changed("rate: float = 0.1", "rate: float = 0.2"), "study"),
    "a field's default": (changed("columns: int = 2", "columns: int = 3"), "study"),
    "a condition": (changed("n < 0", "n <= 0"), "study"),
    "an import": (changed("from torch import", "from torch.ao import"), "study"),
    "a file more": (BEFORE | {"experiments/studies/toy/extra.py": "x = 1"}, "study"),
    "a shared folder": (BEFORE | {"experiments/data/uci.py": "x = 2"}, "study"),
    "means over repetitions": (BEFORE | {"experiments/frame/outcome.py": "x = 2"}, "study"),
    "the library": (BEFORE | {"library/gram.py": "x = 2"}, "library"),
    "a room of the library": (BEFORE | {"library/last_layer/fit.py": "x = 2"}, "library"),
}


@pytest.mark.parametrize(("files", "owner"), SEEN.values(), ids=SEEN)
def test_whatever_may_change_a_result_counts(files: dict[str, str], owner: str, digest) -> None:
    before, after = digest(BEFORE), digest(files)
    assert {name for name in before if before[name] != after[name]} == {owner}


def test_the_library_that_computes_is_where_the_digest_looks() -> None:
    for name in ("posterior/gram.py", "losses.py", "readout/search.py"):
        assert (sources.LIBRARY / name).is_file()
    assert all((sources.LIBRARY / name).exists() for name in sources.SHOWS_ONLY[2:])
    assert all((sources.EXPERIMENTS / name).exists() for name in sources.SHARED)


# --- who may import whom, so that a digest holds all that a study uses ----------------------------


def imported(file: Path) -> set[str]:
    """The modules of the experiments that a file imports anywhere."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name for name in names if name.startswith("experiments.")}


STUDIES = sources.EXPERIMENTS / "studies"
STUDY_FILES = sorted(STUDIES.glob("*/**/*.py"))
SHARED_FILES = [
    file
    for place in sources.SHARED
    for file in sorted(sources.EXPERIMENTS.rglob("*.py"))
    if file.relative_to(sources.EXPERIMENTS).as_posix().startswith(place)
]


def test_no_study_imports_another() -> None:
    for file in STUDY_FILES:
        study = file.relative_to(STUDIES).parts[0]
        studies = {name.split(".")[2] for name in imported(file) if ".studies." in name}
        assert studies <= {study}, file


def test_what_studies_share_imports_no_study() -> None:
    for file in SHARED_FILES:
        assert not any(".studies" in name for name in imported(file)), file


def test_what_computes_imports_no_page() -> None:
    """Otherwise a part would depend on code that no digest holds."""
    shown = ("page", "figures", "parity", "run", "wording")
    for file in STUDY_FILES:
        if file.name == "work.py":
            assert not {name.split(".")[-1] for name in imported(file)} & set(shown), file
