"""Trained networks of QM9's splits, kept on disk: one network serves every part of a study.

`of_split` reads the network of a split from the user's cache, or trains it and writes it there. The
file is named by the settings of the training and the checksum of the data; its header records the
machine, and the digest of the code that trained it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import safetensors
from safetensors.torch import load_file, save

from experiments.atoms import bpnn, training
from experiments.atoms.samples import SOAP, SPECIES, Samples
from experiments.atoms.spectrum import width
from experiments.data.files import FormatError, digest
from experiments.data.qm9 import NAMES
from experiments.frame import files, sources
from experiments.frame.machine import machine
from experiments.training.loop import Fitted

CHANNELS = len(SPECIES) * SOAP.radial


@dataclass(frozen=True)
class Kept(Fitted):
    """A network at the end of its training.

    Attributes:
        machine: On what it was trained, with ", other code" where `of_split` read a network that
            other code trained.
        code: The digest of the code that trained it; None where the file does not tell.
    """

    machine: str
    code: str | None = None


def of_split(data: Samples, *, split: int, seed: int, epochs: int, keep: bool = True) -> Kept:
    """The network of a split: from disk, or trained now.

    Args:
        data: The split.
        split: The number of the split. First weights and batches depend on it too.
        seed: The seed of the whole study.
        epochs: Epochs of the training.
        keep: Whether the network is read from disk, and written there after its training.

    Returns:
        The network in evaluation mode, on the CPU.

    Raises:
        FormatError: The file on disk is no network of this study.
    """
    network_seed = 1000 * seed + split
    if not keep:
        return _trained(data, network_seed, epochs)

    path = file(split, seed, epochs, [len(data.train), len(data.valid), len(data.test)])
    if path.exists():
        network = read(path)
        if network.code != code():
            print(f"  network of split {split} trained by {sources.OTHER_CODE}: --fresh retrains")
            network = replace(network, machine=f"{network.machine}, {sources.OTHER_CODE}")
        return network

    network = _trained(data, network_seed, epochs)
    header = {
        "epoch": str(network.epoch),
        "loss": repr(network.loss),
        "machine": network.machine,
        "code": code(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    files.replace(path, save(dict(network.net.state_dict()), header))
    return read(path)


def file(split: int, seed: int, epochs: int, sizes: list[int]) -> Path:
    """Where a network lies: other arguments or other data are another file."""
    settings = [split, seed, epochs, sizes, digest(NAMES)]
    return files.kept_file("qm9", f"trained {split}", settings, ".safetensors")


def code() -> str:
    """The digest of the code that the training uses."""
    return sources.experiments_digest("atoms", "data", "training")


def read(path: Path) -> Kept:
    """A network from a file, in evaluation mode, on the CPU.

    Raises:
        FormatError: The file is no network of this study.
    """
    net = bpnn.drawn(len(SPECIES), width(CHANNELS, SOAP.angular), 0)
    try:
        with safetensors.safe_open(path, framework="pt") as stored:
            header = stored.metadata()
        net.load_state_dict(load_file(path))
        return Kept(
            net=net.eval(),
            epoch=int(header["epoch"]),
            loss=float(header["loss"]),
            machine=header["machine"],
            code=header.get("code"),
        )
    except (safetensors.SafetensorError, RuntimeError, KeyError, TypeError) as error:
        raise FormatError(
            f"{path} is no net of this experiment ({error}). Delete it: it is then trained again."
        ) from error


def _trained(data: Samples, seed: int, epochs: int) -> Kept:
    """A network that is trained now, on this machine and by today's code."""
    fit = training.trained(data, seed, epochs)
    return Kept(fit.net, fit.epoch, fit.loss, machine(), code())
