"""Units of the room `models` that no public name shows; whoever rewrites it may replace them."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.parametrizations import weight_norm

from rigidities.models.changes import Watch
from rigidities.models.derivatives import pushes
from rigidities.models.plain_copy import plain_copy
from rigidities.models.shadow import shadow

# --- a copy that shares the model's tensors ------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.torch.jit.")
@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(2, 4))])
def test_a_shadow_of_a_scripted_module_shares_its_memory(make):
    scripted = make(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)))
    twin = shadow(scripted)
    assert not any(p.requires_grad for p in twin.parameters())
    for mine, theirs in zip(twin.parameters(), scripted.parameters(), strict=True):
        assert mine.data_ptr() == theirs.data_ptr() and theirs.requires_grad


def test_a_shadow_copies_the_values_of_tensors_that_a_pass_has_left_in_lists():
    model = nn.Linear(3, 1)
    model.kept = [model(torch.ones(2, 3))]
    twin = shadow(model)
    assert torch.equal(twin.kept[0], model.kept[0]) and twin.kept[0].is_leaf


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
    assert watch.look() == watch.first_look
    with torch.no_grad():
        CHANGES[change](model[1])
    assert watch.look() != watch.first_look


def test_hooks_of_a_shadow_are_its_own():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model[0].register_forward_hook(lambda *_: None)
    twin = shadow(model)
    for module in twin:
        module.register_forward_hook(lambda *_: None)
    assert [len(module._forward_hooks) for module in (*model, *twin)] == [1, 0, 2, 1]


# --- a copy that shares nothing; inside a job: `last_layer/test_wrapped_jobs.py` -----------------


class Own(nn.Module):
    """With a method that has the name of one of FSDP's."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(3), weight_norm(nn.Linear(3, 1))

    def forward(self, x):
        return self.head(self.norm(x))

    def reshard(self):
        raise AssertionError


def test_a_plain_model_is_copied_with_nothing_shared():
    model, x = Own().eval(), torch.randn(4, 3)
    twin, expected = plain_copy(nn.DataParallel(model)), model(x)
    assert type(twin) is Own and torch.equal(twin(x), expected)
    with torch.no_grad():
        model.norm.running_mean.add_(1.0)
        model.head.parametrizations.weight.original0.mul_(2.0)
    assert torch.equal(twin(x), expected)


# --- derivatives along directions ----------------------------------------------------------------


def numbers(*shape):
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


class Cube(torch.autograd.Function):
    """As users write them, without forward mode."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * g


def test_an_operation_without_forward_mode_is_pushed_by_reverse_mode():
    point, directions = numbers(6), numbers(3, 6)
    torch.testing.assert_close(pushes(Cube.apply, point, directions), 3 * point**2 * directions)


def test_an_operation_that_is_differentiable_once_is_refused_where_twice_is_needed():
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        @once_differentiable
        def backward(ctx, g):
            return g * ctx.saved_tensors[0].cos()

    with pytest.raises(ValueError, match="cannot itself be differentiated"):
        pushes(Once.apply, numbers(6), numbers(3, 6))
