"""Fits that are interrupted: resumed to the last bit, and refused where they are not the same."""

import hashlib
import itertools
import os
import random
import re
import time
import warnings
from contextlib import contextmanager, suppress
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import rigidities as rg
from rigidities.data import storage
from rigidities.last_layer.checkpoint import Checkpoint, _digest
from rigidities.last_layer.statistics import block
from tests.docs.test_docs import DOCS, blocks
from tests.support.jobs import CONTEXT
from tests.support.tampering import rewrite

ROWS = 1500


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Blocks of 512 rows, so that these few rows are several of them."""
    monkeypatch.setattr(block, "_CPU_BYTES", 1)


@contextmanager
def refused(*words):
    """A ValueError that says all of these."""
    with pytest.raises(ValueError, match=re.escape(words[0])) as found:
        yield
    assert all(word in str(found.value) for word in words), str(found.value)


class Stop(Exception):
    """What interrupts a fit."""


def made(seed=0, width=7, targets=2):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, targets))
    return model, torch.randn(ROWS, 4), torch.randn(ROWS, targets)


MODEL, X, Y = made()


def cut(size, *, until=None, x=X, y=Y):
    """Batches of the data; an error instead of number `until`."""
    for number, i in enumerate(range(0, len(x), size)):
        if number == until:
            raise Stop
        yield x[i : i + size], y[i : i + size]


class Breaking(nn.Module):
    """The model, until so many batches have passed."""

    def __init__(self, model=MODEL):
        super().__init__()
        self.model, self.left = model, 10**9

    def forward(self, x):
        if len(x) > 8:  # fewer: the readout is looked for, or probed
            self.left -= 1
            if self.left < 0:
                raise Stop
        return self.model(x)


class Map(Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        return X[i], Y[i]


def weights(batch):
    return 0.5 + batch[1].abs()[:, :1].expand(-1, 2) * torch.tensor([1.0, 2.0])


def known(uq):
    """All that a fit has learnt from data, as tensors."""
    own = uq._fit.require_state().statistics
    held = own.gram.state() | {f"sketch.{k}": t for k, t in own.sketch.state().items()}
    held |= {} if own.sample is None else {f"rows.{k}": t for k, t in own.sample.state().items()}
    return held | {"matrix": own.gram.matrix}


def assert_same(one, other):
    mine, theirs = known(one), known(other)
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert torch.equal(mine[name].nan_to_num(7), theirs[name].nan_to_num(7)), name


@pytest.fixture
def path(tmp_path):
    return tmp_path / "fit.ckpt.safetensors"


@pytest.fixture
def left(path):
    """The file of a fit that was interrupted, and how to interrupt it."""
    with pytest.raises(Stop):
        rg.LastLayerRigidity(MODEL).fit(cut(100, until=9), checkpoint=path, checkpoint_seconds=0)
    return path


OPTIONS = {
    "double": {},
    "mixed": {"precision": "mixed"},
    "qr": {"method": "qr"},
    "weights of each target": {"sample_weight": weights},
    "weights of each target, qr": {"sample_weight": weights, "method": "qr"},
    "derivatives": {"gradients": 0},
    "a small sample": {"sample": 50},
    "no sample": {"sample": 0},
    "another loss": {"loss": "log-cosh"},
}


@pytest.mark.parametrize("size", [3, 64, 700])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_resumed_fit_equals_one_in_one_go_to_the_last_bit(name, size, path):
    if (name, size) == ("derivatives", 3):
        size = 40  # they are slow
    options, data = OPTIONS[name], partial(cut, size)
    whole = rg.LastLayerRigidity(MODEL).fit(data(), **options)
    uq, count = rg.LastLayerRigidity(MODEL), len(list(data()))
    for until in sorted({2, count // 2, count - 1}):
        with pytest.raises(Stop):
            uq.fit(data(until=until), checkpoint=path, checkpoint_seconds=0, **options)
    assert path.exists()
    uq.fit(data(), checkpoint=path, checkpoint_seconds=0, **options)
    assert_same(uq, whole)
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("options", [{}, {"precision": "mixed"}, {"method": "qr"}], ids=str)
@pytest.mark.parametrize("size", [10, 64, 600])
def test_tensors_and_loaders_resume_too_and_counted_rows_do_not_pass_the_model(options, size, path):
    for data in ((X, Y), TensorDataset(X, Y), DataLoader(Map(), batch_size=size)):
        options = options | ({} if isinstance(data, DataLoader) else {"batch_size": size})
        whole = rg.LastLayerRigidity(Breaking()).fit(data, **options)
        model = Breaking()
        uq, model.left = rg.LastLayerRigidity(model), -(-ROWS // size) * 2 // 3
        with pytest.raises(Stop):
            uq.fit(data, checkpoint=path, checkpoint_seconds=0, **options)
        counted = counted_in(path)
        assert counted > 0
        model.left = -(-ROWS // size) - counted
        uq.fit(data, checkpoint=path, **options)
        assert_same(uq, whole)


def counted_in(path):
    return storage.read(path)[1][storage.UNFINISHED]["batches"]


def test_features_in_any_order_in_memory_resume_to_the_last_bit(path):
    torch.manual_seed(1)
    x, model = torch.randn(33, 5500).T, nn.Linear(33, 2)
    data = partial(cut, 1100, x=x, y=torch.randn(5500, 2))
    whole = rg.LastLayerRigidity(model).fit(data(), precision="mixed")
    options = {"precision": "mixed", "checkpoint": path, "checkpoint_seconds": 0}
    uq = rg.LastLayerRigidity(model)
    with pytest.raises(Stop):
        uq.fit(data(until=3), **options)
    assert counted_in(path) == 3
    assert_same(uq.fit(data(), **options), whole)


def test_only_the_first_and_the_last_batch_of_a_file_are_compared(path):
    asked = partial(rg.LastLayerRigidity(MODEL).fit, checkpoint=path, checkpoint_seconds=0)
    for changed, same in ((0, False), (2, True), (4, False), (5, True)):
        with pytest.raises(Stop):
            asked(cut(100, until=9))
        assert counted_in(path) == 5
        batches = [(x, y + (number == changed)) for number, (x, y) in enumerate(cut(100))]
        if same:
            asked(batches)
            assert not path.exists()
        else:
            with refused("order or batch size"):
                asked(batches)
            path.unlink()


def test_batches_of_changing_form_are_counted_one_by_one(path):
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    lengths = itertools.cycle([2, 3])
    batches = [(torch.randn(6, n, 4), torch.randn(6, n, 1)) for n in itertools.islice(lengths, 12)]
    dataset = partial(rg.LastLayerRigidity(model).fit, checkpoint=path, checkpoint_seconds=0)
    whole = rg.LastLayerRigidity(model).fit(batches)

    def some():
        yield from batches[:7]
        raise Stop

    with pytest.raises(Stop):
        dataset(some())
    assert counted_in(path) >= 6
    assert_same(dataset(batches), whole)


def test_a_fit_that_was_all_but_complete_is_completed(path, monkeypatch):
    uq = rg.LastLayerRigidity(MODEL)
    with monkeypatch.context() as patch:
        patch.setattr("rigidities.last_layer.fit.settled", stopped)
        with pytest.raises(Stop):
            uq.fit(cut(100), checkpoint=path, checkpoint_seconds=0)
    assert counted_in(path) == 15
    assert_same(uq.fit(cut(100), checkpoint=path), rg.LastLayerRigidity(MODEL).fit(cut(100)))
    assert not path.exists()


def stopped(_):
    raise Stop


def test_it_is_written_when_its_seconds_have_passed(path, monkeypatch):
    now = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: float(next(now)), time=time.time)
    monkeypatch.setattr("rigidities.last_layer.checkpoint.time", clock)
    asked = partial(rg.LastLayerRigidity(MODEL).fit, checkpoint=path, checkpoint_seconds=9)
    with pytest.raises(Stop):
        asked(cut(600, until=2))
    assert not path.exists()
    with pytest.raises(Stop):
        asked(itertools.chain(many(), cut(100, until=0)))
    assert counted_in(path) == 90  # of 24 blocks of five batches, 9 and 9 more


def test_the_bar_counts_batches_that_are_passed_over(left, monkeypatch):
    shown = []

    def bar(items, **_):
        for item in items:
            shown.append(item)
            yield item

    monkeypatch.setattr("rigidities.data.feed.tqdm", bar)
    rg.LastLayerRigidity(MODEL, progress=True).fit(list(cut(100)), checkpoint=left)
    assert len(shown) == 15


def test_every_process_of_a_job_has_a_file_of_its_own(path):
    own = Checkpoint(path, 60.0)
    own.resume({}, 0, 4, lambda _: None)
    assert own.path == path.with_name("fit.ckpt.0-of-4.safetensors")


# --- refusals -------------------------------------------------------------------------------------


def other_weights(batch):
    return weights(batch)


def asks(model=MODEL, data=None, **options):
    uq = rg.LastLayerRigidity(model, **{k: options.pop(k) for k in ("layer",) if k in options})
    return lambda path: uq.fit(cut(100) if data is None else data, checkpoint=path, **options)


OTHERS = {
    "weights": asks(made(seed=5)[0]),
    "readout": asks(layer="2"),
    "their loss": asks(loss="huber"),
    "loss:": asks(sample_weight=weights),
    "precision": asks(precision="mixed"),
    "method": asks(method="qr"),
    "sample": asks(sample=10),
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_fit_is_refused_by_what_differs_and_the_file_stays(what, left):
    before = left.read_bytes()
    with refused(what, "remove the file"):
        OTHERS[what](left)
    assert left.read_bytes() == before


def test_another_weight_function_is_refused(path):
    asked = partial(rg.LastLayerRigidity(MODEL).fit, checkpoint=path, checkpoint_seconds=0)
    with pytest.raises(Stop):
        asked(cut(100, until=9), sample_weight=weights)
    with refused("loss", "other_weights", "remove the file"):
        asked(cut(100), sample_weight=other_weights)


@pytest.mark.parametrize(
    "data",
    [
        lambda: cut(50),
        lambda: cut(100, x=X.flip(0), y=Y.flip(0)),
        lambda: cut(100, y=Y + 1e-6),
        lambda: reversed(list(cut(100))),
        lambda: itertools.islice(cut(100), 4),
        list,
    ],
    ids=["batch size", "order", "a target", "order of batches", "fewer", "none"],
)
def test_other_data_are_refused_and_file_and_object_stay(data, left):
    before, uq = left.read_bytes(), rg.LastLayerRigidity(MODEL)
    with refused("order or batch size", "shuffle=False", "remove the file"):
        uq.fit(data(), checkpoint=left)
    assert left.read_bytes() == before
    assert uq._fit.state is None


class Graphs:
    """A batch object whose tensors lie in its attributes."""

    def __init__(self, x, y, names=()):
        self.store, self.names, self.me = SimpleNamespace(x=x, y=y), list(names), self


@pytest.mark.parametrize("wrap", [lambda x, y: {"x": x, "y": y}, Graphs], ids=["mapping", "object"])
def test_tensors_in_mappings_and_objects_are_in_the_digest(wrap, path):
    uq = rg.LastLayerRigidity(
        MODEL,
        forward=lambda m, b: m(b["x"] if isinstance(b, dict) else b.store.x),
        target=lambda b: b["y"] if isinstance(b, dict) else b.store.y,
    )
    asked = partial(uq.fit, checkpoint=path, checkpoint_seconds=0)
    with pytest.raises(Stop):
        asked(itertools.starmap(wrap, cut(100, until=9)))
    with refused("order"):
        asked(itertools.starmap(wrap, cut(100, x=X + 1)))
    asked(itertools.starmap(wrap, cut(100)))


def test_a_saved_fit_is_no_checkpoint_and_a_checkpoint_no_saved_fit(left, tmp_path):
    with refused("unfinished fit", "checkpoint="):
        rg.LastLayerRigidity.load(left, MODEL)
    saved = tmp_path / "saved.safetensors"
    rg.LastLayerRigidity(MODEL).fit((X, Y)).save(saved)
    before = saved.read_bytes()
    with refused("expected 'checkpoint'", "remove the file or name another"):
        asks()(saved)
    assert saved.read_bytes() == before


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_file_that_ends_early_is_refused(share, left):
    content = left.read_bytes()
    left.write_bytes(content[: int(share * len(content))])
    with refused("truncated", "remove the file"):
        asks()(left)


def test_changed_bytes_and_newer_formats_are_refused(left):
    content = bytearray(left.read_bytes())
    content[-40] ^= 1
    left.write_bytes(content)
    with refused("checksum", "remove the file"):
        asks()(left)
    content[-40] ^= 1
    left.write_bytes(content)
    rewrite(left, lambda tensors, header: header.update(format=storage.FORMAT + 1))
    with refused("format", "pip install", "remove the file"):
        asks()(left)


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_bad_intervals_are_refused_before_any_work(seconds, path):
    with refused("zero or more", str(seconds)):
        rg.LastLayerRigidity(MODEL).fit(
            cut(100, until=0), checkpoint=path, checkpoint_seconds=seconds
        )


def test_intervals_without_a_path_and_folders_are_refused(tmp_path):
    uq = rg.LastLayerRigidity(MODEL)
    with refused("needs checkpoint="):
        uq.fit(cut(100, until=0), checkpoint_seconds=5.0)
    for path in (tmp_path, tmp_path / "none" / "fit.safetensors"):
        with refused("a file in a folder that exists"):
            uq.fit(cut(100, until=0), checkpoint=path)


# --- disks and signals ----------------------------------------------------------------------------


def test_a_folder_that_vanishes_is_said_once_and_the_fit_goes_on(tmp_path):
    folder = tmp_path / "some"
    folder.mkdir()

    def data():
        for number, batch in enumerate(cut(100)):
            if number == 4:
                for path in folder.iterdir():
                    path.unlink()
                folder.rmdir()
            yield batch

    uq = rg.LastLayerRigidity(MODEL)
    with pytest.warns(UserWarning, match="The fit continues") as said:
        uq.fit(data(), checkpoint=folder / "fit.safetensors", checkpoint_seconds=0)
    assert len(said) == 1
    assert_same(uq, rg.LastLayerRigidity(MODEL).fit(cut(100)))


def in_a_process(work, *arguments):
    process = CONTEXT.Process(target=work, args=arguments)
    process.start()
    return process


def fit_on_a_full_disk(path, answer):
    """From batch 8 on, no file may be as long as the checkpoint is."""
    import resource

    block._CPU_BYTES = 1

    def data():
        for number, batch in enumerate(cut(100)):
            if number == 8:
                limit = path.stat().st_size // 2
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            if number == 14:
                raise Stop
            yield batch

    with warnings.catch_warnings(record=True) as said, suppress(Stop):
        warnings.simplefilter("always")
        rg.LastLayerRigidity(MODEL).fit(data(), checkpoint=path, checkpoint_seconds=0)
    answer.write_text(str([str(one.message)[:14] for one in said]))


@pytest.mark.thorough
@pytest.mark.skipif(os.name != "posix", reason="limits of POSIX")
def test_a_full_disk_leaves_the_file_before_and_no_temporary(path, tmp_path):
    answer = tmp_path / "answer"
    in_a_process(fit_on_a_full_disk, path, answer).join(60)
    assert answer.read_text() == "['The checkpoint']"
    assert counted_in(path) == 5
    assert {one.name for one in tmp_path.iterdir()} == {path.name, "answer"}
    assert_same(asks()(path), rg.LastLayerRigidity(MODEL).fit(cut(100)))


def many(pause=0.0):
    for n in range(8):
        for batch in cut(100, x=X + n):
            time.sleep(pause)
            yield batch


def fit_slowly(path, saved, begun):
    begun.touch()
    block._CPU_BYTES = 1
    uq = rg.LastLayerRigidity(MODEL)
    uq.fit(many(0.008), checkpoint=path, checkpoint_seconds=0, precision="mixed")
    uq.save(saved, rows=True)


@pytest.mark.thorough
@pytest.mark.skipif(os.name != "posix", reason="a signal of POSIX")
def test_killed_at_any_moment_the_file_is_whole_and_the_fit_resumes_to_the_last_bit(path, tmp_path):
    moments, saved, counts = random.Random(0), tmp_path / "saved.safetensors", [0]
    begun = tmp_path / "begun"
    for kills in range(40):
        if kills >= 6 and counts[-1]:  # something was resumed
            break
        process = in_a_process(fit_slowly, path, saved, begun)
        while not begun.exists():
            time.sleep(0.01)
        begun.unlink()
        process.join(moments.uniform(0.1, 0.4))
        process.kill()
        process.join()
        if path.exists():
            counts.append(counted_in(path))
    assert counts == sorted(counts) and counts[-1] > 0
    process = in_a_process(fit_slowly, path, saved, begun)
    process.join(60)
    assert process.exitcode == 0
    assert {one.name for one in tmp_path.iterdir()} == {saved.name, "begun"}
    whole = rg.LastLayerRigidity(MODEL).fit(many(), precision="mixed")
    assert_same(rg.LastLayerRigidity.load(saved, MODEL), whole)


def test_temporaries_of_a_killed_process_of_the_same_number_are_swept(left):
    own = storage._temporary_prefix(left)
    dead = left.with_name(f"{own}{storage._HOST}-{os.getpid()}-00000000.tmp")
    dead.write_bytes(b"")
    asks()(left)
    assert list(left.parent.iterdir()) == []


def test_the_page_on_long_fits_prints_what_it_shows(tmp_path, monkeypatch, plain_torch):
    monkeypatch.chdir(tmp_path)
    (_, _, code), (_, _, shown) = blocks(DOCS / "long_fits.md")
    lines: list[str] = []
    exec(code, {"print": lambda *words: lines.append(" ".join(map(str, words)))})
    assert "\n".join(lines) == shown.strip()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("when", [2, 12])
def test_weights_written_to_during_a_fit_are_noticed_though_it_was_written_down(path, when):
    model, x, y = made()
    before = model[0].weight.detach().clone()

    def writing():
        for number, batch in enumerate(cut(100, x=x, y=y)):
            if number in (when, when + 1):
                with torch.no_grad():
                    model[0].weight.copy_(before + (number == when))
            yield batch

    with refused("weights changed during the fit"):
        rg.LastLayerRigidity(model).fit(writing(), checkpoint=path, checkpoint_seconds=0)


@pytest.mark.parametrize("ways", [{}, {"precision": "mixed"}, {"method": "qr"}])
def test_a_model_that_uses_its_memory_again_resumes_to_the_last_bit(path, ways):
    space, left = torch.empty(100, 4), [10**9]

    def features(model, x):
        left[0] -= len(x) == 100
        if left[0] < 0:
            raise Stop
        return space.copy_(x.tanh()) if len(x) == 100 else x.tanh()

    asked = partial(rg.LastLayerRigidity(MODEL, features=features).fit, (X, Y), batch_size=100)
    whole = rg.LastLayerRigidity(MODEL, features=features, batch_size=100).fit((X, Y), **ways)
    left[0] = 9
    with pytest.raises(Stop):
        asked(checkpoint=path, checkpoint_seconds=0, **ways)
    assert path.exists()
    left[0] = 10**9
    assert_same(asked(checkpoint=path, **ways), whole)


class Slotted:
    """A batch object without a dictionary."""

    __slots__ = ("rows",)

    def __init__(self, x, y):
        self.rows = {("x", 1): x, ("y", 1): y}


def test_objects_with_slots_keys_of_any_kind_and_odd_arrays_are_in_the_digest(path):
    def odd(x, y):
        batch = Slotted(x, y)
        batch.rows |= {"reversed": x.numpy()[::-1], "big": y.numpy().astype(">f4"), "names": {"a"}}
        return batch

    asked = {"forward": lambda m, b: m(b.rows["x", 1]), "target": lambda b: b.rows["y", 1]}
    uq = rg.LastLayerRigidity(MODEL, **asked)
    with pytest.raises(Stop):
        uq.fit(itertools.starmap(odd, cut(100, until=9)), checkpoint=path, checkpoint_seconds=0)
    with refused("order"), pytest.warns(match="type set, which cannot be compared"):
        uq.fit(itertools.starmap(odd, list(cut(100))[::-1]), checkpoint=path)
    with pytest.warns(match="type set, which cannot be compared"):
        uq.fit(itertools.starmap(odd, cut(100)), checkpoint=path)


def test_another_target_or_features_function_is_refused(path):
    def one(batch):
        return batch[1]

    def other(batch):
        return 100 * batch[1]

    uq = rg.LastLayerRigidity(MODEL, target=one)
    with pytest.raises(Stop):
        uq.fit(cut(100, until=9), checkpoint=path, checkpoint_seconds=0)
    with refused("differ in their readout", "other"):
        rg.LastLayerRigidity(MODEL, target=other).fit(cut(100), checkpoint=path)


def test_every_array_of_objects_in_a_batch_is_in_the_digest():
    def digest(*words):
        total = hashlib.sha256()
        batch = [np.array([word], dtype=object) for word in words]
        assert not _digest(batch, total, {})
        return total.hexdigest()

    many = [digest(*("a" * number), "b", *("a" * (100 - number))) for number in range(100)]
    assert len(set(many)) == 100
