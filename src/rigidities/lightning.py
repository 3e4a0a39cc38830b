"""Error bars where Lightning trains: a callback that fits and calibrates when training ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .data.shards import in_order
from .last_layer.after_training import AfterTraining
from .last_layer.rigidity import LastLayerRigidity
from .models.whole import whole
from .notices import extra, missing
from .prediction.prediction import Prediction

try:  # a Trainer refuses the modules of the other package: the one in use is taken
    if TYPE_CHECKING or "pytorch_lightning" not in sys.modules or "lightning" in sys.modules:
        import lightning.pytorch as pl
    else:
        import pytorch_lightning as pl
except ModuleNotFoundError as error:
    missing(error, extra("lightning"), "lightning")

SUFFIX = ".rigidity.safetensors"


class RigidityCallback(AfterTraining, pl.Callback):
    """Fits the trained module's error bars on the training data, and calibrates on the validation.

    The data are the loaders' data sets, every row once and in order, in batches as the Trainer
    hands them to the module; of many processes each reads its share. `uq` has a copy of the module.

    Args:
        best: take the weights of the (first) ModelCheckpoint, where there is one, and write a file
            `<checkpoint>.rigidity.safetensors`; otherwise the last weights, and no file.
        every_best: after each epoch with a new one too, for a training that is interrupted.
        options: of `AfterTraining`: `valid`, `fit`, `calibrate`, `layer`, `forward` and others.
    """

    def __init__(self, *, best: bool = True, every_best: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.best, self.every_best = best or every_best, every_best
        self.path: str | None = None
        self._seen: tuple[str, int] | None = None

    def on_train_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        """Refuse before the training what could not be done after it."""
        self._data(trainer)
        self.path, self._seen, kept = None, None, trainer.checkpoint_callback
        late = isinstance(trainer.strategy.checkpoint_io, pl.plugins.AsyncCheckpointIO)
        if self.best and kept and (late or "://" in str(getattr(kept, "dirpath", None))):
            raise ValueError("Remote or asynchronous checkpoints are not read: pass best=False.")
        if self.every_best and kept is None:
            raise ValueError("every_best=True needs a ModelCheckpoint in the Trainer's callbacks.")

    def on_train_epoch_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        """After an epoch with a new best checkpoint, if that is wanted."""
        if self.every_best and trainer.checkpoint_callback.best_model_path:
            self.on_train_end(trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        """After the training."""
        best = getattr(trainer.checkpoint_callback, "best_model_path", "") if self.best else ""
        if self.every_best:
            before, self._seen = self._seen, (best, os.stat(best).st_mtime_ns if best else 0)
            if trainer.strategy.broadcast(self._seen == before):
                return
        stage, trainer.validating = trainer.state.stage, True  # hooks for batches may augment
        try:
            with torch.random.fork_rng(devices=[]):
                self._make(trainer, pl_module, best)
        finally:
            trainer.state.stage = stage

    def _make(self, trainer: Any, module: pl.LightningModule, best: str) -> None:
        model = whole(module)
        vars(model).pop("_compiled_call_impl", None)  # would call the module itself
        if vars(model).get("_compiler_ctx") is not None:
            vars(model).pop("forward", None)
        if best:  # the Trainer itself has written it
            held = torch.load(best, map_location="cpu", weights_only=False)["state_dict"]
            model.load_state_dict(held, strict=module.strict_loading)
        self.make(model, *self._data(trainer), trial=bool(trainer.fast_dev_run))
        before, self.path = self.path, best + SUFFIX if best else None
        if self.path is not None and trainer.is_global_zero:
            self.uq.save(self.path)
            if before and not os.path.exists(before.removesuffix(SUFFIX)):  # the Trainer keeps few
                Path(before).unlink(missing_ok=True)
        trainer.strategy.barrier("rigidity")

    def _data(self, trainer: Any) -> tuple[Any, Any]:
        train = _Batches(trainer, trainer.train_dataloader, "training")
        if self.calibrating is None or self.valid is not None:
            return train, self.valid
        return train, _Batches(trainer, trainer.val_dataloaders, "validation")


class RigidityModule(pl.LightningModule):
    """Predictions with error bars by `Trainer.predict`: a `Prediction` for each batch."""

    def __init__(self, uq: LastLayerRigidity) -> None:
        super().__init__()
        self.uq = uq

    def predict_step(self, batch: Any, *numbers: int) -> Prediction:
        """Of one batch; targets in it are ignored."""
        return self.uq.predict([batch], progress=False)


class _Batches:
    """A loader's batches as the Trainer hands them to the module; of a trial run the first few."""

    def __init__(self, trainer: Any, loaders: Any, kind: str) -> None:
        found = list(loaders) if isinstance(loaders, (list, tuple, dict)) else [loaders]
        if len(found) != 1 or loaders is None or isinstance(loaders, dict):
            has = "none" if loaders is None else f"a {type(loaders).__name__} of {len(found)}"
            raise ValueError(
                f"RigidityCallback needs one {kind} loader, and the Trainer has {has}. Give one; "
                "or RigidityCallback the data to calibrate on, valid=..., or calibrate=None."
            )
        self.trainer, self.loader = trainer, in_order(found[0])

    def __iter__(self) -> Iterator[Any]:
        host, overrides = self.trainer, pl.utilities.model_helpers.is_overridden
        hooks = host.datamodule  # go before the module's, as in Lightning's own loops
        if hooks is None or not overrides("on_before_batch_transfer", hooks):
            hooks = host.lightning_module
        for batch in islice(self.loader, host.fast_dev_run or None):
            batch = host.precision_plugin.convert_input(batch)
            batch = hooks.on_before_batch_transfer(batch, 0)
            yield host.strategy.batch_to_device(batch, dataloader_idx=0)
