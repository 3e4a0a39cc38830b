"""The pictures of the pages "Does my model work?", "JAX, Flax and Keras" and on trainers."""

import runpy
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from drawing import BLUE, GREEN, GREY, ORANGE, draw_band

import rigidities as rg

EXAMPLE = Path(__file__).parents[2] / "examples" / "frameworks.py"


def draw_box(axes, x, y, width, text, colour):
    """A rounded box around a text, with its middle at (x, y)."""
    shape = plt.matplotlib.patches.FancyBboxPatch(
        (x - width / 2, y - 0.4),
        width,
        0.8,
        boxstyle="round,pad=0.06",
        facecolor=(*plt.matplotlib.colors.to_rgb(colour), 0.18),
        edgecolor=colour,
        lw=1.5,
    )
    axes.add_patch(shape)
    axes.text(x, y, text, ha="center", va="center", color=GREY, fontsize=10)


def draw_arrow(axes, start, end, colour=GREY):
    """An arrow between two points."""
    style = {"arrowstyle": "-|>", "color": colour, "lw": 1.5}
    axes.annotate("", end, start, arrowprops=style)


def empty_axes(width, height):
    """A figure for boxes and arrows, whose units are those of the text."""
    figure, axes = plt.subplots(figsize=(0.72 * width, 0.72 * height))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def readout():
    """From inputs to a prediction, and what this library reads on the way."""
    figure, axes = empty_axes(10.6, 3.6)
    y = 2.7
    draw_box(axes, 0.95, y, 1.3, "inputs", GREY)
    draw_box(axes, 3.35, y, 1.9, "your layers", GREY)
    draw_box(axes, 5.65, y, 1.3, "features", BLUE)
    draw_box(axes, 7.75, y, 1.5, "last layer\n(linear)", BLUE)
    draw_box(axes, 9.75, y, 1.1, "mean", GREY)
    for start, end in ((1.7, 2.3), (4.4, 4.9), (6.4, 6.9), (8.6, 9.1)):
        draw_arrow(axes, (start, y), (end, y))
    draw_box(axes, 6.35, 0.75, 3.4, "rigidities: fit, calibrate", ORANGE)
    draw_arrow(axes, (5.65, 2.2), (5.65, 1.25), BLUE)
    draw_arrow(axes, (7.75, 2.2), (7.75, 1.25), BLUE)
    draw_box(axes, 9.75, 0.75, 1.1, "± bar", GREEN)
    draw_arrow(axes, (8.15, 0.75), (9.1, 0.75), ORANGE)
    axes.plot([0.3, 4.3], [1.95, 1.95], color=GREY, lw=1)
    axes.text(
        2.3, 1.35, "your trained network:\nit stays unchanged", color=GREY, ha="center", va="center"
    )
    return figure


def trainer():
    """What a trainer does, and what the callback does after it."""
    figure, axes = empty_axes(10.6, 2.6)
    y = 1.2
    draw_box(axes, 1.1, y, 1.7, "training", GREY)
    draw_box(axes, 3.6, y, 1.9, "best\ncheckpoint", GREY)
    draw_box(axes, 5.9, y, 1.3, "fit", ORANGE)
    draw_box(axes, 7.8, y, 1.3, "calibrate", ORANGE)
    draw_box(axes, 9.7, y, 1.3, "file with\nerror bars", GREEN)
    for start, end in ((2.05, 2.55), (4.65, 5.15), (6.65, 7.05), (8.55, 8.95)):
        draw_arrow(axes, (start, y), (end, y))
    texts = {2.35: "your trainer", 6.85: "RigidityCallback, once, after training"}
    for x, text in texts.items():
        axes.text(x, 2.1, text, color=GREY, ha="center", va="center")
    texts = {5.9: "training rows", 7.8: "validation rows", 9.7: "beside the model"}
    for x, text in texts.items():
        axes.text(x, 0.35, text, color=GREY, ha="center", va="center", fontsize=9)
    return figure


def jax_network():
    """Error bars of a network of JAX along its only input, beyond the training data."""
    example = runpy.run_path(str(EXAMPLE))
    x_train, y_train = example["measured"](400, seed=1)
    x_valid, y_valid = example["measured"](200, seed=2)
    network = example["jax_network"](x_train, y_train)
    uq = rg.LastLayerRigidity(example["torch_head"](network, x_train))
    uq.fit(network.features(x_train), y_train)
    uq.calibrate(network.features(x_valid), y_valid, early_stopped=False)

    line = np.linspace(-12, 37, 246, dtype=np.float32)[:, None]
    p = uq.predict(network.features(line))
    low, high = p.interval(0.9)
    figure, axes = plt.subplots(figsize=(6.4, 4))
    draw_band(axes, line, low[:, 0], high[:, 0], BLUE, "90 % interval")
    axes.plot(line, p.mean, color=BLUE, label="network, trained by JAX")
    axes.plot(line, example["true_demand"](line), color=ORANGE, ls="--", lw=1.5, label="truth")
    axes.plot(x_train, y_train, ".", color=GREY, ms=3, label="training rows")
    axes.set(xlabel="outdoor temperature in °C", ylabel="electricity demand in GW", ylim=(20, 95))
    axes.legend(fontsize=9, loc="upper center", ncols=2)
    return figure


PICTURES = {"jax-network": jax_network, "readout": readout, "trainer": trainer}
