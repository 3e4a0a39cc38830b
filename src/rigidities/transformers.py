"""Error bars where transformers trains: a callback for its Trainer, and a pipeline for texts."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from .data.shards import in_order
from .last_layer.after_training import AfterTraining
from .last_layer.rigidity import LastLayerRigidity
from .models.whole import whole
from .notices import extra, missing

try:
    import transformers as hf
except ModuleNotFoundError as error:
    missing(error, extra("transformers"), "transformers")

FILE = "rigidity.safetensors"


class RigidityCallback(AfterTraining, hf.TrainerCallback):
    """Fits the trained model's error bars on the training data, and calibrates on the evaluation's.

    The data are the Trainer's data sets through its own collator, every row once and in order; of
    many processes each reads its share. `uq` has a copy of the model, the best one with
    `load_best_model_at_end`, without autocast; a file in `output_dir` holds what was learnt.

    Args:
        options: of `AfterTraining`: `valid` (a data set of rows, or a loader of batches), `fit`,
            `calibrate`, `layer`, `forward` and others.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Refuse before the training what could not be done after it."""
        _require_regression(given["model"])
        self._require(self.valid if args.eval_strategy == "no" else args.eval_strategy)
        in_order(given["train_dataloader"])

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """After the training."""
        _require_regression(given["model"])  # its first batch may have said so
        train, valid = in_order(given["train_dataloader"]), self.valid
        if valid is None:
            valid = given["eval_dataloader"]
        elif not isinstance(valid, DataLoader):
            columns = list(next(iter(train.dataset)))  # those that the Trainer has left there
            collate = hf.trainer_utils.RemoveColumnsCollator(train.collate_fn, columns)
            valid = DataLoader(valid, args.eval_batch_size, collate_fn=collate)
        self._require(valid)
        plain = whole(given["model"])
        if (own := vars(plain).pop("_original_forward", None)) is not None:
            plain.forward = own  # without the autocast that Accelerate has put around it
        self.make(plain, train, in_order(valid))
        if state.is_world_process_zero:
            os.makedirs(args.output_dir, exist_ok=True)
            self.uq.save(Path(args.output_dir, FILE))

    def _require(self, valid: Any) -> None:
        if valid is None and self.calibrating is not None:
            raise ValueError(
                "The Trainer evaluates nothing to calibrate on. Give it eval_dataset= and "
                'eval_strategy="epoch"; or RigidityCallback valid=..., or calibrate=None.'
            )


class RigidityPipeline(hf.TextClassificationPipeline):
    """Scores of texts with error bars, as dictionaries: label, score, std, low and high.

    A pipeline of transformers, with its options, for a model for sequence classification whose
    labels are numbers; several give a list for each text. `level` is between low and high.
    """

    def __init__(self, uq: LastLayerRigidity, tokenizer: Any, **options: Any) -> None:
        _require_regression(uq.model)
        self.uq, place = uq.to(options.get("device")), next(uq.model.parameters()).device
        options |= {"model": uq.model, "tokenizer": tokenizer, "device": place}
        super().__init__(**options)  # type: ignore[no-untyped-call]

    @classmethod
    def load(cls, folder: str | os.PathLike[str], **options: Any) -> RigidityPipeline:
        """From the folder of a model, its tokenizer and its error bars."""
        model = hf.AutoModelForSequenceClassification.from_pretrained(folder)
        uq = LastLayerRigidity.load(Path(folder, FILE), model)
        return cls(uq, hf.AutoTokenizer.from_pretrained(folder), **options)

    def _sanitize_parameters(self, level: Any = None, **tokenizing: Any) -> Any:  # type: ignore[override]
        known = inspect.signature(type(self.tokenizer).__call__).parameters
        if unknown := set(tokenizing) - set(known):
            raise TypeError(f"Expected level= or the tokenizer's options, got {sorted(unknown)}.")
        return tokenizing, {} if level is None else {"level": level}, {}

    def _forward(self, model_inputs: Any, level: Any = 0.9) -> Any:  # type: ignore[override]
        p = self.uq.predict([dict(model_inputs)], progress=False)
        low, high = p.interval(level)
        return {"score": p.mean, "std": p.std, "low": low, "high": high}

    def postprocess(self, model_outputs: Any) -> Any:  # type: ignore[override]
        """The dictionaries of one text."""
        numbers = {key: one.flatten().tolist() for key, one in model_outputs.items()}
        labels = (self.model.config.id2label or {}).items()
        rows = [{"label": of} | {key: one[k] for key, one in numbers.items()} for k, of in labels]
        return rows if len(rows) > 1 else rows[0]


def _require_regression(model: Any) -> None:
    kind = getattr(getattr(model, "config", None), "problem_type", None)
    if kind not in (None, "regression"):
        raise ValueError(
            f"Error bars are for regression, and the model's problem_type is {kind!r}. For numbers "
            'as labels set model.config.problem_type = "regression" before the training.'
        )
