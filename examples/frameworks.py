"""Error bars for a network of JAX, Flax or Keras.

    python examples/frameworks.py jax
    python examples/frameworks.py flax
    KERAS_BACKEND=jax python examples/frameworks.py keras

The framework trains the network and computes its features: what enters the last layer. torch gets
only that last layer, as an `nn.Linear` with the same weights. The script checks that torch and the
framework predict the same numbers, then fits, calibrates and prints error bars.

`jax_network`, `flax_network` and `keras_network` train the same small network. `torch_head` copies
the last layer and is all that you need for a network of your own.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

import rigidities as rg

WIDTH = 64  # units of the hidden layer
STEPS = 2000
MIDDLE, SPREAD = 12.0, 10.0  # by which the networks scale temperatures


@dataclass(frozen=True)
class Network:
    """What this library needs of a network, as NumPy arrays.

    Attributes:
        features: a function of inputs (N, inputs) that returns what enters the last layer, (N, D).
        outputs: a function of inputs that returns the network's own predictions, (N, targets).
        kernel: the weights of the last layer, (D, targets), as JAX, Flax and Keras store them.
        bias: its bias, (targets,).
    """

    features: Callable[[np.ndarray], np.ndarray]
    outputs: Callable[[np.ndarray], np.ndarray]
    kernel: np.ndarray
    bias: np.ndarray


def measured(rows, seed):
    """Made-up data: the electricity demand of a region (GW) at some outdoor temperatures (°C)."""
    random = np.random.default_rng(seed)
    temperature = random.uniform(-5, 30, (rows, 1))
    # Cold days scatter more.
    scatter = 0.5 + 0.12 * np.maximum(16 - temperature, 0)
    demand = true_demand(temperature) + scatter * random.normal(size=(rows, 1))
    return temperature.astype(np.float32), demand.astype(np.float32)


def true_demand(temperature):
    """Heating below 16 °C, cooling above 22 °C."""
    heating = 0.8 * np.maximum(16 - temperature, 0)
    cooling = 1.2 * np.maximum(temperature - 22, 0)
    return 40 + heating + cooling


def jax_network(x, y):
    """Train a network in plain JAX: a dictionary of arrays, gradient descent with momentum."""
    import jax
    import jax.numpy as jnp

    def features(params, x):
        hidden = (x - MIDDLE) / SPREAD @ params["hidden_kernel"] + params["hidden_bias"]
        return jax.nn.silu(hidden)

    def outputs(params, x):
        return features(params, x) @ params["head_kernel"] + params["head_bias"]

    def loss(params):
        return jnp.mean((outputs(params, x) - y) ** 2)

    def step(_, state):
        params, velocity = state
        slope = jax.grad(loss)(params)
        velocity = jax.tree.map(lambda v, s: 0.9 * v - 0.002 * s, velocity, slope)
        return jax.tree.map(jnp.add, params, velocity), velocity

    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "hidden_kernel": 2 * jax.random.normal(keys[0], (1, WIDTH)),
        "hidden_bias": 2 * jax.random.normal(keys[1], (WIDTH,)),
        "head_kernel": jax.random.normal(keys[2], (WIDTH, 1)) / WIDTH**0.5,
        "head_bias": jnp.asarray(y.mean(0)),
    }
    velocity = jax.tree.map(jnp.zeros_like, params)
    params, _ = jax.lax.fori_loop(0, STEPS, step, (params, velocity))

    return Network(
        features=lambda x: np.array(features(params, x)),
        outputs=lambda x: np.array(outputs(params, x)),
        kernel=np.array(params["head_kernel"]),
        bias=np.array(params["head_bias"]),
    )


def flax_network(x, y):
    """Train the same network with Flax NNX and optax."""
    import optax
    from flax import nnx

    class Regressor(nnx.Module):
        def __init__(self, rngs):
            self.hidden = nnx.Linear(1, WIDTH, rngs=rngs)
            self.head = nnx.Linear(WIDTH, 1, rngs=rngs)
            self.head.bias[...] = y.mean(0)

        def features(self, x):
            return nnx.silu(self.hidden((x - MIDDLE) / SPREAD))

        def __call__(self, x):
            return self.head(self.features(x))

    @nnx.jit
    def step(model, optimizer):
        slope = nnx.grad(lambda model: ((model(x) - y) ** 2).mean())(model)
        optimizer.update(model, slope)

    model = Regressor(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)
    for _ in range(STEPS):
        step(model, optimizer)

    return Network(
        features=lambda x: np.array(model.features(x)),
        outputs=lambda x: np.array(model(x)),
        kernel=np.array(model.head.kernel[...]),
        bias=np.array(model.head.bias[...]),
    )


def keras_network(x, y):
    """Train the same network with Keras 3, on whichever backend it runs."""
    import keras

    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.layers.Input((1,)),
            keras.layers.Rescaling(1 / SPREAD, -MIDDLE / SPREAD),
            keras.layers.Dense(WIDTH, activation="silu"),
            keras.layers.Dense(1, bias_initializer=keras.initializers.Constant(float(y.mean()))),
        ]
    )
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
    model.fit(x, y, epochs=200, batch_size=100, verbose=0)

    trunk = keras.Model(model.inputs, model.layers[-2].output)
    kernel, bias = model.layers[-1].get_weights()
    return Network(
        features=lambda x: trunk.predict(x, verbose=0),
        outputs=lambda x: model.predict(x, verbose=0),
        kernel=kernel,
        bias=bias,
    )


def torch_head(network, x):
    """The network's last layer as torch's, checked on some inputs.

    Raises:
        ValueError: torch's last layer does not predict what the network does.
    """
    features = torch.tensor(network.features(x))
    outputs = torch.tensor(network.outputs(x))
    head = torch.nn.Linear(*network.kernel.shape, dtype=features.dtype)
    with torch.no_grad():
        # A kernel is (inputs, outputs); torch's weight is (outputs, inputs).
        head.weight.copy_(torch.tensor(network.kernel).T)
        head.bias.copy_(torch.tensor(network.bias))
        difference = (head(features) - outputs).abs().max()
    if difference > 1e-4 * outputs.std():
        raise ValueError(
            f"torch's last layer and the network should predict the same, but they differ by up to "
            f"{difference:.3g}. Is the kernel transposed? Are these the features before the last "
            "layer? Does anything follow the last layer?"
        )
    return head


def main(arguments=None):
    """Train a network, give it error bars and print some of them."""
    networks = {"jax": jax_network, "flax": flax_network, "keras": keras_network}
    parser = argparse.ArgumentParser(description="Error bars for a network of another framework.")
    parser.add_argument("framework", nargs="?", default="jax", choices=networks)
    framework = parser.parse_args(arguments).framework

    x_train, y_train = measured(400, seed=1)
    x_valid, y_valid = measured(200, seed=2)
    x_test, y_test = measured(1000, seed=3)
    try:
        network = networks[framework](x_train, y_train)
    except ModuleNotFoundError as missing:
        raise SystemExit(f"{framework} needs {missing.name}: pip install {missing.name}") from None

    head = torch_head(network, x_train)
    uq = rg.LastLayerRigidity(head).fit(network.features(x_train), y_train)
    uq.calibrate(network.features(x_valid), y_valid, early_stopped=False)

    asked = np.array([[-2.0], [19.0], [45.0]], dtype=np.float32)
    prediction = uq.predict(network.features(asked))
    mean, std = prediction.mean[:, 0], prediction.std[:, 0]
    print("temperature   predicted      true (GW)")
    for i, temperature in enumerate(asked[:, 0]):
        true = true_demand(temperature)
        print(f"{temperature:8.1f} °C   {mean[i]:.1f} +- {std[i]:.1f}   {true:.1f}")

    low, high = uq.predict(network.features(x_test)).interval(0.9)
    target = torch.tensor(y_test)
    coverage = ((low <= target) & (target <= high)).float().mean()
    print(f"90 % intervals cover {100 * coverage:.0f} % of 1000 new rows")
    return network, uq


if __name__ == "__main__":
    main()
