"""Networks of JAX and of ONNX files get the error bars of the same network in torch.

The page's blocks run in `test_docs.py`; those of Flax and Keras in `tests/foreign`.
"""

import re
import runpy
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from torch import nn

import rigidities as rg

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "frameworks.py"
PAGE = ROOT / "docs" / "frameworks.md"
INPUTS, WIDTH = 3, 16


def blocks(language):
    """The page's blocks of one language."""
    fence = rf'^```{language}(?: title="torch backend")?\n(.*?)^```'
    return re.findall(fence, PAGE.read_text(encoding="utf-8"), re.S | re.M)


@pytest.fixture(scope="module")
def page():
    """The functions that the page defines for every framework and for ONNX files."""
    names = {}
    for code in blocks("python"):
        if "def torch_head" in code:
            exec(compile(code, PAGE.name, "exec"), names)
        if "def opened" in code:
            exec("import onnx, onnxruntime\n" + code.partition("\n\n\n")[0], names)
    return names


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(EXAMPLE))


def torch_network(targets=1, bias=True):
    """A network that plays the foreign one; its weights are random."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(INPUTS, WIDTH), nn.SiLU(), nn.Linear(WIDTH, targets, bias=bias)
        )


def rows(number, targets=1, seed=0):
    random = np.random.default_rng(seed)
    x = random.normal(size=(number, INPUTS)).astype("float32")
    y = x[:, :1] + 0.3 * random.normal(size=(number, targets)).astype("float32")
    return x, y


def kernels(network):
    """Kernel and bias of the first and of the last layer, as JAX and Keras store them."""
    arrays = []
    for layer in (network[0], network[2]):
        arrays.append(layer.weight.detach().numpy().T)
        arrays.append(None if layer.bias is None else layer.bias.detach().numpy())
    return arrays


def prediction(model, train, valid, asked):
    uq = rg.LastLayerRigidity(model).fit(*train)
    uq.calibrate(*valid, method=rg.Paper(criterion="evidence", noise="bayes"))
    return uq.predict(asked)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("targets", [1, 2])
def test_jax_network_has_the_bars_of_the_same_network_in_torch(page, targets, bias):
    network = torch_network(targets, bias)
    kernel, shift, head_kernel, head_bias = kernels(network)

    def features(x):
        return np.array(jax.nn.silu(x @ kernel + shift))

    train, valid, (asked, _) = (rows(n, targets, seed) for seed, n in enumerate((200, 100, 50)))
    head = page["torch_head"](head_kernel, head_bias)
    found = prediction(
        head, (features(train[0]), train[1]), (features(valid[0]), valid[1]), features(3 * asked)
    )
    true = prediction(network, train, valid, 3 * asked)
    torch.testing.assert_close(found.mean, true.mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.std, true.std, rtol=1e-4, atol=0)
    torch.testing.assert_close(found.epistemic, true.epistemic, rtol=1e-3, atol=0)


def test_check_accepts_the_right_head_and_refuses_a_square_kernel_that_is_transposed(page):
    network = torch_network(targets=WIDTH)
    *_, kernel, bias = kernels(network)
    x = torch.tensor(rows(50)[0])
    features, outputs = network[:2](x).detach().numpy(), network(x).detach().numpy()
    page["check"](page["torch_head"](kernel, bias), features, outputs)
    with pytest.raises(ValueError, match="the last layer and the network differ by"):
        page["check"](page["torch_head"](kernel.T, bias), features, outputs)


@pytest.mark.parametrize("mistake", ["transposed", "features", "activation"])
def test_example_refuses_a_head_that_does_not_predict_what_the_network_does(example, mistake):
    network = torch_network(targets=WIDTH)
    *_, kernel, bias = kernels(network)

    def features(x):
        layers = 1 if mistake == "features" else 2
        return network[:layers](torch.tensor(x)).detach().numpy()

    def outputs(x):
        linear = network(torch.tensor(x)).detach()
        return (linear.relu() if mistake == "activation" else linear).numpy()

    if mistake == "transposed":
        kernel = kernel.T
    foreign = example["Network"](features, outputs, kernel, bias)
    with pytest.raises(ValueError, match=r"predict the same, but they differ .*transposed"):
        example["torch_head"](foreign, rows(50)[0])


def test_kernel_of_the_wrong_shape_is_refused_by_torch(page):
    head = page["torch_head"](np.zeros((1, WIDTH)), np.zeros(WIDTH))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        page["check"](head, np.zeros((5, WIDTH), "float32"), np.zeros((5, 1), "float32"))


# The last layer as exporters write it: torch (one Gemm), Keras on JAX (MatMul, Add), Keras on torch
# (casts between), jax2onnx (Gemm with a zero, Add), and a layer without a bias.
FORMS = {
    "gemm": "y = Gemm <transB = 1> (h, transposed, bias)",
    "matmul and add": "a = MatMul(h, kernel) y = Add(a, bias)",
    "casts": "c = Cast <to = 1> (h) a = MatMul(c, kernel) d = Cast <to = 1> (a) y = Add(d, bias)",
    "gemm and add": "a = Gemm(h, kernel, zero) y = Add(a, bias)",
    "no bias": "y = MatMul(h, kernel)",
}
# Last layers that are no constant matrix plus a constant.
UNKNOWN = {
    "an activation after it": "a = Gemm(h, kernel, bias) y = Tanh(a)",
    "weights that the graph computes": "n = Neg(kernel) a = MatMul(h, n) y = Add(a, bias)",
    "a gemm that scales": "y = Gemm <alpha = 2.0> (h, kernel, bias)",
    "no matrix product": "a = Einsum <equation = 'nd,dt->nt'> (h, kernel) y = Add(a, bias)",
}


def written(path, last_layer, targets=2):
    """An ONNX file of a network with this last layer, and the network in torch."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    network = torch_network(targets)
    first_kernel, first_bias, kernel, bias = kernels(network)
    arrays = {"w": first_kernel, "b": first_bias, "kernel": kernel, "bias": bias}
    arrays |= {"transposed": kernel.T, "zero": np.zeros((), "float32")}
    last_layer = last_layer.replace("'", '"')
    graph = onnx.parser.parse_graph(
        f"network (float[rows, {INPUTS}] x) => (float[rows, {targets}] y) {{"
        f"u = MatMul(x, w) v = Add(u, b) g = Sigmoid(v) h = Mul(v, g) {last_layer} }}"
    )
    for name, array in arrays.items():
        if name in f"w b {last_layer}":
            array = np.ascontiguousarray(array)
            graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    opset = onnx.helper.make_opsetid("", 18)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=10), path)
    return network


@pytest.mark.parametrize("form", FORMS)
def test_onnx_file_opened_by_the_page_returns_features_and_the_last_layer(page, form, tmp_path):
    network = written(tmp_path / "network.onnx", FORMS[form])
    session, kernel = page["opened"](tmp_path / "network.onnx")
    x, _ = rows(40)
    outputs, features = session.run(None, {"x": x})
    head = page["torch_head"](kernel, (outputs - features @ kernel).mean(0))
    page["check"](head, features, outputs)
    expected = network[:2](torch.tensor(x)).detach()
    torch.testing.assert_close(torch.tensor(features), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(head.weight, network[2].weight, rtol=0, atol=0)
    bias = 0 * network[2].bias if form == "no bias" else network[2].bias
    torch.testing.assert_close(head.bias, bias, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", UNKNOWN)
def test_onnx_file_with_another_last_layer_does_not_pass_the_check(page, form, tmp_path):
    written(tmp_path / "network.onnx", UNKNOWN[form], targets=WIDTH)
    session, kernel = page["opened"](tmp_path / "network.onnx")
    outputs, features = session.run(None, {"x": rows(40)[0]})
    head = page["torch_head"](kernel, (outputs - features @ kernel).mean(0))
    with pytest.raises(ValueError, match="differ by"):
        page["check"](head, features, outputs)


def test_blocks_of_flax_and_keras_are_python_and_the_page_has_both():
    code = blocks("py")
    assert any("flax" in block for block in code) and any("keras" in block for block in code)
    for block in code:
        compile(block, PAGE.name, "exec")


@pytest.mark.thorough
def test_example_covers_new_rows_and_is_unsure_beyond_the_data(example, plain_torch, capsys):
    network, uq = example["main"](["jax"])
    x = example["measured"](50, seed=5)[0]
    mean = uq.predict(network.features(x)).mean
    np.testing.assert_allclose(mean, network.outputs(x), rtol=1e-5)
    lines = capsys.readouterr().out.splitlines()
    cold, mild, beyond = (float(line.split("+-")[1].split()[0]) for line in lines[1:4])
    assert mild < cold < beyond
    (share,) = re.findall(r"cover (\d+) %", lines[4])
    assert 80 <= int(share) <= 97


def test_example_names_the_package_that_is_missing(example, monkeypatch):
    monkeypatch.setitem(sys.modules, "keras", None)
    with pytest.raises(SystemExit, match="keras needs keras: pip install keras"):
        example["main"](["keras"])
