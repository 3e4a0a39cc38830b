"""Error bars with Lightning: a callback that fits and calibrates when training ends.

`RigidityCallback` uses the trained module (with the weights of the best checkpoint, if there is
one) and the Trainer's own loaders, fits and calibrates a `LastLayerRigidity`, and writes it beside
the checkpoint. With `RigidityModule`, `Trainer.predict` returns error bars.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .data.sources import in_order
from .last_layer.after_training import AfterTraining
from .last_layer.rigidity import LastLayerRigidity
from .models.plain_copy import plain_copy
from .notices import extra, missing
from .prediction.prediction import Prediction

try:  # a Trainer refuses modules of the other package, so the one already imported is used
    if TYPE_CHECKING or "pytorch_lightning" not in sys.modules or "lightning" in sys.modules:
        import lightning.pytorch as pl
    else:
        import pytorch_lightning as pl
except ModuleNotFoundError as error:
    missing(error, extra("lightning"), "lightning")

__all__ = ["RigidityCallback", "RigidityModule"]


def __dir__() -> list[str]:
    return sorted(__all__)


SUFFIX = ".rigidity.safetensors"
"""Added to a checkpoint's name for its file of error bars."""


class RigidityCallback(AfterTraining, pl.Callback):
    """Fit error bars on the training data and calibrate on validation data when training ends.

    The data are the loaders' data sets, every row once and in order, in batches as the Trainer
    passes them to the module. With several processes, each reads its share. `uq` contains a copy of
    the module.

    Args:
        best: Whether to use the weights of the (first) ModelCheckpoint, if there is one, and write
            a file `<checkpoint>.rigidity.safetensors`. Otherwise the last weights are used, and no
            file is written.
        every_best: Whether to do this after each epoch with a new best checkpoint as well, for
            training that may be interrupted.
        options: Options of `AfterTraining`: `valid`, `fit`, `calibrate`, `layer`, `forward` and
            others.

    Attributes:
        path: The latest file of error bars; None without one.
    """

    def __init__(self, *, best: bool = True, every_best: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.best = best or every_best
        self.every_best = every_best
        self.path: str | None = None
        # Path and time of the checkpoint that was used last.
        self._latest_checkpoint: tuple[str, int] | None = None

    def on_train_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        """Raise before training if error bars could not be fitted after it.

        Raises:
            ValueError: Loaders or a ModelCheckpoint are missing, or checkpoints cannot be read.
        """
        self._data(trainer)
        self.path = None
        self._latest_checkpoint = None
        checkpoints = trainer.checkpoint_callback
        if self.best and checkpoints:
            asynchronous = isinstance(trainer.strategy.checkpoint_io, pl.plugins.AsyncCheckpointIO)
            remote = "://" in str(getattr(checkpoints, "dirpath", None))
            if asynchronous or remote:
                raise ValueError(
                    "Remote or asynchronous checkpoints cannot be read. Pass best=False."
                )
        if self.every_best and checkpoints is None:
            raise ValueError("every_best=True needs a ModelCheckpoint in the Trainer's callbacks.")

    def on_train_epoch_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        """Fit and calibrate after an epoch with a new best checkpoint, if that is wanted."""
        if self.every_best and trainer.checkpoint_callback.best_model_path:
            self.on_train_end(trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        """Fit and calibrate after the training."""
        best_path = ""
        if self.best:
            best_path = getattr(trainer.checkpoint_callback, "best_model_path", "")
        if self.every_best and self._is_used_already(trainer, best_path):
            return
        # Hooks for batches may augment the data in the training stage, so another stage is set.
        stage = trainer.state.stage
        trainer.validating = True
        try:
            with torch.random.fork_rng(devices=[]):
                self._fit_and_save(trainer, pl_module, best_path)
        finally:
            trainer.state.stage = stage

    def _is_used_already(self, trainer: Any, best_path: str) -> bool:
        """Whether error bars of this checkpoint exist already; all processes get the same answer.

        The checkpoint is remembered for the next call.
        """
        written_at = os.stat(best_path).st_mtime_ns if best_path else 0
        checkpoint = (best_path, written_at)
        same = checkpoint == self._latest_checkpoint
        self._latest_checkpoint = checkpoint
        return bool(trainer.strategy.broadcast(same))

    def _fit_and_save(self, trainer: Any, module: pl.LightningModule, best_path: str) -> None:
        """Fit and calibrate a copy of the module, and write the file.

        Args:
            trainer: The Trainer.
            module: The trained module.
            best_path: The best checkpoint, whose weights the copy gets; "" without one.
        """
        model = plain_copy(module)
        vars(model).pop("_compiled_call_impl", None)  # it would call the original module
        if vars(model).get("_compiler_ctx") is not None:
            vars(model).pop("forward", None)
        if best_path:
            # The Trainer has written it, so that it is safe to load any objects.
            checkpoint = torch.load(best_path, map_location="cpu", weights_only=False)
            model.load_state_dict(checkpoint["state_dict"], strict=module.strict_loading)
        train, valid = self._data(trainer)
        self.make(model, train, valid, trial=bool(trainer.fast_dev_run))
        previous_path = self.path
        self.path = best_path + SUFFIX if best_path else None
        if self.path is not None and trainer.is_global_zero:
            self.uq.save(self.path)
            # The Trainer deletes old checkpoints: their files of error bars are deleted too.
            if previous_path and not os.path.exists(previous_path.removesuffix(SUFFIX)):
                Path(previous_path).unlink(missing_ok=True)
        trainer.strategy.barrier("rigidity")

    def _data(self, trainer: Any) -> tuple[Any, Any]:
        """The data to fit on, and those to calibrate on; None where there is no calibration.

        Raises:
            ValueError: The Trainer does not have one loader of each.
        """
        train = _LoaderBatches(trainer, trainer.train_dataloader, "training")
        if self.calibrating is None or self.valid is not None:
            return train, self.valid
        return train, _LoaderBatches(trainer, trainer.val_dataloaders, "validation")


class RigidityModule(pl.LightningModule):
    """Predictions with error bars from `Trainer.predict`: a `Prediction` for each batch.

    Args:
        uq: A fitted and calibrated object.
    """

    def __init__(self, uq: LastLayerRigidity) -> None:
        super().__init__()
        self.uq = uq

    def predict_step(self, batch: Any, *numbers: int) -> Prediction:
        """The prediction for one batch; targets in it are ignored."""
        return self.uq.predict([batch])


class _LoaderBatches:
    """A loader's batches as the Trainer passes them to the module; in a trial run the first few.

    Args:
        trainer: The Trainer.
        loaders: Its loader, or a collection of one.
        kind: "training" or "validation", for the message.
    """

    def __init__(self, trainer: Any, loaders: Any, kind: str) -> None:
        several = list(loaders) if isinstance(loaders, (list, tuple, dict)) else [loaders]
        if len(several) != 1 or loaders is None or isinstance(loaders, dict):
            got = "none" if loaders is None else f"a {type(loaders).__name__} of {len(several)}"
            raise ValueError(
                f"RigidityCallback needs one {kind} loader, but the Trainer has {got}. Pass one "
                "to the Trainer, or pass valid=... (the data to calibrate on) or calibrate=None "
                "to RigidityCallback."
            )
        self.trainer = trainer
        self.loader = in_order(several[0])

    def __iter__(self) -> Iterator[Any]:
        trainer = self.trainer
        # Hooks of a data module take precedence over the module's, as in Lightning's own loops.
        hooks = trainer.datamodule
        is_overridden = pl.utilities.model_helpers.is_overridden
        if hooks is None or not is_overridden("on_before_batch_transfer", hooks):
            hooks = trainer.lightning_module
        for batch in islice(self.loader, trainer.fast_dev_run or None):
            batch = trainer.precision_plugin.convert_input(batch)
            batch = hooks.on_before_batch_transfer(batch, 0)
            yield trainer.strategy.batch_to_device(batch, dataloader_idx=0)
