"""Last-layer Laplace approximation by laplace-torch, on networks that are trained already.

The posterior of the last layer's weights has a full Hessian. Prior precision and observation noise
maximise the log marginal likelihood of the training rows, by gradient steps from one, as the
package's documentation suggests. The predictive variance is that of the function plus that of the
noise.

References:
    Daxberger et al., "Laplace redux: effortless Bayesian deep learning", NeurIPS 2021.
"""

from __future__ import annotations

import copy
import warnings
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

REMEDY = "pip install laplace-torch backpack-for-pytorch"

STEPS = 100
"""Gradient steps on prior precision and noise."""

RATE = 0.1
"""Their learning rate."""

BATCH = 4096
"""Rows of a batch of the fit."""


def installed() -> bool:
    """Whether laplace-torch can be imported."""
    return find_spec("laplace") is not None


def fitted(net: nn.Module, train: tuple[Tensor, Tensor]) -> Any:
    """laplace-torch's posterior of a network, with prior precision and noise chosen.

    Args:
        net: A network whose last module is a linear layer.
        train: Training rows, x (n, d) and y (n, 1).

    Raises:
        ImportError: laplace-torch cannot be imported; the message has the remedy.
    """
    options: dict[str, Any] = {"subset_of_weights": "last_layer", "hessian_structure": "full"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the packages warn, on import too
        try:
            from laplace import Laplace
        except ImportError as error:
            raise ImportError(f"laplace-torch cannot be imported ({error}): {REMEDY}") from error
        if find_spec("backpack") is not None:
            from laplace.curvature import BackPackGGN

            options["backend"] = BackPackGGN
        # In float32 the factorisation fails on naval.
        x, y = train
        rows = TensorDataset(x.double(), y.double())
        posterior = Laplace(copy.deepcopy(net).double(), "regression", **options)
        posterior.fit(DataLoader(rows, batch_size=BATCH))
        _choose(posterior)
    return posterior


def bars(posterior: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Predictive mean and standard deviation of rows, (n,) each."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mean, variance = posterior(x.double())
    total = variance.flatten().double() + float(posterior.sigma_noise) ** 2
    return mean.flatten().detach().double(), total.sqrt().detach()


def chosen(posterior: Any) -> dict[str, float]:
    """The prior precision and the variance of the noise that were chosen."""
    return {
        "prior_precision": float(posterior.prior_precision),
        "noise_variance": float(posterior.sigma_noise) ** 2,
    }


def _choose(posterior: Any) -> None:
    """Set prior precision and noise of a posterior by the marginal likelihood."""
    log_precision = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    log_noise = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.Adam([log_precision, log_noise], lr=RATE)
    for _ in range(STEPS):
        optimiser.zero_grad()
        loss = -posterior.log_marginal_likelihood(log_precision.exp(), log_noise.exp())
        loss.backward()
        optimiser.step()
    posterior.prior_precision = log_precision.detach().exp()
    posterior.sigma_noise = log_noise.detach().exp()
