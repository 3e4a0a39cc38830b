"""The picture of the page on JAX, Flax and Keras: the network that JAX trains in the example."""

import runpy
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from drawing import BLUE, GREY, ORANGE, draw_band

import rigidities as rg

EXAMPLE = Path(__file__).parents[2] / "examples" / "frameworks.py"


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


PICTURES = {"jax-network": jax_network}
