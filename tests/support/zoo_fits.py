"""Fits of the zoo's models."""

import warnings
from collections.abc import Iterable
from typing import Any

import rigidities as rg
from tests.support import zoo


def fitted_to(case: zoo.Case, batches: Iterable[Any], **options: Any) -> rg.LastLayerRigidity:
    """The case's model, fitted as the case asks for; that its tail is not linear is no news."""
    with warnings.catch_warnings():
        if case.outcome in zoo.WARNINGS:
            warnings.filterwarnings("ignore", message=f".*{zoo.WARNINGS[case.outcome]}")
        return rg.LastLayerRigidity(case.model, **case.options).fit(batches, **options)
