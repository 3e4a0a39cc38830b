"""Many threads with one object: every result is that of one thread alone."""

import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from threading import Thread

import pytest
import torch
from torch import nn

import rigidities as rg
from tests.support.nets import Net, calibrated, data, trained
from tests.support.refusals import refused
from tests.support.storms import THREADS, storm


def trunk():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh())


def remembering(model, x):
    """Keeps its state in an attribute during the pass, as recurrent nets do."""
    model.h = model.trunk(x)
    time.sleep(0)
    return model.head(model.h)


def as_function(model, x):
    """A readout that is no call of a layer."""
    return nn.functional.linear(model.trunk(x), model.head.weight, model.head.bias)


CASES = {
    "plain": (lambda m, x: m.head(m.trunk(x)), 1, {}),
    "shared": (lambda m, x: m.head(m.trunk(x[:, None] * m.shifts)).sum(1), 1, {}),
    "jacobian": (lambda m, x: m.head(m.trunk(x)) @ m.mixture, 2, {}),
    "features": (lambda m, x: m.head(m.trunk(x)), 1, {"features": lambda m, x: m.trunk(x)}),
    "parameters": (as_function, 1, {"layer": "head"}),
    "plain with a state": (remembering, 1, {}),
}


def case(name):
    """A calibrated object fresh from its state, and inputs."""
    run, targets, options = CASES[name]
    torch.manual_seed(0)
    parts = {"shifts": torch.randn(3, 1), "mixture": torch.randn(2, 2)}
    model = Net(run, trunk=trunk(), head=nn.Linear(8, targets), **parts)
    uq = rg.LastLayerRigidity(model, **options).fit(data(60, targets, 0))
    uq.calibrate(data(50, targets, 1), method="paper")
    state = uq.state_dict()

    def fresh():
        again = rg.LastLayerRigidity(model, **options)
        again.load_state_dict(state)
        return again

    return fresh, [data(3 + i, targets, 2 + i)[0] for i in range(4)]


def drawn(uq, x):
    return uq.ensemble(4, generator=torch.Generator().manual_seed(0))(x)


READS = {
    "uq(x)": lambda uq, x: uq(x),
    "predict": lambda uq, x: (lambda p: (p.mean, p.std))(uq.predict(x)),
    "ensemble": lambda uq, x: (drawn(uq, x),),
    "gradient": lambda uq, x: (lambda g: (g.mean, g.std))(uq.gradient(x)),
    "propagate": lambda uq, x: (lambda p: (p.mean, p.std))(uq.propagate(torch.mean, x)),
    "local": lambda uq, x: (uq.local(x).std,),
}


def stormed(name, reads, rounds):
    fresh, inputs = case(name)
    expected = {read: [READS[read](fresh(), x) for x in inputs] for read in reads}
    uq = fresh()

    def work(number):
        for i in range(rounds):
            read, at = reads[(i + number) % len(reads)], (i + number) % len(inputs)
            for got, wanted in zip(READS[read](uq, inputs[at]), expected[read][at], strict=True):
                torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-7)

    storm(work)
    for read in reads:  # and one thread alone gets it afterwards
        for got, wanted in zip(READS[read](uq, inputs[0]), expected[read][0], strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_eight_threads_get_what_one_gets(name):
    sums = name in ("plain", "shared", "plain with a state")
    reads = [read for read in READS if read != "local" or sums]
    stormed(name, reads, 3 * len(reads))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_ten_thousand_calls_of_eight_threads(name):
    stormed(name, ["uq(x)", "predict"], 10_000 // THREADS)


@pytest.mark.slow
def test_a_storm_of_a_minute():
    for name in CASES:
        reads = [read for read in READS if read != "local" or name in ("plain", "shared")]
        start = time.monotonic()
        while time.monotonic() - start < 60 / len(CASES):
            stormed(name, reads, 2 * len(reads))


def test_derivatives_through_attention_leave_torch_as_it_was():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    model = Net(lambda m, x: m.head(m.layer(x)).sum((1, 2)), layer=layer, head=nn.Linear(4, 1))
    x = torch.randn(20, 3, 4)
    uq = calibrated(rg.LastLayerRigidity(model).fit((x, x.sum((1, 2)))), (x + 1, x.sum((1, 2))))
    expected, before = uq.gradient(x[:2]).std, torch.backends.mha.get_fastpath_enabled()

    def work(number):
        torch.testing.assert_close(uq.gradient(x[:2]).std, expected)

    storm(work)
    assert torch.backends.mha.get_fastpath_enabled() == before
    assert torch.backends.cuda.flash_sdp_enabled()


def test_a_warning_in_a_thread_that_loads_data_stays_a_warning():
    """Its filters are of the whole process, and the search for a readout listens for warnings."""
    raised = []

    def load():
        try:
            warnings.warn("a package of the loader is old", DeprecationWarning, stacklevel=1)
        except DeprecationWarning as warning:
            raised.append(warning)

    def beside_a_loader(model, x):
        thread = Thread(target=load)
        thread.start()
        thread.join()
        return model.head(model.trunk(x))

    model = Net(beside_a_loader, trunk=trunk(), head=nn.Linear(8, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        uq = rg.LastLayerRigidity(model).fit(data(60, 1, 0))
    assert raised == []
    assert uq.gram.count == 60


def test_rows_added_by_many_threads_are_all_in_the_gram():
    net = trained()
    x, y = net.train
    uq = rg.LastLayerRigidity(net.model).fit((x[:44], y[:44]))
    parts = [slice(44 + 32 * i, 76 + 32 * i) for i in range(THREADS)]
    storm(lambda number: uq.partial_fit((x[parts[number]], y[parts[number]])))
    whole = rg.LastLayerRigidity(net.model).fit(net.train)
    torch.testing.assert_close(uq.gram.matrix, whole.gram.matrix, rtol=1e-12, atol=1e-12)
    assert uq.gram.count == 300


def test_a_reader_sees_a_calibration_whole():
    net = trained()
    uq, x = rg.LastLayerRigidity(net.model).fit(net.train), net.test[0][:5]
    known = []
    for ridge in (1e-3, 10.0):
        uq.calibrate(net.valid, method=rg.Paper(ridge=ridge))
        known.append(uq(x)[1])

    def work(number):
        for i in range(20):
            if number:
                std = uq(x)[1]
                assert any(torch.equal(std, one) for one in known)
            elif i < 5:
                uq.calibrate(net.valid, method=rg.Paper(ridge=(1e-3, 10.0)[i % 2]))

    storm(work)


def test_the_rigidity_of_any_regressor_is_safe_too():
    net = trained()
    pr = rg.PredictionRigidity(net.model, ridge=1e-2).fit(*net.train).set_scale(1.0)
    inputs = [net.test[0][i : i + 5] for i in range(0, 40, 5)]
    expected = [pr.variance(x) for x in inputs]

    def work(number):
        for i in range(5):
            at = (i + number) % len(inputs)
            torch.testing.assert_close(pr.variance(inputs[at]), expected[at])

    storm(work)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:Parameters that reach the output past:UserWarning")
def test_a_reader_sees_another_fit_whole():
    run = lambda m, x: m.one(x) + m.two(x.square())  # noqa: E731
    model, states = Net(run, one=nn.Linear(4, 1), two=nn.Linear(4, 1)), []
    for layer in ("one", "two"):
        uq = rg.LastLayerRigidity(model, layer=layer).fit(data(60, 1, 0))
        uq.calibrate(data(50, 1, 1), method="paper")
        states.append(uq.get_extra_state())
    x, known = data(5, 1, 2)[0], []
    for state in states:
        uq.set_extra_state(state)
        known.append(uq(x)[1])

    def work(number):
        for i in range(40):
            if number:
                std = uq(x)[1]
                assert any(torch.equal(std, one) for one in known)
            else:
                uq.set_extra_state(states[i % 2])

    storm(work)


def test_a_change_inside_another_is_refused():
    net = trained()
    uq = rg.LastLayerRigidity(net.model).fit(net.train)

    def batches():
        uq.partial_fit(net.valid)
        yield net.test

    refused("was called while another", uq.partial_fit, batches())
    assert uq.gram.count == 300


def in_a_new_thread(work):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def test_a_new_thread_knows_nothing_of_the_users_own_passes():
    def cached(m, x):
        if m.mask is None:
            m.mask = torch.ones(len(x), 1)
        return m.head(x) * m.mask[: len(x)]

    model = Net(cached, head=nn.Linear(4, 1))
    model.mask = None
    uq = rg.LastLayerRigidity(model).fit(data(60, 1, 0)).calibrate(data(50, 1, 1), method="paper")
    x = data(9, 1, 2)[0]
    expected = uq(x)[1]
    model(x[:7])  # leaves a mask for seven rows
    assert torch.equal(in_a_new_thread(lambda: uq(x)[1]), expected)


def test_a_change_that_is_undone_during_a_call_leaves_no_trace():
    model = Net(lambda m, x: m.head(x * m.factor), head=nn.Linear(4, 1))
    factor = model.factor = 1.0
    uq = rg.LastLayerRigidity(model).fit(data(60, 1, 0)).calibrate(data(50, 1, 1), method="paper")
    x = data(9, 1, 2)[0]
    expected = uq.predict(x).mean

    def batches():
        model.factor = 2.0  # after the model was looked at, before this thread's first pass
        yield x

    def work():
        uq.predict(batches())
        model.factor = factor
        return uq.predict(x).mean

    assert torch.equal(in_a_new_thread(work), expected)
