"""The picture at the top of the page for chemists, from the page's own code."""

import contextlib
import io
import re
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from drawing import BLUE, GREY, ORANGE

PAGE = Path(__file__).parents[1] / "chemistry.md"


def names_after(heading):
    """What the page's blocks of code have defined before this heading."""
    text = PAGE.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[0]
    names = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for code in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            exec(compile(code, PAGE.name, "exec"), names)
    plt.close("all")
    return names


def chemistry():
    """Energies of new structures with their bars, and a simulation that stops by itself."""
    page = names_after("What to label next")
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.9))

    # Forty of the test clusters: energies per structure, relative to the baseline.
    part = page["batch"](page["test"][:40])
    found = page["uq"].predict([part])
    low, high = found.interval(0.9)
    truth = part["y"]
    spans = torch.stack([found.mean - low, high - found.mean])
    left.errorbar(truth, found.mean, spans, fmt="o", ms=3, color=BLUE, lw=1.2, capsize=2)
    ends = [truth.min(), truth.max()]
    left.plot(ends, ends, color=GREY, lw=1, ls="--")
    left.set(xlabel="energy by EMT, in eV", ylabel="predicted, with 90 % interval")
    left.set_title("40 clusters that the model has not seen")

    time, bar = page["time"], torch.tensor(page["bar"])
    energy, truth = torch.tensor(page["energy"]), page["truth"]
    right.fill_between(time, energy - 2 * bar, energy + 2 * bar, color=BLUE, alpha=0.3, lw=0)
    right.plot(time, energy, color=BLUE, lw=1.2, label="model ± 2 bars")
    right.plot(time, truth, color=ORANGE, lw=1.2, ls="--", label="EMT")
    right.axvline(time[-1], color=GREY, lw=1.5, ls=":")
    right.annotate(
        "a bar reaches its limit:\nthe run stops",
        (time[-1], float((energy - 2 * bar).min())),
        (-8, 6),
        textcoords="offset points",
        color=GREY,
        fontsize=9,
        ha="right",
    )
    right.set(xlabel="time in ps", ylabel="energy in eV")
    right.set_title("a cluster heated in ASE")
    right.legend(fontsize=9, loc="upper left")
    return figure


PICTURES = {"chemistry": chemistry}
