"""What a model raises comes back with how it was called, and the options that mend it."""

import re
from typing import Any

import pytest
import torch
from torch import nn

import rigidities as rg
from tests.support.nets import Net
from tests.support.refusals import refused

X, Y = torch.randn(20, 3, generator=torch.Generator().manual_seed(0)), torch.linspace(-1, 1, 20)
VALID = X.flip(0) + 0.1


class Graph:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Positional(nn.Module):
    """As chemprop's: the batch has seven entries, of which the model takes the first two."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 1)

    def forward(self, graph: Graph, extra: Any = None) -> torch.Tensor:
        return self.head(graph.x)[:, 0]


class OfMapping(nn.Module):
    """As schnetpack's: the model takes a dict, and returns one."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 1)

    def forward(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"energy": self.head(inputs["R"])[:, 0]}


def lines(error: BaseException) -> dict[str, Any]:
    """The options that a message prints, by name, the last of each."""
    found = re.findall(r"(forward|target)=(lambda .*?)(?=,? and | or, | with )", str(error))
    return {name: eval(code.replace("'key'", "'energy'")) for name, code in found}


def test_a_tuple_of_more_than_the_model_takes_is_shown_and_mended_by_the_lines_printed():
    def batch(x: torch.Tensor, y: torch.Tensor) -> tuple[Any, ...]:
        return (Graph(x), None, y, None, None, None, None)

    with pytest.raises(TypeError, match="takes from 2 to 3 positional arguments") as caught:
        rg.LastLayerRigidity(Positional()).fit([batch(X, Y)])
    shown = "Positional(Graph, None, float32 (20,), None, None, None) raised TypeError: "
    assert str(caught.value).startswith(shown)
    assert isinstance(caught.value.__cause__, TypeError)
    uq = rg.LastLayerRigidity(Positional(), **lines(caught.value)).fit([batch(X, Y)])
    uq.calibrate([batch(VALID, Y)], method="paper")
    assert uq.predict([batch(X, None)]).mean.shape == (20,)


def test_an_input_that_the_batches_lack_is_none_in_the_line_printed():
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 1)

        def forward(self, numbers: torch.Tensor, kinds: torch.Tensor | None) -> torch.Tensor:
            return self.head(numbers)[:, 0]

    with pytest.raises(TypeError, match="missing 1 required positional argument") as caught:
        rg.LastLayerRigidity(Table()).fit((X, Y))
    uq = rg.LastLayerRigidity(Table(), **lines(caught.value)).fit((X, Y))
    uq.calibrate((VALID, Y), method="paper")
    assert uq(X)[1].shape == uq.predict(X).std.shape == (20,)


def test_a_mapping_for_a_model_of_mappings_is_mended_by_the_lines_printed():
    model, batch = OfMapping(), {"_idx": torch.arange(20), "R": X, "energy": Y}
    with pytest.raises(TypeError, match="unexpected keyword argument '_idx'") as caught:
        rg.LastLayerRigidity(model).fit([batch])
    assert "OfMapping(_idx=int64 (20,), R=float32 (20, 3), energy=" in str(caught.value)
    chosen = lines(caught.value)
    uq = rg.LastLayerRigidity(model, forward=lambda m, b: m(b), target=chosen["target"])
    uq.fit([batch]).calibrate([batch | {"R": VALID}], method="paper")
    assert uq({"R": X})[0].shape == (20,)


@pytest.mark.parametrize(
    "error",
    [
        *(TypeError, RuntimeError, ValueError, AttributeError),
        *(KeyError, IndexError, AssertionError),
    ],
)
@pytest.mark.parametrize("own", [None, lambda m, b: m(b[0])])
def test_what_the_model_raises_keeps_its_words_and_its_class(error, own):
    def fails(model: Net, x: torch.Tensor) -> torch.Tensor:
        raise error("a word of its own")

    called = r"Net\(float32 \(20, 3\)\)" if own is None else r"forward\(Net, tuple of 2 \("
    match = rf"{called}.* raised {error.__name__}: .*a word of its own.*\. .*forward="
    uq = rg.LastLayerRigidity(Net(fails, head=nn.Linear(3, 1)), forward=own)
    refused(match, uq.fit, (X, Y), error=error)


class Custom(RuntimeError):
    pass


@pytest.mark.parametrize("error", [Custom, KeyboardInterrupt, NotImplementedError])
def test_classes_that_a_user_or_torch_may_catch_pass_as_they_are(error):
    def fails(model: Net, x: torch.Tensor) -> torch.Tensor:
        raise error("as it is")

    uq = rg.LastLayerRigidity(Net(fails, head=nn.Linear(3, 1)))
    refused("^as it is$", uq.fit, (X, Y), error=error)


CALLING: dict[str, dict[str, Any]] = {
    "as it is": {},
    "forward": {"forward": lambda m, b: m(b[0])},
    "features": {"features": lambda m, x: m[:-1](x)},
}


@pytest.mark.parametrize("way", CALLING)
def test_calls_after_the_first_show_what_was_given_and_what_worked_but_no_other_way(way, tmp_path):
    model, y = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)), Y[:, None]
    uq = rg.LastLayerRigidity(model, **CALLING[way]).fit((X, y))
    uq.calibrate((VALID, y), method="paper")
    uq.save(tmp_path / "fit.safetensors")
    again = rg.LastLayerRigidity.load(tmp_path / "fit.safetensors", model, **CALLING[way])
    calls = (uq, uq.predict, lambda x: uq.partial_fit((x, y)), uq.ensemble(4), again)
    for call in calls:
        with pytest.raises(
            RuntimeError, match=r"float32 \(20, 2\).* raised .*shapes can"
        ) as caught:
            call(X[:, :2])
        assert "forward=" not in str(caught.value)
        if call in calls[:3] and way != "features":
            assert re.search(r"In the fit .*float32 \((8|20), 3\).* worked", str(caught.value))


def test_a_refusal_of_the_library_inside_the_model_is_not_wrapped():
    def forks(model: Net, x: torch.Tensor) -> torch.Tensor:
        return model.one(x) if bool(x[0, 0] > 0) else model.other(x)

    uq = rg.LastLayerRigidity(Net(forks, one=nn.Linear(3, 1), other=nn.Linear(3, 1)))
    uq.fit((X.abs(), Y[:, None]))
    with pytest.raises(ValueError, match="other") as caught, pytest.warns(match="not calib"):
        uq(-X.abs())
    assert "raised" not in str(caught.value)


def test_values_are_described_by_kind_and_size():
    given = (X, None, [Y.long()], {"a": 1}, Graph(X))
    inner = "float32 (20, 3), None, list of 1 (int64 (20,)), dict with keys ['a'], Graph"

    def fails(model: nn.Module, batch: Any) -> torch.Tensor:
        raise ValueError("a word of its own")

    uq = rg.LastLayerRigidity(nn.Linear(3, 1), forward=fails, target=lambda b: Y)
    refused(re.escape(f"tuple of 5 ({inner})"), uq.fit, [given])


# --- inputs that a forward pass writes into -----------------------------------------------------


class Shifting(nn.Module):
    """Subtracts the mean of its inputs in place, at once or where it is told to."""

    def __init__(self, always: bool = True) -> None:
        super().__init__()
        self.body, self.head, self.always = nn.Linear(3, 4), nn.Linear(4, 1), always

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.always or bool(x[0, 0] > 100):
            x -= 1
        return self.head(self.body(x).tanh())


WRITING: dict[str, tuple[dict[str, Any], Any]] = {
    "as it is": ({}, (X, Y[:, None])),
    "layer": ({"layer": "head"}, (X, Y[:, None])),
    "features": ({"features": lambda m, x: m.body(x)}, (X, Y[:, None])),
    "an object": (
        {"forward": lambda m, b: m(b.x), "target": lambda b: Y[:, None]},
        [Graph(X)],
    ),
}


@pytest.mark.parametrize("way", WRITING)
def test_a_model_that_writes_into_its_inputs_is_refused_and_they_stay_as_they_were(way):
    options, data = WRITING[way]
    before = X.clone()
    uq = rg.LastLayerRigidity(Shifting(), **options)
    refused(r"changes its inputs in place.*x = x - 1.*forward=.*clone\(\)", uq.fit, data)
    assert torch.equal(X, before)


def test_a_model_that_writes_into_copies_is_right_by_the_line_printed():
    y, before = Y[:, None], X.clone()
    uq = rg.LastLayerRigidity(Shifting(), forward=lambda m, b: m(b[0].clone())).fit((X, y))
    h = uq.model.body(X - 1).tanh().detach()
    rows = torch.cat([h, torch.ones(20, 1)], 1).double()
    torch.testing.assert_close(uq.gram.matrix, rows.mT @ rows, rtol=1e-6, atol=1e-6)
    uq.calibrate((VALID, y), method="paper")
    uq.predict([(X, y)])
    assert torch.equal(X, before)


def test_a_later_batch_that_is_written_into_is_refused():
    uq = rg.LastLayerRigidity(Shifting(always=False)).fit((X, Y[:, None]))
    uq.calibrate((VALID, Y[:, None]), method="paper")
    for call in (uq, uq.predict, lambda x: uq.partial_fit((x, Y[:, None]))):
        refused("changes its inputs in place", call, X + 1000)


# --- output= for one tensor ---------------------------------------------------------------------


@pytest.mark.parametrize("output", [0, -1, "T"])
def test_output_of_a_model_that_returns_one_tensor_is_refused(output):
    uq = rg.LastLayerRigidity(nn.Linear(3, 2), output=output)
    message = rf"output={output!r} selects one of several.*one tensor \(\d+, 2\).*forward="
    refused(message, uq.fit, (X, torch.stack([Y, Y], 1)))


def test_a_model_may_add_entries_to_its_batch():
    def run(m, b):
        b["hidden"] = b["x"] * 2
        return m(b["hidden"])

    batch = {"x": X, "y": Y[:, None]}
    uq = rg.LastLayerRigidity(nn.Linear(3, 1), forward=run).fit([batch])
    features = torch.cat([2 * X, torch.ones(20, 1)], 1).double()
    torch.testing.assert_close(uq.gram.matrix, features.T @ features)


def test_inputs_of_many_parts_are_looked_at_in_part():
    model, looked = torch.nn.Linear(3, 1), []

    class Part:
        @property
        def __dict__(self):
            looked.append(self)
            return {}

    batch = {"parts": [Part() for _ in range(5000)], "x": X, "y": Y[:, None]}
    rg.LastLayerRigidity(model, forward=lambda m, b: m(b["x"])).fit([batch])
    assert len(looked) < 1000
