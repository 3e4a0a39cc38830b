r"""How unfamiliar an input is to each layer of a model.

`Novelty` adds up what enters the layers of a model, batch by batch (`update`), and then measures
how far other inputs lie from that in each layer (`score`), by the distance $d^2$ of `distance`.
Where an output is a sum over rows (atoms), the largest of their distances counts. Divided by what
is usual on held-out rows (`distance.usual_distances`), a distance is a novelty.

A fit is not needed:

    novelty = Novelty.begin(readout, first_batch)
    for batch in batches:
        novelty.update(readout, batch)
    reading, distances = novelty.score(readout, new_batch)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from ...data.batches import Batch
from ...data.storage import prefixed, unprefixed
from ...posterior.gram import Gram
from ...readout.reading import Reading
from ...readout.readout import AnyReadout
from .distance import LayerDistance
from .layers import Layer, find_layers, read_with_layers

_MOST_BATCHES = 64
"""Batches that wait at most before they are added up: small products keep a processor waiting."""
_MOST_BYTES = 1 << 24
"""Bytes that wait at most."""


class Novelty:
    r"""What entered the layers of a model, and the distance of other inputs from it.

    For each layer it keeps the Gram of the layer's rows with a column of ones, in float64: $\sum f
    f^\top$, $\sum f$ and the number of rows in one matrix. They are added and subtracted like any
    Gram. Every row counts once, whatever its weight in the loss.

    One thread at a time may add to it. Once its sums have been read, any number may call `score`.

    Args:
        layers: The L layers that are watched.
        grams: The sums over what entered each of them.

    Attributes:
        layers: As given.
    """

    def __init__(self, layers: Sequence[Layer], grams: Sequence[Gram]) -> None:
        self.layers = tuple(layers)
        self._grams = list(grams)
        # What entered in the latest batches, (R, columns) for each batch and layer.
        self._waiting: list[list[Tensor]] = []
        self._waiting_bytes = 0
        # Made when needed, by their precision.
        self._distances: dict[torch.dtype, list[LayerDistance]] = {}

    @classmethod
    def begin(cls, readout: AnyReadout, batch: Batch) -> Novelty:
        """A novelty that has seen no rows yet, of the layers that a first batch calls.

        Args:
            readout: Runs the model.
            batch: The first batch, which is not added.

        Raises:
            ValueError: There is no layer to watch.
        """
        device, _ = readout.placement
        layers = find_layers(readout, batch)
        return cls(layers, [Gram(layer.columns + 1, device=device) for layer in layers])

    def empty(self) -> Novelty:
        """A novelty of the same layers that has seen no rows yet."""
        grams = [Gram(gram.width, device=gram.device) for gram in self._grams]
        return Novelty(self.layers, grams)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the layers."""
        return tuple(layer.name for layer in self.layers)

    @property
    def grams(self) -> list[Gram]:
        """The sums over the rows of each layer. What waits is added first."""
        self._settle()
        return self._grams

    # --- adding and removing rows ----------------------------------------------------------------

    def update(self, readout: AnyReadout, batch: Batch) -> Reading:
        """Pass a batch through the model once, add what entered the layers, return the reading.

        Args:
            readout: Reads outputs and features off the model.
            batch: The batch.

        Raises:
            ValueError: A layer was not called, or with rows of another form than at first.
        """
        reading, rows_by_layer = read_with_layers(readout, self.layers, batch)
        self._distances = {}
        self._waiting.append(rows_by_layer)
        for rows in rows_by_layer:
            self._waiting_bytes += rows.nbytes
        if len(self._waiting) >= _MOST_BATCHES or self._waiting_bytes >= _MOST_BYTES:
            self._settle()
        return reading

    def merge(self, other: Novelty) -> Novelty:
        """Add the rows of another novelty, which must watch the same layers, and return this one.

        Raises:
            ValueError: The layers differ.
        """
        self._require_same_layers(other)
        for gram, other_gram in zip(self.grams, other.grams, strict=True):
            gram.merge(other_gram)
        self._distances = {}
        return self

    def without(self, removed: Novelty) -> Novelty:
        """The novelty of the rows that remain when those of another one are removed.

        Raises:
            ValueError: The layers differ, or there are not as many rows.
        """
        self._require_same_layers(removed)
        remaining = []
        for gram, removed_gram in zip(self.grams, removed.grams, strict=True):
            remaining.append(gram.without(removed_gram))
        return Novelty(self.layers, remaining)

    def _settle(self) -> None:
        """Add what waits to the sums."""
        if not self._waiting:
            return
        # `_waiting` goes by batch, then by layer; here each layer needs its rows.
        rows_by_layer = zip(*self._waiting, strict=True)
        for gram, rows in zip(self._grams, rows_by_layer, strict=True):
            gram.update(torch.cat(rows).to(gram.device), ones=True)
        self._waiting = []
        self._waiting_bytes = 0

    def _require_same_layers(self, other: Novelty) -> None:
        if other.layers != self.layers:
            raise ValueError(
                "Only a novelty of the same layers can be added or removed: expected "
                f"{self.names}, got {other.names}. Begin both with batches of one form."
            )

    # --- distances -------------------------------------------------------------------------------

    def score(
        self, readout: AnyReadout, batch: Batch, usual: Tensor | None = None
    ) -> tuple[Reading, Tensor]:
        """Pass a batch through the model once, and measure how far it lies from the rows so far.

        Args:
            readout: Reads outputs and features off the model.
            batch: The batch of N samples.
            usual: What is usual in each layer, (L,) in float64; None for plain distances.

        Returns:
            The reading, and (N, L): squared distances, or what they are relative to `usual`, in
            float32.

        Raises:
            ValueError: It is not known which rows of a layer belong to which sample, or NaN or
                infinity has entered a layer in training.
        """
        _, model_dtype = readout.placement
        layer_distances = self.layer_distances(model_dtype)
        reading, rows_by_layer = read_with_layers(readout, self.layers, batch)
        samples = reading.output.shape[0]
        owners: Tensor | None = None  # asked for where a layer needs them
        columns = []
        for distance, rows in zip(layer_distances, rows_by_layer, strict=True):
            layer = distance.layer
            row_distances = distance(rows, model_dtype)
            if layer.of_samples:
                if len(row_distances) != samples:
                    raise ValueError(_ROWS.format(layer.name, len(row_distances), samples))
                columns.append(row_distances)
                continue
            if owners is None:
                owners = readout.row_owners(batch)
            if owners is None or len(owners) != len(row_distances):
                raise ValueError(_ROWS.format(layer.name, len(row_distances), samples))
            # The largest distance of a sample's rows.
            zeros = row_distances.new_zeros(samples)
            columns.append(zeros.scatter_reduce(0, owners, row_distances, "amax"))
        distances = torch.stack(columns, dim=1)
        if usual is None:
            return reading, distances
        return reading, (distances.double() / usual).to(torch.float32)

    def require_finite(self) -> None:
        """Refuse sums over rows that were not finite.

        Raises:
            ValueError: NaN or infinity entered a layer.
        """
        for layer, gram in zip(self.layers, self.grams, strict=True):
            if not bool(gram.diagonal.isfinite().all()):
                raise ValueError(
                    f"NaN or infinity enters {layer.name!r} in the training data, although the "
                    "readout's features are finite. Clean the data, or fit without novelty=True."
                )

    def layer_distances(self, model_dtype: torch.dtype) -> list[LayerDistance]:
        """The distance of each layer, for a model of a precision.

        Raises:
            ValueError: NaN or infinity has entered a layer in training.
        """
        # Inputs of a half-precision model's layers are watched in single precision.
        dtype = torch.float64 if model_dtype == torch.float64 else torch.float32
        if dtype not in self._distances:
            self.require_finite()
            distances = []
            for layer, gram in zip(self.layers, self.grams, strict=True):
                distances.append(LayerDistance.of(layer, gram, dtype))
            self._distances[dtype] = distances  # two threads at once make the same
        return self._distances[dtype]

    # --- copies and files ------------------------------------------------------------------------

    def clone(self) -> Novelty:
        """An independent copy."""
        return Novelty(self.layers, [gram.clone() for gram in self.grams])

    def to(self, device: torch.device) -> Novelty:
        """An independent copy on a device."""
        return Novelty(self.layers, [gram.to(device) for gram in self.grams])

    def header(self) -> dict[str, Any]:
        """The layers, as a file's header holds them."""
        return {"layers": [asdict(layer) for layer in self.layers]}

    def state(self) -> dict[str, Tensor]:
        """The sums as tensors, by the number of the layer."""
        tensors: dict[str, Tensor] = {}
        for number, gram in enumerate(self.grams):
            tensors.update(prefixed(str(number), gram.state()))
        return tensors

    @classmethod
    def from_state(cls, header: dict[str, Any], state: dict[str, Tensor]) -> Novelty:
        """The novelty that `header` and `state` came from."""
        layers = [Layer(**layer) for layer in header["layers"]]
        grams = []
        for number in range(len(layers)):
            grams.append(Gram.from_state(unprefixed(str(number), state)))
        return cls(layers, grams)


_ROWS = (
    "novelty watches {!r}, which got {} rows for {} samples here, and it is not known which rows "
    "belong to which sample. Pass batches like those of the fit, or fit without novelty=True."
)
