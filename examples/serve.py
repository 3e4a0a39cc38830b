"""Serve an exported model over HTTP: means, error bars and a flag for unfamiliar inputs.

    python examples/serve.py model.onnx --port 8000
    python examples/serve.py --demo

The first form serves a file that `rigidities.export.onnx` wrote with the outputs "mean", "std",
"epistemic" and "quantiles". It needs onnxruntime and numpy, but not torch. The second form trains a
small network, gives it error bars, exports it and serves it.

`GET /` describes inputs and outputs of the model, `GET /health` reports that the service runs, and
`POST /predict {"inputs": [[...], ...]}` predicts. Errors come back as JSON: what was expected, what
came, and what to do. The service has no encryption and no login. To serve other machines, put it
behind a proxy that has both.

`Model` checks inputs and predicts, `Handler` answers a connection, `Server` starts a thread for
each connection.
"""

import argparse
import json
import tempfile
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import onnxruntime

LEVELS = (0.05, 0.95)  # the ends of the central 90 % interval
NORMAL_QUANTILE = 1.6448536269514722  # of the standard normal distribution, at 0.95

# An input is unfamiliar if its epistemic variance exceeds this many times the 99 % quantile of the
# training rows, that is, if its error bar is more than twice as long as theirs.
UNFAMILIAR_RATIO = 4.0

NUMPY_TYPES = {
    "tensor(float16)": np.float16,
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
}
EXAMPLE = 'send {"inputs": [[...], ...]}, one list of numbers per row'


class Refused(Exception):
    """A request that cannot be answered with a prediction.

    Attributes:
        status: the HTTP status of the answer.
        error: what was expected, what came and what to do, as the client reads it.
    """

    def __init__(self, status, expected, got, remedy):
        super().__init__(f"expected {expected}, got {got}")
        self.status = status
        self.error = {"expected": expected, "got": got, "remedy": remedy}


class Model:
    """An ONNX file with its calibration. Any number of threads may predict at once.

    Attributes:
        session: runs the graph.
        max_rows: largest number of rows in a request.
        calibration: what the exporter wrote into the file's metadata.
        output_names: names of the outputs of the graph.
        input_name: name of its only input.
        width: number of columns of that input.
        dtype: numpy type of that input.
        has_quantiles: whether the graph returns both ends of the interval.
    """

    def __init__(self, path, max_rows=4096):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1  # requests run side by side, each on one core
        options.enable_cpu_mem_arena = False  # an arena would keep the memory of the largest batch
        self.session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
        self.max_rows = max_rows
        self._read_metadata(path)
        self._read_input()
        self._require_an_interval()

    def _read_metadata(self, path):
        """Read the calibration and the names of the outputs."""
        metadata = self.session.get_modelmeta().custom_metadata_map
        if "rigidities" not in metadata:
            raise SystemExit(f"{path} has no error bars: write it with rigidities.export.onnx.")
        self.calibration = json.loads(metadata["rigidities"])
        self.output_names = [output.name for output in self.session.get_outputs()]
        missing = {"mean", "std"} - set(self.output_names)
        if missing:
            raise SystemExit(f"{path} does not give {', '.join(sorted(missing))}: export it again.")

    def _read_input(self):
        """Read name, width and type of the graph's only input."""
        inputs = self.session.get_inputs()
        if len(inputs) != 1 or len(inputs[0].shape) != 2 or not isinstance(inputs[0].shape[1], int):
            shapes = {entry.name: entry.shape for entry in inputs}
            raise SystemExit(f"Expected one input of shape (rows, width), got {shapes}.")
        self.input_name = inputs[0].name
        self.width = inputs[0].shape[1]
        self.dtype = NUMPY_TYPES[inputs[0].type]

    def _require_an_interval(self):
        """Without quantiles in the graph, intervals exist only for the normal distribution."""
        levels = self.calibration["quantiles"]
        self.has_quantiles = "quantiles" in self.output_names and set(LEVELS) <= set(levels)
        distribution = self.calibration["distribution"]["name"]
        if not self.has_quantiles and distribution != "gaussian":
            raise SystemExit(
                f"90 % intervals of the {distribution} distribution need its quantiles: export "
                'with outputs=("mean", "std", "epistemic", "quantiles") and '
                f"quantiles={LEVELS}."
            )

    def describe(self):
        """What the model accepts and returns."""
        return {
            "inputs": {"name": self.input_name, "width": self.width, "rows at most": self.max_rows},
            "outputs": ["mean", "std", "interval", "unfamiliar"],
            "calibration": self.calibration,
        }

    def predict(self, inputs):
        """Answer checked inputs (N, width)."""
        values = self.session.run(None, {self.input_name: inputs})
        outputs = dict(zip(self.output_names, values, strict=True))
        low, high = self.interval(outputs)
        arrays = (outputs["mean"], outputs["std"], low, high)
        if not all(np.isfinite(array).all() for array in arrays):
            raise Refused(
                422,
                "inputs for which the model gives finite numbers",
                "NaN or infinity from the model",
                "send inputs of the size that it was trained on",
            )
        return {
            "mean": outputs["mean"].tolist(),
            "std": outputs["std"].tolist(),
            "interval": [low.tolist(), high.tolist()],
            "unfamiliar": self.unfamiliar(outputs),
        }

    def interval(self, outputs):
        """Both ends of the central 90 %: quantiles of the graph, or of the normal distribution."""
        if self.has_quantiles:
            levels = self.calibration["quantiles"]
            low, high = (outputs["quantiles"][levels.index(level)] for level in LEVELS)
            return low, high
        half_width = outputs["std"] * outputs["std"].dtype.type(NORMAL_QUANTILE)
        return outputs["mean"] - half_width, outputs["mean"] + half_width

    def unfamiliar(self, outputs):
        """Which rows lie far from the training rows for any target, or None if that is unknown."""
        usual = self.calibration.get("epistemic_q99")  # one number for each target
        if usual is None or "epistemic" not in outputs:
            return None
        epistemic = outputs["epistemic"].reshape(len(outputs["epistemic"]), -1)
        return (epistemic > UNFAMILIAR_RATIO * np.array(usual)).any(axis=1).tolist()

    def checked(self, body):
        """The inputs (N, width) of a request's body, or `Refused`."""
        rows = entry_inputs(body)
        expected = f"1 to {self.max_rows} rows of {self.width} numbers"
        if not isinstance(rows, list):
            raise Refused(400, f'"inputs": a list of {expected}', json_type(rows), EXAMPLE)
        if not 1 <= len(rows) <= self.max_rows:
            status = 413 if rows else 400
            raise Refused(status, expected, f"{len(rows)} rows", "split or fill the batch")
        for number, row in enumerate(rows):
            self.check_row(number, row, expected)
        try:
            with np.errstate(over="ignore"):
                inputs = np.array(rows, dtype=self.dtype)
        except OverflowError:  # a whole number beyond every float
            inputs = np.array([[np.inf]])
        if not np.isfinite(inputs).all():
            range_of_type = f"finite numbers within {np.dtype(self.dtype).name}"
            raise Refused(400, range_of_type, "a number beyond", "scale the inputs as in training")
        return inputs

    def check_row(self, number, row, expected):
        """Refuse what numpy would accept as numbers: booleans, strings, other shapes."""
        if not isinstance(row, list):
            raise Refused(400, expected, f"{json_type(row)} as row {number}", EXAMPLE)
        if len(row) != self.width:
            remedy = "give all rows the columns that the model was trained on, in their order"
            raise Refused(400, expected, f"{len(row)} values in row {number}", remedy)
        for column, value in enumerate(row):
            # `type`, not `isinstance`: a boolean is an instance of int.
            if type(value) not in (int, float):
                got = f"{json_type(value)} in row {number}, column {column}"
                raise Refused(400, expected, got, "encode categories and gaps as in training")


def entry_inputs(body):
    """The entry "inputs" of a request's body, or `Refused`."""
    try:
        request = json.loads(body, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:  # invalid UTF-8 is a ValueError too
        raise Refused(400, "a JSON object", f"{error}", EXAMPLE) from None
    expected = 'an object with the key "inputs"'
    if not isinstance(request, dict):
        raise Refused(400, expected, json_type(request), EXAMPLE)
    if "inputs" not in request:
        raise Refused(400, expected, f"the keys {sorted(request)}", EXAMPLE)
    return request["inputs"]


def refuse_constant(name):
    """Refuse NaN and infinity: Python reads them, but they are not valid JSON."""
    raise Refused(400, "finite numbers", name, "fill gaps as in training")


def json_type(value):
    """What a JSON value is, in a few words."""
    if value is None:
        return "null"
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return names.get(type(value), "a number")


class Handler(BaseHTTPRequestHandler):
    """Answers one connection. The server has the attributes `model` and `max_bytes`."""

    protocol_version = "HTTP/1.1"  # a client may keep its connection
    timeout = 30  # seconds that a client may stay silent
    # Buffered, so that headers and body leave in one packet: the second of two packets would wait
    # until the client has acknowledged the first.
    wbufsize = -1
    routes = {"/": "GET", "/health": "GET", "/predict": "POST"}  # noqa: RUF012

    def answer(self):
        """Answer a request. Nothing in a request can stop the server."""
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
        """The answer to a valid request, as an object for JSON."""
        # Read the body first: an unread body would be mistaken for the next request.
        body = self.body()
        path = self.path.split("?")[0]
        if path not in self.routes:
            routes = ", ".join(f"{method} {path}" for path, method in self.routes.items())
            raise Refused(404, f"one of {routes}", f"{self.command} {path}", "see GET /")
        method = self.routes[path]
        if self.command != method:
            raise Refused(405, f"{method} {path}", f"{self.command} {path}", f"use {method}")
        model = self.server.model
        if path == "/predict":
            return model.predict(model.checked(body))
        if path == "/health":
            return {"status": "ok"}
        return model.describe()

    def body(self):
        """The whole body, or `Refused`, after which the connection ends."""
        length_text = self.headers.get("Content-Length", "0")
        is_number = length_text.isascii() and length_text.isdigit()
        if "Transfer-Encoding" in self.headers or not is_number:
            self.close_connection = True
            got = self.headers.get("Transfer-Encoding", length_text)
            raise Refused(411, "a Content-Length", got, "send the body's length")
        length = int(
            length_text[:18]
        )  # no body is that long, and int() limits the number of digits
        limit = self.server.max_bytes
        if length > limit:
            self.read_past(length)
            self.close_connection = True
            raise Refused(413, f"at most {limit} bytes", f"{length_text} bytes", "split the batch")
        body = b"".join(self.pieces(length))
        if len(body) < length:
            self.close_connection = True
            remedy = "send as many as Content-Length says"
            raise Refused(408, f"{length_text} bytes", "fewer", remedy)
        return body

    def read_past(self, length):
        """Read a body that is too long, and drop it: a client that still sends reads no answer.

        A body of more than four times the limit is not read.
        """
        if length <= 4 * self.server.max_bytes:
            for _ in self.pieces(length):
                pass

    def pieces(self, length):
        """Pieces of the body as they arrive, until `length` bytes, its end or a long silence."""
        remaining = length
        try:
            while remaining:
                piece = self.rfile.read1(min(remaining, 1 << 16))
                if not piece:
                    return
                remaining -= len(piece)
                yield piece
        except TimeoutError:
            self.close_connection = True

    def send_json(self, status, reply):
        """Send `reply`, and tell the client if the connection closes."""
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
        """Answer requests that http.server itself refuses: malformed, or with an unknown method."""
        self.close_connection = True
        self.command = getattr(self, "command", None)  # not set if the first line is malformed
        error = {
            "expected": "an HTTP request by GET or POST",
            "got": message or explain or str(code),
            "remedy": "see GET /",
        }
        self.send_json(400 if code == 501 else code, {"error": error})

    def log_message(self, format, *args):
        """Log nothing: a proxy in front keeps the log."""


class Server(ThreadingHTTPServer):
    """Starts a thread for each connection."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address, model, max_bytes):
        super().__init__(address, Handler)
        self.model = model
        self.max_bytes = max_bytes

    def handle_error(self, request, client_address):
        """Log nothing: a client that disconnects is not an error."""


def write_demo(path):
    """Train a small network, give it error bars and write it to `path`.

    Returns:
        Arguments of curl for a first request.
    """
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
    """Serve the given file, or the demo, until it is interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "model", nargs="?", type=Path, help="file written by rigidities.export.onnx"
    )
    parser.add_argument("--demo", action="store_true", help="train, export and serve a network")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 chooses a free port")
    parser.add_argument("--max-rows", type=int, default=4096, help="rows per request")
    parser.add_argument("--max-bytes", type=int, default=1 << 23, help="bytes per request")
    options = parser.parse_args(arguments)
    if options.demo == (options.model is not None):
        parser.error("give the path of a model, or --demo.")

    if options.demo:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "demo.onnx"
            curl_data = write_demo(path)
            model = Model(path, options.max_rows)
    else:
        curl_data = "-d '{\"inputs\": [[...], ...]}'"
        model = Model(options.model, options.max_rows)

    with Server((options.host, options.port), model, options.max_bytes) as server:
        print(f"curl http://{options.host}:{server.server_port}/predict {curl_data}", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("stopped")


if __name__ == "__main__":
    main()
