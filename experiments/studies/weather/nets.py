"""The forecaster: the day's records and a learnt vector for the station, through two layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from experiments.training.protocol import Protocol
from experiments.training.stack import ACTIVATIONS

EMBEDDING = 256
"""Numbers that describe a station."""

PROTOCOL = Protocol(
    hidden=(256, 256), activation="silu", epochs=100, batch=128, rate=1e-3, decay=1e-2
)


class Forecaster(nn.Module):
    """Two inputs: the continuous records (N, d) and the station's place in the list (N,)."""

    def __init__(self, inputs: int, stations: int, protocol: Protocol = PROTOCOL) -> None:
        super().__init__()
        self.stations = nn.Embedding(stations, EMBEDDING)
        width, layers = inputs + EMBEDDING, []
        for hidden in protocol.hidden:
            layers += [nn.Linear(width, hidden), ACTIVATIONS[protocol.activation].module()]
            width = hidden
        self.hidden = nn.Sequential(*layers)
        self.head = nn.Linear(width, 1, bias=protocol.last_bias)

    def forward(self, continuous: Tensor, station: Tensor) -> Tensor:
        """(N, 1)."""
        inputs = torch.cat([continuous, self.stations(station)], dim=-1)
        output: Tensor = self.head(self.hidden(inputs))
        return output


def drawn(inputs: int, stations: int, seed: int, protocol: Protocol = PROTOCOL) -> Forecaster:
    """Torch's default first weights, from a seed of their own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Forecaster(inputs, stations, protocol)
