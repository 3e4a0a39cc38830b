"""Trained networks that come with the project, so that a calibration can be judged in minutes.

``experiments/nets/<study>.safetensors`` holds float32 weights, one row a network (`Stack.flat`),
and in its header what they are: sizes, activation, and the digest of the rows that they were
trained on. `nets` reads them where that digest is the one of the rows that are here. With other
rows, another seed or other epochs the same recipe trains anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from experiments.data import benchmark, california, outside, uci
from experiments.training.descent import Trained, trained
from experiments.training.protocol import Protocol
from experiments.training.stack import Stack

FOLDER = Path(__file__).parents[1] / "nets"

EPOCHS = 400
"""Epochs of the committed networks."""

MEMBERS = 5
"""Networks of one split in ``uci``."""

NETS = 10
"""Networks of a set in ``california`` and ``outside``."""

APART = 1000
"""Distance of the seeds of two members."""

PROTOCOLS = {
    "silu": Protocol((128, 128), "silu", decay=1e-3),
    "relu": Protocol((50,)),
}
"""How the networks of ``california`` are trained."""


class Kept(NamedTuple):
    """Networks of one set.

    Attributes:
        stack: The networks, with the weights of each one's smallest validation loss.
        epoch: The epochs of those weights, (B,).
        committed: Whether they were read from the project's files, or trained now.
    """

    stack: Stack
    epoch: Tensor
    committed: bool


def nets(
    study: str,
    name: str,
    member: int | str = 0,
    *,
    count: int | None = None,
    seed: int = 0,
    epochs: int = EPOCHS,
) -> Kept:
    """The first networks of a set: read from the project's files, or trained now.

    Args:
        study: "uci", "california" or "outside".
        name: The name of the UCI set, or "silu" or "relu" for California.
        member: In "uci", the place of the network among those of its split, from 0; or "random",
            the first network on random splits.
        count: Number of networks; all by default.
        seed: Seed of the networks, and of splits that are random.
        epochs: Epochs of the training.
    """
    recipe = RECIPES[study]
    count = count or recipe.count(name)
    if seed == 0 and epochs == EPOCHS:
        committed = _read(study, key(study, name, member), recipe.rows(name), count)
        if committed is not None:
            return committed
    training = recipe.train(name, member, count, seed, epochs)
    return Kept(training.best, training.epoch, committed=False)


def key(study: str, name: str, member: int | str = 0) -> str:
    """The name of an entry of the file."""
    return f"{name}/{member}" if study == "uci" else name


def digest(study: str) -> str:
    """The SHA-256 of the committed file; empty where there is none."""
    path = FOLDER / f"{study}.safetensors"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""


def write(study: str, stacks: Mapping[str, tuple[Stack, Tensor]]) -> Path:
    """Write the file of a study.

    Args:
        study: The study whose networks they are.
        stacks: The networks and their epochs, by `key`.
    """
    recipe = RECIPES[study]
    tensors: dict[str, Tensor] = {}
    about: dict[str, dict[str, Any]] = {}
    for entry, (stack, epoch) in stacks.items():
        tensors[entry] = stack.flat.cpu().contiguous()
        tensors[f"{entry}/epoch"] = epoch.contiguous()
        about[entry] = {
            "sizes": stack.sizes,
            "activation": stack.activation,
            "rows": recipe.rows(entry.split("/")[0]),
        }
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{study}.safetensors"
    save_file(tensors, path, {"nets": json.dumps(about, sort_keys=True)})
    return path


def make(study: str) -> Path:
    """Train all networks of a study and write its file."""
    recipe = RECIPES[study]
    stacks = {}
    for name, member in recipe.entries():
        training = recipe.train(name, member, recipe.count(name), 0, EPOCHS)
        stacks[key(study, name, member)] = (training.best, training.epoch)
    return write(study, stacks)


def _read(study: str, entry: str, rows: str, count: int) -> Kept | None:
    """The networks of an entry; None where they are too few or were trained on other rows.

    Args:
        study: The study whose file is read.
        entry: The name of the entry.
        rows: The digest of the rows that are here.
        count: The number of networks that are wanted.
    """
    path = FOLDER / f"{study}.safetensors"
    if not path.exists():
        return None
    with safe_open(path, "pt") as file:
        header = file.metadata() or {}
        about = json.loads(header.get("nets", "{}")).get(entry, {})
        if about.get("rows") != rows:
            return None
        flat = file.get_tensor(entry)[:count]
        epoch = file.get_tensor(f"{entry}/epoch")[:count]
    if len(flat) < count:
        return None
    return Kept(Stack(flat, about["sizes"], about["activation"]), epoch, committed=True)


# --- the recipes ---------------------------------------------------------------------------------


class Recipe(NamedTuple):
    """How the networks of a study are made.

    Attributes:
        entries: Returns all names and members.
        count: Returns the number of networks of a name.
        rows: Returns the digest of a name's rows.
        train: Trains networks, given name, member, count, seed and epochs.
    """

    entries: Callable[[], list[tuple[str, int | str]]]
    count: Callable[[str], int]
    rows: Callable[[str], str]
    train: Callable[[str, int | str, int, int, int], Trained]


def _train_uci(name: str, member: int | str, count: int, seed: int, epochs: int) -> Trained:
    """One network for each of the first splits of a UCI set, published or random."""
    rows = uci.read(name)
    if member == benchmark.RANDOM:
        drawing = benchmark.RANDOM
    else:
        drawing = benchmark.OFFICIAL
    splits = benchmark.divisions(rows, count, drawing, seed)
    train_index = np.stack([split.train for split in splits])
    valid_index = np.stack([split.valid for split in splits])
    train, valid = benchmark.standardised(rows, train_index, valid_index).parts
    first_seed = seed
    if isinstance(member, int):
        first_seed += APART * member
    protocol = Protocol(hidden=(benchmark.width(name),), epochs=epochs)
    seeds = range(first_seed, first_seed + count)
    return trained(train, valid, protocol, seeds, f"{name}, {member}")


def _train_outside(name: str, member: int | str, count: int, seed: int, epochs: int) -> Trained:
    """Networks of a UCI set that see a part of the domain alone."""
    train, valid, _ = outside.drawn(name, count, seed).samples.parts
    protocol = Protocol(hidden=(benchmark.width(name),), epochs=epochs)
    return trained(train, valid, protocol, range(seed, seed + count), f"{name}, domain")


def _train_california(name: str, member: int | str, count: int, seed: int, epochs: int) -> Trained:
    """Networks that see the east of California alone."""
    samples = california.drawn(count, seed, california.OUT_OF_DOMAIN, restricted=True)
    protocol = replace(PROTOCOLS[name], epochs=epochs)
    seeds = range(APART * seed, APART * seed + count)
    return trained(samples.train, samples.valid, protocol, seeds, f"California, {name}")


def _uci_entries() -> list[tuple[str, int | str]]:
    """All UCI sets but the largest, with every member and the random splits."""
    members: list[int | str] = [*range(MEMBERS), benchmark.RANDOM]
    names = sorted(set(uci.SETS) - {"year"})
    return [(name, member) for name in names for member in members]


def _digest(rows: Any) -> str:
    """SHA-256 of inputs, targets and published lists."""
    arrays = [rows.x, rows.y]
    for name in ("train_index", "test_index"):
        index = getattr(rows, name, None)
        if index is not None:
            arrays.append(index.astype(np.int64))
    total = hashlib.sha256()
    for array in arrays:
        total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()


RECIPES = {
    "uci": Recipe(
        entries=_uci_entries,
        count=benchmark.split_count,
        rows=lambda name: _digest(uci.read(name)),
        train=_train_uci,
    ),
    "outside": Recipe(
        entries=lambda: [(name, 0) for name in outside.SETS],
        count=lambda name: NETS,
        rows=lambda name: _digest(uci.read(name)),
        train=_train_outside,
    ),
    "california": Recipe(
        entries=lambda: [(name, 0) for name in PROTOCOLS],
        count=lambda name: NETS,
        rows=lambda name: _digest(california.read()),
        train=_train_california,
    ),
}
