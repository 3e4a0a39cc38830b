"""What a fit says about its readout, by public names alone."""

import re
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import rigidities as rg


def fitted_on(model: nn.Module, *inputs: Any, **options: Any) -> rg.LastLayerRigidity:
    """A fit to one batch with random targets.

    Args:
        model: a model that returns one tensor.
        inputs: its inputs.
        options: keyword arguments of `LastLayerRigidity`.
    """
    with torch.no_grad():
        target = torch.randn_like(model(*inputs))
    return rg.LastLayerRigidity(model, **options).fit([(*inputs, target)])


def features_of(uq: rg.LastLayerRigidity, x: Any) -> Tensor:
    """`uq.features(x)`, whether the fit is calibrated or not."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not calibrated")
        return uq.features(x)


def filed(uq: rg.LastLayerRigidity) -> dict[str, Tensor]:
    """The tensors of the fit's file with its kept rows: sums, hashes and `rows.*`, by name."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "uq.safetensors"
        uq.save(path, probes=False, rows=True)
        return load_file(path)


def layers_of(uq: rg.LastLayerRigidity) -> list[str]:
    """The names of the readout's modules or parameters, as the summary gives them."""
    return re.findall(r"'([^']*)'", _line(uq))


def has_one_weight_vector(uq: rg.LastLayerRigidity) -> bool:
    """Whether several targets have one weight vector, as the summary says."""
    return "with one weight vector" in _line(uq)


def _line(uq: rg.LastLayerRigidity) -> str:
    (line,) = re.findall(r"^  readout +(.*)$", uq.summary(), re.MULTILINE)
    return line
