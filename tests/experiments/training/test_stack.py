"""Many nets trained at once are trained as each would be alone, by torch's own parts."""

import pytest
import torch
from experiments.training.adam import Adam
from experiments.training.descent import Trained, descended, trained
from experiments.training.objectives import mean_squares, squared_error
from experiments.training.plateau import Plateau
from experiments.training.protocol import Protocol, device
from experiments.training.stack import ACTIVATIONS, Stack
from torch import Tensor, nn

from tests.support.tensors import normal

CASES = {
    "relu": ((3, 5, 1), "relu", True),
    "silu": ((3, 5, 1), "silu", True),
    "two outputs": ((3, 5, 2), "relu", True),
    "two layers": ((3, 5, 4, 1), "silu", True),
    "no last bias": ((3, 5, 4, 1), "relu", False),
    "one input": ((1, 4, 2), "silu", False),
}
NETS, ROWS = 4, 7


def stack_of(case: str, dtype: torch.dtype = torch.float64) -> Stack:
    sizes, activation, last_bias = CASES[case]
    drawn = Stack.drawn(range(NETS), sizes, activation, last_bias=last_bias)
    return Stack(drawn.flat.to(dtype), sizes, activation, last_bias)


def output_of(stack: Stack, flat: Tensor, x: Tensor, masks: list[Tensor] | None) -> Tensor:
    """The nets one by one, with slices of their own of the flat weights."""
    phi = {"relu": torch.relu, "silu": nn.functional.silu}[stack.activation]
    outputs = []
    for net in range(len(flat)):
        hidden, start = x[net], 0
        for layer in range(len(stack.sizes) - 1):
            fan_in, fan_out = stack.sizes[layer : layer + 2]
            last = layer == len(stack.sizes) - 2
            if masks is not None:
                hidden = hidden * masks[layer][net]
            weight = flat[net, start : start + fan_in * fan_out].reshape(fan_in, fan_out)
            start += fan_in * fan_out
            hidden = hidden @ weight
            if not last or stack.last_bias:
                hidden = hidden + flat[net, start : start + fan_out]
                start += fan_out
            hidden = hidden if last else phi(hidden)
        assert start <= flat.shape[1]
        outputs.append(hidden)
    return torch.stack(outputs)


@pytest.mark.parametrize("dropping", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("case", CASES)
def test_both_passes_of_a_stack_are_those_of_autograd(case: str, dropping: bool) -> None:
    stack = stack_of(case)
    x, slope = normal(NETS, ROWS, stack.sizes[0]), normal(NETS, ROWS, stack.sizes[-1], seed=1)
    masks = None
    if dropping:
        masks = [1.25 * (normal(NETS, ROWS, w, seed=w) > -0.8).double() for w in stack.sizes[:-1]]
    flat, inputs = stack.flat.clone().requires_grad_(), x.clone().requires_grad_()
    expected = output_of(stack, flat, inputs, masks)
    (expected * slope).sum().backward()
    trace = stack.forward(x, masks)
    torch.testing.assert_close(trace.output, expected.detach())
    found = stack.backward(trace, slope, inputs=True)
    torch.testing.assert_close(found, inputs.grad)
    torch.testing.assert_close(stack.gradient, flat.grad)
    with_inputs = stack.gradient.clone()
    assert stack.backward(stack.forward(x, masks), slope) is None
    assert torch.equal(stack.gradient, with_inputs)


@pytest.mark.parametrize("case", CASES)
def test_a_net_taken_out_of_the_stack_is_the_same(case: str) -> None:
    stack = stack_of(case, torch.float32)
    x = normal(NETS, ROWS, stack.sizes[0]).float()
    picked = stack.picked([2, 0])
    torch.testing.assert_close(picked(x[[2, 0]]), stack(x)[[2, 0]])
    for net in range(NETS):
        module = stack.module(net)
        with torch.no_grad():
            torch.testing.assert_close(module(x[net]), stack(x)[net])
            features = module[:-1](x[net])
        found = stack.features(x)[net]
        torch.testing.assert_close(found[:, : features.shape[1]], features)
        assert found.shape[1] == features.shape[1] + stack.last_bias
        assert not stack.last_bias or bool((found[:, -1] == 1).all())
    picked.flat.zero_()
    assert bool((stack.flat != 0).any(1).all())


def test_first_weights_are_those_of_torch_in_distribution_and_of_the_seed_alone() -> None:
    alone = Stack.drawn([7], (9, 50, 1))
    together = Stack.drawn([3, 7], (9, 50, 1))
    assert torch.equal(alone.flat[0], together.flat[1])
    assert not torch.equal(together.flat[0], together.flat[1])
    many = Stack.drawn(range(200), (9, 50, 1))
    for part, fan_in in ((many.weights[0], 9), (many.biases[1], 50)):
        assert part is not None and float(part.abs().max()) <= fan_in**-0.5
        assert float(part.var()) == pytest.approx(1 / (3 * fan_in), rel=0.1)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adam_is_that_of_torch_with_a_rate_for_each_net(decay: float) -> None:
    weights = normal(3, 6)
    own = [weights[net].clone().requires_grad_() for net in range(3)]
    rates = (1e-2, 3e-3, 0.0)
    theirs = [
        torch.optim.AdamW([w], lr=rate, weight_decay=decay)
        for w, rate in zip(own, rates, strict=True)
    ]
    ours = Adam(weights, 1.0, decay)
    ours.rate.copy_(torch.tensor(rates, dtype=torch.float64)[:, None])
    for step in range(30):
        gradient = normal(3, 6, seed=step) * 10.0 ** (-step / 4)
        ours.step(gradient)
        for net, optimiser in enumerate(theirs):
            own[net].grad = gradient[net].clone()
            optimiser.step()
    for net in range(3):
        torch.testing.assert_close(weights[net], own[net].detach(), rtol=1e-9, atol=1e-12)


def test_the_plateau_cuts_rates_when_torch_does_and_keeps_the_best_weights() -> None:
    """A curve that falls, waits, falls by too little to count, rises, falls and waits again."""
    protocol = Protocol(patience=3, cut=0.1, smallest=1e-5)
    curve = [5, 4, 3, 3.5, 3.2, 2.9999, 2.9998, 2.9997, 3.1, 2, 2.1, 2.2, 2.3, 2.4, 2.5]
    curve += [1.0] + [1.5] * 9
    curves = torch.tensor([curve, curve[::-1]], dtype=torch.float64)
    weights, rate = torch.zeros(2, 1, dtype=torch.float64), torch.full((2, 1), 1e-3).double()
    plateau = Plateau(weights, rate, protocol)
    dummies = [torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1e-3) for _ in range(2)]
    theirs = [
        torch.optim.lr_scheduler.ReduceLROnPlateau(d, factor=0.1, patience=3, min_lr=1e-5)
        for d in dummies
    ]
    seen = set()
    for epoch in range(curves.shape[1]):
        weights.fill_(epoch + 1)
        plateau.update(curves[:, epoch])
        for net, scheduler in enumerate(theirs):
            scheduler.step(float(curves[net, epoch]))
            assert float(rate[net]) == pytest.approx(dummies[net].param_groups[0]["lr"], rel=1e-6)
            seen.add(round(float(rate[net]), 9))
    assert seen == {1e-3, 1e-4, 1e-5}
    first = [float(row.argmin()) + 1 for row in curves]
    assert plateau.epoch.tolist() == plateau.weights[:, 0].tolist() == first
    assert plateau.loss.tolist() == curves.amin(1).tolist()


def rows_of(nets: int, rows: int, seed: int, targets: int = 1) -> tuple[Tensor, Tensor]:
    x = normal(nets, rows, 3, seed=seed).float()
    noise = 0.3 * normal(nets, rows, targets, seed=seed + 50).float()
    return x, torch.sin(x[..., :1]) * x[..., 1:2] + noise


def alone(
    stack: Stack,
    net: int,
    train: tuple[Tensor, Tensor],
    valid: tuple[Tensor, Tensor],
    protocol: Protocol,
    seed: int,
) -> tuple[nn.Module, list[float]]:
    """One net in an ordinary loop of torch's parts, in the same order of batches."""
    module = stack.module(net).train()
    optimiser = torch.optim.AdamW(
        module.parameters(), lr=protocol.rate, weight_decay=protocol.decay
    )
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimiser, factor=protocol.cut, patience=protocol.patience, min_lr=protocol.smallest
    )
    generator = torch.Generator().manual_seed(seed)
    losses, best = [], {}
    for _ in range(protocol.epochs):
        order = torch.randperm(len(train[0]), generator=generator)
        for batch in order.split(protocol.batch):
            optimiser.zero_grad()
            nn.functional.mse_loss(module(train[0][batch]), train[1][batch]).backward()
            optimiser.step()
        with torch.no_grad():
            losses.append(float(nn.functional.mse_loss(module(valid[0]), valid[1])))
        scheduler.step(losses[-1])
        if losses[-1] == min(losses):
            best = {key: value.clone() for key, value in module.state_dict().items()}
    module.load_state_dict(best)
    return module, losses


def run(protocol: Protocol, seeds: list[int], places: list[int]) -> Trained:
    train, valid = rows_of(3, 50, 1), rows_of(3, 30, 2)
    train, valid = ((x[places], y[places]) for x, y in (train, valid))
    return trained(train, valid, protocol, seeds)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_net_in_a_stack_ends_where_an_ordinary_loop_ends(activation: str) -> None:
    # 50 rows in batches of 16: the last one has two rows, and counts as a batch of its own.
    protocol = Protocol((6,), activation, epochs=25, batch=16, rate=1e-2, decay=0.01, patience=2)
    result = run(protocol, [4, 5, 6], [0, 1, 2])
    start = Stack.drawn([4, 5, 6], (3, 6, 1), activation)
    train, valid = rows_of(3, 50, 1), rows_of(3, 30, 2)
    for net in range(3):
        own = [tuple(part[net] for part in rows) for rows in (train, valid)]
        module, losses = alone(start, net, *own, protocol, 4 + net)
        with torch.no_grad():
            torch.testing.assert_close(
                result.best.module(net)(valid[0][net]), module(valid[0][net]), rtol=1e-3, atol=1e-4
            )
        assert int(result.epoch[net]) == min(range(25), key=losses.__getitem__) + 1


def test_a_net_does_not_depend_on_its_companions() -> None:
    protocol = Protocol((6,), epochs=5, batch=16, rate=1e-2)
    together = run(protocol, [4, 5, 6], [0, 1, 2])
    by_itself = run(protocol, [6], [2])
    torch.testing.assert_close(together.best.flat[2], by_itself.best.flat[0])
    torch.testing.assert_close(together.last.flat[2], by_itself.last.flat[0])
    other = run(protocol, [7], [2])
    assert not torch.allclose(other.best.flat[0], by_itself.best.flat[0])


def test_training_lowers_the_loss_and_the_best_is_no_worse_than_the_last() -> None:
    protocol = Protocol((20,), epochs=60, batch=16, rate=1e-2)
    valid = rows_of(3, 30, 2)
    start = Stack.drawn([4, 5, 6], (3, 20, 1))
    result = run(protocol, [4, 5, 6], [0, 1, 2])
    best, last = (mean_squares(nets, *valid) for nets in (result.best, result.last))
    assert bool((best < 0.8 * mean_squares(start, *valid)).all())
    assert bool((best <= last).all()) and bool((best < last).any())


def test_without_validation_rows_the_last_weights_stand() -> None:
    train = rows_of(2, 40, 3)
    stack = Stack.drawn([0, 1], (3, 6, 1))
    result = descended(stack, train, None, Protocol((6,), epochs=3), [0, 1])
    assert result.best is result.last is stack
    assert result.epoch.tolist() == [3, 3]


def test_the_objective_is_the_gradient_of_the_loss() -> None:
    stack = stack_of("two outputs")
    x, y = normal(NETS, ROWS, 3), normal(NETS, ROWS, 2, seed=1)
    squared_error(stack, x, y)
    flat = stack.flat.clone().requires_grad_()
    loss = (output_of(stack, flat, x, None) - y).square().mean((1, 2))
    loss.sum().backward()
    torch.testing.assert_close(stack.gradient, flat.grad)
    torch.testing.assert_close(mean_squares(stack, x, y), loss.detach())


def test_the_environment_says_where_nets_train(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RIGIDITIES_DEVICE", raising=False)
    assert device() == torch.device("cpu")
    monkeypatch.setenv("RIGIDITIES_DEVICE", "cuda:1")
    assert device() == torch.device("cuda", 1)
