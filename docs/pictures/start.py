"""The pictures of Getting started: what the page's own code draws."""

import os
import re
import tempfile
from functools import cache

import matplotlib.pyplot as plt
import torch
from drawing import DOCS, GREY, ORANGE

PAGE = DOCS / "start.md"
LAST_SECTION = "## Save and load"
"""What follows on the page needs no picture."""


@cache
def page_names():
    """The names that the page's blocks of code define, up to the last section drawn.

    The blocks save their figures; that happens in a folder that is then removed.
    """
    text = PAGE.read_text(encoding="utf-8").partition(LAST_SECTION)[0]
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE))
    names = {"print": lambda *words: None}
    usual_folder = os.getcwd()
    usual_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)  # as for a reader who runs the page
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            exec(compile(code, PAGE.name, "exec"), names)
        finally:
            os.chdir(usual_folder)
            torch.set_default_dtype(usual_dtype)
            plt.close("all")
    return names


def parity():
    """Predictions of the test rows against their true values."""
    names = page_names()
    some = slice(0, 300)  # so that single intervals can be seen
    axes = names["uq"].plot(names["x_test"][some], names["y_test"][some])
    axes.set(xlabel="true distance, m", ylabel="predicted distance, m")
    for line in axes.get_lines():
        line.set_color(GREY)  # the diagonal, to be seen on a dark page too
    axes.get_legend().get_title().set_color(GREY)
    return axes.figure


def along():
    """Predictions along speed."""
    names = page_names()
    axes = names["uq"].plot(names["road"], along=0)
    axes.set(xlabel="speed, km/h", ylabel="braking distance, m")
    return axes.figure


def far():
    """Predictions along speed, far beyond the training rows, beside the truth."""
    names = page_names()
    speed = torch.linspace(20, 250, 300, dtype=torch.float32)
    wet = torch.full_like(speed, 0.9)
    metres = 0.28 * speed + speed**2 / (254 * (0.8 - 0.4 * wet))
    axes = names["uq"].plot(torch.stack([speed, wet], 1), along=0)
    axes.plot(speed, metres, "--", color=ORANGE, label="true distance")
    axes.axvline(130, color=GREY, ls=":", lw=1.5)
    axes.set(xlabel="speed, km/h", ylabel="braking distance, m")
    axes.legend(loc="upper left")
    return axes.figure


PICTURES = {"start-parity": parity, "start-along": along, "start-far": far}
