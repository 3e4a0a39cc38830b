"""From residuals to ridge, scale, noise and distribution.

Data flow: `residuals` gathers the rows of a calibration in one pass. Either `search`
chooses ridge, scale and noise by one of the `criteria` or by the `evidence`, or `full_model` fits
noise, tails and shape of the distribution. Both end in a `Calibration` (`calibration`), which
predictions use, and a `CalibrationReport` (`report`) on it, with its `gain` over one constant bar.
`coverage` says where intervals cover too much or too little; `conformal` guarantees it.
"""

from .report import CalibrationReport

__all__ = ["CalibrationReport"]


def __dir__() -> list[str]:
    return sorted(__all__)
