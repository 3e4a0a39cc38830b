"""Trained nets, kept on disk: the net of a split serves every part of the experiment."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import safetensors
from safetensors.torch import load_file, save

from experiments import sources
from experiments.atoms import bpnn
from experiments.atoms.spectrum import width
from experiments.data.files import cache_folder, digest
from experiments.data.qm9 import NAMES
from experiments.qm9 import training
from experiments.qm9.samples import SOAP, SPECIES, Samples
from experiments.report import replace
from experiments.training.loop import Fitted

CHANNELS = len(SPECIES) * SOAP.radial


def of_split(data: Samples, *, split: int, seed: int, epochs: int, keep: bool = True) -> Fitted:
    """The net of a split: from disk, or trained now.

    Args:
        data: the split.
        split: its number, which first weights and batches follow too.
        seed: of the whole.
        epochs: of the training.
        keep: it on disk, and take it from there.
    """
    own = 1000 * seed + split
    if not keep:
        return training.trained(data, own, epochs)
    path = file(split, seed, epochs, [len(data.train), len(data.valid), len(data.test)])
    if not path.exists():
        found = training.trained(data, own, epochs)
        path.parent.mkdir(parents=True, exist_ok=True)
        header = {"epoch": str(found.epoch), "loss": repr(found.loss)}
        replace(path, save(dict(found.net.state_dict()), header))
    return read(path)


def file(split: int, seed: int, epochs: int, sizes: list[int]) -> Path:
    """Where a net lies: other arguments, data or code of the training are another file."""
    code = sources.digest("experiments.qm9.training", library=False)
    arguments = json.dumps([split, seed, epochs, sizes])
    key = hashlib.sha256("\0".join([code, digest(NAMES), arguments]).encode()).hexdigest()
    return cache_folder() / "nets" / f"qm9-{split}-{key[:16]}.safetensors"


def read(path: Path) -> Fitted:
    """A net that was kept, on the CPU."""
    net = bpnn.drawn(len(SPECIES), width(CHANNELS, SOAP.angular), 0)
    with safetensors.safe_open(path, framework="pt") as stored:
        header = stored.metadata()
    net.load_state_dict(load_file(path))
    return Fitted(net.eval(), int(header["epoch"]), float(header["loss"]))
