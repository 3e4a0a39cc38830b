"""Networks of Flax and Keras, by the page, by the example, and through the files they export."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN = """\
import re
text = open({page!r}, encoding="utf-8").read()
names = {{}}
for code in re.findall(r'^```(?:python|py){title}\\n(.*?)^```', text, re.S | re.M):
    exec(compile(code, "frameworks.md", "exec"), names)
assert "nnx" in names and "linen" in names and names["keras"].backend.backend() == {backend!r}
"""
EXPORTED = """
def exported(session, kernel, x):
    (entry,) = session.get_inputs()
    outputs, computed = session.run(None, {entry.name: x})
    head = names["torch_head"](kernel, (outputs - computed @ kernel).mean(0))
    names["check"](head, computed, outputs)
    return outputs, computed

import numpy as np
opened, x = names["opened"], names["x_train"]
trained = names["keras"].Sequential(names["model"].layers)
trained(x[:2])
trained.export("keras.onnx", format="onnx", verbose=False)
outputs, computed = exported(*opened("keras.onnx"), x)
np.testing.assert_allclose(outputs, trained.predict(x, verbose=0), rtol=1e-4)
trunk = names["trunk"].predict(x, verbose=0)
np.testing.assert_allclose(computed, trunk, rtol=1e-4, atol=1e-5)
"""
WRAPPED = """
import torch
from_inputs, by_features = names["from_inputs"], names["prediction"]
torch.testing.assert_close(from_inputs.mean, by_features.mean, rtol=1e-5, atol=0)
torch.testing.assert_close(from_inputs.std, by_features.std, rtol=1e-4, atol=0)
head, dense = names["wrapped"].head, names["model"].layers[-1]
assert head.weight.data_ptr() == dense.kernel.value.data_ptr()
assert head.bias.data_ptr() == dense.bias.value.data_ptr()

asked = torch.tensor(names["asked"], requires_grad=True)
(slope,) = torch.autograd.grad(names["model"](asked).sum(), asked)
torch.testing.assert_close(names["uq"].gradient(names["asked"]).mean, slope)

names["model"].fit(names["x_train"], names["y_train"], verbose=0)
try:
    names["uq"].predict(names["asked"])
except ValueError as error:
    assert "weights have changed since the fit" in str(error)
else:
    raise AssertionError("predicted after further training")
"""
JAX_EXPORTED = """
import jax2onnx
params = names["params"]
jax2onnx.to_onnx(
    lambda x: names["network"](params, x), [("rows", 1)], return_mode="file", output_path="jax.onnx"
)
outputs, computed = exported(*opened("jax.onnx"), x)
expected = names["features"](params, x)
np.testing.assert_allclose(computed, expected, rtol=1e-4, atol=1e-5)
"""


def run(*command, backend):
    """What a process of its own prints: Keras chooses its backend once per process."""
    environment = {**os.environ, "KERAS_BACKEND": backend}
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_every_block_of_the_page_runs_and_its_networks_export(backend):
    # Blocks for the torch backend have this title.
    title = "" if backend == "jax" else '(?: title="torch backend")?'
    page = str(ROOT / "docs" / "frameworks.md")
    code = RUN.format(page=page, backend=backend, title=title) + EXPORTED
    code += JAX_EXPORTED if backend == "jax" else WRAPPED
    run("-c", code, backend=backend)


@pytest.mark.parametrize(
    ("framework", "backend"), [("flax", "jax"), ("keras", "jax"), ("keras", "torch")]
)
def test_example_covers_new_rows_and_is_unsure_beyond_the_data(framework, backend):
    printed = run(str(ROOT / "examples" / "frameworks.py"), framework, backend=backend)
    cold, mild, beyond = (float(bar) for bar in re.findall(r"\+- (\d+\.\d)", printed))
    assert mild < cold < beyond
    (share,) = re.findall(r"cover (\d+) %", printed)
    assert 80 <= int(share) <= 97
