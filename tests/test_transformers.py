"""The callback and the pipeline of transformers against plain calls of the library."""

import importlib
import re
import sys

import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers

import rigidities as rg
from rigidities.transformers import FILE, RigidityCallback, RigidityPipeline
from tests.docs.test_docs import DOCS, blocks

hf.logging.set_verbosity_error()
hf.logging.disable_progress_bar()
WORDS = ["good", "bad", "very", "not", "film", "book", "the", "a", "and", "is", "one", "two", "of"]
TEXTS = ["good film", "not a very bad book", "the one of two"]
PAPER = {"method": "paper"}


def tokenizer():
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return hf.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")


def bert(labels=1, **options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "max_position_embeddings": 16}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 2 + len(WORDS)}
    given = {"problem_type": "regression", "num_labels": labels} | options
    return hf.BertForSequenceClassification(hf.BertConfig(**sizes, **layers, **given))


def data(count, seed, labels=1):
    """Of several lengths, to be padded, and with a column that the model does not take."""
    drawn, rows = torch.Generator().manual_seed(seed), []
    for _ in range(count):
        size = int(torch.randint(3, 12, (), generator=drawn))
        picked = torch.randint(len(WORDS), (size,), generator=drawn).tolist()
        score = float(sum(1 if one == 0 else -1 if one == 1 else one / 20 for one in picked))
        label = score if labels == 1 else [score * (k + 1) for k in range(labels)]
        text = " ".join(WORDS[one] for one in picked)
        rows.append({**tokenizer()(text), "labels": label, "text": text})
    return rows


TRAIN, VALID = data(43, seed=1), data(40, seed=2)


def train(folder, callback, model, train=TRAIN, valid=VALID, **options):
    quiet = {"report_to": [], "disable_tqdm": True, "log_level": "error"}
    sizes = {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 8}
    given = {"eval_strategy": "epoch", "save_strategy": "no", "logging_strategy": "no"} | options
    args = hf.TrainingArguments(
        folder, use_cpu=True, num_train_epochs=2, learning_rate=1e-2, **quiet, **sizes, **given
    )
    trainer = hf.Trainer(
        model,
        args,
        train_dataset=train,
        eval_dataset=valid,
        data_collator=hf.DataCollatorWithPadding(tokenizer()),
        callbacks=[callback],
        processing_class=tokenizer(),
    )
    trainer.remove_callback(hf.PrinterCallback)
    trainer.train()
    return trainer


def batches(rows):
    known = [{key: row[key] for key in row if key != "text"} for row in rows]
    return [
        hf.DataCollatorWithPadding(tokenizer())(known[i : i + 8]) for i in range(0, len(rows), 8)
    ]


def plain(model, train=TRAIN, valid=VALID):
    uq = rg.LastLayerRigidity(model).fit(batches(train))
    uq.calibrate(batches(valid), **PAPER)
    return uq


def answers(uq, level=0.9):
    """Of the plain library, one text at a time: scores, bars and bounds, (texts, labels, 4)."""
    found = []
    for text in TEXTS:
        p = uq.predict([dict(tokenizer()(text, return_tensors="pt"))])
        low, high = p.interval(level)
        found.append(torch.stack([p.mean, p.std, low, high], -1)[0])
    return torch.stack(found)


def numbers(rows):
    keys = ["label", "score", "std", "low", "high"]
    assert all(list(row) == keys for row in rows)
    return torch.tensor([[row[key] for key in keys[1:]] for row in rows])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Shuffled, the last rows dropped, and the worst of two checkpoints loaded at the end."""
    folder = tmp_path_factory.mktemp("run")
    callback, model = RigidityCallback(calibrate=PAPER), bert()
    options = {"load_best_model_at_end": True, "greater_is_better": True}
    options |= {"save_strategy": "epoch", "dataloader_drop_last": True}
    trainer = train(folder, callback, model, **options)
    trainer.save_model(folder)
    return trainer, callback, folder


@pytest.mark.thorough
def test_the_bars_are_those_of_the_best_model_and_all_rows(trained):
    trainer, callback, _ = trained
    best = hf.AutoModelForSequenceClassification.from_pretrained(
        trainer.state.best_model_checkpoint
    )
    assert callback.uq.gram.count == len(TRAIN)
    torch.testing.assert_close(answers(callback.uq), answers(plain(best)), rtol=1e-5, atol=1e-6)


def test_the_file_beside_the_model_makes_the_same_pipeline(trained):
    _, callback, folder = trained
    assert (folder / FILE).is_file()
    loaded, own = RigidityPipeline.load(folder), RigidityPipeline(callback.uq, tokenizer())
    # Weights that were read from a file lie elsewhere in memory, and sums may round otherwise.
    rows, expected = loaded(TEXTS), own(TEXTS)
    assert [row["label"] for row in rows] == [row["label"] for row in expected]
    torch.testing.assert_close(numbers(rows), numbers(expected), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"batch_size": 3}, {"level": 0.5}])
def test_a_pipeline_gives_the_numbers_of_plain_calls(trained, options):
    _, callback, _ = trained
    rows = RigidityPipeline(callback.uq, tokenizer())(TEXTS, **options)
    expected = answers(callback.uq, options.get("level", 0.9))[:, 0]
    torch.testing.assert_close(numbers(rows), expected, rtol=1e-5, atol=1e-6)
    assert {row["label"] for row in rows} == {"LABEL_0"}


@pytest.mark.thorough
def test_a_pipeline_takes_what_pipelines_take(trained):
    pipeline = RigidityPipeline(trained[1].uq, tokenizer())
    expected = pipeline(TEXTS)
    assert pipeline(TEXTS[0]) == expected[:1]
    assert list(pipeline(text for text in TEXTS)) == expected
    assert pipeline({"text": "good", "text_pair": "film"})["std"] > 0


@pytest.mark.thorough
def test_several_labels_give_a_list_for_each_text(tmp_path):
    rows = data(43, 1, labels=3), data(40, 2, labels=3)
    callback = RigidityCallback(calibrate=PAPER)
    trainer = train(tmp_path, callback, bert(3), *rows)
    uq = plain(trainer.model, *rows)
    found = RigidityPipeline(callback.uq, tokenizer())(TEXTS)
    assert [row["label"] for row in found[0]] == ["LABEL_0", "LABEL_1", "LABEL_2"]
    each = torch.stack([numbers(one) for one in found])
    torch.testing.assert_close(each, answers(uq), rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_autocast_of_the_training_is_not_in_the_error_bars(tmp_path):
    callback = RigidityCallback(calibrate=PAPER)
    trainer = train(tmp_path, callback, bert(), bf16=True)
    trainer.save_model(tmp_path)
    fresh = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    torch.testing.assert_close(answers(callback.uq), answers(plain(fresh)), rtol=1e-5, atol=1e-6)
    cast = trainer.model(**batches(VALID)[0]).logits
    assert not torch.equal(cast, fresh(**batches(VALID)[0]).logits)  # the Trainer's own stays


@pytest.mark.thorough
def test_data_to_calibrate_on_may_be_given(tmp_path):
    callback = RigidityCallback(valid=VALID, calibrate=PAPER, layer="classifier")
    trainer = train(tmp_path, callback, bert(), valid=None, eval_strategy="no")
    torch.testing.assert_close(
        answers(callback.uq), answers(plain(trainer.model)), rtol=1e-5, atol=1e-6
    )


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return ({key: row[key] for key in row if key != "text"} for row in TRAIN)


@pytest.mark.thorough
def test_a_stream_is_read_to_its_end_and_data_may_have_further_columns(tmp_path):
    callback = RigidityCallback(valid=VALID, calibrate=PAPER)
    options = {"eval_strategy": "no", "max_steps": 2, "remove_unused_columns": False}
    trainer = train(tmp_path, callback, bert(), Stream(), None, **options)
    assert callback.uq.gram.count == len(TRAIN)
    torch.testing.assert_close(
        answers(callback.uq), answers(plain(trainer.model)), rtol=1e-5, atol=1e-6
    )


@pytest.mark.thorough
def test_a_pipeline_is_moved_and_refuses_unknown_options(trained):
    pipeline = RigidityPipeline(trained[1].uq, tokenizer())
    with pytest.raises(TypeError, match=r"level= or the tokenizer's options, got .'levle'"):
        pipeline(TEXTS, levle=0.5)
    moved = RigidityPipeline(rg.LastLayerRigidity(bert()), tokenizer(), device="meta")
    assert moved.device.type == "meta" and moved.uq.model.classifier.weight.is_meta


@pytest.mark.thorough
def test_no_calibration_may_be_asked_for(tmp_path):
    callback = RigidityCallback(calibrate=None)
    train(tmp_path, callback, bert(), valid=None, eval_strategy="no")
    assert callback.uq.calibration_report is None


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("regression", {"eval_strategy": "no"}, "has no evaluation data to calibrate on.*valid="),
        ("multi_label_classification", {}, "problem_type is 'multi_label_classification'"),
    ],
)
def test_what_cannot_be_done_is_refused_before_the_training(tmp_path, kind, options, message):
    model, before = bert(problem_type=kind), bert().state_dict()
    with pytest.raises(ValueError, match=message):
        train(tmp_path, RigidityCallback(), model, **options)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


@pytest.mark.thorough
def test_a_trainer_that_has_not_evaluated_is_refused(tmp_path):
    callback = RigidityCallback()
    with pytest.raises(ValueError, match="has no evaluation data"):
        train(tmp_path, callback, bert(), eval_delay=100)
    assert not (tmp_path / FILE).exists()
    with pytest.raises(ValueError, match="There is no fit yet"):
        _ = callback.uq


def test_a_classifier_has_no_pipeline_with_error_bars():
    uq = rg.LastLayerRigidity(bert(2, problem_type="single_label_classification"))
    with pytest.raises(ValueError, match="Error bars are for regression"):
        RigidityPipeline(uq, tokenizer())


def test_the_extra_is_named_where_transformers_is_missing(monkeypatch):
    monkeypatch.setattr(rg, "transformers", rg.transformers)  # back at the end
    monkeypatch.delitem(sys.modules, "rigidities.transformers")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "rigidities\[transformers\]"'):
        importlib.import_module("rigidities.transformers")


@pytest.mark.thorough
def test_the_page_runs_and_prints_what_it_says(plain_torch):
    printed, text = [], blocks(DOCS / "trainers.md")[1][2]
    exec(compile(text, "trainers.md", "exec"), {"print": lambda *one: printed.append(one)})
    shown = re.findall(r"print\(.+\)  # (.+)", text)
    assert [" ".join(map(str, one)) for one in printed] == shown != []
