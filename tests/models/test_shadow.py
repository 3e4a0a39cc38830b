"""Models that are not plain: without values yet, scripted, of quantised weights, transformed."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rigidities as rg
from tests.support.nets import fitted
from tests.support.readouts import layers_of
from tests.support.refusals import refused


def lazy() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.LazyBatchNorm1d(), nn.LazyLinear(1))


def meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))


@pytest.mark.parametrize("features", [None, lambda m, x: m[0](x)])
@pytest.mark.parametrize(("model", "name"), [(lazy(), "1.weight"), (meta(), "0.weight")])
def test_a_model_without_values_is_told_what_to_do(net, model, name, features):
    uq = rg.LastLayerRigidity(model, features=features)
    refused(f"'{name}' has no values yet. Run a model with lazy .*to_empty", uq.fit, net.train)


@pytest.mark.filterwarnings("ignore:.torch.jit.")
def test_a_scripted_head_is_seen_and_can_be_named(net):
    model = nn.Sequential(*net.model[:-1], torch.jit.script(net.model[-1]))
    name = str(len(model) - 1)
    refused(f'"?layer="{name}" uses', rg.LastLayerRigidity(model).fit, net.train)
    uq = fitted(net._replace(model=model), layer=name)
    torch.testing.assert_close(uq(net.test[0]), fitted(net)(net.test[0]))


@pytest.mark.filterwarnings("ignore:.torch.jit.")
@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(2, 4))])
def test_a_scripted_module_works_with_features_of_ones_own_and_is_not_touched(net, make):
    model = nn.Sequential(nn.Sequential(*net.model[:-1]), nn.Dropout(0.5), net.model[-1])
    scripted = make(model.eval()).train()
    for layer in (None, "2"):
        uq = rg.LastLayerRigidity(scripted, layer=layer)
        refused("cannot be inspected. Pass features=", uq.fit, net.train)

    def own(m: Any, x: Tensor) -> Tensor:
        hidden = getattr(m, "0")(x)
        return torch.cat([hidden, torch.ones_like(hidden[:, :1])], 1)

    uq, expected = fitted(net._replace(model=scripted), features=own), fitted(net)
    torch.testing.assert_close(uq(net.test[0]), expected(net.test[0]))
    assert all(module.training for module in scripted.modules())
    assert all(p.requires_grad for p in scripted.parameters())
    with torch.no_grad():
        next(scripted.parameters()).add_(1.0)
    refused("weights have changed", uq, net.test[0])


class Quantised(Tensor):
    """Whole numbers and a scale behind a real matrix; knows `linear`, `detach` and little else."""

    numbers: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor) -> "Quantised":
        return Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scale.dtype)

    def __init__(self, numbers: Tensor, scale: Tensor) -> None:
        self.numbers, self.scale = numbers, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scale"], None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            x, weight, bias = args
            return nn.functional.linear(x, weight.numbers * weight.scale, bias)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].numbers, args[0].scale)
        raise NotImplementedError(f"{func} of quantised weights")


def quantised(weight: Tensor) -> nn.Parameter:
    scale = weight.detach().abs().amax() / 127
    held = Quantised((weight.detach() / scale).round().to(torch.int8), scale)
    return nn.Parameter(held, requires_grad=False)


@pytest.mark.parametrize("layers", [(0,), (0, 2, 4)])
def test_weights_of_a_quantised_class_work_with_features_of_ones_own(net, tmp_path, layers):
    for number in layers:
        net.model[number].weight = quantised(net.model[number].weight)
    own = {"features": lambda m, x: m[:-1](x)}
    uq, x = fitted(net, **own), net.test[0]
    assert torch.equal(uq(x)[0], net.model(x).detach())
    uq.save(tmp_path / "q.safetensors")
    again = rg.LastLayerRigidity.load(tmp_path / "q.safetensors", net.model, **own)
    assert torch.equal(again(x)[1], uq(x)[1])
    net.model[0].weight.numbers[0, 0] += 1
    refused("weights have changed", uq, x)
    load = rg.LastLayerRigidity.load
    refused("weights differ", load, tmp_path / "q.safetensors", net.model, **own)


BACKENDS = ("eager", "aot_eager")


@pytest.mark.thorough
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("own", [{}, {"forward": lambda m, b: 2 * m(b[0])}])
def test_a_compiled_wrapper_gives_what_the_plain_one_does(net, backend, own):
    uq, x = fitted(net, **own), net.test[0]
    torch._dynamo.reset()
    for given in (torch.compile(uq, backend=backend), _twice(uq, backend)):
        for rows in (x, x[:7]):
            torch.testing.assert_close(given(rows), uq(rows))


def _twice(uq: rg.LastLayerRigidity, backend: str) -> Any:
    """The wrapper inside a function that is compiled."""

    def inside(x: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = uq(x + 1 - 1)
        return mean * 1.0, std * 1.0

    return torch.compile(inside, backend=backend)


def test_a_warning_of_a_compiled_wrapper_stands_at_the_users_line(net):
    uq = rg.LastLayerRigidity(net.model).fit(net.train)
    with pytest.warns(UserWarning, match="not calibrated") as caught:
        torch.compile(uq, backend="eager")(net.test[0])
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("which", ["uq", "ensemble"])
def test_function_transforms_and_exports_are_told_what_to_do(net, which):
    uq, x = fitted(net, forward=lambda m, b: 2 * m(b[0])), net.test[0][:5]
    call = uq if which == "uq" else uq.ensemble(4)
    for transform in (torch.func.vmap, torch.func.jacrev, torch.func.jacfwd):
        refused("all rows at once", transform(call), x)
    torch.testing.assert_close(call(x), call(x))


@pytest.mark.skipif(not hasattr(torch.compiler, "is_exporting"), reason="older than 2.7")
def test_an_exported_wrapper_is_refused(net):
    uq = fitted(net)
    refused(r"uq.freeze", torch.export.export, uq, (net.test[0],), strict=False)


def compiled_in_place(model: nn.Module) -> None:
    model.compile(backend="eager")


def compiled_forward(model: nn.Module) -> None:
    model.forward = torch.compile(model.forward, backend="eager")


def compiled_twice(model: nn.Module) -> None:
    compiled_forward(model)
    compiled_in_place(model)


def compiled_parts(model: Any) -> None:
    for part in model:
        compiled_in_place(part)


@pytest.mark.parametrize(
    "compiled", [compiled_in_place, compiled_forward, compiled_twice, compiled_parts]
)
def test_what_was_compiled_in_place_gives_the_bars_of_the_plain_model(net, compiled):
    x, expected = net.test[0], fitted(net)(net.test[0])
    compiled(net.model)
    before = [dict(vars(module)) for module in net.model.modules()]
    uq = fitted(net)
    # Only the bars of a plain layer can be differentiated by the inputs.
    assert uq(x.clone().requires_grad_())[1].requires_grad
    torch.testing.assert_close(uq(x), expected)
    torch.testing.assert_close(uq.freeze()(x), expected)
    for module, own in zip(net.model.modules(), before, strict=True):
        assert all(vars(module)[name] is value for name, value in own.items())
    with torch.no_grad():
        net.model[0].bias.add_(1.0)
    refused("weights have changed", uq, x)


@pytest.mark.parametrize("compiled", [compiled_in_place, compiled_forward])
def test_a_refitted_readout_of_a_compiled_model_is_that_of_the_copy(net, compiled):
    x, plain = net.test[0], fitted(net).refit().model
    compiled(net.model)
    again = fitted(net).refit().model
    torch.testing.assert_close(again(x), plain(x))


class Stepped(nn.Module):
    """A model that has compiled a method of its own."""

    def __init__(self, parts: Any) -> None:
        super().__init__()
        self.trunk, self.head = parts[:-1], parts[-1]
        self.step = torch.compile(self.plain_step, backend="eager")

    def plain_step(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.step(x)


def test_a_method_that_a_model_has_compiled_is_the_copys_own(net):
    expected = fitted(net)(net.test[0])
    uq = fitted(net._replace(model=Stepped(net.model)))
    torch.testing.assert_close(uq(net.test[0]), expected)


class Keeping(nn.Module):
    """A model that keeps what it computes in a list and a dictionary, as KANs and LeViT do."""

    def __init__(self, parts: Any) -> None:
        super().__init__()
        self.trunk, self.head = parts[:-1], parts[-1]
        self.shift = nn.Parameter(torch.zeros(4))
        self.kept: list[Tensor] = []
        self.cache: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.cache.setdefault("shift", 2 * self.shift)
        self.kept.append(self.trunk(x + self.cache["shift"]))
        return self.head(self.kept[-1])


def test_tensors_that_a_pass_has_left_in_lists_are_copied_by_their_values(net):
    expected, model = fitted(net)(net.test[0]), Keeping(net.model)
    model(net.train[0])
    assert not model.kept[0].is_leaf and not model.cache["shift"].is_leaf
    uq = fitted(net._replace(model=model))
    torch.testing.assert_close(uq(net.test[0]), expected)
    assert len(model.kept) == 1 and not model.kept[0].is_leaf


def test_an_attribute_that_cannot_be_copied_is_named(net):
    net.model[1].locks = [None, threading.Lock()]
    said = r"its attribute '1.locks\[1\]' \(a lock\) does not support .* Set that attribute to None"
    with pytest.raises(TypeError, match=said):
        rg.LastLayerRigidity(net.model).fit(net.train)
    net.model[1].locks = None
    net.model.lock = threading.Lock()
    with pytest.raises(TypeError, match="its attribute 'lock' "):
        rg.LastLayerRigidity(net.model).fit(net.train)


class Widths(nn.Linear):
    """A layer that reads its width off its parameter, as those of mup do."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.weight.width


def test_parameters_keep_the_attributes_that_a_library_gave_them(net):
    x = net.test[0]
    net.model[0] = Widths(4, net.model[0].out_features)
    net.model[0].weight.width = 1.0
    with torch.no_grad():
        uq, own = fitted(net), net.model(x)
        torch.testing.assert_close(uq(x)[0], own)
        torch.testing.assert_close(uq.freeze()(x), uq(x))
        torch.testing.assert_close(uq.refit().model[0](x), net.model[0](x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_of_half_precision_works_whatever_the_default_dtype(net, dtype):
    given = net._replace(model=net.model.to(dtype))
    rows = [(x.to(dtype), y) for x, y in (net.train, net.valid)]
    found = []
    before = torch.get_default_dtype()
    try:
        for default in (torch.float32, torch.float64):
            torch.set_default_dtype(default)
            uq = rg.LastLayerRigidity(given.model).fit(rows[0])
            uq.calibrate(*rows[1])
            found.append((uq.gram.matrix, uq.predict(net.test[0].to(dtype)).std.double()))
    finally:
        torch.set_default_dtype(before)
    torch.testing.assert_close(found[1], found[0])


class Listed(nn.Module):
    """Layers that are registered, and called from plain containers, as in darts' N-BEATS."""

    def __init__(self, parts: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(parts)
        self.layers = [*parts[:-1]]
        self.table = {"heads": (parts[-1],)}

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return 2 * self.table["heads"][0](x)


def test_layers_that_are_called_from_plain_containers_are_seen(net):
    class Twice(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    expected = fitted(net._replace(model=Twice(*net.model)))(net.test[0])
    model = Listed(list(net.model))
    uq = fitted(net._replace(model=model))
    assert layers_of(uq) == ["blocks.4"]
    torch.testing.assert_close(uq(net.test[0]), expected)
    torch.testing.assert_close(uq.freeze()(net.test[0]), expected)
    layers = (*model.layers, *model.table["heads"])
    assert all(layer is own for layer, own in zip(layers, net.model, strict=True))


def test_modules_nested_too_deeply_are_refused_with_the_limit_to_raise():
    model = nn.Linear(3, 1)
    for _ in range(300):
        model = nn.Sequential(model)
    rows = torch.randn(20, 3)
    uq = rg.LastLayerRigidity(model)
    refused("nested too deeply.*sys.setrecursionlimit", uq.fit, rows, rows, error=RecursionError)


def test_an_attribute_without_values_is_no_weight():
    class WithTemplate(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(3, 1)
            self.template = torch.empty(3, device="meta")

        def forward(self, x):
            return self.head(x)

    x = torch.randn(20, 3)
    uq = rg.LastLayerRigidity(WithTemplate()).fit(x, x[:, :1])
    assert uq.gram.count == 20
