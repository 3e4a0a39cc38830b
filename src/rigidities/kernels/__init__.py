"""Kernels of wide nets: dual activations, NNGP and NTK, and the process at training time t."""

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

__all__ = ["Activation", "activation", "by_quadrature"]
__all__ += ["FullyConnected", "Kernels", "empirical_nngp", "empirical_ntk"]
__all__ += ["TrainedProcess", "gaussian_process_at", "last_layer_process_at"]
__all__ += ["CubicCorrections", "cubic_corrections", "odd_coefficients"]
__all__ += ["dual_series", "recursion_series"]
