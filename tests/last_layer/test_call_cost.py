"""What one call costs: operations counted where they are dispatched, and what is imported."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import rigidities as rg
from tests.support.operations import Operations
from tests.support.tensors import close


def calibrated(targets: int = 1, method: str = "full") -> tuple[rg.LastLayerRigidity, torch.Tensor]:
    """Of an 8-50-1 net whose noise follows an input, by 300 rows; and rows to call it with."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(600, 8, generator=generator)
    noise = (0.1 + 0.2 * x[:, 1:2].abs()) * torch.randn(600, targets, generator=generator)
    y = x[:, :1].sin() + noise
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 50), nn.Tanh(), nn.Linear(50, targets))
    uq = rg.LastLayerRigidity(model).fit((x[:300], y[:300]))
    uq.calibrate((x[300:], y[300:]), method=method)
    return uq, x[:4].clone()


def operations(module: nn.Module, x: torch.Tensor) -> int:
    """Of a later call, without gradients."""
    with torch.no_grad():
        module(x)
        with Operations() as counted:
            module(x)
    return len(counted.names)


@pytest.mark.parametrize(
    ("method", "called", "frozen"),
    [("paper", 12, 8), ("full", 48, 50)],
)
def test_a_call_takes_few_operations(method, called, frozen):
    uq, x = calibrated(method=method)
    assert operations(uq.model, x) == 5  # of the bare model, two of them views
    assert operations(uq, x) <= called
    assert operations(uq.freeze(), x) <= frozen


@pytest.mark.thorough
def test_several_targets_take_hardly_more():
    uq, x = calibrated(targets=3)
    assert operations(uq, x) <= 55
    assert operations(uq.freeze(), x) <= 56


@pytest.mark.parametrize("method", ["paper", "full"])
@pytest.mark.parametrize("targets", [1, 3])
def test_a_call_a_frozen_module_and_predict_give_the_same_bars(method, targets):
    uq, x = calibrated(targets, method)
    _, std = uq(x)
    close(uq.freeze()(x)[1], std, 1e-6)
    close(uq.predict(x).std, std, 1e-6)


FIRST_CALLS = """
import sys, torch
import rigidities as rg
x = torch.randn(60, 3)
y = x.sum(1, keepdim=True)
model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
uq = rg.LastLayerRigidity(model).fit((x, y))
uq.calibrate((x, y + torch.randn(60, 1)))
uq(x)
uq.predict(x).interval()
uq.freeze()(x)
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
"""


@pytest.mark.thorough
def test_no_compiler_is_imported_by_the_first_calls():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FIRST_CALLS],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout.strip() == "[]"
