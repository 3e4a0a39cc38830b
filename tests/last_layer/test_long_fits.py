"""A fit in shards that is killed and run again: the lines of docs/long_fits.md, to the last bit."""

import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

import rigidities as rg
from tests.support import markdown

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="a signal of POSIX")

ROWS, SHARD = 60_000, 5000
DATA = """
import time
import torch
import rigidities as rg
from tests.last_layer.test_long_fits import data

model, x, y = data()


class Slow(torch.Tensor):
    '''Rows of which every shard takes a while to read, so that there is a middle of the fit.'''

    def __getitem__(self, rows):
        time.sleep(0.02)
        return self.as_subclass(torch.Tensor)[rows]


x = x.as_subclass(Slow)
open("begun", "w").close()
"""


def data():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2))
    return model, torch.randn(ROWS, 8), torch.randn(ROWS, 2)


def statistics(uq):
    """All that a fit has learnt from data, as tensors."""
    snapshot = uq._fit.require_state().snapshot(probes=False, rows=True)
    return snapshot.tensors


def program(folder):
    """A process that has begun the page's program in a folder."""
    (folder / "begun").unlink(missing_ok=True)
    code = DATA + markdown.block("long_fits.md", "fit.py")
    process = subprocess.Popen([sys.executable, "-c", code], cwd=folder)
    while not (folder / "begun").exists():
        assert process.poll() is None
        time.sleep(0.005)
    return process


@pytest.fixture
def path(tmp_path, monkeypatch):
    # The program runs in another folder, and must find this library and these tests.
    monkeypatch.setenv("PYTHONPATH", ":".join(dict.fromkeys(filter(None, sys.path))))
    return tmp_path / "fit.safetensors"


@pytest.mark.thorough
def test_killed_at_any_moment_the_file_is_whole_and_the_fit_ends_with_the_same_bits(path):
    model, x, y = data()
    moments, counts = random.Random(0), []
    for _ in range(3):
        process = program(path.parent)
        if path.exists():
            time.sleep(moments.uniform(0.02, 0.15))
        while not path.exists():  # the first run gets as far as a file
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
        counts.append(rg.LastLayerRigidity.load(path, model).gram.count)
    assert counts == sorted(counts) and counts[0] < ROWS
    assert all(count % SHARD == 0 for count in counts)

    assert program(path.parent).wait() == 0
    resumed = rg.LastLayerRigidity.load(path, model)
    assert {file.name for file in path.parent.iterdir()} == {path.name, "begun"}

    whole = rg.LastLayerRigidity(model)
    for i in range(0, ROWS, SHARD):
        whole.partial_fit(x[i : i + SHARD], y[i : i + SHARD])
    found, expected = statistics(resumed), statistics(whole)
    assert found.keys() == expected.keys() and resumed.gram.count == ROWS
    for name, tensor in expected.items():
        assert torch.equal(found[name].nan_to_num(7), tensor.nan_to_num(7)), name
    one_go = rg.LastLayerRigidity(model).fit(x, y)
    torch.testing.assert_close(resumed.gram.matrix, one_go.gram.matrix, rtol=1e-12, atol=1e-9)


def test_the_lines_of_the_page_continue_where_the_file_ends(path, monkeypatch):
    monkeypatch.chdir(path.parent)
    model, x, y = data()
    code = markdown.block("long_fits.md", "fit.py")
    exec(code, {"rg": rg, "model": model, "x": x[:15_000], "y": y[:15_000]})
    assert rg.LastLayerRigidity.load(path, model).gram.count == 15_000
    names = {"rg": rg, "model": model, "x": x[:20_000], "y": y[:20_000]}
    exec(code, names)
    assert names["start"] == 15_000
    whole = rg.LastLayerRigidity(model).fit(x[:20_000], y[:20_000])
    torch.testing.assert_close(names["uq"].gram.matrix, whole.gram.matrix, rtol=1e-12, atol=1e-9)
