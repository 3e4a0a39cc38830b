"""What several test files share: a small trained net and its data; other seeds; the browser.

It also cuts the suite in two. `make test` runs the short part, which guards every room and door in
minutes; `make test-all` runs the long part, which is everything else. Together they are what a
plain `pytest` runs.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import browser
from tests.support.nets import Trained, trained

LEFT_OUT = pytest.StashKey[int]()


@pytest.fixture
def net() -> Trained:
    return trained()


@pytest.fixture(autouse=True)
def _no_figure_stays_open() -> Iterator[None]:
    """Figures are global: what one test leaves open, another of the same process would find."""
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


@pytest.fixture
def plain_torch() -> Iterator[None]:
    """For pages and examples, which may set the default precision and the seed."""
    before = torch.get_default_dtype()
    with torch.random.fork_rng():
        yield
    torch.set_default_dtype(before)


@pytest.fixture
def net3() -> Trained:
    return trained(targets=3)


# --- a short part and a long part of the suite --------------------------------------------------
#
# The short part has every test function but those of the folders below and those marked `thorough`
# or `browser`; of a parametrised function it takes the first and the last case. The long part is
# the complement, so that no test can be in neither.

PARTS = ("short", "long")
LONG_FOLDERS = tuple(Path(__file__).parent / name for name in ("experiments", "benchmarks"))
LEFT_TO_THE_LONG_PART = ("thorough", "browser", "slow", "gpu")
"""Marks of tests that are in the long part, or that neither part runs."""

SHORT_CASES = 2
"""How many cases of a parametrised test the short part takes: the first and the last."""


def in_long_folder(path: Path) -> bool:
    return any(path.is_relative_to(folder) for folder in LONG_FOLDERS)


def short_part(items: list[pytest.Item]) -> set[pytest.Item]:
    """The tests of the short part, of all that were collected."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        marked = any(item.get_closest_marker(name) for name in LEFT_TO_THE_LONG_PART)
        if not marked and not in_long_folder(item.path):
            function = item.nodeid.partition("[")[0]
            cases[function].append(item)
    chosen: set[pytest.Item] = set()
    for function_cases in cases.values():
        last = len(function_cases) - 1
        steps = SHORT_CASES - 1
        chosen.update(function_cases[last * step // steps] for step in range(SHORT_CASES))
    return chosen


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The short part does not even import what it leaves out whole."""
    if config.getoption("--part") == "short" and in_long_folder(collection_path):
        return True
    return None


# --- other seeds ----------------------------------------------------------------------------------
#
# From one seed, processors and numbers of threads train different nets. Other seeds train nets that
# differ more: what a test asks of a net, it must ask of those too.


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "added to all seeds of torch: other draws, other nets, which the tests must bear"
    parser.addoption("--moved-seeds", type=int, default=0, metavar="N", help=text)
    text = "the short part of the suite, or the long one; by default both"
    parser.addoption("--part", choices=PARTS, help=text)


def pytest_configure(config: pytest.Config) -> None:
    moved: int = config.getoption("--moved-seeds")
    seeded, plain = torch.manual_seed, torch.Generator

    class Generator(plain):  # type: ignore[misc,valid-type]
        def manual_seed(self, seed: int) -> torch.Generator:
            return super().manual_seed(seed + moved)

    if moved:
        torch.manual_seed = lambda seed: seeded(seed + moved)
        torch.Generator = Generator


# --- the browser ----------------------------------------------------------------------------------
#
# Where there is no browser, its tests are left out, and the summary says how many. In CI they stay,
# and fail. Workers of xdist collect, the main process sums up.


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = config.getoption("--part")
    if part is not None:
        short = short_part(items)
        deselect(config, items, {item for item in items if (item in short) != (part == "short")})
    if not browser.executable() and not browser.required():
        without = {item for item in items if item.get_closest_marker("browser")}
        config.stash[LEFT_OUT] = len(without)
        deselect(config, items, without)


def deselect(config: pytest.Config, items: list[pytest.Item], unwanted: set[pytest.Item]) -> None:
    if unwanted:
        config.hook.pytest_deselected(items=[item for item in items if item in unwanted])
        items[:] = [item for item in items if item not in unwanted]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    left_out = getattr(node, "workeroutput", {}).get("left_out", 0)  # all workers collect the same
    if left_out:
        node.config.stash[LEFT_OUT] = left_out


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if left_out := config.stash.get(LEFT_OUT, 0):
        terminalreporter.section("browser")
        terminalreporter.line(f"{left_out} tests left out: {browser.MISSING}")
