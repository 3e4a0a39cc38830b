"""metatrain's LLPR through its own calls: covariance, factorisation, calibration, prediction."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

import torch
from metatrain.llpr import LLPRUncertaintyModel
from metatrain.utils.data import Dataset
from torch import Tensor

from benchmarks.rivals.soap_bpnn import Network, Structures, dataset_info, energy_maps, outputs

UNCERTAINTY = "energy_uncertainty"


class Llpr(LLPRUncertaintyModel):
    """metatrain's wrapper, which also takes batches that were collated before.

    Its loader turns every system into an ASE object and all of a batch into one buffer. Where it
    gets a list of such buffers instead of a data set, nothing is left to do: in the rival's favour.
    """

    def _get_dataloader(self, datasets: Any, batch_size: int, is_distributed: bool) -> Any:
        if isinstance(datasets, Collated):
            return datasets
        return super()._get_dataloader(datasets, batch_size, is_distributed)


class Collated(list[Any]):
    """Batches as metatrain's loader makes them."""


class Rival:
    """metatrain's LLPR of one model, with the data in metatrain's form."""

    def __init__(self, network: Network, batches: Sequence[Structures]) -> None:
        self.batch_size = len(batches[0].systems)
        self.llpr = Llpr({"num_ensemble_members": {}}, dataset_info())
        self.llpr.set_wrapped_model(network.model)
        self.llpr.double().eval()
        self.datasets = self.dataset(batches)
        self.collated = self.collate(self.datasets)

    @staticmethod
    def dataset(batches: Sequence[Structures]) -> list[Dataset]:
        """Systems, with the neighbour lists they have, and energies."""
        systems = [system for batch in batches for system in batch.systems]
        energies = energy_maps(torch.cat([batch.y for batch in batches]))
        return [Dataset.from_dict({"system": systems, "energy": energies})]

    def collate(self, datasets: list[Dataset]) -> Collated:
        """All batches that the loader gives."""
        return Collated(self.llpr._get_dataloader(datasets, self.batch_size, False))

    def fit(self, data: Any, ridge: float | None) -> None:
        """Covariance and Cholesky factor; `ridge=None` is its default, the least that factors."""
        self.covariance.zero_()  # otherwise the covariance would be added to the last one
        self.llpr.compute_covariance(data, self.batch_size, False)
        self.llpr.compute_cholesky_decomposition(ridge)

    def calibrate(self, batches: Sequence[Structures]) -> float:
        """The multiplier of the greatest likelihood, which is returned."""
        valid = self.collate(self.dataset(batches))
        self.llpr.calibrate(valid, self.batch_size, False, "squared_residuals")
        return float(self.llpr._get_multiplier(UNCERTAINTY))

    def std(self, batches: Sequence[Structures]) -> Tensor:
        """Standard deviations, (N, 1); the energies come with them."""
        requested = outputs("energy", UNCERTAINTY)
        with torch.no_grad():
            maps = [self.llpr(batch.systems, requested)[UNCERTAINTY] for batch in batches]
        return torch.cat([uncertainty.block().values for uncertainty in maps])

    @property
    def covariance(self) -> Tensor:
        """The buffer that `fit` adds to."""
        return self.llpr._get_covariance(UNCERTAINTY)


class Jitters(logging.Handler):
    """The ridges that metatrain chooses by itself, which it tells its log alone."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.ridges: list[float] = []

    def emit(self, record: logging.LogRecord) -> None:
        match = re.search(r"regularization parameter of (\S+)", record.getMessage())
        if match:
            self.ridges.append(float(match.group(1)))

    def __enter__(self) -> Jitters:
        root = logging.getLogger()
        self.level_before = root.level
        root.addHandler(self)
        root.setLevel(logging.INFO)
        return self

    def __exit__(self, *error: object) -> None:
        root = logging.getLogger()
        root.removeHandler(self)
        root.setLevel(self.level_before)
