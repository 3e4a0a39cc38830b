"""Error bars of derivatives by the inputs against a loop over last-layer members.

The loop draws members of the last layer, differentiates each by a backward pass of its own and
takes the standard deviation. `gradient` has the exact bars; they are compared with those of the
brute-force Jacobian.
"""

from __future__ import annotations

import torch
from torch import Tensor

import rigidities as rg
from benchmarks.frame.results import Row, at_most, for_information
from benchmarks.frame.timing import Task, interleaved
from benchmarks.frame.workload import Workload, workload
from benchmarks.speed import calibrated

MEMBERS = 64
INPUTS = 30
UNIT = f"loops of {MEMBERS} backward passes"


def run(*, quick: bool = False) -> list[Row]:
    """Width 256 and 30 inputs, a batch of 1024."""
    rows, width, rounds = (1_200, 32, 2) if quick else (20_000, 256, 15)
    work = workload(rows, width=width, inputs=INPUTS)
    uq = calibrated(work)
    x = work.x[: work.batch_size]
    direction = torch.ones(INPUTS)
    tasks: dict[str, Task] = {
        "loop": lambda: looped(work, uq, x),
        "gradient": lambda: uq.gradient(x),
        "along": lambda: uq.gradient(x, along=direction),
        "members": lambda: uq.gradient(x, members=MEMBERS),
    }
    timings = interleaved(tasks, rounds=rounds)
    size = f"{len(x)} rows, width {width}, {INPUTS} inputs"
    return [
        at_most(f"gradient(x), {size}", timings.ratio("gradient", "loop"), 0.7, UNIT),
        at_most(f"gradient(x, along=v), {size}", timings.ratio("along", "loop"), 0.2, UNIT),
        for_information(
            f"gradient(x, members={MEMBERS}), {size}", timings.ratio("members", "loop"), UNIT
        ),
        *accuracy(work),
    ]


def looped(work: Workload, uq: rg.LastLayerRigidity, x: Tensor) -> Tensor:
    """Standard deviation over members, each differentiated by a backward pass of its own."""
    generator = torch.Generator().manual_seed(0)
    deviations = uq.posterior.sample(MEMBERS, generator)[:, 0].to(x.dtype)
    x = x.clone().requires_grad_()
    hidden = work.model[:-1](x)
    members = hidden @ deviations[:, :-1].mT + deviations[:, -1]
    gradients = [
        torch.autograd.grad(members[:, i].sum(), x, retain_graph=True)[0] for i in range(MEMBERS)
    ]
    return torch.stack(gradients).std(0)


def accuracy(work: Workload) -> list[Row]:
    """Largest relative error of the variance against the brute-force Jacobian, in float64."""
    double = Workload(work.model.double(), work.x.double(), work.y.double(), work.batch_size)
    uq = calibrated(double)
    x = double.x[:8]
    variance = uq.gradient(x).variance
    members_variance = looped(double, uq, x).square()
    # Derivatives of the features by the inputs, (8, inputs, width); that of the bias is zero.
    jacobian = torch.autograd.functional.jacobian(double.model[:-1], x)
    slopes = torch.stack([jacobian[i, :, i].mT for i in range(len(x))])
    slopes = torch.cat([slopes, slopes.new_zeros(*slopes.shape[:2], 1)], dim=-1)
    matrix = uq.gram.matrix + uq.ridge * torch.eye(uq.gram.width, dtype=torch.float64)
    quadratic = torch.einsum("nid,nid->ni", slopes, torch.linalg.solve(matrix, slopes.mT).mT)
    expected = uq.scale.square() * quadratic
    error = float(((variance - expected).abs() / expected).max())
    sampled = float(((members_variance / expected).sqrt() - 1).square().mean().sqrt())
    return [
        at_most("gradient(x).variance against the brute-force Jacobian, float64", error, 1e-8),
        for_information(f"root mean square error of the std of {MEMBERS} members", sampled),
    ]
