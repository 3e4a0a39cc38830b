"""What several test files share: a small trained net and its data; and who needs a browser."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import browser

LEFT_OUT = pytest.StashKey[int]()


class Trained(NamedTuple):
    model: nn.Module
    train: tuple[Tensor, Tensor]
    valid: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def data(rows: int, targets: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, generator=generator)
    noise = torch.randn(rows, targets, generator=generator)
    y = torch.sin(x[:, :1] + torch.arange(targets)) + (0.05 + 0.2 * x[:, 1:2].abs()) * noise
    return x, y


def trained(targets: int = 1, seed: int = 0, steps: int = 150) -> Trained:
    """A 4-24-24-K net after a short training on a few hundred rows."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Linear(4, 24), nn.SiLU(), nn.Linear(24, 24), nn.SiLU(), nn.Linear(24, targets)
        )
    sets = [data(rows, targets, seed + i) for i, rows in enumerate((300, 200, 200))]
    x, y = sets[0]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    model.zero_grad(set_to_none=True)
    return Trained(model, *sets)


@pytest.fixture
def net() -> Trained:
    return trained()


@pytest.fixture
def net3() -> Trained:
    return trained(targets=3)


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
