"""The committed net of QM9's first split: read where the molecules are its own, else trained."""

from __future__ import annotations

import hashlib

import safetensors
from safetensors.torch import save

from experiments.atoms import nets
from experiments.atoms.nets import Kept
from experiments.atoms.samples import Samples
from experiments.frame.files import replace
from experiments.training.kept import FOLDER

PATH = FOLDER / "qm9.safetensors"
SPLIT = 0


def of(data: Samples, *, seed: int, epochs: int, keep: bool) -> tuple[Kept, int | None]:
    """The net of the first split, and the epochs that the committed one was trained for, if it is.

    Args:
        data: the split.
        seed: of the split and of the training.
        epochs: of the training.
        keep: a net that is trained now, on disk.
    """
    if PATH.exists():
        with safetensors.safe_open(PATH, framework="pt") as stored:
            header = stored.metadata() or {}
        if header.get("question") == question(data, seed, epochs):
            return nets.read(PATH), int(header["done"])
    return nets.of_split(data, split=SPLIT, seed=seed, epochs=epochs, keep=keep), None


def write(found: Kept, data: Samples, *, seed: int, epochs: int, done: int) -> None:
    """Make a net the committed one, in float32.

    Args:
        found: the net.
        data: the split.
        seed: of the split and of the training.
        epochs: that were asked for.
        done: epochs after which the training was stopped.
    """
    state = {name: value.float().contiguous() for name, value in found.net.state_dict().items()}
    header = {"epoch": str(found.epoch), "loss": repr(found.loss), "machine": found.machine}
    PATH.parent.mkdir(exist_ok=True)
    header |= {"done": str(done), "question": question(data, seed, epochs)}
    replace(PATH, save(state, header))


def question(data: Samples, seed: int, epochs: int) -> str:
    """What a net answers: the molecules that it was trained and chosen on, seed and epochs."""
    own = [data.molecules.picked(rows) for rows in (data.train, data.valid)]
    parts = [one.structures.digest() for one in own] + [str([seed, epochs])]
    energies = b"".join(one.energy.numpy().tobytes() for one in own)
    return hashlib.sha256("".join(parts).encode() + energies).hexdigest()
