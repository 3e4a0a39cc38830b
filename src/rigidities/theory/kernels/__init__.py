"""Kernels of wide networks: dual activations, NNGP and NTK, and the process at training time t.

`activation` describes what one layer does to a kernel, and `FullyConnected` composes this over the
layers of an infinitely wide network. `empirical_ntk` and `empirical_nngp` are the kernels of a
given network, and `gaussian_process_at` trains a process with such kernels for a time t.
"""

from .activations import Activation, activation, by_quadrature
from .dynamics import TrainedProcess, gaussian_process_at, last_layer_process_at
from .empirical import empirical_nngp, empirical_ntk
from .fully_connected import FullyConnected, Kernels
from .series import (
    CubicCorrections,
    cubic_corrections,
    dual_series,
    odd_coefficients,
    recursion_series,
)

__all__ = [
    "Activation",
    "CubicCorrections",
    "FullyConnected",
    "Kernels",
    "TrainedProcess",
    "activation",
    "by_quadrature",
    "cubic_corrections",
    "dual_series",
    "empirical_nngp",
    "empirical_ntk",
    "gaussian_process_at",
    "last_layer_process_at",
    "odd_coefficients",
    "recursion_series",
]


def __dir__() -> list[str]:
    return sorted(__all__)
