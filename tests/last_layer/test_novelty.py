"""Novelty: what enters every layer, against dense sums, under every change, and what it sees."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import rigidities as rg
from rigidities import cli
from rigidities.data.batches import Batch
from rigidities.last_layer.novelty.distance import alarm_threshold
from rigidities.last_layer.novelty.novelty import Novelty
from rigidities.models.calling import Source
from rigidities.notices import NotFittedError
from rigidities.posterior.gram import Gram
from rigidities.prediction.prediction import Prediction
from rigidities.readout.find import find_readout
from rigidities.report import html, verdict
from tests.support import jobs
from tests.support.jobs import share
from tests.support.operations import Operations

ROWS, VALID = 900, 300
OPERATIONS = 7
pytestmark = pytest.mark.filterwarnings("ignore:.*are also in the training data")


def made(seed=0, inputs=3):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(inputs, 12), nn.Tanh(), nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 2)
    )
    x = torch.randn(ROWS + VALID, inputs) * torch.tensor([1.0, 100.0, 0.01])[:inputs]
    y = model(x / x.std(0)).detach() + 0.1 * torch.randn(ROWS + VALID, 2)
    return model, x, y


def fitted(seed=0, batch_size=None):
    model, x, y = made(seed)
    uq = rg.LastLayerRigidity(model, batch_size=batch_size)
    uq.fit(x[:ROWS], y[:ROWS], novelty=True)
    uq.calibrate(x[ROWS:], y[ROWS:], method="paper")
    return uq, model, x, y


def fitted_in_float64(rows=ROWS, batch_size=None):
    model, x, y = made()
    model, x, y = model.double(), x.double(), y.double()
    uq = rg.LastLayerRigidity(model, batch_size=batch_size)
    return uq.fit(x[:rows], y[:rows], novelty=True), model, x, y


def distances(uq, x):
    """Squared distances (N,) of each layer: the novelty, times what is usual in that layer."""
    found, usual = uq.novelty(x), uq.calibration_report.novelty
    return {
        name: (usual[name] * column.double()).numpy()
        for name, column in zip(found.layers, found.by_layer.unbind(1), strict=True)
    }


def entering(model, x):
    """What enters the three linear maps of `made`, in float64."""
    first, second, third = x, model[:2](x), model[:4](x)
    return [part.detach().double().numpy() for part in (first, second, third)]


def dense_distances(train, rows, *, scaled):
    """Squared Mahalanobis distances with a ridge, by NumPy."""
    if scaled:
        unit = train.std(0)
        train, rows = train / unit, rows / unit
    centred = train - train.mean(0)
    covariance = centred.T @ centred / len(train)
    covariance += 0.01 * np.trace(covariance) / len(covariance) * np.eye(len(covariance))
    away = rows - train.mean(0)
    return np.einsum("nd,de,ne->n", away, np.linalg.inv(covariance), away)


# --- the formula ---------------------------------------------------------------------------------


def test_it_is_the_distance_in_each_layer_over_what_most_validation_rows_stay_below():
    uq, model, x, _ = fitted()
    asked = torch.cat([x[ROWS:], 4 * x[:20]])
    found = uq.novelty(asked)
    assert found.layers == ("the input", "2", "4")
    train, rows = entering(model, x[:ROWS]), entering(model, asked)
    place = math.ceil(0.95 * VALID) - 1
    relative = []
    for column, (known, new) in enumerate(zip(train, rows, strict=True)):
        expected = dense_distances(known, new, scaled=column == 0)
        relative.append(expected / np.sort(expected[:VALID])[place])
    relative = np.stack(relative, 1)
    relative /= np.sort(relative[:VALID].max(1))[place]  # one factor for all layers
    np.testing.assert_allclose(found.by_layer.numpy(), relative, rtol=1e-4)
    assert int((found.largest[:VALID] > 1 + 1e-5).sum()) == VALID - place - 1
    torch.testing.assert_close(found.largest, found.by_layer.amax(1))
    names = [found.layers[i] for i in found.by_layer.argmax(1)]
    assert found.layer == names


def test_units_of_the_inputs_do_not_matter():
    """A column of small numbers counts as much as one of large numbers."""
    uq, _, x, _ = fitted()
    for column in range(3):
        moved = x[:1].clone()
        moved[0, column] += 10 * float(x[:, column].std())
        assert float(uq.novelty(moved).by_layer[0, 0]) > 5


def test_large_offsets_of_the_inputs_leave_the_digits():
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x = torch.randn(400, 2, dtype=torch.float64)
    y = torch.randn(400, 1, dtype=torch.float64)
    near, far = (
        rg.LastLayerRigidity(nn.Sequential(Shift(shift), model)).fit(x + shift, y, novelty=True)
        for shift in (0.0, 1e4)
    )
    found = []
    for uq, shift in ((near, 0.0), (far, 1e4)):
        uq.calibrate(x + shift, y, method="paper")
        found.append(uq.novelty(3 * x[:50] + shift).by_layer)
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


class Shift(nn.Module):
    def __init__(self, by):
        super().__init__()
        self.by = by

    def forward(self, x):
        return x - self.by


@pytest.mark.parametrize("spread", [1.0, 1000.0])
def test_constant_columns_are_novel_when_they_change_and_only_then(spread):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    x = spread * torch.randn(500, 3)
    x[:, 1], x[:, 2] = 7.0, 0.0
    y = torch.randn(500, 1)
    uq = rg.LastLayerRigidity(model).fit(x[:400], y[:400], novelty=True)
    uq.calibrate(x[400:], y[400:], method="paper")
    changed = x[:3].clone()
    changed[1, 1], changed[2, 2] = 21.0, 5.0 * spread
    at_input = uq.novelty(changed).by_layer[:, 0]
    assert float(at_input[0]) < 3 < float(at_input[1:].min())


def at_one_temperature(dtype=torch.float32):
    """A fit at 300 K only, rows like its own, and those rows at other temperatures, a function."""
    torch.manual_seed(0)
    x = torch.cat([torch.randn(600, 3), torch.full((600, 1), 300.0)], 1).to(dtype)
    y = x[:, :1] + 0.1 * torch.randn(600, 1).to(dtype)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).to(dtype)
    uq = rg.LastLayerRigidity(model).fit(x[:400], y[:400], novelty=True)
    uq.calibrate(x[400:], y[400:], method="paper")

    def at(temperature):
        moved = x[400:].clone()
        moved[:, 3] = temperature
        return moved

    return uq, x[400:], at


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("change", [400.0, 350.0, 301.0, 300.001])
def test_an_input_that_was_constant_is_novel_once_it_moves(dtype, change):
    uq, x, at = at_one_temperature(dtype)
    moved = at(change)
    if dtype == torch.bfloat16 and change < 350.0:  # within a few steps of bfloat16 at 300
        torch.testing.assert_close(uq.predict(moved).novelty, uq.predict(x).novelty)
        return
    assert float(uq.predict(moved).novelty.min()) > 5
    assert set(uq.novelty(moved).layer) == {"the input"}


def test_an_input_that_was_constant_stays_as_novel_as_it_was_within_rounding():
    uq, x, at = at_one_temperature()
    usual = uq.predict(x).novelty
    for steps in (-2, -1, 1, 2):
        moved = at(300.0 + steps * 2**-15)  # the distance between float32 numbers there
        assert float(moved[0, 3]) != 300.0
        torch.testing.assert_close(uq.predict(moved).novelty, usual, rtol=1e-3, atol=1e-4)


def test_the_sums_alone_say_which_columns_were_constant(tmp_path):
    """After a merge, more rows, fewer rows and a file, they are those of the rows that remain."""
    uq, x, at = at_one_temperature()
    model, y = uq.model, x[:, :1]
    train = torch.cat([at(300.0), at(310.0)])
    changed = rg.LastLayerRigidity(model).fit(train, train[:, :1], novelty=True)
    changed.calibrate(x, y, method="paper")
    assert float(changed.predict(at(305.0)).novelty.median()) < 2  # it has varied
    changed.forget(at(310.0), y)
    merged = rg.LastLayerRigidity(model).fit(x[:100], y[:100], novelty=True)
    merged.merge(rg.LastLayerRigidity(model).fit(x[100:], y[100:], novelty=True))
    added = rg.LastLayerRigidity(model).fit(x[:100], y[:100], novelty=True)
    added.partial_fit(x[100:], y[100:])
    for fit in (changed, merged, added):
        fit.calibrate(x, y, method="paper")
        fit.save(tmp_path / "fit")
        for other in (fit, rg.LastLayerRigidity.load(tmp_path / "fit", model)):
            assert float(other.predict(x).novelty.median()) < 1
            assert float(other.predict(at(305.0)).novelty.min()) > 5


class Gate(nn.Module):
    """Three units that are silent, saturated or constant unless the first input is large."""

    def __init__(self):
        super().__init__()
        self.first, self.out = nn.Linear(3, 8), nn.Linear(11, 1)

    def forward(self, x):
        large = torch.relu(x[:, :1] - 10)
        units = [0.01 * large, 1 - 0.01 * large, torch.exp(-large)]
        return self.out(torch.cat([torch.tanh(self.first(x)), *units], 1))


def test_a_unit_that_was_constant_is_novel_once_it_moves():
    torch.manual_seed(0)
    x = torch.randn(900, 3)
    uq = rg.LastLayerRigidity(Gate(), layer="out").fit(x[:600], x[:600, :1], novelty=True)
    uq.calibrate(x[600:], x[600:, :1], method="paper")
    large = torch.zeros(2, 3)
    large[1, 0] = 11.0
    at_output = uq.novelty(large).by_layer[:, uq.novelty(large).layers.index("out")]
    assert float(at_output[0]) < 1
    assert float(at_output[1]) > 10


class Rounding(nn.Module):
    """Columns that would be constant but for rounding, of many sizes, behind norms and sums."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(40, 64)
        self.norm = nn.BatchNorm1d(64)
        self.second = nn.Linear(64, 32)
        self.out = nn.Linear(32, 1)
        with torch.no_grad():
            self.first.weight[:32, :20] = 0.0  # half of the units see constant inputs alone
            self.second.weight[:16, 32:] = 0.0

    def forward(self, x):
        return self.out(torch.tanh(self.second(self.norm(self.first(x)))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rounding_of_constant_units_is_not_novel_whatever_the_batches(dtype):
    torch.manual_seed(0)
    x = torch.randn(1000, 40)
    x[:, 20:] = 10 * torch.randn(20)
    model, y = Rounding().train(), x[:, :1]
    for start in range(0, 600, 100):
        model(x[start : start + 100])  # for the means of the norm
    model, x, y = model.eval().to(dtype), x.to(dtype), y.to(dtype)
    uq = rg.LastLayerRigidity(model, batch_size=600).fit(x[:600], y[:600], novelty=True)
    uq.calibrate(x[600:], y[600:], method="paper")
    whole = uq.predict(x).novelty
    for size in (1, 3, 17):
        uq.batch_size = size
        found = uq.predict(x[:100]).novelty
        rounding = 0.1 if dtype == torch.bfloat16 else 1e-2
        torch.testing.assert_close(found, whole[:100], rtol=rounding, atol=rounding)


def test_a_layer_that_only_gets_zeros_is_silent():
    class Off(nn.Module):
        def __init__(self):
            super().__init__()
            self.dead, self.out = nn.Linear(2, 3), nn.Linear(2, 1)

        def forward(self, x):
            return self.out(x) + 0.0 * self.dead(0 * x).sum(1, keepdim=True)

    x, y = torch.randn(300, 2), torch.randn(300, 1)
    uq = rg.LastLayerRigidity(Off(), layer="out").fit(x[:200], y[:200], novelty=True)
    uq.calibrate(x[200:], y[200:], method="paper")
    found = uq.novelty(x)
    assert "dead" in found.layers
    assert bool(found.by_layer.isfinite().all())


# --- exact under every change --------------------------------------------------------------------


def check_distances(uq, model, train, x, y):
    """After a calibration, those of all rows are those from the training rows alone."""
    uq.calibrate(x[ROWS:], y[ROWS:], method="paper")
    asked = torch.cat([x, 4 * x[:20]])
    found = list(distances(uq, asked).values())
    layers = zip(entering(model, train), entering(model, asked), strict=True)
    expected = [dense_distances(*rows, scaled=i == 0) for i, rows in enumerate(layers)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("size", [7, 100, 900])
def test_the_distances_are_those_from_all_rows_whatever_the_batches(size):
    uq, model, x, y = fitted_in_float64(batch_size=size)
    check_distances(uq, model, x[:ROWS], x, y)


def test_rows_can_be_added_taken_out_and_merged():
    uq, model, x, y = fitted_in_float64()
    uq.partial_fit(x[ROWS:], y[ROWS:])
    uq.forget(x[:200], y[:200])
    check_distances(uq, model, x[200:], x, y)
    parts = [
        rg.LastLayerRigidity(model).fit(x[a:b], y[a:b], novelty=True)
        for a, b in ((200, 500), (500, ROWS + VALID))
    ]
    check_distances(parts[0].merge(parts[1]), model, x[200:], x, y)


def test_files_and_state_dicts_keep_it_to_the_bit(tmp_path):
    uq, model, x, _ = fitted()
    uq.save(tmp_path / "uq.safetensors")
    loaded = rg.LastLayerRigidity.load(tmp_path / "uq.safetensors", model)
    taken = rg.LastLayerRigidity(model)
    taken.load_state_dict(uq.state_dict())
    expected = uq.novelty(x)
    for other in (loaded, taken):
        found = other.novelty(x)
        assert found.layers == expected.layers
        assert torch.equal(found.by_layer, expected.by_layer)


def test_a_fit_from_a_file_goes_on(tmp_path):
    uq, model, x, y = fitted_in_float64(700)
    uq.save(tmp_path / "fit", rows=True)
    uq = rg.LastLayerRigidity.load(tmp_path / "fit", model)
    uq.partial_fit(x[700:ROWS], y[700:ROWS])
    check_distances(uq, model, x[:ROWS], x, y)


def shared(rank, size):
    model, x, y = made()
    uq = rg.LastLayerRigidity(model)
    uq.fit(share((x[:ROWS], y[:ROWS]), rank, size), novelty=True)
    uq.calibrate(share((x[ROWS:], y[ROWS:]), rank, size), method="paper")
    p = uq.predict(share(x, rank, size), gather=True)
    return uq.novelty(x).by_layer, p.novelty


@pytest.mark.thorough
def test_processes_together_know_what_one_knows():
    uq, _, x, _ = fitted()
    alone = uq.novelty(x)
    (first, gathered), *others = jobs.values(shared, 3)
    torch.testing.assert_close(first, alone.by_layer, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(one[0], first) for one in others)
    assert gathered.shape == (len(x), 2)
    assert torch.equal(gathered[:, 0].sort().values, first.amax(1).sort().values)


def test_parts_that_watch_and_parts_that_do_not_are_no_one_fit():
    _, model, x, y = fitted()
    watching = rg.LastLayerRigidity(model).fit(x[:300], y[:300], novelty=True)
    plain = rg.LastLayerRigidity(model).fit(x[300:], y[300:])
    with pytest.raises(ValueError, match="novelty=True or none"):
        watching.merge(plain)
    assert watching.gram.count == 300


def test_refitted_readouts_keep_what_the_layers_have_seen():
    uq, _, x, y = fitted()
    new = uq.refit()
    new.calibrate(x[ROWS:], y[ROWS:], method="paper")
    torch.testing.assert_close(new.novelty(x).by_layer, uq.novelty(x).by_layer)


def test_a_partial_fit_that_fails_leaves_what_the_layers_have_seen():
    uq, _, x, y = fitted()
    before = uq.novelty(x)
    broken = torch.full((30, 3), torch.nan)
    with pytest.raises(ValueError, match="Batch 1: NaN or infinity"):
        uq.partial_fit([(x[:30], y[:30]), (broken, y[:30])])
    assert torch.equal(uq.novelty(x).by_layer, before.by_layer)


def changed_together(rank, size):
    """Two of the processes add and remove rows; the last one has none in any call."""
    torch.set_default_dtype(torch.float64)
    model, x, y = made()
    whole = [(0, 700), (700, ROWS), (0, 100)]
    halves = [np.array_split(np.arange(a, b), size - 1) + [[]] for a, b in whole]
    first, added, removed = ([(x[half[rank]], y[half[rank]])] for half in halves)
    none = rank == size - 1
    uq = rg.LastLayerRigidity(model).fit([] if none else first, novelty=True)
    uq.partial_fit([] if none else added)
    uq.forget([] if none else removed)
    uq.process_group = False
    uq.calibrate(x[ROWS:], y[ROWS:], method="paper")
    alone = rg.LastLayerRigidity(model, process_group=False)
    alone.fit(x[100:ROWS], y[100:ROWS], novelty=True)
    alone.calibrate(x[ROWS:], y[ROWS:], method="paper")
    return distances(uq, x), distances(alone, x)


@pytest.mark.thorough
def test_processes_add_and_remove_rows_as_one_does_though_one_of_them_has_none():
    found = jobs.values(changed_together, 3)
    for together, alone in found:
        assert together.keys() == alone.keys()
        for name, values in together.items():
            np.testing.assert_allclose(values, alone[name], rtol=1e-6)
            np.testing.assert_array_equal(values, found[0][0][name])


# --- by itself, without a fit --------------------------------------------------------------------


def batch_of(x):
    return Batch((x,), {}, None, None)


def test_it_needs_no_fit():
    model, x, _ = made()
    model, x = model.double(), x.double()
    readout = find_readout(model, Source(), None, batch_of(x[:100])).readout
    novelty = Novelty.begin(readout, batch_of(x[:100]))
    for start in range(0, ROWS, 100):
        reading = novelty.update(readout, batch_of(x[start : start + 100]))
        torch.testing.assert_close(reading.output, model(x[start : start + 100]))
    _, found = novelty.score(readout, batch_of(x[ROWS:]))
    assert novelty.names == ("the input", "2", "4")
    layers = zip(entering(model, x[:ROWS]), entering(model, x[ROWS:]), strict=True)
    expected = [dense_distances(*rows, scaled=i == 0) for i, rows in enumerate(layers)]
    np.testing.assert_allclose(found.mT.numpy(), expected, rtol=1e-9)
    # what is added later counts too, though distances were measured before
    novelty.update(readout, batch_of(x[ROWS:]))
    _, later = novelty.score(readout, batch_of(x[ROWS:]))
    expected = dense_distances(*2 * entering(model, x)[:1], scaled=True)[ROWS:]
    np.testing.assert_allclose(later[:, 0].numpy(), expected, rtol=1e-9)


def test_rows_of_small_batches_wait_until_they_are_many_or_someone_asks(monkeypatch):
    counts = []
    update = Gram.update

    def counted(gram, features, **options):
        counts.append(len(features))
        update(gram, features, **options)

    model, x, _ = made()
    readout = find_readout(model, Source(), None, batch_of(x)).readout
    novelty = Novelty.begin(readout, batch_of(x))
    monkeypatch.setattr(Gram, "update", counted)
    for row in range(100):
        novelty.update(readout, batch_of(x[row : row + 1]))
    assert counts == [64, 64, 64]  # for each of the layers
    assert [gram.count for gram in novelty.grams] == [100, 100, 100]
    assert counts[3:] == [36, 36, 36]
    novelty.update(readout, batch_of(x[:200]))
    assert [gram.count for gram in novelty.clone().grams] == [300, 300, 300]


def test_novelties_of_other_layers_are_neither_added_nor_removed():
    model, x, _ = made()
    readout = find_readout(model, Source(), None, batch_of(x)).readout
    novelty = Novelty.begin(readout, batch_of(x))
    novelty.update(readout, batch_of(x))
    fewer = Novelty(novelty.layers[1:], novelty.grams[1:])
    for verb in (novelty.merge, novelty.without):
        with pytest.raises(ValueError, match=r"expected \('the input', '2', '4'\), got \('2', '4'"):
            verb(fewer)


# --- what is watched -----------------------------------------------------------------------------


def watched(model, x, y=None, **options):
    target = torch.randn(len(x), 1) if y is None else y
    uq = rg.LastLayerRigidity(model, **options).fit(x, target, novelty=True)
    uq.calibrate(x, target, method="paper")
    return uq


def check_rows(uq, x, name, rows, *, scaled):
    """A layer is watched by these rows: the distances from them, in single precision."""
    rows = rows.detach().double().numpy()
    expected = dense_distances(rows, rows, scaled=scaled)
    np.testing.assert_allclose(distances(uq, x)[name], expected, rtol=1e-3)


def test_convolutions_are_watched_by_means_and_deviations_of_their_channels():
    torch.manual_seed(0)
    first, second = nn.Conv2d(3, 5, 3), nn.Conv2d(5, 4, 3)
    model = nn.Sequential(
        first, nn.ReLU(), second, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 1)
    )
    x = torch.randn(60, 3, 9, 9)
    uq = watched(model, x)
    assert uq.novelty(x).layers == ("the input", "2", "6")
    for name, image in (("the input", x), ("2", model[:2](x))):
        rows = torch.cat([image.mean((2, 3)), image.flatten(2).std(2, correction=0)], 1)
        check_rows(uq, x, name, rows, scaled=name == "the input")
    # noise of another size has the same mean: the deviation tells
    assert float(uq.novelty(3 * x).by_layer[:, 0].min()) > 2


class Reader(nn.Module):
    """Tokens, embedded, normalised, attended, read from their mean."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(20, 8)
        self.block = nn.TransformerEncoderLayer(
            8, 2, 16, batch_first=True, norm_first=True, dropout=0.0
        )
        self.out = nn.Linear(8, 1)

    def forward(self, ids):
        return self.out(self.block(self.tokens(ids)).mean(1))


def moments(tokens):
    """Means and deviations over the tokens or steps of (N, T, d)."""
    return torch.cat([tokens.mean(1), tokens.std(1, correction=0)], 1)


def test_transformers_are_watched_by_means_and_deviations_over_their_tokens():
    torch.manual_seed(0)
    model = Reader().eval()
    ids = torch.randint(0, 15, (80, 6))
    uq = watched(model, ids)
    watched_layers = set(uq.novelty(ids).layers)
    assert {"tokens", "out"} <= watched_layers
    # Before PyTorch 2.5 a fused path goes around the layers of an encoder, whoever watches them.
    assert "block.linear1" in watched_layers or torch.__version__ < "2.5"
    check_rows(uq, ids, "tokens", moments(model.tokens(ids)), scaled=False)
    after, known = uq.novelty(torch.full((4, 6), 17)), uq.novelty(ids)
    column = known.layers.index("tokens")
    assert float(after.by_layer[:, column].min()) > float(known.by_layer[:, column].median())


@pytest.mark.parametrize("batch_first", [True, False])
def test_attention_is_watched_by_means_and_deviations_over_its_tokens(batch_first):
    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=batch_first)
            self.out = nn.Linear(4, 1)

        def forward(self, x):  # (N, T, d) whatever the layer wants
            tokens = 1 * x if batch_first else x.transpose(0, 1)
            mixed, _ = self.attention(tokens, tokens, tokens)
            return self.out(mixed.mean(1 if batch_first else 0))

    x = torch.randn(70, 5, 4)
    check_rows(watched(Attending(), x), x, "attention", moments(x), scaled=False)


class Recurrent(nn.Module):
    """The last state of a recurrent layer; inputs are (N, T, d) whatever the layer wants."""

    def __init__(self, layer=nn.LSTM, batch_first=True):
        super().__init__()
        self.layer, self.out = layer(3, 5, batch_first=batch_first), nn.Linear(5, 1)
        self.batch_first = batch_first

    def states(self, x):
        states, _ = self.layer(x if self.batch_first else x.transpose(0, 1))
        return states if self.batch_first else states.transpose(0, 1)

    def forward(self, x):
        return self.out(self.states(x)[:, -1])


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_nets_are_watched_by_means_deviations_and_changes_of_steps(layer, batch_first):
    def rows(steps):
        change = torch.stack([steps[:, t + 1] - steps[:, t] for t in range(3)], 1)
        return torch.cat([moments(steps), (change.square().sum(1) / 4).sqrt()], 1)

    x = torch.randn(70, 4, 3)
    model = Recurrent(layer, batch_first)
    uq = watched(model, x)
    name = "the input" if batch_first else "layer"
    assert uq.novelty(x).layers == (name, "the states of layer", "out")
    check_rows(uq, x, name, rows(x), scaled=batch_first)
    check_rows(uq, x, "the states of layer", rows(model.states(x)), scaled=False)


def test_sequences_of_one_step_have_no_change():
    x = torch.randn(70, 1, 3)
    found = watched(Recurrent(), x).novelty(x)
    assert bool(found.by_layer.isfinite().all())
    assert float((found.largest > 1).double().mean()) < 0.1


def waves(count, frequency, amplitude=1.0):
    phase = 6.3 * torch.rand(count, 1, 3)
    angles = frequency * torch.arange(30.0)[:, None] + phase
    return amplitude * torch.sin(angles) + 0.1 * torch.randn(count, 30, 3)


def test_waves_of_another_frequency_or_amplitude_are_novel_to_a_recurrent_net():
    """Their means over time are the same."""
    torch.manual_seed(0)
    x = waves(600, 0.4)
    y = torch.randn(600, 1)
    uq = rg.LastLayerRigidity(Recurrent()).fit(x[:400], y[:400], novelty=True)
    uq.calibrate(x[400:], y[400:], method="paper")
    assert float((uq.novelty(waves(200, 0.4)).largest > 1).double().mean()) < 0.12
    for other in (waves(50, 0.9), waves(50, 0.4, amplitude=1.5)):
        assert float(uq.novelty(other).largest.min()) > 2


# --- frozen --------------------------------------------------------------------------------------


def check_frozen(uq, *inputs):
    """A frozen module gives the bars of `uq(x)`, which are those of `predict`."""
    mean, std = uq(*inputs)
    frozen_mean, frozen_std = uq.freeze()(*inputs)
    torch.testing.assert_close(frozen_mean, mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(frozen_std, std, rtol=1e-4, atol=1e-6)
    return std


def test_a_frozen_recurrent_net_listens_to_what_comes_out_of_its_layer():
    torch.manual_seed(0)
    x = waves(600, 0.4)
    model = Recurrent()
    y = x[:, -1, :1] + 0.1 * torch.randn(600, 1)
    uq = rg.LastLayerRigidity(model).fit(x[:400], y[:400], novelty=True).calibrate(x[400:], y[400:])
    familiar = check_frozen(uq, waves(20, 0.4))
    novel = check_frozen(uq, waves(20, 0.9))
    assert float(novel.mean()) > float(familiar.mean())


def fitted_to_atoms(model):
    torch.manual_seed(0)
    uq = rg.LastLayerRigidity(model)
    batches = []
    for seed in range(12):
        inputs, noise = structures(seed, 20)
        batches.append((*inputs, model(*inputs).detach() + 0.1 * noise))
    return uq.fit(batches[:8], novelty=True).calibrate(batches[8:])


def test_a_frozen_sum_over_atoms_takes_the_sample_of_each_atom_from_its_input():
    uq = fitted_to_atoms(Atoms())
    for far in (None, 7):
        inputs, _ = structures(20, 20, far=far)
        check_frozen(uq, *inputs)
    fewer, _ = structures(21, 3, far=1)  # as many structures as a call brings
    bars = check_frozen(uq, *fewer)
    plain, _ = structures(21, 3)
    usual = check_frozen(uq, *plain)
    assert float(bars[1]) > 2 * float(usual[1])
    torch.testing.assert_close(bars[2], usual[2])


def test_a_frozen_sum_over_atoms_can_be_exported():
    class Boxes(Atoms):
        """The number of structures is that of their boxes."""

        def forward(self, atoms, edges, structure, box):
            return super().forward(atoms, edges, structure, len(box))

    torch.manual_seed(0)
    batches = []
    for seed in range(12):
        (atoms, edges, structure, count), target = structures(seed, 20)
        batches.append((atoms, edges, structure, torch.ones(int(count), 1), target))
    uq = rg.LastLayerRigidity(Boxes()).fit(batches[:8], novelty=True).calibrate(batches[8:])
    frozen = uq.freeze()
    (atoms, edges, structure, count), _ = structures(20, 20, far=7)
    inputs = (atoms, edges, structure, torch.ones(int(count), 1))
    exported = torch.export.export(frozen, inputs).module()
    torch.testing.assert_close(exported(*inputs)[1], uq(*inputs)[1], rtol=1e-4, atol=1e-6)


def test_a_sum_over_atoms_of_which_no_input_tells_the_sample_is_not_frozen():
    class Counted(Atoms):
        """The number of atoms of each structure is given instead."""

        def forward(self, atoms, edges, sizes):
            structure = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
            return super().forward(atoms, edges, structure, len(sizes))

    torch.manual_seed(0)
    batches = []
    for seed in range(12):
        (atoms, edges, structure, _), target = structures(seed, 20)
        batches.append((atoms, edges, structure.bincount(), target))
    uq = rg.LastLayerRigidity(Counted()).fit(batches[:8], novelty=True).calibrate(batches[8:])
    with pytest.raises(ValueError, match=r"no input of the model gives the number of the sample"):
        uq.freeze()
    assert uq.freeze(outputs="mean") is not None
    uq.fit(batches[:8]).calibrate(batches[8:])  # the remedy
    check_frozen(uq, *batches[9][:3])


# --- what is watched, continued ------------------------------------------------------------------


class Atoms(nn.Module):
    """Energies as sums over the atoms of structures, with messages along edges."""

    def __init__(self):
        super().__init__()
        self.first, self.edge, self.out = nn.Linear(3, 8), nn.Linear(3, 8), nn.Linear(8, 1)

    def forward(self, atoms, edges, structure, count):
        hidden = torch.tanh(self.first(atoms))
        messages = torch.tanh(self.edge(atoms[edges[0]] - atoms[edges[1]]))
        hidden = hidden.index_add(0, edges[0], messages)
        energies = self.out(hidden)
        return energies.new_zeros(int(count), 1).index_add(0, structure, energies)


def structures(seed, count, *, far=None):
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(2, 6, (count,), generator=generator)
    structure = torch.repeat_interleave(torch.arange(count), sizes)
    atoms = torch.randn(len(structure), 3, generator=generator)
    if far is not None:
        atoms[(structure == far).nonzero()[0]] = 9.0
    edges = torch.stack([torch.arange(len(atoms)), torch.arange(len(atoms)).roll(1)])
    edges = torch.cat([edges, edges[:, :3]], 1)
    return (atoms, edges, structure, torch.tensor(count)), torch.randn(count, 1)


def test_atoms_are_watched_one_by_one_and_the_most_novel_one_counts():
    torch.manual_seed(0)
    uq = rg.LastLayerRigidity(Atoms(), forward=lambda m, b: m(*b[0]))
    uq.fit([structures(seed, 20) for seed in range(8)], novelty=True)
    uq.calibrate([structures(seed, 20) for seed in range(8, 12)], method="paper")
    batch = structures(20, 20, far=7)
    found = uq.novelty([batch])
    assert found.layers == ("the input", "out")  # edges are not watched
    assert len(found) == 20
    assert int(found.largest.argmax()) == 7
    # each structure by itself is as novel as among others
    atoms, _, structure, _ = batch[0]
    known = torch.cat([structures(seed, 20)[0][0] for seed in range(8)])
    each = dense_distances(known.double().numpy(), atoms.double().numpy(), scaled=True)
    expected = np.stack([each[structure.numpy() == i].max() for i in range(20)])
    np.testing.assert_allclose(distances(uq, [batch])["the input"], expected, rtol=1e-4)


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(2, 1)

    def forward(self, a, b):
        return self.out(torch.stack([a.square().mean(1), b.mean(1)], 1))


def test_inputs_are_known_by_their_names_in_whatever_order_they_come():
    a, b, y = torch.randn(200, 3), 50 + torch.randn(200, 4), torch.randn(200, 1)
    uq = rg.LastLayerRigidity(Named()).fit({"a": a, "b": b, "y": y}, novelty=True)
    uq.calibrate({"a": a, "b": b, "y": y}, method="paper")
    found = uq.novelty({"a": a, "b": b})
    assert found.layers == ("input a", "input b", "out")
    turned = uq.novelty({"b": b, "a": a})
    torch.testing.assert_close(turned.by_layer, found.by_layer)


def test_what_is_written_to_in_place_is_watched_again():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.LayerNorm(4), nn.LayerNorm(4)
            self.inner, self.out = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x):
            hidden = x.clone()
            hidden += torch.tanh(self.inner(self.first(hidden)))
            return self.out(self.second(hidden))

    x = torch.randn(90, 4)
    assert watched(Residual(), x).novelty(x).layers == (
        "the input",
        "first",
        "inner",
        "second",
        "out",
    )


def test_rows_that_are_no_samples_are_not_watched_though_they_are_as_many():
    class Positions(nn.Module):
        """As many tokens as samples, attended to with the tokens first."""

        def __init__(self):
            super().__init__()
            self.tokens, self.places = nn.Embedding(9, 8), nn.Embedding(64, 8)
            self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
            self.out = nn.Linear(8, 1)

        def forward(self, ids):
            hidden = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
            hidden = self.block(hidden.transpose(0, 1))
            return self.out(hidden.mean(0))

    ids = torch.randint(0, 9, (64, 64))
    uq = rg.LastLayerRigidity(Positions().eval())
    uq.fit([(ids, torch.randn(64, 1))], novelty=True)
    uq.calibrate([(ids[:40], torch.randn(40, 1))], method="paper")
    assert uq.novelty(ids[:7]).layers == ("tokens", "block.self_attn", "out")


def test_samples_that_a_model_sorts_are_not_watched_while_they_are():
    class Sorting(nn.Module):
        def __init__(self):
            super().__init__()
            self.sorted, self.out = nn.Linear(3, 5), nn.Linear(5, 1)

        def forward(self, x):
            order = x[:, 0].argsort()
            hidden = torch.tanh(self.sorted(x[order]))
            return self.out(hidden[order.argsort()])

    x = torch.randn(100, 3)
    assert watched(Sorting(), x).novelty(x).layers == ("the input", "out")


def test_edges_that_were_as_many_as_atoms_in_the_first_batch_are_named():
    def rings(seed, more):
        generator = torch.Generator().manual_seed(seed)
        structure = torch.repeat_interleave(torch.arange(10), 4)
        atoms = torch.randn(40, 3, generator=generator)
        edges = torch.stack([torch.arange(40), torch.arange(40).roll(1)])
        edges = torch.cat([edges, edges[:, :more]], 1)
        return (atoms, edges, structure, torch.tensor(10)), torch.randn(10, 1)

    uq = rg.LastLayerRigidity(Atoms(), forward=lambda m, b: m(*b[0]))
    with pytest.raises(ValueError, match=r"Batch 1: novelty watches what enters 'edge'.*edges"):
        uq.fit([rings(0, 0), rings(1, 5)], novelty=True)
    uq.fit([rings(1, 5), rings(0, 0)], novelty=True)
    uq.calibrate([rings(2, 3)], method="paper")
    assert uq.novelty([rings(3, 0)]).layers == ("the input", "out")


def test_several_nets_as_one_are_watched_each():
    models = [made(seed)[0] for seed in (1, 2)]
    _, x, y = made()
    uq = rg.LastLayerRigidity(rg.MeanOf(models)).fit(x[:ROWS], y[:ROWS], novelty=True)
    uq.calibrate(x[ROWS:], y[ROWS:], method="paper")
    assert len(uq.novelty(x[:3]).layers) == 5


def test_what_enters_several_layers_is_watched_once():
    class Forked(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.out = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 1)

        def forward(self, x):
            return self.out(torch.tanh(self.a(x)) * self.b(x))

    x = torch.randn(50, 4)
    assert watched(Forked(), x).novelty(x).layers == ("the input", "out")


def test_inputs_before_a_norm_are_watched_beside_what_follows_it():
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(400, 4)
    uq = watched(model, x)
    found = uq.novelty(3 * x)
    assert found.layers == ("the input", "1", "3")
    at_input, after = found.by_layer[:, 0], found.by_layer[:, 1]
    assert float(at_input.median()) > 2
    assert float((after > 1).double().mean()) < 0.1  # the norm hides it


def test_a_function_that_gives_the_features_leaves_the_layers_watched():
    model, x, y = made()
    uq = rg.LastLayerRigidity(model, features=lambda m, x: m[:4](x))
    uq.fit(x[:ROWS], y[:ROWS], novelty=True)
    uq.calibrate(x[ROWS:], y[ROWS:], method="paper")
    plain = fitted()[0]
    torch.testing.assert_close(uq.novelty(x).by_layer, plain.novelty(x).by_layer)


def test_batches_that_forward_takes_show_the_models_own_inputs():
    model, x, y = made()
    batches = [{"x": x[i : i + 300], "y": y[i : i + 300]} for i in range(0, ROWS + VALID, 300)]
    uq = rg.LastLayerRigidity(model, forward=lambda m, b: m(b["x"]))
    uq.fit(batches[:3], novelty=True)
    uq.calibrate(batches[3:], method="paper")
    plain = fitted()[0]
    torch.testing.assert_close(uq.novelty(batches).by_layer, plain.novelty(x).by_layer)


def test_wide_inputs_that_are_new_are_seen_through_the_projection():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(700, 4), nn.Tanh(), nn.Linear(4, 1))
    basis = torch.randn(20, 700)
    x = torch.randn(800, 20) @ basis
    uq = watched(model, x)
    assert uq.novelty(x[:5]).layers == ("the input", "2")
    outside = torch.randn(50, 700) * x.std()  # off the twenty directions
    found = uq.novelty(torch.cat([x, outside])).by_layer[:, 0]
    assert float(found[-50:].min()) > float(found[:-50].max())


# --- where it is shown ---------------------------------------------------------------------------


def test_predictions_carry_it_in_the_shape_of_the_output():
    uq, _, x, _ = fitted(batch_size=100)
    p = uq.predict(x)
    largest = uq.novelty(x).largest
    assert p.novelty.shape == p.mean.shape
    for column in range(2):
        torch.testing.assert_close(p.novelty[:, column], largest)
    few = p[p.novelty[:, 0] > 1.0]
    torch.testing.assert_close(few.novelty[:, 0], largest[largest > 1.0])
    assert torch.equal((2 * p + 1).novelty, p.novelty)
    both = Prediction.concatenate([p[:5], p[5:]])
    assert torch.equal(both.novelty, p.novelty)
    table = p.to_pandas()
    np.testing.assert_allclose(table["novelty"], largest.numpy())
    assert list(table.columns)[-1] == "novelty"
    assert p.to_numpy()["novelty"].shape == tuple(p.mean.shape)


def test_predictions_without_it_have_none():
    model, x, y = made()
    uq = rg.LastLayerRigidity(model).fit(x[:ROWS], y[:ROWS])
    uq.calibrate(x[ROWS:], y[ROWS:], method="paper")
    p = uq.predict(x)
    assert p.novelty is None
    assert p[:3].novelty is None
    assert "novelty" not in p.to_pandas()
    watching = fitted()[0].predict(x)
    assert Prediction.concatenate([watching, replace(watching, novelty=None)]).novelty is None


def test_a_call_of_the_model_pays_nothing_for_it():
    """`uq(x)` leaves no hook on the model, and runs what it runs in a fit without novelty."""
    uq, model, x, y = fitted()
    plain = rg.LastLayerRigidity(model).fit(x[:ROWS], y[:ROWS])
    plain.calibrate(x[ROWS:], y[ROWS:], method="paper")
    uq.novelty(x)
    names = []
    for fit in (uq, plain):
        fit(x[:5])
        with Operations() as operations:
            fit(x[:5])
        names.append(operations.names)
    assert names[0] == names[1]
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks


def test_the_reports_tell_of_it():
    uq, _, x, y = fitted()
    text = str(uq.calibration_report)
    assert "3 layers watched" in text
    assert "3 layers watched" in uq.summary()
    assert f"above {uq.calibration_report.novelty_usual:.2f}" in text
    largest = uq.novelty(x[ROWS:]).largest
    above = int((largest > uq.calibration_report.novelty_usual).sum())
    assert 2 <= above <= 4  # a hundredth of the rows, the last of which may round
    far = torch.cat([x[:270], 6 * x[:30]])
    p = uq.predict(far)
    said = str(verdict(p, y[:300], calibration=uq.calibration_report))
    count = int((uq.novelty(far).largest > uq.calibration_report.novelty_usual).sum())
    assert f"{count} of 300 rows" in said
    assert "novel to some layer" in said
    inside = str(verdict(uq.predict(x[:300]), y[:300], calibration=uq.calibration_report))
    assert "novel to some layer" not in inside
    assert "novelty" in html(p, y[:300], calibration=uq.calibration_report)


@pytest.mark.parametrize("hidden", [1, 6])
def test_one_calibration_row_in_twenty_is_above_one_however_many_layers_there_are(hidden):
    torch.manual_seed(0)
    layers = [nn.Linear(3, 12), nn.Tanh()]
    for _ in range(hidden - 1):
        layers += [nn.Linear(12, 12), nn.Tanh()]
    model, x = nn.Sequential(*layers, nn.Linear(12, 1)), torch.randn(800, 3)
    uq = rg.LastLayerRigidity(model).fit(x[:400], x[:400, :1], novelty=True)
    uq.calibrate(x[400:], x[400:, :1], method="paper")
    novelty = uq.predict(x[400:]).novelty
    assert int((novelty > 1 + 1e-5).sum()) == 20
    assert int((novelty >= 1 - 1e-5).sum()) == 21


@pytest.mark.parametrize("rows", [1, 5, 20, 98, 99, 100, 198, 199, 300, 1000])
def test_one_new_row_in_a_hundred_is_above_the_threshold_or_one_in_n_plus_one(rows):
    """Any of n + 1 rows may be the new one: each in turn is compared with the n others."""
    novelty = torch.randn(rows + 1)
    above = 0
    for new in range(rows + 1):
        others = torch.cat([novelty[:new], novelty[new + 1 :]])
        above += float(novelty[new]) > alarm_threshold(others)
    if rows < 99:
        assert above == 1
    else:
        assert above == (rows + 1) // 100  # at most 1 %, and as near to it as can be


@pytest.mark.parametrize(("hidden", "most"), [(0, 1 / 21), (2, 0.06)])
def test_few_calibration_rows_raise_as_many_false_alarms_as_the_report_says(hidden, most):
    """Those of 20 rows, averaged over 100 calibrations."""
    torch.manual_seed(0)
    layers = [part for _ in range(hidden) for part in (nn.Linear(3, 3), nn.Tanh())]
    model, x = nn.Sequential(*layers, nn.Linear(3, 1)), torch.randn(4400, 3)
    y = x[:, :1] + 0.1 * torch.randn(4400, 1)
    uq = rg.LastLayerRigidity(model).fit(x[:400], y[:400], novelty=True)
    shares = []
    for start in range(400, 2400, 20):
        rows = slice(start, start + 20)
        report = uq.calibrate(x[rows], y[rows], method="paper").calibration_report
        above = uq.novelty(x[2400:]).largest > report.novelty_usual
        shares.append(float(above.double().mean()))
    assert report.novel_share == 1 / 21
    assert "about 4.8 % of new rows like these are above" in str(report)
    chance = 4 * np.std(shares) / math.sqrt(len(shares))
    assert 1 / 21 - chance < np.mean(shares) < most + chance


# --- what is refused -----------------------------------------------------------------------------


def test_fits_that_did_not_watch_and_fits_without_calibration_say_what_to_do():
    model, x, y = made()
    uq = rg.LastLayerRigidity(model)
    with pytest.raises(NotFittedError):
        uq.novelty(x)
    uq.fit(x[:ROWS], y[:ROWS])
    uq.calibrate(x[ROWS:], y[ROWS:], method="paper")
    with pytest.raises(ValueError, match=r"fit\(x, y, novelty=True\)"):
        uq.novelty(x)
    uq.fit(x[:ROWS], y[:ROWS], novelty=True)
    with (
        pytest.warns(UserWarning, match="not calibrated"),
        pytest.raises(ValueError, match=r"calibrate\(x, y\)"),
    ):
        uq.novelty(x)
    with pytest.raises(ValueError, match="no batches"):
        fitted()[0].novelty([])


@pytest.mark.parametrize("given", ["yes", 1, None])
def test_novelty_is_true_or_false(given):
    model, x, y = made()
    with pytest.raises(ValueError, match="True or False"):
        rg.LastLayerRigidity(model).fit(x, y, novelty=given)


class Imputing(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x):
        return self.net(x.nan_to_num())


def test_missing_values_that_the_model_fills_are_named():
    x, y = torch.randn(200, 3), torch.randn(200, 1)
    x[7, 1] = torch.nan
    uq = rg.LastLayerRigidity(Imputing())
    with pytest.raises(ValueError, match="NaN or infinity enters 'the input'"):
        uq.fit(x, y, novelty=True)
    uq.fit(x, y)  # without it the fit is what it was
    assert uq.gram.count == 200
    uq.fit(x[8:], y[8:], novelty=True)
    with pytest.raises(ValueError, match="NaN or infinity enters 'the input'"):
        uq.partial_fit(x[:8], y[:8])
    assert uq.gram.count == 192


def test_batches_of_another_form_are_named():
    class Any_(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(4, 1)

        def forward(self, x):
            return self.out(nn.functional.adaptive_avg_pool1d(x[:, None], 4)[:, 0])

    batches = [(torch.randn(40, width), torch.randn(40, 1)) for width in (6, 9)]
    uq = rg.LastLayerRigidity(Any_())
    with pytest.raises(ValueError, match=r"Batch 1: novelty watches what enters 'the input'"):
        uq.fit(batches, novelty=True)


def test_distances_of_layers_that_never_varied_are_finite():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.quiet, self.out = nn.Linear(2, 3), nn.Linear(2, 1)

        def forward(self, x, gate):
            return self.out(x) + 0.0 * self.quiet(gate * x).sum(1, keepdim=True)

    x, closed, y = torch.randn(300, 2), torch.zeros(300, 1), torch.randn(300, 1)
    uq = rg.LastLayerRigidity(Gated(), layer="out").fit((x, closed, y), novelty=True)
    uq.calibrate((x + 1, closed, y), method="paper")
    asked = (torch.tensor([[0.0, 0.0], [3.0, 4.0]]), torch.ones(2, 1))
    # Two columns changed that were constant: each adds 100 times the number of columns.
    np.testing.assert_allclose(distances(uq, asked)["quiet"], [0.0, 25.0 + 400.0], rtol=1e-6)


def test_inputs_that_are_missing_where_none_were_are_novel():
    x, y = torch.randn(300, 3), torch.randn(300, 1)
    uq = rg.LastLayerRigidity(Imputing()).fit(x[:200], y[:200], novelty=True)
    x[250, 1] = torch.nan
    uq.calibrate(x[200:], y[200:], method="paper")
    found = uq.novelty(x[249:252])
    assert found.largest.isinf().tolist() == [False, True, False]
    assert found.layer[1] == "the input"
    assert math.isfinite(uq.calibration_report.novelty["the input"])


def test_models_that_differentiate_inside_are_watched_where_values_are():
    class Slope(nn.Module):
        """Its output is an energy and its slope's size, by `torch.func`."""

        def __init__(self):
            super().__init__()
            self.first, self.out = nn.Linear(3, 6), nn.Linear(6, 1)

        def forward(self, x):
            slope = torch.func.vmap(torch.func.grad(lambda row: torch.tanh(self.first(row)).sum()))
            return self.out(torch.tanh(self.first(x)) * slope(x).square().sum(1, keepdim=True))

    x = torch.randn(120, 3)
    uq = watched(Slope(), x, layer="out")
    assert uq.novelty(x).layers == ("the input", "out")
    assert float(uq.novelty(5 * x).by_layer[:, 0].median()) > 5


def test_files_are_merged_without_a_model(tmp_path):
    _, model, x, y = fitted_in_float64()
    for number, (start, end) in enumerate(((0, 400), (400, ROWS))):
        part = rg.LastLayerRigidity(model).fit(x[start:end], y[start:end], novelty=True)
        part.save(tmp_path / f"{number}", rows=True)
    paths = [str(tmp_path / name) for name in ("0", "1")]
    assert cli.main(["merge", *paths, "--out", str(tmp_path / "whole")]) == 0
    whole = rg.LastLayerRigidity.load(tmp_path / "whole", model)
    check_distances(whole, model, x[:ROWS], x, y)


def test_a_layer_costs_a_handful_of_operations():
    """Those of an answer with novelty beyond one without, a layer: a count that is told."""

    def more(hidden, constant=False):
        """Operations that novelty adds for a net of some hidden layers."""
        between = [part for _ in range(hidden) for part in (nn.Linear(3, 3), nn.Tanh())]
        model, x, y = nn.Sequential(*between, nn.Linear(3, 1)), torch.randn(300, 3), torch.ones(300)
        if constant:  # an input
            x[:, 0] = 1.0
        names = []
        for watching in (True, False):
            uq = rg.LastLayerRigidity(model).fit(x[:200], y[:200], novelty=watching)
            uq.calibrate(x[200:], y[200:], method="paper")
            uq.predict(x[:64])
            with Operations() as operations:
                uq.predict(x[:64])
            names.append(operations.names)
        return len(names[0]) - len(names[1])

    assert more(3) - more(2) == more(2) - more(1)
    assert more(2) - more(1) in (OPERATIONS, OPERATIONS + 1)  # PyTorch 2.4 takes one more
    page = Path("docs/speed.md").read_text(encoding="utf-8")
    assert f"{OPERATIONS} more operations per layer" in page
    assert f"and {more(2, constant=True) - more(2)} more where an" in page


def test_a_calibration_of_which_many_rows_lack_a_number_says_so():
    x, y = torch.randn(400, 3), torch.randn(400, 1)
    uq = rg.LastLayerRigidity(Imputing()).fit(x[:200], y[:200], novelty=True)
    x[200:230, 1] = torch.nan
    report = uq.calibrate(x[200:], y[200:], method="paper").calibration_report
    assert "30 of 200 calibration rows have a missing value" in str(report)
    assert all(map(math.isfinite, report.novelty.values()))
    found = uq.novelty(x[225:235]).largest
    assert found.isinf().tolist() == 5 * [True] + 5 * [False]
    assert float(found[5:].min()) > 0
    assert report.novelty_usual < 5


def test_a_model_without_anything_to_watch_is_refused():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))

        def forward(self, x):  # (N, T, d)
            return (x.mean(1) * self.weight).sum(1, keepdim=True)

    with pytest.raises(ValueError, match="found no layer to watch"):
        rg.LastLayerRigidity(Bare(), layer="").fit(
            torch.randn(50, 3, 4), torch.randn(50, 1), novelty=True
        )


def test_rows_whose_samples_are_not_known_are_refused_by_name():
    class Repeating(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.out = nn.Linear(3, 8), nn.Linear(8, 1)

        def forward(self, x, twice):
            rows = torch.cat([x, x]) if twice else x
            return self.out(self.first(rows).tanh())[: len(x)]

    x, y = torch.randn(200, 3), torch.randn(200, 1)
    uq = rg.LastLayerRigidity(Repeating()).fit([(x, False, y)], novelty=True)
    uq.calibrate([(x + 1, False, y)], method="paper")
    with pytest.raises(ValueError, match=r"'out', which got 400 rows for 200 samples.*not known"):
        uq.novelty([(x, True, y)])


def test_atoms_of_several_structures_at_once_are_refused():
    class Coupled(Atoms):
        def forward(self, atoms, edges, structure, count, coupled=False):
            energies = super().forward(atoms, edges, structure, count)
            return energies + 0.5 * energies.roll(1, 0) if coupled else energies

    torch.manual_seed(0)
    uq = rg.LastLayerRigidity(Coupled(), forward=lambda m, b: m(*b[0]))
    uq.fit([structures(seed, 20) for seed in range(4)], novelty=True)
    uq.calibrate([structures(9, 20)], method="paper")
    inputs, target = structures(5, 20)
    with pytest.raises(ValueError, match=r"differ from those in the first batch|not known"):
        uq.novelty([((*inputs, True), target)])


def test_autocast_shortens_no_distance():
    uq, _, x, _ = fitted()
    plain = uq.novelty(3 * x[:60])
    with torch.autocast("cpu", torch.bfloat16):
        mixed = uq.novelty(3 * x[:60])
    torch.testing.assert_close(mixed.by_layer[:, 0], plain.by_layer[:, 0])  # the input itself
    torch.testing.assert_close(mixed.by_layer, plain.by_layer, rtol=0.2, atol=0.2)


def test_some_of_the_inputs_can_be_taken():
    uq, _, x, _ = fitted()
    whole = uq.novelty(x)
    few = whole[whole.largest > 1]
    assert len(few) == int((whole.largest > 1).sum())
    torch.testing.assert_close(few.largest, whole.largest[whole.largest > 1])
    assert len(whole[3]) == 1
    assert "1 input to 3 layers" in str(whole[3])
    assert str(whole).count("row") == 5


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_models_of_any_precision_are_watched(dtype):
    model, x, y = made()
    inputs = (x / x.std(0)).to(dtype)
    uq = rg.LastLayerRigidity(model.to(dtype)).fit(inputs[:ROWS], y[:ROWS].to(dtype), novelty=True)
    uq.calibrate(inputs[ROWS:], y[ROWS:].to(dtype), method="paper")
    found = uq.novelty(torch.cat([inputs[:50], 5 * inputs[:50]])).largest
    assert found.dtype == torch.float32
    assert float(found[50:].median()) > 5 * float(found[:50].median())


# --- bars that listen ----------------------------------------------------------------------------


def far_rows(x):
    """Every tenth row far from all others."""
    x = x.clone()
    x[::10] *= 6
    return x


def test_conformal_scores_are_those_of_the_predictions():
    model, x, y = made()
    uq = rg.LastLayerRigidity(model).fit(x[:ROWS], y[:ROWS], novelty=True)
    uq.calibrate(x[ROWS:], y[ROWS:])
    torch.manual_seed(1)
    others, truth = far_rows(x[:200] + 0.01 * x[:200].roll(1, 0)), torch.randn(200, 2)
    tails = uq.predict(others).tail(truth)
    uq.conformalize(others, truth)
    conformal = uq.calibration.conformal
    expected = tails.T.sort(1, descending=True).values.flatten().double()
    torch.testing.assert_close(conformal.tails.double(), expected, rtol=1e-5, atol=1e-9)


def test_a_frozen_epistemic_bar_does_not_depend_on_what_else_is_frozen():
    model, x, y = made()
    uq = rg.LastLayerRigidity(model).fit(x[:ROWS], y[:ROWS], novelty=True)
    uq.calibrate(x[ROWS:], y[ROWS:])
    others = far_rows(x[:100])
    expected = uq.predict(others).epistemic
    for outputs in (("epistemic",), ("mean", "std", "epistemic")):
        found = uq.freeze(outputs)(others)
        epistemic = found if isinstance(found, torch.Tensor) else found[-1]
        torch.testing.assert_close(epistemic, expected, rtol=1e-4, atol=1e-9)
