"""What several test files share: a small trained net and its data; other seeds; the browser."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support import browser
from tests.support.nets import Trained, trained

LEFT_OUT = pytest.StashKey[int]()


@pytest.fixture
def net() -> Trained:
    return trained()


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


# From one seed, processors and numbers of threads train different nets. Other seeds train nets that
# differ more: what a test asks of a net, it must ask of those too.


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "added to all seeds of torch: other draws, other nets, which the tests must bear"
    parser.addoption("--moved-seeds", type=int, default=0, metavar="N", help=text)


def pytest_configure(config: pytest.Config) -> None:
    moved: int = config.getoption("--moved-seeds")
    seeded, plain = torch.manual_seed, torch.Generator

    class Generator(plain):  # type: ignore[misc,valid-type]
        def manual_seed(self, seed: int) -> torch.Generator:
            return super().manual_seed(seed + moved)

    if moved:
        torch.manual_seed = lambda seed: seeded(seed + moved)
        torch.Generator = Generator


# Where there is no browser, its tests are left out, and the summary says how many. In CI they stay,
# and fail. Workers of xdist collect, the main process sums up.


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if browser.executable() or browser.required():
        return
    without = [item for item in items if item.get_closest_marker("browser")]
    if without:
        config.stash[LEFT_OUT] = len(without)
        config.hook.pytest_deselected(items=without)
        items[:] = [item for item in items if item not in without]


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
