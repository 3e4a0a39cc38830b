"""`uq.freeze()` on every road out of eager torch, and with input that the model would not take.

The roads are compiled, exported, compiled ahead of time and ONNX; each gives the numbers of the
frozen module itself. Tracing costs a second or two and is asked in every run. What takes longer,
a C++ compiler mostly, is marked slow, and `make versions` asks it on every PyTorch.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import rigidities as rg
from rigidities.last_layer.frozen import OUTPUTS, Frozen
from tests.support.nets import Net, trained
from tests.support.refusals import refused

FORMS = {"paper's form": "paper", "default": "full"}
TARGETS = {"one target": 1, "several targets": 3}
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-10}
RELEASE = tuple(int(number) for number in torch.__version__.split(".")[:2])
Road = Callable[..., Callable[[Tensor], Any]]

forms = pytest.mark.parametrize("form", FORMS)
targets = pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS)


def needs_torch(release: str, what: str) -> pytest.MarkDecorator:
    """Skipped, in words, on an older PyTorch than that."""
    oldest = tuple(int(number) for number in release.split("."))
    reason = f"{what} needs PyTorch {release} or newer, and this is {torch.__version__}"
    return pytest.mark.skipif(oldest > RELEASE, reason=reason)


def scaled(net: Any, x: Tensor) -> Tensor:
    """An output that is that of no layer, whose features come by `torch.vmap`."""
    return 2 * net.inner(x) + 10


@cache
def fitted(
    form: str, targets: int, dtype: torch.dtype = torch.float32, wrapped: bool = False
) -> tuple[rg.LastLayerRigidity, Tensor]:
    """A calibrated net, and rows to call it with."""
    net = trained(targets)
    train, valid = ([part.to(dtype) for part in rows] for rows in (net.train, net.valid))
    model = (Net(scaled, inner=net.model) if wrapped else net.model).to(dtype)
    uq = rg.LastLayerRigidity(model, progress=False).fit(tuple(train))
    uq.calibrate(tuple(valid), method=FORMS[form])
    return uq, net.test[0].to(dtype)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Graphs of other tests must not count, nor those of these tests in others."""
    torch._dynamo.reset()
    counters.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of its own parts, otherwise in each release
        yield
    torch._dynamo.reset()


def compiled(uq: rg.LastLayerRigidity, x: Tensor, folder: Path, **options: Any) -> Any:
    return torch.compile(uq.freeze(), **options)


def inductor(uq: rg.LastLayerRigidity, x: Tensor, folder: Path) -> Any:
    return compiled(uq, x, folder)


def inductor_whole(uq: rg.LastLayerRigidity, x: Tensor, folder: Path) -> Any:
    return compiled(uq, x, folder, fullgraph=True, dynamic=True)


def exported(uq: rg.LastLayerRigidity, x: Tensor, folder: Path) -> Any:
    return rg.export.torch_export(uq, x[:4]).module()


def ahead_of_time(uq: rg.LastLayerRigidity, x: Tensor, folder: Path) -> Any:
    program = rg.export.torch_export(uq, x[:4])
    path = str(folder / "net.pt2")
    return torch._inductor.aoti_load_package(
        torch._inductor.aoti_compile_and_package(program, package_path=path)
    )


def onnx(uq: rg.LastLayerRigidity, x: Tensor, folder: Path) -> Any:
    import onnxruntime

    rg.export.onnx(uq, folder / "net.onnx", x[:4])
    session = onnxruntime.InferenceSession(folder / "net.onnx")
    (given,) = session.get_inputs()
    return lambda rows: [
        torch.from_numpy(part) for part in session.run(None, {given.name: rows.numpy()})
    ]


SLOW = pytest.mark.slow
ROADS = [
    pytest.param(inductor, id="torch.compile", marks=SLOW),
    pytest.param(inductor_whole, id="torch.compile, fullgraph", marks=SLOW),
    pytest.param(exported, id="torch.export"),
    pytest.param(ahead_of_time, id="AOTInductor", marks=[SLOW, needs_torch("2.6", "AOTInductor")]),
    # in every run `tests/test_export.py` asks ONNX
    pytest.param(onnx, id="ONNX", marks=[SLOW, needs_torch("2.7", "ONNX")]),
]


def same(road: Callable[[Tensor], Any], frozen: Frozen, x: Tensor) -> None:
    """For two batch sizes."""
    for rows in (x[:40], x[:7]):
        with torch.no_grad():
            expected = frozen(rows)
            found = road(rows)
        for part, known in zip(found, expected, strict=True):
            rtol = TOLERANCES[x.dtype]
            torch.testing.assert_close(part.cpu(), known.cpu(), rtol=rtol, atol=rtol / 10)


@pytest.mark.thorough
@forms
@targets
@pytest.mark.parametrize("road", ROADS)
def test_a_road_gives_the_numbers_of_the_frozen_module(form, targets, road: Road, tmp_path):
    uq, x = fitted(form, targets)
    same(road(uq, x, tmp_path), uq.freeze(), x)


@forms
@targets
def test_a_program_gives_them_in_float64_too(form, targets, tmp_path):
    uq, x = fitted(form, targets, torch.float64)
    same(exported(uq, x, tmp_path), uq.freeze(), x)


@pytest.mark.gpu
@forms
@targets
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_module_gives_the_same_on_cuda(form, targets, mode):
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    uq, x = fitted(form, targets)
    frozen, x = uq.freeze().cuda(), x.cuda()
    same(torch.compile(frozen, mode=mode, fullgraph=True), frozen, x)


@pytest.mark.thorough
@forms
@targets
def test_nothing_breaks_a_graph_and_no_frame_is_traced_in_vain(form, targets):
    uq, x = fitted(form, targets)
    module = torch.compile(uq.freeze(), backend="aot_eager")
    same(module, uq.freeze(), x)
    assert not counters["graph_break"]
    # one graph of fixed size, then one of any: each from one frame, none of which was given up
    assert counters["stats"]["unique_graphs"] == 2
    assert dict(counters["frames"]) == {"total": 2, "ok": 2}


def test_an_old_torch_is_told_by_name(tmp_path, monkeypatch):
    uq, x = fitted("paper's form", 1)
    monkeypatch.setattr(torch, "__version__", "2.4.1+cpu")
    path = tmp_path / "net.onnx"
    words = r"ONNX needs PyTorch 2\.7 or newer; this is 2\.4\.1"
    refused(words, rg.export.onnx, uq, path, x, error=RuntimeError)
    in_other_units = fitted("paper's form", 1, wrapped=True)[0]
    words = r"Export of a readout that is scaled.* needs PyTorch 2\.7 or newer"
    refused(words, rg.export.torch_export, in_other_units, x, error=RuntimeError)
    words = r"different numbers of rows needs PyTorch 2\.6 or newer"
    refused(words, rg.export.torch_export, uq, (x, x[:3]), error=RuntimeError)


# --- input that is not what the model was fitted with -------------------------------------------


def rows(x: Tensor) -> dict[str, Tensor]:
    """Batches that the model takes, whatever their layout."""
    return {
        "no rows": x[:0],
        "one row": x[:1],
        "every other row": x[:40:2],
        "columns first": x[:40].t().contiguous().t(),
        "a repeated row": x[:1].expand(5, -1),
        "a single sample": x[0],
        "rows in two dimensions": x[:6].reshape(2, 3, 4),
        "no rows in two dimensions": x[:0].reshape(0, 3, 4),
    }


def bad_rows(x: Tensor) -> dict[str, Any]:
    """Batches that the model does not take."""
    return {
        "float64": x.double(),
        "float16": x.half(),
        "integers": x.long(),
        "too wide": torch.cat([x, x], 1),
        "too narrow": x[:, :3],
        "no rows and too narrow": x[:0, :3],
        "no dimension": x[0, 0],
        "another device": x.to("meta"),
        "an array": x.numpy(),
    }


plain_and_scaled = pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "scaled"])


@forms
@targets
@plain_and_scaled
@pytest.mark.parametrize("rank", [None, 3], ids=["all", "truncated"])
def test_batches_of_any_layout_give_outputs_shaped_like_the_models(form, targets, wrapped, rank):
    uq, x = fitted(form, targets, wrapped=wrapped)
    frozen = uq.freeze(OUTPUTS, members=3, quantiles=(0.1, 0.5), rank=rank)
    for name, batch in rows(x).items():
        output = uq.model(batch)
        found = dict(zip(OUTPUTS, frozen(batch), strict=True))
        known = frozen(batch.contiguous().reshape(-1, 4))
        leading = {"quantiles": (2,), "members": (3,)}
        for (part, values), flat in zip(found.items(), known, strict=True):
            assert values.shape == (*leading.get(part, ()), *output.shape), (name, part)
            assert values.dtype == output.dtype
            if part == "members" and batch.ndim != 2:
                continue  # what single members do not share is drawn for each sample, not each row
            torch.testing.assert_close(values, flat.reshape(values.shape), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found["mean"], output, rtol=1e-5, atol=1e-6)


def raised(call: Callable[..., Any], batch: Any) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - it is compared
        call(batch)
    return caught.value


@forms
@targets
@plain_and_scaled
def test_what_the_model_refuses_is_refused_with_its_words(form, targets, wrapped):
    uq, x = fitted(form, targets, wrapped=wrapped)
    for name, batch in bad_rows(x).items():
        model = raised(uq.model, batch)
        words = str(model).replace("to linear need", "to matmul need") if wrapped else str(model)
        for outputs in (("mean", "std"), ("std", "quantiles")):
            error = raised(uq.freeze(outputs), batch)
            assert type(error) is type(model), name
            assert words in str(error), name


@forms
def test_a_cast_module_wants_the_precision_of_its_model(form):
    uq, x = fitted(form, 1)
    frozen, model = uq.freeze().double(), copy.deepcopy(uq.model).double()
    assert {part.dtype for part in frozen(x.double())} == {torch.float64}
    assert str(raised(model, x)) in str(raised(frozen, x))


@forms
def test_a_module_without_values_says_so(form):
    uq, x = fitted(form, 1)
    refused("has no values yet", uq.freeze().to("meta"), x)


@pytest.mark.thorough
@forms
def test_a_compiled_module_takes_and_refuses_what_the_compiled_model_does(form):
    uq, x = fitted(form, 1)
    frozen = uq.freeze()
    options: dict[str, Any] = {"fullgraph": True, "backend": "aot_eager"}
    for name in ("no rows", "columns first"):
        batch = rows(x)[name]
        for part, known in zip(torch.compile(frozen, **options)(batch), frozen(batch), strict=True):
            torch.testing.assert_close(part, known, rtol=1e-5, atol=1e-6)
    for name in ("float64", "too narrow"):
        batch = bad_rows(x)[name]
        model = raised(torch.compile(uq.model, **options), batch)
        assert type(raised(torch.compile(frozen, **options), batch)) is type(model), name


@targets
@forms
def test_a_program_for_any_rows_refuses_what_the_models_program_does(form, targets):
    uq, x = fitted(form, targets)
    shapes = ({0: torch.export.Dim("batch")},)
    model = torch.export.export(uq.model, (x[:4],), dynamic_shapes=shapes).module()
    program = rg.export.torch_export(uq, x[:4]).module()
    for name in ("too narrow", "too wide"):
        batch = bad_rows(x)[name]
        assert type(raised(program, batch)) is type(raised(model, batch)), name
    for part, known in zip(program(rows(x)["columns first"]), uq(x[:40]), strict=True):
        torch.testing.assert_close(part, known, rtol=1e-5, atol=1e-6)
