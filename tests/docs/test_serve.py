"""The service answers as its model does, whatever else is asked of it at the same time."""

import http.client
import json
import random
import runpy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import psutil
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

SERVE = Path(__file__).parents[2] / "examples" / "serve.py"
WIDTH, LEVEL, MAX_ROWS, MAX_BYTES = 4, 9.0, 64, 50_000
DRAWN = np.random.default_rng(0)
WEIGHT = DRAWN.normal(size=(WIDTH, 1)).astype(np.float32)
FACTOR = DRAWN.normal(size=(WIDTH, WIDTH)).astype(np.float32)
NOISE = np.float32(0.25)


def stand_in(path, *, distribution="gaussian", outputs=("mean", "std", "epistemic"), quantiles=()):
    """An ONNX file of the exporter's form: a linear mean, a quadratic variance, the metadata."""
    node, tensor = onnx.helper.make_node, onnx.numpy_helper.from_array
    nodes = [
        node("MatMul", ["x", "weight"], ["mean"]),
        node("MatMul", ["x", "factor"], ["solved"]),
        node("ReduceSumSquare", ["solved", "axes"], ["epistemic"], keepdims=1),
        node("Add", ["epistemic", "noise"], ["variance"]),
        node("Sqrt", ["variance"], ["std"]),
        node("Mul", ["std", "steps"], ["moved"]),
        node("Add", ["mean", "moved"], ["quantiles"]),
    ]
    steps = np.array(quantiles, dtype=np.float32).reshape(-1, 1, 1)
    given = {"weight": WEIGHT, "factor": FACTOR, "noise": NOISE, "steps": steps}
    given["axes"] = np.array([1])
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        nodes,
        "stand-in",
        [value("x", onnx.TensorProto.FLOAT, ["batch", WIDTH])],
        [value(name, onnx.TensorProto.FLOAT, None) for name in outputs],
        [tensor(array, name) for name, array in given.items()],
    )
    opset = onnx.helper.make_opsetid("", 18)
    model = onnx.helper.make_model(graph, opset_imports=[opset], ir_version=10)
    said = {
        "distribution": {"name": distribution},
        "quantiles": list(quantiles),
        "epistemic_q99": [LEVEL / 4],
    }
    onnx.helper.set_model_props(model, {"rigidities": json.dumps({"version": "0", **said})})
    onnx.save(model, path)
    return path


def expected(x):
    """What the stand-in says of rows, in float64."""
    epistemic = np.square(x @ FACTOR.astype(float)).sum(1, keepdims=True)
    mean, std = x @ WEIGHT.astype(float), np.sqrt(epistemic + NOISE)
    half = 1.6448536 * std
    return mean, std, [mean - half, mean + half], (epistemic > LEVEL)[:, 0].tolist()


@contextmanager
def serving(*arguments):
    """The service as a process, and its port."""
    words = [sys.executable, str(SERVE), "--port", "0", *map(str, arguments)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        yield process, urlsplit(line.split()[1]).port, line
    finally:
        process.terminate()
        process.communicate()


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    path = stand_in(tmp_path_factory.mktemp("serve") / "model.onnx")
    with serving(path, "--max-rows", MAX_ROWS, "--max-bytes", MAX_BYTES) as (process, port, _):
        yield process, port


def asked(connection, method, path, body=None, headers=None):
    """Status and JSON of one request."""
    connection.request(method, path, body, headers or {})
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def once(port, method, path, body=None, headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        return asked(connection, method, path, body, headers)
    finally:
        connection.close()


def rows(*values):
    return json.dumps({"inputs": values})


def nested(text):
    return f'{{"inputs": [[{text}, 0, 0, 0]]}}'


BAD = {
    "no JSON": (400, "POST", "/predict", "{inputs"),
    "no UTF-8": (400, "POST", "/predict", b"\xff\xfe\xfa"),
    "nothing": (400, "POST", "/predict", ""),
    "no object": (400, "POST", "/predict", "[[1, 2, 3, 4]]"),
    "missing key": (400, "POST", "/predict", '{"input": [[1, 2, 3, 4]]}'),
    "no list": (400, "POST", "/predict", '{"inputs": "1 2 3 4"}'),
    "no rows": (400, "POST", "/predict", rows()),
    "a row that is none": (400, "POST", "/predict", rows([1, 2, 3, 4], 5)),
    "wrong width": (400, "POST", "/predict", rows([1, 2, 3])),
    "ragged": (400, "POST", "/predict", rows([1, 2, 3, 4], [1, 2, 3])),
    "a string": (400, "POST", "/predict", nested('"1"')),
    "a boolean": (400, "POST", "/predict", nested("true")),
    "null": (400, "POST", "/predict", nested("null")),
    "one list too deep": (400, "POST", "/predict", nested("[1]")),
    "NaN": (400, "POST", "/predict", nested("NaN")),
    "infinity": (400, "POST", "/predict", nested("-Infinity")),
    "beyond float64": (400, "POST", "/predict", nested("1e999")),
    "beyond float32": (400, "POST", "/predict", nested("1e39")),
    "a whole number beyond": (400, "POST", "/predict", nested("1" + "0" * 400)),
    "digits without end": (400, "POST", "/predict", nested("1" * 10_000)),
    "brackets without end": (400, "POST", "/predict", "[" * 20_000),
    "NaN from the model": (422, "POST", "/predict", nested("3e38")),
    "too many rows": (413, "POST", "/predict", rows(*[[0] * WIDTH] * (MAX_ROWS + 1))),
    "too many bytes": (413, "POST", "/predict", "1" * (MAX_BYTES + 1)),
    "wrong path": (404, "POST", "/predictions", rows([1, 2, 3, 4])),
    "wrong method": (405, "GET", "/predict", None),
    "another method": (405, "DELETE", "/", None),
    "an unknown method": (400, "BREW", "/", None),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_request_is_refused_with_what_to_do_and_the_next_one_is_served(name, service):
    status, *request = BAD[name]
    found, answer = once(service[1], *request)
    assert found == status
    assert answer["error"].keys() == {"expected", "got", "remedy"}
    assert all(answer["error"].values())
    assert once(service[1], "GET", "/health") == (200, {"status": "ok"})


@pytest.mark.parametrize("length", ["-1", "many", "9" * 30])
def test_length_that_is_none_is_refused(length, service):
    status, answer = once(service[1], "POST", "/predict", None, {"Content-Length": length})
    assert status in (411, 413)
    assert answer["error"]["remedy"]


def test_service_says_what_the_model_takes_and_gives(service):
    status, answer = once(service[1], "GET", "/")
    assert status == 200
    assert answer["inputs"] == {"name": "x", "width": WIDTH, "rows at most": MAX_ROWS}
    assert answer["calibration"]["distribution"] == {"name": "gaussian"}


def test_interval_comes_from_the_quantiles_of_the_graph(tmp_path):
    outputs = ("mean", "std", "quantiles")
    levels = (0.95, 0.5, 0.05)  # the stand-in takes them for steps too
    path = stand_in(
        tmp_path / "model.onnx", distribution="mixture", outputs=outputs, quantiles=levels
    )
    with serving(path) as (_, port, _):
        _, answer = once(port, "POST", "/predict", rows([1, 2, 3, 4]))
    mean, std, _, _ = expected(np.array([[1.0, 2.0, 3.0, 4.0]]))
    np.testing.assert_allclose(
        answer["interval"], [mean + 0.05 * std, mean + 0.95 * std], rtol=1e-5
    )
    assert answer["unfamiliar"] is None


def test_distribution_without_quantiles_is_refused_at_the_start(tmp_path):
    path = stand_in(tmp_path / "model.onnx", distribution="student-t")
    words = [sys.executable, str(SERVE), str(path), "--port", "0"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 1
    assert "need its quantiles: export with" in done.stderr


def load(port, seed, requests):
    """What goes wrong of mixed requests over one kept connection, every seventh of them bad."""
    wrong = []
    draw, values = random.Random(seed), np.random.default_rng(seed)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    for number in range(requests):
        if number % 7 == 3:
            status, *request = BAD[draw.choice(list(BAD))]
            same = asked(connection, *request)[0] == status
        else:
            x = values.normal(size=(draw.choice([1, 2, 17, MAX_ROWS]), WIDTH))
            x = x.astype(np.float32).astype(float)
            status, answer = asked(connection, "POST", "/predict", rows(*x.tolist()))
            same = status == 200 and matches(answer, x)
        if not same:
            wrong.append((seed, number))
    connection.close()
    return wrong


def matches(answer, x):
    mean, std, interval, unfamiliar = expected(x)
    pairs = ((answer["mean"], mean), (answer["std"], std), (answer["interval"], interval))
    close = all(np.allclose(found, true, rtol=1e-5, atol=1e-5) for found, true in pairs)
    return close and answer["unfamiliar"] == unfamiliar


def stormed(port, requests):
    """What eight threads at once got wrong."""
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda seed: load(port, seed, requests), range(8))
        return [each for wrong in found for each in wrong]


@pytest.mark.thorough
def test_eight_threads_get_the_models_answers_in_steady_memory(service):
    process, port = service
    resident = psutil.Process(process.pid).memory_info
    assert stormed(port, 100) == []
    before = resident().rss
    assert stormed(port, 300) == []
    assert process.poll() is None
    assert resident().rss - before < 16 * 2**20


@pytest.mark.thorough
def test_demo_serves_what_it_trained(plain_torch, capsys, monkeypatch):
    """In this process, which has imported torch already."""
    script, answers = runpy.run_path(str(SERVE)), []

    def one_request(server):
        body = capsys.readouterr().out.split("'")[1]
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(once, server.server_port, "POST", "/predict", body)
            server.handle_request()
            answers.append(answer.result())

    monkeypatch.setattr(script["Server"], "serve_forever", one_request)
    script["main"](["--demo", "--port", "0"])
    ((status, answer),) = answers
    assert status == 200
    (near,), (far,) = answer["std"]
    assert near < far
    assert answer["unfamiliar"] == [False, True]
    low, high = np.array(answer["interval"])
    assert (low < answer["mean"]).all() and (high > answer["mean"]).all()
