"""Models that are not plain: without values yet, scripted, of quantised weights, transformed."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rigidities as rg
from rigidities.last_layer.readout.binding import model_fingerprint
from rigidities.models.shadow import Watch, shadow
from tests.support.nets import fitted
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
    refused(f"'{name}' holds no values yet. Run a model with lazy .*to_empty", uq.fit, net.train)


@pytest.mark.filterwarnings("ignore:.torch.jit.")
def test_a_scripted_head_is_seen_and_can_be_named(net):
    model = nn.Sequential(*net.model[:-1], torch.jit.script(net.model[-1]))
    name = str(len(model) - 1)
    refused(f'"?layer="{name}" takes', rg.LastLayerRigidity(model).fit, net.train)
    uq = fitted(net._replace(model=model), layer=name)
    torch.testing.assert_close(uq(net.test[0]), fitted(net)(net.test[0]))


@pytest.mark.filterwarnings("ignore:.torch.jit.")
@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(2, 4))])
def test_a_scripted_module_works_with_features_of_ones_own_and_is_not_touched(net, make):
    model = nn.Sequential(nn.Sequential(*net.model[:-1]), nn.Dropout(0.5), net.model[-1])
    scripted = make(model.eval()).train()
    for layer in (None, "2"):
        uq = rg.LastLayerRigidity(scripted, layer=layer)
        refused("cannot be looked into. Pass features=", uq.fit, net.train)

    def own(m: Any, x: Tensor) -> Tensor:
        hidden = getattr(m, "0")(x)
        return torch.cat([hidden, torch.ones_like(hidden[:, :1])], 1)

    uq, expected = fitted(net._replace(model=scripted), features=own), fitted(net)
    torch.testing.assert_close(uq(net.test[0]), expected(net.test[0]))
    assert all(module.training for module in scripted.modules())
    twin = shadow(scripted)
    assert not any(p.requires_grad for p in twin.parameters())
    for mine, theirs in zip(twin.parameters(), scripted.parameters(), strict=True):
        assert mine.data_ptr() == theirs.data_ptr() and theirs.requires_grad
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
    before, watch = model_fingerprint(net.model), Watch(net.model)
    net.model[0].weight.numbers[0, 0] += 1
    assert not watch.same() and model_fingerprint(net.model) != before
    refused("weights have changed", uq, x)


BACKENDS = ("eager", "aot_eager")


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


class Attributed(nn.Linear):
    """A layer with attributes of several kinds beside its weights."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.factor, self.gone, self.kept = 2.0, None, [torch.ones(2), 3]
        self.table, self.plain = {"a": 1.5}, torch.zeros(2)
        self.empty, self.blank = [], {}
        self.register_buffer("mean", torch.zeros(3))


def swapped(layer: Any) -> None:
    del layer.gone
    layer.other = None


def rewritten(layer: Any) -> None:
    layer.weight.data = layer.weight.data.clone()  # which leaves the version as it was


CHANGES = {
    "a number": lambda layer: setattr(layer, "factor", 3.0),
    "one of the same value and another kind": lambda layer: setattr(layer, "factor", 2),
    "none for another none": swapped,
    "an entry of a list": lambda layer: layer.kept.__setitem__(1, 4),
    "one more entry": lambda layer: layer.kept.append(4),
    "an entry of a dictionary": lambda layer: layer.table.update(a=2.5),
    "a tensor in a list": lambda layer: layer.kept[0].add_(1),
    "a plain tensor": lambda layer: layer.plain.add_(1),
    "a buffer": lambda layer: layer.mean.add_(1),
    "weights by their memory": rewritten,
    "the kind of weights": lambda layer: layer.double(),
    "a first hook": lambda layer: layer.register_forward_hook(lambda *_: None),
    "a first pre-hook": lambda layer: layer.register_forward_pre_hook(lambda *_: None),
    "the first entry of a list": lambda layer: layer.empty.append(1.0),
    "the first entry of a dictionary": lambda layer: layer.blank.update(a=1.0),
    "a part": lambda layer: layer.add_module("more", nn.Identity()),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_a_watch_notices_what_is_written_or_set_anew(change):
    model = nn.Sequential(nn.Linear(3, 3), Attributed())
    watch = Watch(model)
    model.train(not model.training)
    model.zero_grad()
    assert watch.same()
    with torch.no_grad():
        CHANGES[change](model[1])
    assert not watch.same()


def test_hooks_of_a_shadow_are_its_own():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model[0].register_forward_hook(lambda *_: None)
    twin = shadow(model)
    for module in twin:
        module.register_forward_hook(lambda *_: None)
    assert [len(module._forward_hooks) for module in (*model, *twin)] == [1, 0, 2, 1]
