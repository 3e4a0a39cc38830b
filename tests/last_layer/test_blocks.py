"""A fit in blocks: however batches are gathered, the statistics are those of all rows at once."""

import pytest
import torch
from torch import nn

import rigidities as rg
from rigidities.statistics import block as blocks
from rigidities.statistics.statistics import Statistics
from tests.support.refusals import refused

F64 = torch.float64


def data(rows=900, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 5, generator=generator)
    return x, x.sum(1, keepdim=True).sin()


def net(bias=True):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1, bias=bias))


def whole(model, x):
    """Features of all rows, in float64."""
    h = model[:-1](x).detach().to(F64)
    return torch.cat([h, torch.ones_like(h[:, :1])], 1) if model[-1].bias is not None else h


class Buffered(nn.Module):
    """Writes what goes into its readout into the same memory in every call."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 1)
        self.register_buffer("memory", torch.zeros(2000, 7), persistent=False)

    def forward(self, x):
        with torch.no_grad():
            self.memory[: len(x)] = torch.tanh(self.first(x))
        return self.last(self.memory[: len(x)])


def loaders(x, y, size):
    """The same rows as they come to a fit."""

    def reused():
        spare = torch.empty(size, 5), torch.empty(size, 1)
        for a, b in zip(x.split(size), y.split(size), strict=True):
            spare[0][: len(a)], spare[1][: len(a)] = a, b
            yield spare[0][: len(a)], spare[1][: len(a)]

    def over_numpy():
        spare = torch.empty(size, 5).numpy()
        for a, b in zip(x.split(size), y.split(size), strict=True):
            spare[: len(a)] = a.numpy()
            yield torch.from_numpy(spare)[: len(a)], b

    batches = list(zip(x.split(size), y.split(size), strict=True))
    return {
        "list": batches,
        "twice the same memory": reused(),
        "memory that NumPy writes to": over_numpy(),
        "loader": torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), size),
    }


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("size", [1, 17, 300, 513, 4000])
def test_batches_of_any_size_give_the_dense_sums(size, bias):
    (x, y), model = data(), net(bias)
    uq = rg.LastLayerRigidity(model, batch_size=size).fit((x, y))
    f, r = whole(model, x), (y.to(F64) - model(x).detach())
    torch.testing.assert_close(uq.gram.matrix, f.mT @ f, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(uq.gram.cross, f.mT @ r, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(uq.gram.square, r.mT @ r, rtol=1e-6, atol=1e-6)
    assert uq.gram.count == len(x)


@pytest.mark.parametrize("size", [40, 700])
@pytest.mark.parametrize("how", loaders(*data(), 40))
def test_memory_that_a_loader_uses_again_changes_nothing(how, size):
    x, y = data()
    expected = rg.LastLayerRigidity(net()).fit((x, y))._fit.state.statistics
    got = rg.LastLayerRigidity(net()).fit(loaders(x, y, size)[how])._fit.state.statistics
    torch.testing.assert_close(got.gram.matrix, expected.gram.matrix)
    assert torch.equal(got.sketch.hashes, expected.sketch.hashes)
    torch.testing.assert_close(got.kept_rows.rows["features"], expected.kept_rows.rows["features"])


@pytest.mark.parametrize("size", [20, 600])
def test_a_model_may_write_all_its_features_into_one_memory(size):
    x, y = data()
    torch.manual_seed(2)
    model = Buffered()
    uq = rg.LastLayerRigidity(model, layer="last", batch_size=size).fit((x, y))
    h = torch.tanh(model.first(x)).detach().to(F64)
    torch.testing.assert_close(uq.gram.matrix[:-1, :-1], h.mT @ h, rtol=1e-6, atol=1e-6)


def test_batches_of_different_shapes_are_not_joined():
    x = torch.randn(60, 4, 5)
    batches = [x[:20], x[20:40, :2], x[40:]]
    model = net()
    uq = rg.LastLayerRigidity(model, target=lambda b: None).fit(batches)
    f = torch.cat([whole(model, b.flatten(0, 1)) for b in batches])
    torch.testing.assert_close(uq.gram.matrix, f.mT @ f, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bad", [3, 57, 88])
@pytest.mark.parametrize("where", ["inputs", "targets"])
def test_the_batch_with_nan_is_named_also_inside_a_block(bad, where):
    x, y = data()
    (x if where == "inputs" else y)[10 * bad + 4] = torch.nan
    model = net()
    what = {"inputs": "features", "targets": "targets or predictions"}[where]
    refused(
        f"Batch {bad}: NaN or infinity in the {what}",
        rg.LastLayerRigidity(model, batch_size=10).fit,
        (x, y),
    )


def test_weights_and_losses_are_those_of_their_batch():
    (x, y), model = data(), net()
    weights = torch.rand(len(x)) + 0.1
    position = {row.sum().item(): w for row, w in zip(x, weights, strict=True)}

    def weigh(batch):
        return torch.stack([position[row.sum().item()] for row in batch[0]])

    uq = rg.LastLayerRigidity(model, batch_size=30).fit((x, y), sample_weight=weigh)
    f = whole(model, x)
    expected = f.mT @ (weights.to(F64)[:, None] * f)
    torch.testing.assert_close(uq.gram.matrix, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [100, 900])
def test_a_sample_of_known_size_is_that_of_rows_that_come_one_by_one(size):
    """Knowing how many rows will come saves work and changes nothing."""
    x, y = data()
    cut = rg.LastLayerRigidity(net(), batch_size=size).fit((x, y), keep_rows=50)
    fed = rg.LastLayerRigidity(net()).fit([(x, y)], keep_rows=50)
    first, second = (uq._fit.state.statistics.kept_rows for uq in (cut, fed))
    first.settle()
    second.settle()
    assert torch.equal(first.hashes, second.hashes) and first.limit == second.limit
    assert len(first.hashes) == 50


@pytest.fixture
def block_sizes(monkeypatch):
    """Samples of each block that reaches the statistics."""
    sizes = []
    real = Statistics.update

    def counted(self, block):
        sizes.append(list(block.batches.ends))
        return real(self, block)

    monkeypatch.setattr(Statistics, "update", counted)
    return sizes


@pytest.mark.parametrize("how", ["tensors", "list", "loader", "iterable"])
def test_every_source_waits_for_the_same_blocks(how, block_sizes, monkeypatch):
    monkeypatch.setattr(blocks, "_CPU_BYTES", 1)
    x, y = data(1300)
    batches = list(zip(x.split(50), y.split(50), strict=True))
    loader = torch.utils.data.DataLoader(list(zip(x, y, strict=True)), 50)
    sources = {"tensors": (x, y), "list": batches, "loader": loader, "iterable": iter(batches)}
    rg.LastLayerRigidity(net(), batch_size=50).fit(sources[how])
    # 512 rows at least, in whole batches
    full = [50 * i for i in range(1, 11)]
    assert block_sizes == [full, full, full[:6]]


def test_a_large_batch_is_used_as_it_is_after_those_that_wait(block_sizes, monkeypatch):
    monkeypatch.setattr(blocks, "_CPU_BYTES", 1)
    x, y = data(1300)
    sizes = [100, 100, 700, 100, 300]
    batches = list(zip(x.split(sizes), y.split(sizes), strict=True))
    model = net()
    uq = rg.LastLayerRigidity(model).fit(batches)
    assert block_sizes == [[100, 200], [700], [100], [300]]
    f = whole(model, x)
    torch.testing.assert_close(uq.gram.matrix, f.mT @ f, rtol=1e-6, atol=1e-6)


def test_a_block_ends_where_its_bytes_do(block_sizes, monkeypatch):
    # a row has 5 inputs, 7 features, an output and a target, of four bytes each
    monkeypatch.setattr(blocks, "_CPU_BYTES", 14 * 4 * 650)
    rg.LastLayerRigidity(net(), batch_size=100).fit(data(1300))
    assert [ends[-1] for ends in block_sizes] == [600, 600, 100]


def test_wide_inputs_are_hashed_as_they_come_and_not_kept(monkeypatch):
    """Images, say: what waits has room for their hashes alone."""
    monkeypatch.setattr(blocks, "_CPU_BYTES", 1)
    kept = []
    real = Statistics.update

    def looked(self, block):
        kept.append((len(block.inputs), block.sample_hashes is not None))
        return real(self, block)

    monkeypatch.setattr(Statistics, "update", looked)
    x, y = torch.randn(60, 40, 40), torch.randn(60, 1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(1600, 7), nn.Tanh(), nn.Linear(7, 1))
    waited = rg.LastLayerRigidity(model, batch_size=20).fit((x, y))
    assert kept == [(0, True)]
    at_once = rg.LastLayerRigidity(model).fit((x, y))
    first, second = (uq._fit.state.statistics.sketch.hashes for uq in (waited, at_once))
    assert torch.equal(first, second) and len(first) == 60


class Warming(Buffered):
    """Computes anew a few times before it writes into the same memory, as captured graphs do."""

    calls = 0

    def forward(self, x):
        type(self).calls += 1
        return super().forward(x) if self.calls > 30 else self.last(torch.tanh(self.first(x)))


@pytest.mark.parametrize("source", ["tensors", "list"])
def test_a_model_that_begins_to_use_one_memory_is_right(source):
    x, y = data(9000)
    Warming.calls = 0
    model = Warming()
    batches = list(zip(x.split(20), y.split(20), strict=True))
    given = (x, y) if source == "tensors" else batches
    uq = rg.LastLayerRigidity(model, layer="last", batch_size=20).fit(given)
    h = torch.tanh(model.first(x)).detach().to(F64)
    torch.testing.assert_close(uq.gram.matrix[:-1, :-1], h.mT @ h, rtol=1e-6, atol=1e-6)


def test_weights_that_are_written_to_during_a_fit_are_noticed():
    (x, y), model, calls = data(), net(), []

    def weigh(batch):
        calls.append(1)
        if len(calls) == 3:
            with torch.no_grad():
                model[0].weight.mul_(3)
        return torch.ones(len(batch[0]))

    uq = rg.LastLayerRigidity(model, batch_size=90)
    refused("weights changed during the fit", uq.fit, (x, y), sample_weight=weigh)
    refused("fit", lambda: uq.gram, error=Exception)


def test_hashes_are_of_the_rows_and_not_of_memory_used_again():
    """Batches of several lengths, each flushed alone, from one buffer."""
    x, spare = torch.randn(8, 40, 6, 5), torch.empty(40, 6, 5)
    lengths = [6, 3, 5, 2, 6, 4, 3, 5]

    def reused():
        for rows, n in zip(x, lengths, strict=True):
            spare[:, :n] = rows[:, :n]
            yield spare[:, :n]

    apart = [rows[:, :n].clone() for rows, n in zip(x, lengths, strict=True)]
    fits = [rg.LastLayerRigidity(net(), target=lambda b: None).fit(b) for b in (reused(), apart)]
    first, second = (uq._fit.state.statistics.sketch.hashes for uq in fits)
    assert torch.equal(first, second)


def test_a_sample_of_masked_rows_holds_all_that_have_a_target():
    x, y = data(4000)
    weights = (torch.arange(4000) % 40 == 0).float()
    known = {row.sum().item(): w for row, w in zip(x, weights, strict=True)}

    def weigh(batch):
        return torch.stack([known[row.sum().item()] for row in batch[0]])

    uq = rg.LastLayerRigidity(net()).fit((x, y), sample_weight=weigh, keep_rows=300)
    assert len(uq._fit.state.statistics.kept_rows.rows["mean"]) == 100


def test_rows_without_inputs_of_their_own_leave_nothing_to_judge_by():
    torch.manual_seed(3)
    x, c, y = torch.randn(1500, 5), torch.randn(3), torch.randn(1500, 1)

    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 1)

        def forward(self, x, c):
            return self.last(torch.tanh(self.first(x)) + c.mean())

    uq = rg.LastLayerRigidity(Shifted()).fit([(x[:100], c, y[:100])])
    whole = (x, c.expand(1500, 3).clone(), y)
    uq.batch_size = 700
    uq.partial_fit(tuple(t[100:] for t in whole))
    kept = uq._fit.state.statistics
    kept.kept_rows.settle()
    assert not kept.sketch.judges and len(kept.kept_rows.hashes) == 1500
    some = tuple(t[100:400] for t in whole)
    refused("cannot be recognised.*check=False", uq.forget, some)
    assert uq.gram.count == 1500
    uq.forget(some, check=False)
    assert uq.gram.count == 1200 and uq._fit.state.statistics.kept_rows is None


def test_heads_that_only_later_rows_call_are_found():
    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(4, 1) for _ in range(2))

        def forward(self, x):
            out = x.new_zeros(len(x), 1)
            for kind, head in enumerate(self.heads):
                own = (x[:, 4] == kind).nonzero()[:, 0]
                if len(own):
                    out = out.index_add(0, own, head(x[own, :4]))
            return out

    x = torch.randn(60, 5)
    x[:, 4] = (torch.arange(60) > 30).float()
    uq = rg.LastLayerRigidity(Routed()).fit((x, torch.randn(60, 1)))
    assert uq.gram.width == 10


def test_squares_that_overflow_are_refused_with_what_to_do():
    x, y = data()
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1))
    with torch.no_grad():
        model[0].weight.mul_(1e21)
    refused("precision='double'", rg.LastLayerRigidity(model).fit, (x, y), precision="mixed")


def test_a_refit_is_refused_where_mixed_precision_is_too_coarse():
    torch.manual_seed(0)
    x = torch.randn(20_000, 4)
    y = x.sin().sum(1, keepdim=True) + 0.05 * torch.randn(20_000, 1)
    model = nn.Sequential(nn.Linear(4, 64), nn.Sigmoid(), nn.Linear(64, 1))
    with torch.no_grad():
        model[0].weight.mul_(0.2)
    uq = rg.LastLayerRigidity(model).fit((x, y), precision="mixed")
    refused("mixed precision.*precision='double' first", uq.refit)


def test_a_block_ends_after_so_many_batches(block_sizes):
    rg.LastLayerRigidity(net(), batch_size=9).fit(data(900))
    assert [len(ends) for ends in block_sizes] == [64, 36]


def test_views_that_begin_at_an_odd_number_are_hashed():
    wide = torch.randn(1025, 6)
    x, y = wide[:, 1:], wide[:, :1]
    uq = rg.LastLayerRigidity(net()).fit(x, y)
    assert uq.calibrate(x[:1024] + 1, y[:1024], method="paper").calibration_report.samples == 1024
    one_by_one = rg.LastLayerRigidity(net()).fit([(x[i : i + 1], y[i : i + 1]) for i in range(20)])
    assert torch.equal(
        one_by_one._fit.state.statistics.sketch.hashes,
        rg.LastLayerRigidity(net()).fit(x[:20], y[:20])._fit.state.statistics.sketch.hashes,
    )
    flat = torch.randn(1 + 900 * 5)
    rg.LastLayerRigidity(net()).fit([(flat[1:].view(900, 5), torch.randn(900, 1))])


def test_weights_may_come_with_a_graph():
    (x, y), model = data(), net()
    scale = nn.Linear(5, 1)
    uq = rg.LastLayerRigidity(model, batch_size=90)
    uq.fit((x, y), sample_weight=lambda b: scale(b[0])[:, 0].exp())
    f, w = whole(model, x), scale(x).exp().detach().to(F64)
    torch.testing.assert_close(uq.gram.matrix, f.mT @ (w * f), rtol=1e-5, atol=1e-5)
    assert not uq.gram.matrix.requires_grad


@pytest.mark.parametrize(("distinct", "copies"), [(3, 30_000), (1000, 80)])
def test_rows_that_repeat_are_all_known_whatever_the_source(distinct, copies):
    x, y = data(distinct)
    x, y = x.repeat(copies, 1), y.repeat(copies, 1)
    for given in ((x, y), list(zip(x.split(4096), y.split(4096), strict=True))):
        uq = rg.LastLayerRigidity(net()).fit(given)
        kept = uq._fit.state.statistics
        kept.kept_rows.settle()
        assert len(kept.sketch.hashes) == len(kept.kept_rows.hashes) == distinct
        assert int(kept.kept_rows.counts.sum()) == len(x)


def test_the_order_of_keywords_does_not_matter():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 1)

        def forward(self, a, b):
            return self.last(torch.tanh(self.first(a - b)))

    (x, y), (z, _) = data(60), data(60, seed=1)
    uq = rg.LastLayerRigidity(Two()).fit([{"a": x, "b": z, "y": y}])
    uq.forget([{"b": z[:10], "y": y[:10], "a": x[:10]}])
    assert uq.gram.count == 50


def test_predictions_without_targets_are_looked_at_too():
    class Spoilt(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(5, 1)

        def forward(self, x):
            return self.last(x) / torch.where(x[:, :1] > 2.5, 0.0, 1.0)

    x, _ = data(900)
    x[x[:, 0] > 2.0, 0] = 1.0
    x[745, 0] = 3.0
    uq = rg.LastLayerRigidity(Spoilt(), batch_size=100)
    refused("Batch 7: NaN or infinity", uq.fit, x)


def test_features_that_change_their_precision_on_the_way_are_added_in_double():
    x, y = data(1200)

    def features(model, x):
        h = torch.tanh(x)
        return h.double() if float(x[0, 0]) > 0 else h

    batches = list(zip(x.split(100), y.split(100), strict=True))
    uq = rg.LastLayerRigidity(net(), features=features).fit(batches)
    h = torch.cat([features(None, part) for part, _ in batches])
    torch.testing.assert_close(uq.gram.matrix, h.mT @ h, rtol=1e-6, atol=1e-6)
    assert len(uq._fit.state.statistics.kept_rows.rows["features"]) == 1200


@pytest.mark.parametrize("blocks_end", ["with every batch", "later"])
def test_features_that_change_their_width_are_refused_with_their_batch(blocks_end, monkeypatch):
    if blocks_end == "with every batch":
        monkeypatch.setattr(blocks, "_MOST_BATCHES", 1)
    x, y = data(1200)
    x[700:] = 9.0

    def features(model, x):
        return x[:, :3] if float(x[0, 0]) == 9.0 else x

    uq = rg.LastLayerRigidity(net(), features=features)
    batches = list(zip(x.split(100), y.split(100), strict=True))
    refused(r"Batch(es)? 7.*3 features here, but 5 in earlier data", uq.fit, batches)
    assert uq._fit.state is None


def test_data_that_end_in_an_error_leave_the_fit_as_it_was():
    x, y = data(3000)

    def broken(error):
        yield from zip(x[1000:].split(300), y[1000:].split(300), strict=True)
        raise error

    uq = rg.LastLayerRigidity(net()).fit(x[:1000], y[:1000])
    before = {name: t.clone() for name, t in uq.get_extra_state()["tensors"].items()}
    for error in (OSError("the disk is gone"), KeyboardInterrupt()):
        for call in (uq.fit, uq.partial_fit):
            with pytest.raises(type(error)):
                call(broken(error))
            after = uq.get_extra_state()["tensors"]
            assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
