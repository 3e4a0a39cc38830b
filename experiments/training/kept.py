"""Trained nets that come with the project, so that a calibration can be judged in minutes.

``experiments/nets/<study>.safetensors`` holds float32 weights, one row a net (`Stack.flat`). They
are read where they were trained on the very rows that are here; with other rows, another seed or
other epochs the same recipe trains anew.
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
MEMBERS = 5
"""Nets of one split in ``uci``."""

NETS = 10
"""Of a set in ``california`` and ``outside``."""

APART = 1000
"""Between the seeds of two members."""

PROTOCOLS = {
    "silu": Protocol((128, 128), "silu", decay=1e-3),
    "relu": Protocol((50,)),
}
"""Of the nets of ``california``."""


class Kept(NamedTuple):
    """Nets of one set.

    Attributes:
        stack: the weights of each net's smallest validation loss.
        epoch: that had it, (B,).
        committed: whether they were read; they were trained otherwise.
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
    """The first nets of a set.

    Args:
        study: "uci", "california" or "outside".
        name: of the UCI set, or "silu" or "relu" for California.
        member: of each split's nets in "uci", from 0; or "random": the first, on random splits.
        count: nets; all by default.
        seed: of the nets, and of splits that are random.
        epochs: of the training.
    """
    recipe = RECIPES[study]
    count = count or recipe.count(name)
    if seed == 0 and epochs == EPOCHS:
        found = _read(study, key(study, name, member), recipe.rows(name), count)
        if found is not None:
            return found
    made = recipe.train(name, member, count, seed, epochs)
    return Kept(made.best, made.epoch, committed=False)


def key(study: str, name: str, member: int | str = 0) -> str:
    """Of an entry of the file."""
    return f"{name}/{member}" if study == "uci" else name


def digest(study: str) -> str:
    """Of the committed file; empty where there is none."""
    path = FOLDER / f"{study}.safetensors"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""


def write(study: str, stacks: Mapping[str, tuple[Stack, Tensor]]) -> Path:
    """Keep nets.

    Args:
        study: whose they are.
        stacks: the nets and their epochs, by `key`.
    """
    recipe, tensors, about = RECIPES[study], {}, {}
    for entry, (stack, epoch) in stacks.items():
        tensors |= {entry: stack.flat.cpu().contiguous(), f"{entry}/epoch": epoch.contiguous()}
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
    """Train all nets of a study and keep them."""
    recipe = RECIPES[study]
    found = {}
    for name, member in recipe.entries():
        made = recipe.train(name, member, recipe.count(name), 0, EPOCHS)
        found[key(study, name, member)] = made.best, made.epoch
    return write(study, found)


def _read(study: str, entry: str, rows: str, count: int) -> Kept | None:
    """The nets that were trained on these rows, if there are as many."""
    path = FOLDER / f"{study}.safetensors"
    if not path.exists():
        return None
    with safe_open(path, "pt") as file:
        about = json.loads((file.metadata() or {}).get("nets", "{}")).get(entry, {})
        if about.get("rows") != rows:
            return None
        flat, epoch = (file.get_tensor(name)[:count] for name in (entry, f"{entry}/epoch"))
    if len(flat) < count:
        return None
    return Kept(Stack(flat, about["sizes"], about["activation"]), epoch, committed=True)


class Recipe(NamedTuple):
    """How the nets of a study are made.

    Attributes:
        entries: all names and members.
        count: nets of a name.
        rows: the digest of a name's rows.
        train: name, member, count, seed and epochs to nets.
    """

    entries: Callable[[], list[tuple[str, int | str]]]
    count: Callable[[str], int]
    rows: Callable[[str], str]
    train: Callable[[str, int | str, int, int, int], Trained]


def _uci(name: str, member: int | str, count: int, seed: int, epochs: int) -> Trained:
    rows = uci.read(name)
    drawing = benchmark.RANDOM if member == benchmark.RANDOM else benchmark.OFFICIAL
    splits = benchmark.divisions(rows, count, drawing, seed)
    lists = (np.stack([getattr(one, part) for one in splits]) for part in ("train", "valid"))
    first = seed + APART * (member if isinstance(member, int) else 0)
    protocol = Protocol(hidden=(benchmark.width(name),), epochs=epochs)
    train, valid = benchmark.standardised(rows, *lists).parts
    return trained(train, valid, protocol, range(first, first + count), f"{name}, {member}")


def _outside(name: str, member: int | str, count: int, seed: int, epochs: int) -> Trained:
    train, valid, _ = outside.drawn(name, count, seed).samples.parts
    protocol = Protocol(hidden=(benchmark.width(name),), epochs=epochs)
    return trained(train, valid, protocol, range(seed, seed + count), f"{name}, domain")


def _california(name: str, member: int | str, count: int, seed: int, epochs: int) -> Trained:
    samples = california.drawn(count, seed, california.OUT_OF_DOMAIN, restricted=True)
    protocol = replace(PROTOCOLS[name], epochs=epochs)
    seeds = range(APART * seed, APART * seed + count)
    return trained(samples.train, samples.valid, protocol, seeds, f"California, {name}")


def _digest(rows: Any) -> str:
    """Of inputs, targets and published lists."""
    lists = [getattr(rows, name, None) for name in ("train_index", "test_index")]
    arrays = [rows.x, rows.y, *(one.astype(np.int64) for one in lists if one is not None)]
    joined = hashlib.sha256()
    for one in arrays:
        joined.update(np.ascontiguousarray(one).tobytes())
    return joined.hexdigest()


RECIPES = {
    "uci": Recipe(
        lambda: [
            (name, member)
            for name in sorted(set(uci.SETS) - {"year"})
            for member in (*range(MEMBERS), benchmark.RANDOM)
        ],
        benchmark.split_count,
        lambda name: _digest(uci.read(name)),
        _uci,
    ),
    "outside": Recipe(
        lambda: [(name, 0) for name in outside.SETS],
        lambda name: NETS,
        lambda name: _digest(uci.read(name)),
        _outside,
    ),
    "california": Recipe(
        lambda: [(name, 0) for name in PROTOCOLS],
        lambda name: NETS,
        lambda name: _digest(california.read()),
        _california,
    ),
}
