"""Trained nets, kept on disk: the net of a split serves every part of the experiment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import safetensors
from safetensors.torch import load_file, save

from experiments.atoms import bpnn, training
from experiments.atoms.samples import SOAP, SPECIES, Samples
from experiments.atoms.spectrum import width
from experiments.data.files import FormatError, cache_folder, digest
from experiments.data.qm9 import NAMES
from experiments.frame import keys, sources
from experiments.frame.files import replace
from experiments.frame.machine import machine
from experiments.training.loop import Fitted

CHANNELS = len(SPECIES) * SOAP.radial


@dataclass(frozen=True)
class Kept(Fitted):
    """A net at the end of its training, and on what it was trained."""

    machine: str


def of_split(data: Samples, *, split: int, seed: int, epochs: int, keep: bool = True) -> Kept:
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
        found = training.trained(data, own, epochs)
        return Kept(found.net, found.epoch, found.loss, machine())
    path = file(split, seed, epochs, [len(data.train), len(data.valid), len(data.test)])
    if keys.rekeyed(path):
        print(f"  net of split {split} re-keyed, trained {keys.origin(path, read(path).machine)}")
    if not path.exists():
        found = training.trained(data, own, epochs)
        path.parent.mkdir(parents=True, exist_ok=True)
        header = {"epoch": str(found.epoch), "loss": repr(found.loss), "machine": machine()}
        replace(path, save(dict(found.net.state_dict()), header | {"code": code()}))
    return read(path)


def file(split: int, seed: int, epochs: int, sizes: list[int]) -> Path:
    """Where a net lies: other arguments, data or code of the training are another file."""
    folder = cache_folder() / "experiments" / "qm9"
    question = [split, seed, epochs, sizes, digest(NAMES)]
    return keys.path(folder, f"trained {split}", question, code(), ".safetensors")


def code() -> str:
    """Of the training and of what it is given."""
    return sources.digest(training.__name__, Samples.__module__, library=False)


def read(path: Path) -> Kept:
    """A net that was kept, on the CPU."""
    net = bpnn.drawn(len(SPECIES), width(CHANNELS, SOAP.angular), 0)
    try:
        with safetensors.safe_open(path, framework="pt") as stored:
            header = stored.metadata()
        net.load_state_dict(load_file(path))
        epoch, loss = int(header["epoch"]), float(header["loss"])
        machine = header["machine"] + keys.mark(path, header.get("code"))
    except (safetensors.SafetensorError, RuntimeError, KeyError, TypeError) as error:
        raise FormatError(
            f"{path} is no net of this experiment ({error}). Delete it: it is then trained again."
        ) from error
    return Kept(net.eval(), epoch, loss, machine)
