"""Error bars with transformers: a callback for its Trainer, and a pipeline for texts.

`RigidityCallback` uses the trained model and the Trainer's own loaders, fits and calibrates a
`LastLayerRigidity`, and writes it into the Trainer's output folder. `RigidityPipeline` loads such a
folder and scores texts.
"""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from .data.sources import in_order
from .last_layer.after_training import AfterTraining
from .last_layer.rigidity import LastLayerRigidity
from .models.plain_copy import plain_copy
from .notices import extra, missing

try:
    import transformers as hf
except ModuleNotFoundError as error:
    missing(error, extra("transformers"), "transformers")

__all__ = ["RigidityCallback", "RigidityPipeline"]


def __dir__() -> list[str]:
    return sorted(__all__)


FILE = "rigidity.safetensors"
"""The name of the file of error bars in a model's folder."""


class RigidityCallback(AfterTraining, hf.TrainerCallback):
    """Fit error bars on the training data and calibrate on evaluation data when training ends.

    The data are the Trainer's data sets through its own collator, every row once and in order. With
    several processes, each reads its share. `uq` contains a copy of the model without autocast;
    with `load_best_model_at_end` it is the best model. The fit is saved to a file in `output_dir`.

    Args:
        options: Options of `AfterTraining`: `valid` (a data set of rows, or a loader of batches),
            `fit`, `calibrate`, `layer`, `forward` and others.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Raise before training if error bars could not be fitted after it."""
        _require_regression(objects["model"])
        # The evaluation loader does not exist yet: the strategy says whether there will be one.
        valid = self.valid if args.eval_strategy == "no" else args.eval_strategy
        self._require_data(valid)
        in_order(objects["train_dataloader"])

    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Fit and calibrate after the training, and write the file."""
        # Transformers may decide on the problem type at the first batch.
        _require_regression(objects["model"])
        train = in_order(objects["train_dataloader"])
        valid = self.valid
        if valid is None:
            valid = objects["eval_dataloader"]
        elif not isinstance(valid, DataLoader):
            columns = list(next(iter(train.dataset)))  # those that the Trainer has not removed
            collate = hf.trainer_utils.RemoveColumnsCollator(train.collate_fn, columns)
            valid = DataLoader(valid, args.eval_batch_size, collate_fn=collate)
        self._require_data(valid)
        model = plain_copy(objects["model"])
        # Remove the autocast that Accelerate has put around the forward pass.
        original_forward = vars(model).pop("_original_forward", None)
        if original_forward is not None:
            model.forward = original_forward
        self.make(model, train, in_order(valid))
        if state.is_world_process_zero:
            os.makedirs(args.output_dir, exist_ok=True)
            self.uq.save(Path(args.output_dir, FILE))

    def _require_data(self, valid: Any) -> None:
        """Refuse a calibration without data."""
        if valid is None and self.calibrating is not None:
            raise ValueError(
                "The Trainer has no evaluation data to calibrate on. Pass eval_dataset= and "
                'eval_strategy="epoch" to the Trainer, or valid=... or calibrate=None to '
                "RigidityCallback."
            )


class RigidityPipeline(hf.TextClassificationPipeline):
    """Scores of texts with error bars, as dictionaries: label, score, std, low and high.

    It is a transformers pipeline for a sequence classification model whose labels are numbers. With
    several labels, each text gives a list. When called, `level=` is the probability of the interval
    from low to high.

    Args:
        uq: A fitted and calibrated object for the model.
        tokenizer: The model's tokenizer.
        options: Options of `transformers.Pipeline`, such as `device`.
    """

    def __init__(self, uq: LastLayerRigidity, tokenizer: Any, **options: Any) -> None:
        _require_regression(uq.model)
        self.uq = uq.to(options.get("device"))
        options["model"] = uq.model
        options["tokenizer"] = tokenizer
        options["device"] = next(uq.model.parameters()).device
        super().__init__(**options)  # type: ignore[no-untyped-call]

    @classmethod
    def load(cls, folder: str | os.PathLike[str], **options: Any) -> RigidityPipeline:
        """A pipeline from the folder of a model, its tokenizer and its error bars.

        Args:
            folder: The folder that the Trainer's `save_model` and the `RigidityCallback` wrote to.
            options: Options of the class.
        """
        model = hf.AutoModelForSequenceClassification.from_pretrained(folder)
        uq = LastLayerRigidity.load(Path(folder, FILE), model)
        return cls(uq, hf.AutoTokenizer.from_pretrained(folder), **options)

    def _sanitize_parameters(self, level: Any = None, **tokenizing: Any) -> Any:  # type: ignore[override]
        """Options of the three steps: for the tokenizer, for `_forward`, for `postprocess`."""
        tokenizer_options = inspect.signature(type(self.tokenizer).__call__).parameters
        unknown = set(tokenizing) - set(tokenizer_options)
        if unknown:
            raise TypeError(f"Expected level= or the tokenizer's options, got {sorted(unknown)}.")
        forward_options = {} if level is None else {"level": level}
        return tokenizing, forward_options, {}

    def _forward(self, model_inputs: Any, level: Any = 0.9) -> Any:  # type: ignore[override]
        """Score, error bar and interval of tokenised texts, as tensors."""
        prediction = self.uq.predict([dict(model_inputs)])
        low, high = prediction.interval(level)
        return {"score": prediction.mean, "std": prediction.std, "low": low, "high": high}

    def postprocess(self, model_outputs: Any) -> Any:  # type: ignore[override]
        """The dictionary of one text, or a list with one for each label."""
        numbers = {name: tensor.flatten().tolist() for name, tensor in model_outputs.items()}
        labels = self.model.config.id2label or {}
        scores = []
        for index, label in labels.items():
            score = {"label": label}
            for name, values in numbers.items():
                score[name] = values[index]
            scores.append(score)
        return scores if len(scores) > 1 else scores[0]


def _require_regression(model: Any) -> None:
    """Refuse a model for classification."""
    problem_type = getattr(getattr(model, "config", None), "problem_type", None)
    if problem_type not in (None, "regression"):
        raise ValueError(
            f"Error bars are for regression, but the model's problem_type is {problem_type!r}. If "
            'the labels are numbers, set model.config.problem_type = "regression" before the '
            "training."
        )
