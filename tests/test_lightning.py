"""The callback of Lightning against plain calls of the library on the same weights."""

import importlib
import os
import re
import shutil
import signal
import sys

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import rigidities as rg
from rigidities.lightning import SUFFIX, RigidityCallback, RigidityModule
from rigidities.notices import NotFittedError
from tests.docs.test_docs import DOCS, blocks

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:You defined a .validation_step"),
]
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
PAPER = {"method": "paper"}


def regressor(host=pl, dtype=torch.float64):
    class Regressor(host.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            layers = torch.nn.Linear(3, 6), torch.nn.BatchNorm1d(6), torch.nn.Tanh()
            self.net = torch.nn.Sequential(*layers, torch.nn.Linear(6, 1)).to(dtype)

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, index):
            return (self(batch[0]) - batch[1]).square().mean()

        def validation_step(self, batch, index, dataloader_idx=0):
            self.log("loss", self.training_step(batch, index))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05)

    return Regressor()


def rows(count, seed):
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x, x.sum(1, keepdim=True) + 0.1 * x[:, :1] ** 2


TRAIN, VALID, TEST = rows(53, 1), rows(50, 2), rows(9, 3)


def loader(data, **options):
    return DataLoader(TensorDataset(*data), 8, **options)


def shuffled():
    order = torch.Generator().manual_seed(4)
    return loader(TRAIN, shuffle=True, drop_last=True, generator=order)


def trainer(*callbacks, host=pl, **options):
    kept = any(hasattr(one, "best_model_path") for one in callbacks)
    given = {"max_epochs": 2, "accelerator": "cpu", "enable_checkpointing": kept} | QUIET | options
    return host.Trainer(callbacks=list(callbacks), **given)


def keeper(folder, mode="min", **options):
    return ModelCheckpoint(folder, monitor="loss", mode=mode, **options)


def plain(module, **options):
    uq = rg.LastLayerRigidity(module, **options).fit(TRAIN)
    uq.calibrate(VALID, **PAPER)
    return uq


def assert_same_bars(uq, other):
    mine, theirs = uq.predict(TEST[0]), other.predict(TEST[0])
    torch.testing.assert_close(mine.mean, theirs.mean, rtol=1e-10, atol=0)
    torch.testing.assert_close(mine.std, theirs.std, rtol=1e-8, atol=0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """After three epochs; of the checkpoints, the worst is kept, which is not the last."""
    callback, kept = (
        RigidityCallback(calibrate=PAPER),
        keeper(tmp_path_factory.mktemp("run"), "max"),
    )
    host = trainer(callback, kept, max_epochs=3)
    host.fit(module := regressor(), shuffled(), loader(VALID))
    return host, module, callback, kept


def best_of(kept):
    module = regressor()
    held = torch.load(kept.best_model_path, weights_only=True)
    module.load_state_dict(held["state_dict"])
    return module


def test_the_bars_are_those_of_the_best_checkpoint_and_all_rows(trained):
    _, module, callback, kept = trained
    best = best_of(kept)
    assert callback.uq.gram.count == len(TRAIN[0])
    assert_same_bars(callback.uq, plain(best))
    assert not torch.equal(best.net[3].weight, module.net[3].weight)


def test_the_file_beside_the_checkpoint_is_for_a_module_with_its_weights(trained):
    _, _, callback, kept = trained
    assert callback.path == kept.best_model_path + SUFFIX
    assert_same_bars(rg.LastLayerRigidity.load(callback.path, best_of(kept)), callback.uq)


def test_the_last_weights_are_taken_if_asked_for_and_no_file_is_written(tmp_path):
    callback = RigidityCallback(best=False, calibrate=PAPER)
    trainer(callback, keeper(tmp_path, "max")).fit(module := regressor(), shuffled(), loader(VALID))
    assert_same_bars(callback.uq, plain(module))
    assert callback.path is None and len(list(tmp_path.iterdir())) == 1


def test_trainer_predict_gives_predictions(trained):
    host, _, callback, _ = trained
    found = host.predict(RigidityModule(callback.uq), loader(TEST))
    expected = callback.uq.predict(TEST[0])
    assert [len(one) for one in found] == [8, 1]
    assert torch.equal(torch.cat([one.std for one in found]), expected.std)
    low = torch.cat([one.interval(0.5)[0] for one in found])
    torch.testing.assert_close(low, expected.interval(0.5)[0])


def test_the_callback_leaves_the_training_and_the_module_as_they_are(tmp_path):
    weights, states = [], []
    drawn = WeightedRandomSampler([1.0] * 53, 53)  # by torch's own random numbers, every time
    for callbacks in ([], [RigidityCallback(every_best=True, calibrate=PAPER)]):
        torch.manual_seed(5)
        host = trainer(*callbacks, keeper(tmp_path), max_epochs=3)
        host.fit(module := regressor(), loader(TRAIN, sampler=drawn), loader(VALID))
        weights.append(torch.cat([one.flatten() for one in module.state_dict().values()]))
        states.append(torch.random.get_rng_state())
    assert torch.equal(*weights) and torch.equal(*states) and module.training


class Stop(pl.Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 2:
            raise KeyboardInterrupt


@pytest.mark.parametrize("filename", [None, "best"])
def test_an_interrupted_training_has_the_bars_of_the_best_so_far(tmp_path, filename):
    callback, kept = RigidityCallback(every_best=True, calibrate=PAPER), keeper(tmp_path)
    kept.filename = filename
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit):
            trainer(callback, kept, Stop(), max_epochs=5).fit(
                regressor(), shuffled(), loader(VALID)
            )
    finally:
        signal.signal(signal.SIGINT, before)
    names = {path.name for path in tmp_path.iterdir()}
    own = os.path.basename(kept.best_model_path)
    assert names == {own, own + SUFFIX}
    uq = rg.LastLayerRigidity.load(tmp_path / (own + SUFFIX), best_of(kept))
    assert_same_bars(uq, plain(best_of(kept)))


def test_a_checkpoint_that_stays_the_best_is_fitted_once(tmp_path, monkeypatch):
    callback, made = RigidityCallback(every_best=True, calibrate=None), []
    make = callback.make
    monkeypatch.setattr(
        callback, "make", lambda *given, **named: made.append(make(*given, **named))
    )
    trainer(callback, keeper(tmp_path, "max"), max_epochs=3).fit(
        regressor(), shuffled(), loader(VALID)
    )
    assert len(made) == 1


def test_an_interrupted_training_leaves_no_file_without_that_option(tmp_path):
    callback, before = RigidityCallback(calibrate=PAPER), signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit):
            trainer(callback, keeper(tmp_path), Stop(), max_epochs=5).fit(
                regressor(), shuffled(), loader(VALID)
            )
    finally:
        signal.signal(signal.SIGINT, before)
    assert not list(tmp_path.glob("*" + SUFFIX)) and not list(tmp_path.glob(".*"))
    with pytest.raises(NotFittedError, match="There is no fit yet"):
        _ = callback.uq


class Data(pl.LightningDataModule):
    """In single precision, and in other units than the module's."""

    def train_dataloader(self):
        return loader([10 * part.float() for part in TRAIN], shuffle=True)

    def val_dataloader(self):
        return [loader([10 * part.float() for part in VALID])]

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return [part / 10 for part in batch]


@pytest.mark.filterwarnings("ignore:You have overridden")
def test_batches_are_those_that_the_trainer_hands_to_the_module():
    module = regressor()

    def augmented(batch, dataloader_idx):
        spoilt = module.trainer.training
        return [batch[0] + spoilt * torch.randn_like(batch[0]), batch[1]]

    module.on_after_batch_transfer = augmented
    callback = RigidityCallback(calibrate=PAPER)
    trainer(callback, precision="64-true").fit(module, Data())
    expected = plain(callback.uq.model)
    mine, theirs = callback.uq.gram.matrix, expected.gram.matrix
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)  # the data were float32
    torch.testing.assert_close(callback.uq.scale, expected.scale, rtol=1e-4, atol=0)


@pytest.mark.filterwarnings("ignore:You have overridden")
def test_a_hook_of_the_data_module_replaces_the_modules():
    module = regressor()

    class Hooked(type(module)):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            raise AssertionError

    module.__class__ = Hooked
    callback = RigidityCallback(calibrate=None)
    trainer(callback, precision="64-true", max_epochs=1).fit(module, Data())
    mine, theirs = callback.uq.gram.matrix, plain(callback.uq.model).gram.matrix
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("whole", [False, True])
def test_a_compiled_module_is_copied_without_it(whole):
    module = regressor()
    if not whole:
        module.compile(backend="eager")
    given = torch.compile(module, backend="eager") if whole else module
    callback = RigidityCallback(calibrate=PAPER)
    trainer(callback, max_epochs=1).fit(given, loader(TRAIN), loader(VALID))
    fresh = regressor()
    fresh.load_state_dict(module.state_dict())
    assert_same_bars(callback.uq, plain(fresh))


def test_a_callback_serves_again_after_its_folder_is_gone(tmp_path):
    callback = RigidityCallback(calibrate=PAPER)
    for fold in (tmp_path / "one", tmp_path / "two"):
        trainer(callback, keeper(fold), max_epochs=1).fit(regressor(), loader(TRAIN), loader(VALID))
        assert callback.path.startswith(str(fold))
        shutil.rmtree(fold)


def test_options_are_passed_on():
    options = {"layer": "net.3", "forward": lambda m, b: 2 * m(b[0]), "target": lambda b: 2 * b[1]}
    callback = RigidityCallback(fit={"precision": "mixed"}, calibrate=PAPER, valid=VALID, **options)
    trainer(callback, max_epochs=1).fit(module := regressor(), loader(TRAIN))  # validates nothing
    uq = rg.LastLayerRigidity(module, **options).fit(TRAIN, precision="mixed")
    uq.calibrate(VALID, **PAPER)
    assert_same_bars(callback.uq, uq)


def test_a_trial_run_fits_a_batch_and_writes_nothing(tmp_path):
    callback = RigidityCallback(best=True)
    trainer(callback, keeper(tmp_path), fast_dev_run=2).fit(regressor(), shuffled(), loader(VALID))
    assert callback.uq.gram.count == 16 and callback.uq.calibration_report is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "valid", "message"),
    [
        ({}, None, "one validation loader, but the Trainer has none.*valid=.*calibrate=None"),
        ({}, [VALID, TEST], "one validation loader, but the Trainer has a list of 2"),
        ({"every_best": True}, [VALID], "needs a ModelCheckpoint"),
    ],
)
def test_what_cannot_be_done_is_refused_before_the_training(options, valid, message):
    host = trainer(RigidityCallback(**options))
    loaders = valid and [loader(one) for one in valid]
    with pytest.raises(ValueError, match=message):
        host.fit(regressor(), loader(TRAIN), loaders)
    assert host.global_step == 0


@pytest.mark.parametrize("remote", [True, False])
def test_checkpoints_that_cannot_be_read_are_refused_before_the_training(remote, tmp_path):
    plugins = [] if remote else [AsyncCheckpointIO()]
    kept = keeper("memory://run" if remote else tmp_path)
    host = trainer(RigidityCallback(), kept, plugins=plugins)
    with pytest.raises(ValueError, match=r"cannot be read\. Pass best=False"):
        host.fit(regressor(), loader(TRAIN), loader(VALID))
    assert host.global_step == 0


def test_several_training_loaders_are_refused():
    host = trainer(RigidityCallback())
    with pytest.raises(ValueError, match="one training loader, but the Trainer has a dict of 1"):
        host.fit(regressor(), {"a": loader(TRAIN)}, loader(VALID))


def test_without_calibration_no_validation_is_needed():
    callback = RigidityCallback(calibrate=None)
    trainer(callback, max_epochs=1).fit(regressor(), loader(TRAIN))
    assert callback.uq.calibration_report is None and callback.uq.gram.count == len(TRAIN[0])


@pytest.mark.parametrize(
    "options", [{"lyer": ""}, {"fit": {"lyer": 1}}, {"calibrate": {"lyer": 1}}]
)
def test_an_unknown_option_is_refused_at_once(options):
    with pytest.raises(TypeError, match="lyer"):
        RigidityCallback(**options)


def test_messages_of_the_library_come_through_and_leave_the_callback_unfitted():
    callback = RigidityCallback(output="energy")
    with pytest.raises((TypeError, ValueError), match="energy"):
        trainer(callback, max_epochs=1).fit(regressor(), loader(TRAIN), loader(VALID))
    with pytest.raises(NotFittedError):
        _ = callback.uq


@pytest.fixture
def anew(monkeypatch):
    """Import the door again, as if other packages had been there."""

    def door(**modules):
        monkeypatch.delitem(sys.modules, "rigidities.lightning")
        for name, module in modules.items():
            if module is None:
                monkeypatch.setitem(sys.modules, name, None)
            else:
                monkeypatch.delitem(sys.modules, name)
        return importlib.import_module("rigidities.lightning")

    monkeypatch.setattr(rg, "lightning", rg.lightning)  # back at the end
    return door


def test_the_older_package_is_taken_where_it_is_the_one_in_use(anew):
    import pytorch_lightning as old

    door = anew(lightning=...)
    callback = door.RigidityCallback(calibrate=PAPER)
    host = trainer(callback, host=old)
    host.fit(module := regressor(old), shuffled(), loader(VALID))
    assert_same_bars(callback.uq, plain(module))
    assert len(host.predict(door.RigidityModule(callback.uq), loader(TEST))) == 2


def test_the_extra_is_named_where_lightning_is_missing(anew, monkeypatch):
    monkeypatch.delitem(sys.modules, "pytorch_lightning", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "rigidities\[lightning\]"'):
        anew(lightning=None)


@pytest.mark.thorough
def test_the_page_runs_and_prints_what_it_says(plain_torch):
    printed, text = [], blocks(DOCS / "trainers.md")[0][2]
    exec(compile(text, "trainers.md", "exec"), {"print": lambda *one: printed.append(one)})
    shown = re.findall(r"print\(.+\)  # (.+)", text)
    assert [" ".join(map(str, one)) for one in printed] == shown != []
