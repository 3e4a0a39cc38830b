"""laplace-torch as a worker process: one request a line on stdin, one answer a line on stdout.

The worker runs in an environment of its own and never imports ``rigidities``.
``benchmarks.rivals.laplace`` starts it as ``python -m benchmarks.rivals.laplace_worker --rows N
--width D``. It builds the same workload from the same seed, then times each request in this
process: ``bare``, ``fit <backend>`` or ``predict <backend>``, with the backends ``default``
(curvlinops) and ``backpack``.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import torch
from laplace import Laplace
from laplace.curvature import BackPackGGN
from torch import Tensor
from torch.utils.data import TensorDataset

from benchmarks.frame.timing import clocked
from benchmarks.frame.workload import Workload, workload

BACKENDS: dict[str, dict[str, Any]] = {"default": {}, "backpack": {"backend": BackPackGGN}}


class SlicedLoader:
    """The part of a loader that laplace-torch needs, without collating rows: in its favour."""

    def __init__(self, work: Workload) -> None:
        self.work = work
        self.dataset = TensorDataset(work.x, work.y)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.work.batches()


class Worker:
    """The workload and, per backend, the posterior that was fitted last."""

    def __init__(self, work: Workload) -> None:
        self.work = work
        self.fitted: dict[str, Any] = {}

    def fit(self, backend: str) -> None:
        """A fit of the last layer with the full Hessian."""
        posterior = Laplace(
            self.work.model,
            "regression",
            subset_of_weights="last_layer",
            hessian_structure="full",
            **BACKENDS[backend],
        )
        posterior.fit(SlicedLoader(self.work))
        self.fitted[backend] = posterior

    def predict(self, backend: str) -> None:
        """Predictions of all rows by the posterior fitted last."""
        for x, _ in self.work.batches():
            self.fitted[backend](x)

    def seconds(self, request: str) -> float:
        """Seconds that a request takes."""
        if request.strip() == "bare":
            return clocked(self.work.bare_pass)
        task, backend = request.split()
        if task == "fit":
            return clocked(lambda: self.fit(backend))
        if backend not in self.fitted:
            self.fit(backend)
        return clocked(lambda: self.predict(backend))


def main() -> None:
    """Answer requests until stdin ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    # Only answers go to stdout; whatever a library prints goes to stderr.
    answers = sys.stdout
    sys.stdout = sys.stderr
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    worker = Worker(workload(options.rows, width=options.width))
    packages = ("laplace-torch", "backpack-for-pytorch", "curvlinops-for-pytorch", "torch")
    print(json.dumps({name: version(name) for name in packages}), file=answers, flush=True)
    for line in sys.stdin:
        try:
            answer: dict[str, Any] = {"seconds": worker.seconds(line)}
        except Exception as error:  # the caller reports it and goes on with other tasks
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
