"""Fits of the zoo's models."""

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

import rigidities as rg
from tests.support import oracle, zoo
from tests.support.readouts import has_one_weight_vector


def fitted_to(case: zoo.Case, batches: Iterable[Any], **options: Any) -> rg.LastLayerRigidity:
    """The case's model, fitted as the case asks for; that its tail is not linear is no news."""
    with warnings.catch_warnings():
        if case.outcome in zoo.WARNINGS:
            warnings.filterwarnings("ignore", message=f".*{zoo.WARNINGS[case.outcome]}")
        return rg.LastLayerRigidity(case.model, **case.options).fit(batches, **options)


def row_weights(uq: rg.LastLayerRigidity, cases: Iterable[zoo.Case]) -> Tensor:
    """The weight of every output of some training batches, in the order of a dense Jacobian's rows.

    Where one weight vector serves several targets, each target counts in its own unit.
    """
    cases = list(cases)
    if not has_one_weight_vector(uq):
        return torch.ones(sum(case.target.numel() for case in cases), dtype=torch.float64)
    targets = torch.cat([case.target.reshape(-1, len(uq.scale)) for case in cases])
    return oracle.own_units(targets).repeat(len(targets))
