"""From rows to ridge, scale, noise and distribution: pure functions.

Data flow: `rows` collects the rows of a calibration in one pass into one table. A method
(`methods`) turns them into a `Calibration` (`calibration`), which predictions use, with a
`CalibrationReport` (`report`) on it, in numbers: `paper` chooses ridge, scale and noise by one
criterion or by the `evidence`; `full` fits a density head to each target (`target_fit`), which
starts at one mixture for all rows and follows the inputs as far as left-out rows support it
(`density_fit`, `density_loss`). Both measure their `gain` over one constant bar. `coverage` says
where intervals cover too much or too little; `conformal` guarantees it; `words` puts reports into
sentences.
"""

from .report import CalibrationReport

__all__ = ["CalibrationReport"]


def __dir__() -> list[str]:
    return sorted(__all__)
