"""One net after the other, judged by the default error bars and by parts of them."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from experiments.data import california, outside, uci
from experiments.data.benchmark import OFFICIAL, STEPS, divisions, standardised
from experiments.judging import error_bars
from experiments.judging.error_bars import Calibration
from experiments.judging.predictive import row_scores, summary
from experiments.training import kept
from rigidities import metrics

FORMS = {
    "paper": error_bars.PAPER,
    "floor": Calibration("auto", "constant", "gaussian"),
    "floor_t": Calibration("auto", "constant", "student-t"),
    "head_t": Calibration("auto", "features", "student-t"),
    "all": Calibration("auto", "features", "tilted"),
    "unguarded": Calibration("auto", "features", "tilted", guard=False),
}
"""From the paper's form to the default, "all", part by part; and the default without its guard."""

REPEATED = r"\d+ of \d+ calibration rows stand in the training data"

Rows = tuple[Tensor, Tensor]


class Case(NamedTuple):
    """A net and its rows.

    Attributes:
        net: trained.
        train, valid, test: rows.
        inside: which test rows lie in the domain of the training, (n,).
        unit: what a target of one means.
        step: between neighbouring targets that lie on a grid.
    """

    net: nn.Module
    train: Rows
    valid: Rows
    test: Rows
    inside: Tensor
    unit: float = 1.0
    step: float | None = None


def parts(
    study: str, name: str, *, count: int, seed: int, epochs: int, nets: str
) -> dict[str, Any]:
    """Every form of the error bars of every net.

    Args:
        study: "uci", "outside" or "california": whose nets.
        name: of the set, or of California's nets.
        count: nets.
        seed: of the nets.
        epochs: of their training.
        nets: digest of the nets that come with the project.

    Returns:
        ``forms``: of each form and net, the summaries "inside" and, where there are such rows,
        "outside", and ``auroc`` of the whole bar; ``auroc`` of the rigidity, a net each; rows of
        the first net; whether the nets were ``committed``; ``seconds``.
    """
    start = time.monotonic()
    found = kept.nets(study, name, count=count, seed=seed, epochs=epochs)
    each = [judged(case) for case in cases(study, name, found, seed)]
    forms = {form: [one["forms"][form] for one in each] for form in FORMS}
    about = {"committed": found.committed, "nets": nets, "rows": each[0]["rows"]}
    auroc = [one["auroc"] for one in each if one["auroc"] is not None]
    return {"forms": forms, "auroc": auroc, **about, "seconds": time.monotonic() - start}


def cases(study: str, name: str, found: kept.Kept, seed: int) -> Iterator[Case]:
    """The nets, one after the other, with their rows."""
    return _CASES[study](name, found.stack, seed)


def judged(case: Case) -> dict[str, Any]:
    """One net by all forms."""
    uq = error_bars.fitted(case.net, case.train)
    x, y = case.test
    forms: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=REPEATED)
        for form, how in FORMS.items():
            error_bars.calibrated(uq, case.valid, how)
            p = uq.predict(x)
            rows = row_scores(p, y, case.step).in_unit(case.unit)
            sides = {"inside": case.inside, "outside": ~case.inside}
            scores: dict[str, Any] = {
                side: summary(rows.picked(mask)) for side, mask in sides.items() if mask.any()
            }
            forms[form] = scores | {"auroc": _auroc(rows.bar, case.inside)}
    counts = {"train": len(case.train[0]), "valid": len(case.valid[0]), "test": len(x)}
    counts |= {"inside": int(case.inside.sum()), "outside": int((~case.inside).sum())}
    rigid = _auroc(1 / p.rigidity.double().flatten(), case.inside)
    return {"forms": forms, "auroc": rigid, "rows": counts}


def _auroc(value: Tensor, inside: Tensor) -> float | None:
    """The probability that a row outside has the larger value; None where there is none."""
    return None if bool(inside.all()) else metrics.auroc(value[inside], value[~inside])


def _uci(name: str, stack: Any, seed: int) -> Iterator[Case]:
    rows = uci.read(name)
    found = divisions(rows, len(stack), OFFICIAL, seed)
    lists = (np.stack([getattr(one, part) for one in found]) for part in ("train", "valid", "test"))
    samples = standardised(rows, *lists)
    for k in range(len(stack)):
        parts = [(x[k], y[k]) for x, y in samples.parts]
        yield _case(name, stack.module(k), parts, samples.unit[k])


def _outside(name: str, stack: Any, seed: int) -> Iterator[Case]:
    samples, inside = vars(outside.drawn(name, len(stack), seed)).values()
    for k in range(len(stack)):
        parts = [(x[k], y[k]) for x, y in samples.parts]
        yield _case(name, stack.module(k), parts, samples.unit[k])._replace(inside=inside[k])


def _case(name: str, net: nn.Module, parts: list[Rows], unit: Tensor) -> Case:
    every = torch.ones(len(parts[2][0]), dtype=torch.bool)
    step = STEPS[name] / float(unit) if name in STEPS else None
    return Case(net, *parts, every, float(unit), step)


def _california(name: str, stack: Any, seed: int) -> Iterator[Case]:
    samples = california.drawn(len(stack), seed, california.OUT_OF_DOMAIN, restricted=True)
    for k, inside in enumerate(samples.inside):
        yield Case(stack.module(k), *samples.of(k), inside)


_CASES = {"uci": _uci, "outside": _outside, "california": _california}
