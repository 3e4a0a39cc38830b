"""The machine on which a part of an experiment is computed, in words."""

from __future__ import annotations

import torch
from benchmarks.frame.provenance import processor

from experiments.training.protocol import device


def machine() -> str:
    """The GPU or the processor in use, and torch's version."""
    where = device()
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else processor()
    return f"{name}, torch {torch.__version__.split('+')[0]}"
