"""The committed network of QM9's first split.

`of` reads it where it was trained on the very molecules that are asked for; otherwise a network is
trained. `write` makes a network the committed one.
"""

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
    """The network of the first split.

    Args:
        data: The split.
        seed: The seed of the split and of the training.
        epochs: Epochs of the training.
        keep: Whether a network that is trained now is kept on disk.

    Returns:
        The network, and the epochs that the committed one was trained for; None where it is not
        the committed one.
    """
    if PATH.exists():
        with safetensors.safe_open(PATH, framework="pt") as stored:
            header = stored.metadata() or {}
        if header.get("question") == question(data, seed, epochs):
            return nets.read(PATH), int(header["done"])
    return nets.of_split(data, split=SPLIT, seed=seed, epochs=epochs, keep=keep), None


def write(trained: Kept, data: Samples, *, seed: int, epochs: int, done: int) -> None:
    """Make a network the committed one, in float32.

    Args:
        trained: The network at the end of its training.
        data: The split.
        seed: The seed of the split and of the training.
        epochs: Epochs that were asked for.
        done: Epochs after which the training was stopped.
    """
    weights = trained.net.state_dict()
    state = {name: value.float().contiguous() for name, value in weights.items()}
    header = {
        "epoch": str(trained.epoch),
        "loss": repr(trained.loss),
        "machine": trained.machine,
        "done": str(done),
        "question": question(data, seed, epochs),
    }
    PATH.parent.mkdir(exist_ok=True)
    replace(PATH, save(state, header))


def question(data: Samples, seed: int, epochs: int) -> str:
    """A digest of what determines a network: training and validation molecules, seed, epochs."""
    train = data.molecules.picked(data.train)
    valid = data.molecules.picked(data.valid)
    text = train.structures.digest() + valid.structures.digest() + str([seed, epochs])
    energies = train.energy.numpy().tobytes() + valid.energy.numpy().tobytes()
    return hashlib.sha256(text.encode() + energies).hexdigest()
