"""Serve an exported model over HTTP: means, error bars and a flag for unfamiliar inputs.

    python examples/serve.py model.onnx --port 8000
    python examples/serve.py --demo

The first form serves a file that `rigidities.export.onnx` wrote with the outputs "mean", "std",
"epistemic" and "quantiles"; it needs onnxruntime and numpy, not torch. The second trains a small
net, gives it error bars, exports it and serves it. `GET /` says what the model takes and gives,
`GET /health` that it is there, and `POST /predict {"inputs": [[...], ...]}` predicts. Whatever is
wrong with a request comes back as JSON: what was expected, what came, what to do. There is no
encryption and no log-in: beyond one machine, put it behind a proxy that has both.
"""

import argparse
import json
import tempfile
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import onnxruntime

LEVELS = (0.05, 0.95)
NORMAL = 1.6448536269514722  # of the standard normal distribution, the quantile at 0.95
FAR = 4.0  # times the epistemic variance that 99 % of the training rows stay below: twice their bar
TYPES = {"tensor(float16)": np.float16, "tensor(float)": np.float32, "tensor(double)": np.float64}
EXAMPLE = 'send {"inputs": [[...], ...]}, one list of numbers a row'


class Refused(Exception):
    """A request that gets no prediction, and why."""

    def __init__(self, status, expected, got, remedy):
        super().__init__(f"expected {expected}, got {got}")
        self.status = status
        self.error = {"expected": expected, "got": got, "remedy": remedy}


class Model:
    """An ONNX file with its calibration; any number of threads may predict at once."""

    def __init__(self, path, max_rows=4096):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1  # requests run side by side, each on one core
        options.enable_cpu_mem_arena = False  # it would keep the memory of the largest batch
        self.session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
        self.max_rows = max_rows
        properties = self.session.get_modelmeta().custom_metadata_map
        if "rigidities" not in properties:
            raise SystemExit(f"{path} has no error bars: write it with rigidities.export.onnx.")
        self.calibration = json.loads(properties["rigidities"])
        self.outputs = [output.name for output in self.session.get_outputs()]
        if lacking := {"mean", "std"} - set(self.outputs):
            raise SystemExit(f"{path} does not give {', '.join(sorted(lacking))}: export it again.")
        inputs = self.session.get_inputs()
        if len(inputs) != 1 or len(inputs[0].shape) != 2 or not isinstance(inputs[0].shape[1], int):
            shapes = {given.name: given.shape for given in inputs}
            raise SystemExit(f"Expected one input of shape (rows, width), got {shapes}.")
        self.name, self.width = inputs[0].name, inputs[0].shape[1]
        self.type = TYPES[inputs[0].type]
        self.levels = self.calibration["quantiles"]
        distribution = self.calibration["distribution"]["name"]
        given = "quantiles" in self.outputs and set(LEVELS) <= set(self.levels)
        if not given and distribution != "gaussian":
            raise SystemExit(
                f"90 % intervals of the {distribution} distribution need its quantiles: export with outputs="
                f'("mean", "std", "epistemic", "quantiles") and quantiles={LEVELS}.'
            )

    def describe(self):
        """What it takes and gives."""
        return {
            "inputs": {"name": self.name, "width": self.width, "rows at most": self.max_rows},
            "outputs": ["mean", "std", "interval", "unfamiliar"],
            "calibration": self.calibration,
        }

    def predict(self, inputs):
        """Answer checked inputs (N, width)."""
        values = self.session.run(None, {self.name: inputs})
        found = dict(zip(self.outputs, values, strict=True))
        low, high = self.interval(found)
        answer = {"mean": found["mean"], "std": found["std"], "low": low, "high": high}
        if not all(np.isfinite(value).all() for value in answer.values()):
            raise Refused(
                422,
                "inputs for which the model gives finite numbers",
                "NaN or infinity from the model",
                "send inputs of the size that it was trained on",
            )
        answer = {name: value.tolist() for name, value in answer.items()}
        return {
            "mean": answer["mean"],
            "std": answer["std"],
            "interval": [answer["low"], answer["high"]],
            "unfamiliar": self.unfamiliar(found),
        }

    def interval(self, found):
        """The central 90 %, from the distribution's quantiles in the graph or from the normal
        distribution."""
        if "quantiles" in found and set(LEVELS) <= set(self.levels):
            return [found["quantiles"][self.levels.index(level)] for level in LEVELS]
        half = found["std"] * found["std"].dtype.type(NORMAL)
        return found["mean"] - half, found["mean"] + half

    def unfamiliar(self, found):
        """Which rows lie far from the training rows, by any target; None where that is unknown."""
        usual = self.calibration.get("epistemic_q99")
        if usual is None or "epistemic" not in found:
            return None
        epistemic = found["epistemic"].reshape(len(found["epistemic"]), -1)
        return (epistemic > FAR * np.array(usual)).any(axis=1).tolist()

    def checked(self, body):
        """The inputs (N, width) of a request's body."""
        rows = parsed(body)
        wanted = f"1 to {self.max_rows} rows of {self.width} numbers"
        if not isinstance(rows, list):
            raise Refused(400, f'"inputs": a list of {wanted}', kind(rows), EXAMPLE)
        if not 1 <= len(rows) <= self.max_rows:
            status = 413 if rows else 400
            raise Refused(status, wanted, f"{len(rows)} rows", "split or fill the batch")
        for number, row in enumerate(rows):
            self.check_row(number, row, wanted)
        try:
            with np.errstate(over="ignore"):
                inputs = np.array(rows, dtype=self.type)
        except OverflowError:  # a whole number beyond every float
            inputs = np.array([[np.inf]])
        if not np.isfinite(inputs).all():
            size = f"finite numbers within {np.dtype(self.type).name}"
            raise Refused(400, size, "a number beyond", "scale the inputs as in training")
        return inputs

    def check_row(self, number, row, wanted):
        """Refuse what numpy would take for numbers: booleans, strings, other shapes."""
        if not isinstance(row, list):
            raise Refused(400, wanted, f"{kind(row)} as row {number}", EXAMPLE)
        if len(row) != self.width:
            remedy = "give all rows the columns that the model was trained on, in their order"
            raise Refused(400, wanted, f"{len(row)} values in row {number}", remedy)
        for column, value in enumerate(row):
            if type(value) not in (int, float):
                place = f"{kind(value)} in row {number}, column {column}"
                raise Refused(400, wanted, place, "encode categories and gaps as in training")


def parsed(body):
    """What a body has under "inputs"."""
    try:
        given = json.loads(body, parse_constant=constant)
    except (ValueError, RecursionError) as error:  # bytes that are no UTF-8 are a ValueError too
        raise Refused(400, "a JSON object", f"{error}", EXAMPLE) from None
    if not isinstance(given, dict) or "inputs" not in given:
        got = f"the keys {sorted(given)}" if isinstance(given, dict) else kind(given)
        raise Refused(400, 'an object with the key "inputs"', got, EXAMPLE)
    return given["inputs"]


def constant(name):
    """JSON knows no NaN and no infinity, though Python reads them."""
    raise Refused(400, "finite numbers", name, "fill gaps as in training")


def kind(value):
    """What a JSON value is, in a few words."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")


class Handler(BaseHTTPRequestHandler):
    """One connection; `model` and `max_bytes` belong to the server."""

    protocol_version = "HTTP/1.1"  # a client may keep its connection
    timeout = 30  # seconds that it may stay silent
    wbufsize = -1  # headers and body in one packet: two would wait for the client's word between
    routes = {"/": "GET", "/health": "GET", "/predict": "POST"}  # noqa: RUF012

    def answer(self):
        """Route a request; nothing that it holds stops the server."""
        try:
            status, reply = 200, self.reply()
        except Refused as error:
            status, reply = error.status, {"error": error.error}
        except Exception:
            traceback.print_exc()
            status, reply = 500, {"error": {"got": "an error of the server, see its log"}}
        self.send_json(status, reply)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = do_OPTIONS = answer

    def reply(self):
        """What to say to a request that is right."""
        body, path = self.body(), self.path.split("?")[0]
        if path not in self.routes:
            routes = ", ".join(f"{method} {path}" for path, method in self.routes.items())
            raise Refused(404, f"one of {routes}", f"{self.command} {path}", "see GET /")
        method = self.routes[path]
        if self.command != method:
            raise Refused(405, f"{method} {path}", f"{self.command} {path}", f"use {method}")
        if path == "/predict":
            return self.server.model.predict(self.server.model.checked(body))
        return {"status": "ok"} if path == "/health" else self.server.model.describe()

    def body(self):
        """Read it whole, or end the connection: what is left would be the next request."""
        length, most = self.headers.get("Content-Length", "0"), self.server.max_bytes
        if "Transfer-Encoding" in self.headers or not (length.isascii() and length.isdigit()):
            self.close_connection = True
            got = self.headers.get("Transfer-Encoding", length)
            raise Refused(411, "a Content-Length", got, "send the body's length")
        wanted = int(length[:18])
        body = self.received(wanted, keep=wanted <= most)
        if wanted > most:
            self.close_connection = True
            raise Refused(413, f"at most {most} bytes", f"{length} bytes", "split the batch")
        if len(body) < wanted:
            self.close_connection = True
            raise Refused(408, f"{length} bytes", "fewer", "send as many as Content-Length says")
        return body

    def received(self, wanted, keep):
        """The body; one that is too long is read past, for closing on it would lose the answer."""
        pieces, left = [], wanted if wanted <= 4 * self.server.max_bytes else 0
        try:
            while left and (piece := self.rfile.read1(min(left, 1 << 16))):
                left -= len(piece)
                pieces += [piece] if keep else []
        except TimeoutError:
            self.close_connection = True
        return b"".join(pieces)

    def send_json(self, status, reply):
        """Send `reply`, and close where the connection is not to be kept."""
        content = json.dumps(reply, allow_nan=False).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if status == 405:
            self.send_header("Allow", self.routes[self.path.split("?")[0]])
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def send_error(self, code, message=None, explain=None):
        """What http.server itself refuses: a line or a header that is none, an unknown method."""
        self.close_connection = True
        expected, got = "an HTTP request by GET or POST", message or explain or str(code)
        self.command = getattr(self, "command", None)
        error = {"expected": expected, "got": got, "remedy": "see GET /"}
        self.send_json(400 if code == 501 else code, {"error": error})

    def log_message(self, format, *args):
        """Keep quiet: a proxy in front keeps the log."""


class Server(ThreadingHTTPServer):
    """A thread a connection."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address, model, max_bytes):
        super().__init__(address, Handler)
        self.model, self.max_bytes = model, max_bytes

    def handle_error(self, request, client_address):
        """A client that went away is no error."""


def demo(path):
    """Train a small net, give it error bars and write it to `path`; a line of curl to try it."""
    import torch

    import rigidities as rg

    torch.manual_seed(0)
    x = 2 * torch.rand(1000, 2) - 1
    y = torch.sin(3 * x[:, :1]) * torch.exp(x[:, 1:]) + 0.1 * torch.randn(1000, 1)
    model = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(300):
        optimiser.zero_grad()
        torch.nn.functional.mse_loss(model(x[:600]), y[:600]).backward()
        optimiser.step()
    uq = rg.LastLayerRigidity(model).fit((x[:600], y[:600]))
    uq.calibrate((x[600:], y[600:]))
    rg.export.onnx(uq, path, x[:8], outputs=("mean", "std", "epistemic", "quantiles"))
    return """-d '{"inputs": [[0.5, 0.2], [4.0, 4.0]]}'"""


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path, help="file of rigidities.export.onnx")
    parser.add_argument("--demo", action="store_true", help="train, export and serve a small net")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 takes one that is free")
    parser.add_argument("--max-rows", type=int, default=4096, help="of a request")
    parser.add_argument("--max-bytes", type=int, default=1 << 23, help="of a request")
    options = parser.parse_args(arguments)
    if options.demo == (options.model is not None):
        parser.error("give the path of a model, or --demo.")
    data = "-d '{\"inputs\": [[...], ...]}'"
    with tempfile.TemporaryDirectory() as folder:
        path = options.model or Path(folder) / "demo.onnx"
        if options.demo:
            data = demo(path)
        model = Model(path, options.max_rows)
    with Server((options.host, options.port), model, options.max_bytes) as server:
        print(f"curl http://{options.host}:{server.server_port}/predict {data}", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("stopped")


if __name__ == "__main__":
    main()
