"""How often a fit calls the model, with how many rows, and what a pass costs."""

import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset

import rigidities as rg
from tests.support import oracle
from tests.support.nets import Net
from tests.support.readouts import layers_of
from tests.support.refusals import refused

ROWS, BATCHES, FEW = 40, 3, 8
MOST_CALLS = 60
"""Python functions that `uq(x)` of the paper's form enters beyond those of the model."""


def net(*, tail=lambda y: y, dtype=torch.float32, **parts) -> Net:
    """A small net; `tail` is what follows its readout."""
    torch.manual_seed(0)
    parts = {"trunk": nn.Linear(4, 6), "head": nn.Linear(6, 2)} | parts
    return Net(lambda m, x: tail(m.head(m.trunk(x).tanh())), **parts).to(dtype)


def rows_of_calls(model: nn.Module, hooked: nn.Module, data, **options) -> list[int]:
    """Rows that a module within a model is called with in a fit, one entry a call."""
    rows: list[int] = []
    hook = hooked.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
    rg.LastLayerRigidity(model, **options).fit(data)
    hook.remove()
    return rows


def batches(dtype=torch.float32, outputs=2) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    shapes = (ROWS, 4), (ROWS, outputs)
    return [tuple(torch.randn(shape, dtype=dtype) for shape in shapes) for _ in range(BATCHES)]


class Rows(Dataset):
    """Rows one by one, so that a loader is not read as tensors."""

    def __init__(self) -> None:
        self.x, self.y = (torch.cat(each) for each in zip(*batches(), strict=True))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i], self.y[i]


SOURCES = {
    "list": batches,
    "tensors": lambda: tuple(torch.cat(each) for each in zip(*batches(), strict=True)),
    "loader": lambda: DataLoader(Rows(), batch_size=ROWS),
    "mappings": lambda: [{"x": x, "y": y} for x, y in batches()],
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_plain_head_is_found_with_two_calls_of_eight_rows(source):
    model = net()
    rows = rows_of_calls(model, model.trunk, SOURCES[source]())
    whole = [ROWS * BATCHES] if source == "tensors" else [ROWS] * BATCHES
    assert rows == [FEW, FEW, *whole]


PLAIN = {
    "named": ({}, {"layer": "head"}),
    "squeezed": ({"tail": lambda y: y.squeeze(-1), "head": nn.Linear(6, 1)}, {}),
    "first column of one": ({"tail": lambda y: y[:, 0], "head": nn.Linear(6, 1)}, {}),
    "reshaped": ({"tail": lambda y: y.reshape(-1, 1, 2)}, {}),
    "dropout": ({"tail": nn.Dropout().eval()}, {}),
    "by forward of a tuple": ({}, {"forward": lambda m, b: m(b[0])}),
    "a field": ({"tail": lambda y: {"mean": y, "other": 2 * y}}, {"output": "mean"}),
    "half": ({"dtype": torch.bfloat16}, {}),
}


@pytest.mark.parametrize("name", PLAIN)
def test_any_form_of_a_plain_head_takes_two_calls_of_eight_rows(name):
    parts, options = PLAIN[name]
    outputs = 1 if isinstance(parts.get("head"), nn.Linear) else 2
    model = net(**parts)
    data = batches(parts.get("dtype", torch.float32), outputs)
    if name == "reshaped":
        data = [(x, y[:, None]) for x, y in data]
    assert rows_of_calls(model, model.trunk, data, **options) == [FEW] * 2 + [ROWS] * BATCHES


def test_features_of_the_user_take_one_call_of_eight_rows():
    model = net()
    rows = rows_of_calls(model, model.trunk, batches(), features=lambda m, x: x)
    assert rows == [FEW] + [ROWS] * BATCHES


def test_layers_over_time_and_convolutions_take_two_calls():
    steps = net()
    data = [(torch.randn(ROWS, 5, 4), torch.randn(ROWS, 5, 2)) for _ in range(BATCHES)]
    assert rows_of_calls(steps, steps.trunk, data) == [FEW] * 2 + [ROWS] * BATCHES
    images = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Tanh(), nn.Conv2d(6, 2, 1))
    data = [(torch.randn(ROWS, 3, 6, 6), torch.randn(ROWS, 2, 4, 4)) for _ in range(BATCHES)]
    assert rows_of_calls(images, images[0], data) == [FEW] * 2 + [ROWS] * BATCHES


TAILS = {
    "scaled": (lambda y: 3 * y + 1, 3),
    "copied": (lambda y: y.clone(), 3),
    "targets mixed": (lambda y: y @ torch.tensor([[1.0, 0.5], [0.0, 1.0]]).to(y), 3),
    "bent": (lambda y: y.exp(), 5),
    "clamped, but not these rows": (lambda y: y.clamp(-2, 2), 7),
}
"""What follows the head, and how often a model in float64 is called to find its readout."""


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("tail", TAILS)
def test_other_tails_take_few_calls_of_eight_rows(tail, dtype):
    run, most = TAILS[tail]
    model = net(tail=run, dtype=dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The output is not linear")
        rows = rows_of_calls(model, model.trunk, batches(dtype))
    assert rows[-BATCHES:] == [ROWS] * BATCHES
    assert set(rows[:-BATCHES]) == {FEW} and len(rows) - BATCHES <= most


def test_a_sum_over_atoms_with_a_mask_takes_three_calls_of_eight_rows():
    torch.manual_seed(0)

    def run(m, x, mask):
        return (m.head(m.trunk(x).tanh()) * mask[..., None]).sum(1)

    model = Net(run, trunk=nn.Linear(4, 6), head=nn.Linear(6, 1))
    mask = (torch.rand(ROWS, 5) > 0.3).float()
    data = [(torch.randn(ROWS, 5, 4), mask, torch.randn(ROWS, 1)) for _ in range(BATCHES)]
    assert rows_of_calls(model, model.trunk, data) == [FEW] * 3 + [ROWS] * BATCHES
    keywords = [{"x": x, "mask": mask, "y": y} for x, mask, y in data]
    assert rows_of_calls(model, model.trunk, keywords) == [FEW] * 3 + [ROWS] * BATCHES


def two_inputs() -> Net:
    def run(m, a, b, scale=1.0):
        return m.head((m.trunk(a) + m.other(b)).tanh()) if scale else None

    torch.manual_seed(0)
    return Net(run, trunk=nn.Linear(4, 6), other=nn.Linear(3, 6), head=nn.Linear(6, 2))


def test_two_inputs_are_cut_alike():
    data = [[torch.randn(ROWS, n) for n in (4, 3, 2)] for _ in range(BATCHES)]
    model = two_inputs()
    assert rows_of_calls(model, model.trunk, data) == [FEW] * 2 + [ROWS] * BATCHES
    named = [{"a": a, "b": b, "scale": 1.0, "y": y} for a, b, y in data]
    assert rows_of_calls(model, model.trunk, named) == [FEW] * 2 + [ROWS] * BATCHES


def graph(atoms: int, structures: int, *, flat: bool):
    """Atoms of some structures; `flat` as tensors with one row an atom, else as an object."""
    x, owner = torch.randn(atoms, 4), torch.arange(atoms) % structures
    y = torch.randn(structures, 1)
    return (x, owner.sort().values, y) if flat else SimpleNamespace(x=x, i=owner, n=structures, y=y)


def test_a_batch_of_graphs_that_cannot_be_cut_passes_whole():
    torch.manual_seed(0)

    def run(m, batch):
        atoms = m.head(m.trunk(batch.x).tanh())
        return atoms.new_zeros(batch.n, 1).index_add(0, batch.i, atoms)

    model = Net(run, trunk=nn.Linear(4, 6), head=nn.Linear(6, 1))
    data = [graph(ROWS, 7, flat=False) for _ in range(BATCHES)]
    options = {"forward": lambda m, b: m(b), "target": lambda b: b.y}
    assert rows_of_calls(model, model.trunk, data, **options) == [ROWS] * (3 + BATCHES)
    model.run = lambda m, batch: m.head(m.trunk(batch.x).tanh())
    options["target"] = lambda b: b.x[:, :1]
    assert rows_of_calls(model, model.trunk, data, **options) == [ROWS] * (2 + BATCHES)


def test_atoms_in_tensors_are_no_samples_and_are_not_cut():
    torch.manual_seed(0)

    def run(m, x, owner):
        atoms = m.head(m.trunk(x).tanh())
        return atoms.new_zeros(int(owner.max()) + 1, 1).index_add(0, owner, atoms)

    model = Net(run, trunk=nn.Linear(4, 6), head=nn.Linear(6, 1))
    data = [graph(ROWS, 7, flat=True) for _ in range(BATCHES)]
    rows = rows_of_calls(model, model.trunk, data)
    assert rows[-BATCHES - 3 :] == [ROWS] * (3 + BATCHES)
    assert set(rows[: -BATCHES - 3]) == {FEW}


# --- what the first rows do not tell ------------------------------------------------------------


def test_layers_that_only_later_rows_of_the_first_batch_call_belong_to_the_readout():
    torch.manual_seed(0)

    def run(m, x):
        large = x[:, :1] > 2
        y = m.head(m.trunk(x).tanh())
        return torch.where(large, m.second(x), y) if bool(large.any()) else y

    model = Net(run, trunk=nn.Linear(4, 6), head=nn.Linear(6, 1), second=nn.Linear(4, 1))
    x, y = torch.randn(ROWS, 4).clamp(max=1), torch.randn(ROWS, 1)
    x[FEW + 3 :, 0] = 3
    uq = rg.LastLayerRigidity(model).fit([(x, y)])
    assert sorted(layers_of(uq)) == ["head", "second"]
    # a layer that no row of the first batch calls is refused when a later batch calls it
    data = [(x.clamp(max=1), y), (x, y)]
    refused("'second' is called here but was not", rg.LastLayerRigidity(model).fit, data)


def test_an_unused_layer_costs_no_second_search():
    model = net(unused=nn.Linear(3, 3))
    assert rows_of_calls(model, model.trunk, batches()) == [FEW] * 2 + [ROWS] * BATCHES


def test_a_tail_that_shows_in_later_rows_of_the_first_batch_alone_is_read_right():
    torch.manual_seed(0)

    def run(m, x, mixing):
        return (m.head(m.trunk(x).tanh())[:, None] @ mixing)[:, 0]

    model = Net(run, trunk=nn.Linear(4, 6), head=nn.Linear(6, 2)).double()
    x, y = (torch.randn(ROWS, n).double() for n in (4, 2))
    mixing = torch.eye(2).double().repeat(ROWS, 1, 1)
    mixing[FEW:, 0, 1] = 0.5
    uq = rg.LastLayerRigidity(model).fit([(x, mixing, y)])
    weights = tuple(model.head.parameters())

    def output(weight, bias):
        hidden = model.trunk(x).tanh()
        return ((hidden @ weight.mT + bias)[:, None] @ mixing)[:, 0]

    parts = torch.autograd.functional.jacobian(output, weights)
    rows = torch.cat([part.reshape(2 * ROWS, -1) for part in parts], dim=1)
    weighted = oracle.own_units(y).repeat(ROWS)[:, None] * rows  # each target in its own unit
    torch.testing.assert_close(uq.gram.matrix, rows.mT @ weighted)


# --- what one pass over the same rows tells -----------------------------------------------------


def test_a_model_that_is_random_is_told():
    hidden = Net(lambda m, x: m.head(nn.functional.dropout(x, 0.5)), head=nn.Linear(4, 2))
    with pytest.warns(UserWarning, match="Two passes of the model over the same inputs differ"):
        rg.LastLayerRigidity(hidden).fit(batches())


def test_samples_that_belong_together_are_not_random():
    model = Net(lambda m, x: m.head(x - x.mean(0)), head=nn.Linear(4, 2))
    rows: list[int] = []
    model.head.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        uq = rg.LastLayerRigidity(model).fit(batches())
    assert rows.count(ROWS) == BATCHES and set(rows) == {FEW, ROWS}
    model.run = lambda m, x: m.head(x - x.amax(0))  # which is noticed all the same
    refused("but its predictions are not", uq.calibrate, batches()[0])


@pytest.mark.parametrize("source", SOURCES)
def test_a_model_that_has_changed_is_told_whatever_the_source(source):
    model = net(tail=lambda y: y * factor[0])
    factor = [2.0]
    uq = rg.LastLayerRigidity(model).fit(SOURCES[source]())
    model.run = lambda m, x: 5 * m.head(m.trunk(x).tanh())
    refused("but its predictions are not", uq.calibrate, batches()[0])


def test_batches_whose_memory_is_used_again_leave_the_probes_alone(tmp_path):
    buffers = torch.empty(ROWS, 4), torch.empty(ROWS, 2)

    def reused():
        for batch in batches():
            for buffer, values in zip(buffers, batch, strict=True):
                buffer.copy_(values)
            yield buffers

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        uq = rg.LastLayerRigidity(net()).fit(reused())
    uq.calibrate(torch.randn(ROWS, 4), torch.randn(ROWS, 2), method="paper")  # no other model
    uq.save(tmp_path / "uq")
    assert batches()[0][0][:2].numpy().tobytes() in (tmp_path / "uq").read_bytes()


def test_what_a_pass_keeps_in_attributes_is_known_by_its_place_in_the_model():
    class Keeps(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.last = x
            return super().forward(x)

    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), Keeps(6, 5), nn.Linear(5, 2))
    rows: list[int] = []
    model[0].register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
    uq = rg.LastLayerRigidity(model).fit(batches())
    uq.calibrate(torch.randn(ROWS, 4), torch.randn(ROWS, 2), method="paper")
    x = torch.randn(5, 4)
    for _ in range(3):
        model(x)  # which sets the attribute anew
        rows.clear()
        uq(x)
        assert rows == [5]  # the model is not looked at again


# --- the pass itself ----------------------------------------------------------------------------


class Operations(TorchDispatchMode):
    """Counts torch operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def python_calls(function, *args) -> int:
    """How many Python functions one call of a function enters, itself included."""
    count = 0

    def seen(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(seen)
    try:
        function(*args)
    finally:
        sys.setprofile(None)
    return count


def test_a_pass_through_the_readout_adds_little_to_the_models_own():
    model, x = nn.Sequential(nn.Linear(8, 50), nn.Tanh(), nn.Linear(50, 1)), torch.randn(64, 8)
    uq = rg.LastLayerRigidity(model).fit(torch.randn(200, 8), torch.randn(200, 1))
    uq.calibrate(torch.randn(200, 8), torch.randn(200, 1), method="paper")
    uq(x)  # which learns whether the model runs without gradients
    with torch.no_grad():
        bare = python_calls(model, x)
        assert python_calls(uq, x) - bare <= MOST_CALLS
        with Operations() as own:
            model(x)
        with Operations() as read:
            uq(x)
    assert read.count <= own.count + 6  # what reads the features, the product and the scale
