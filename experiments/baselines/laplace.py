"""Last-layer Laplace approximation by laplace-torch, on nets that are trained already.

The posterior of the last layer's weights with a full Hessian; prior precision and observation noise
maximise the log marginal likelihood of the training rows, by gradient steps from one, as the
package's documentation suggests. The predictive variance is that of the function plus the noise's.

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
STEPS, RATE = 100, 0.1
BATCH = 4096


def installed() -> bool:
    """Whether laplace-torch can be imported."""
    return find_spec("laplace") is not None


def fitted(net: nn.Module, train: tuple[Tensor, Tensor]) -> Any:
    """laplace-torch's posterior of a net, its two numbers chosen.

    Args:
        net: its last module is a linear layer.
        train: x (n, d) and y (n, 1).

    Raises:
        ImportError: with the remedy.
    """
    options: dict[str, Any] = {"subset_of_weights": "last_layer", "hessian_structure": "full"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages' own, on import too
        try:
            from laplace import Laplace
        except ImportError as error:
            raise ImportError(f"laplace-torch cannot be imported ({error}): {REMEDY}") from error
        if find_spec("backpack") is not None:
            from laplace.curvature import BackPackGGN

            options["backend"] = BackPackGGN
        # In float32 the factorisation fails on naval.
        rows = TensorDataset(*(part.double() for part in train))
        posterior = Laplace(copy.deepcopy(net).double(), "regression", **options)
        posterior.fit(DataLoader(rows, batch_size=BATCH))
        _choose(posterior)
    return posterior


def bars(posterior: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation, (n,)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mean, variance = posterior(x.double())
    total = variance.flatten().double() + float(posterior.sigma_noise) ** 2
    return mean.flatten().detach().double(), total.sqrt().detach()


def chosen(posterior: Any) -> dict[str, float]:
    """The two numbers."""
    return {
        "prior_precision": float(posterior.prior_precision),
        "noise_variance": float(posterior.sigma_noise) ** 2,
    }


def _choose(posterior: Any) -> None:
    """Prior precision and noise by the marginal likelihood; they stay in the posterior."""
    prior, noise = (torch.zeros(1, dtype=torch.float64, requires_grad=True) for _ in range(2))
    optimiser = torch.optim.Adam([prior, noise], lr=RATE)
    for _ in range(STEPS):
        optimiser.zero_grad()
        (-posterior.log_marginal_likelihood(prior.exp(), noise.exp())).backward()
        optimiser.step()
    posterior.prior_precision = prior.detach().exp()
    posterior.sigma_noise = noise.detach().exp()
