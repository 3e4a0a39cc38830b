"""Models of Keras 3 on the torch backend, in float32: its Dense layers multiply in no other.

They are wrapped in the class that the page "JAX, Flax and Keras" shows. The reference
differentiates the Keras model itself.
"""

import os
import re
from pathlib import Path

import torch

from tests.foreign.specimen import Given, specimen, thirds
from tests.foreign.training import first, pairs

os.environ["KERAS_BACKEND"] = "torch"

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"


def from_keras():
    """The class of the page, by the name that it has there."""
    text = PAGE.read_text(encoding="utf-8")
    (code,) = re.findall(r"^```py [^\n]*\n(class FromKeras.*?)^```", text, re.S | re.M)
    names = {"torch": torch}
    exec(compile(code, PAGE.name, "exec"), names)
    return {"FromKeras": names["FromKeras"]}


def weights(model, layer):
    """The names that torch has for a layer's kernel and bias."""
    own = [name for name, _ in model.named_parameters()]
    return [name for name in own if f".{layer}." in f".{name}".replace("/", ".")]


@specimen(
    "keras",
    "Sequential of Dense layers",
    "rg.LastLayerRigidity(FromKeras(trunk, model.layers[-1]))",
)
def keras_sequential():
    import keras

    model = keras.Sequential(
        [
            keras.layers.Input((4,)),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dense(2, name="head"),
        ]
    )
    trunk = keras.Model(model.inputs, model.layers[-1].input)
    return Given(
        model,
        **thirds(pairs(torch.float32)),
        readout=weights(model, "head"),
        output=first,
        extra={"trunk": trunk, **from_keras()},
    )


@specimen(
    "keras",
    "a functional model of two inputs, in units of the targets",
    "rg.LastLayerRigidity(FromKeras(trunk, model.layers[-2]), "
    "forward=lambda m, b: m([b[0], b[1]]) * 3 + 1)",
)
def keras_functional():
    import keras
    from keras import layers

    left, right = keras.Input((4,)), keras.Input((3,))
    hidden = layers.Concatenate()([left, layers.Dense(5)(right)])
    hidden = layers.Dense(16, activation="relu")(hidden)
    out = layers.Rescaling(3.0, 1.0)(layers.Dense(1, name="head")(hidden))
    model = keras.Model([left, right], out)
    trunk = keras.Model(model.inputs, model.layers[-2].input)
    batches = [(x, torch.randn(8, 3), torch.randn(8, 1)) for x, _ in pairs(torch.float32)]
    return Given(
        model,
        **thirds(batches),
        readout=weights(model, "head"),
        output=lambda m, b: m([b[0], b[1]]),
        extra={"trunk": trunk, **from_keras()},
    )


@specimen(
    "keras",
    "a subclass with batch norm and dropout, trained",
    "rg.LastLayerRigidity(FromKeras(lambda x: model.drop(model.norm(model.first(x))), model.head))",
)
def keras_subclass():
    import keras
    from keras import layers

    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.first = layers.Dense(16, activation="gelu")
            self.norm = layers.BatchNormalization()
            self.drop = layers.Dropout(0.3)
            self.head = layers.Dense(2, name="head", use_bias=False)

        def call(self, x, training=None):
            return self.head(self.drop(self.norm(self.first(x), training=training)))

    model, data = Net(), thirds(pairs(torch.float32))
    model.compile(optimizer="adam", loss="mse")
    x, y = (torch.cat(part) for part in zip(*data["train"], strict=True))
    model.fit(x.numpy(), y.numpy(), epochs=2, batch_size=16, verbose=0)
    return Given(model, **data, readout=weights(model, "head"), output=first, extra=from_keras())
