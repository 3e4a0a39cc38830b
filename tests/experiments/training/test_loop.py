"""The ordinary training loop against one written by hand."""

import copy
import math

import pytest
import torch
from experiments.training.protocol import Protocol
from torch import Tensor, nn

from experiments.training import loop

PROTOCOL = Protocol(epochs=12, batch=16, rate=0.05, decay=0.1, patience=1, cut=0.5, smallest=2e-3)


class Pair(nn.Module):
    """Two inputs: numbers and a category."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.kinds = nn.Embedding(3, 2)
        self.hidden = nn.Linear(4, 8)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        hidden = torch.tanh(self.hidden(torch.cat([x, self.kinds(kind)], dim=-1)))
        return self.head(self.dropout(hidden))


def net(seed: int = 0, dropout: float = 0.0) -> Pair:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Pair(dropout).double()


def rows(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 2, generator=generator, dtype=torch.float64)
    kind = torch.randint(3, (count,), generator=generator)
    noise = torch.randn(count, 1, generator=generator, dtype=torch.float64)
    return x, kind, torch.sin(2 * x[:, :1]) * kind[:, None] + 0.5 * noise


TRAIN, VALID = rows(70, 1), rows(30, 2)


def by_hand(model: nn.Module, protocol: Protocol, seed: int) -> tuple[dict, int, list[float]]:
    """AdamW, plateau and choice of weights written out; the best weights, epoch, all losses."""
    generator = torch.Generator().manual_seed(seed)
    weights = list(model.parameters())
    first = [torch.zeros_like(w) for w in weights]
    second = [torch.zeros_like(w) for w in weights]
    rate, step, waited, reference = protocol.rate, 0, 0, math.inf
    losses: list[float] = []
    best: dict = {}
    for _ in range(protocol.epochs):
        order = torch.randperm(len(TRAIN[0]), generator=generator)
        for start in range(0, len(order), protocol.batch):
            some = order[start : start + protocol.batch]
            error = model(TRAIN[0][some], TRAIN[1][some]) - TRAIN[2][some]
            gradients = torch.autograd.grad(error.square().mean(), weights)
            step += 1
            with torch.no_grad():
                for w, m, v, g in zip(weights, first, second, gradients, strict=True):
                    m.copy_(0.9 * m + 0.1 * g)
                    v.copy_(0.999 * v + 0.001 * g * g)
                    w.mul_(1 - rate * protocol.decay)
                    unbiased = m / (1 - 0.9**step), v / (1 - 0.999**step)
                    w.sub_(rate * unbiased[0] / (unbiased[1].sqrt() + 1e-8))
        with torch.no_grad():
            losses.append(float((model(*VALID[:2]) - VALID[2]).square().mean()))
        if losses[-1] == min(losses):
            best = copy.deepcopy(model.state_dict())
        if losses[-1] < reference * (1 - 1e-4):
            reference, waited = losses[-1], 0
        else:
            waited += 1
        if waited > protocol.patience:
            rate, waited = max(rate * protocol.cut, protocol.smallest), 0
    return best, 1 + losses.index(min(losses)), losses


def test_the_loop_equals_one_written_by_hand() -> None:
    def telling(seed: int) -> bool:  # best weights from last, a cut rate from a constant
        constant = Protocol(**{**vars(PROTOCOL), "patience": 100})
        _, epoch, losses = by_hand(net(), PROTOCOL, seed)
        return 1 < epoch < PROTOCOL.epochs and by_hand(net(), constant, seed)[2] != losses

    seed = next(filter(telling, range(3, 30)))
    found = loop.fitted(net(), TRAIN, VALID, PROTOCOL, seed=seed)
    best, epoch, losses = by_hand(net(), PROTOCOL, seed)
    assert found.epoch == epoch
    assert found.loss == pytest.approx(min(losses), rel=1e-9)
    for name, value in found.net.state_dict().items():
        torch.testing.assert_close(value, best[name], rtol=1e-7, atol=1e-9)


def test_the_weights_returned_have_the_loss_returned_and_draw_nothing() -> None:
    found = loop.fitted(net(dropout=0.3), TRAIN, VALID, PROTOCOL, seed=0)
    assert not found.net.training
    assert loop.mean_loss(found.net, VALID) == pytest.approx(found.loss, rel=1e-12)


def test_a_training_depends_on_its_seed_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one = loop.fitted(net(dropout=0.3), TRAIN, VALID, PROTOCOL, seed=1)
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(7)
    again, other = (loop.fitted(net(dropout=0.3), TRAIN, VALID, PROTOCOL, seed=s) for s in (1, 2))
    assert one.loss == again.loss != other.loss
    assert torch.equal(one.net.head.weight, again.net.head.weight)
    assert not torch.equal(one.net.head.weight, other.net.head.weight)


def test_another_loss_is_minimised_and_followed() -> None:
    def to_seven(model: nn.Module, inputs: list[Tensor], target: Tensor) -> Tensor:
        return (model(*inputs) - 7).square().mean()

    protocol = Protocol(epochs=60, batch=16, rate=0.05)
    found = loop.fitted(net(), TRAIN, VALID, protocol, seed=0, loss=to_seven)
    assert found.loss < 0.05
    assert float(found.net(*VALID[:2]).mean().detach()) == pytest.approx(7, abs=0.1)


def test_the_mean_loss_does_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    whole = float((model(*VALID[:2]) - VALID[2]).square().mean().detach())
    monkeypatch.setattr(loop, "CHUNK", 7)
    assert loop.mean_loss(model, VALID) == pytest.approx(whole, rel=1e-12)


def test_an_epoch_sees_every_row_once_with_its_own_target() -> None:
    order = torch.Generator().manual_seed(0)
    inputs, kind, target = (
        torch.cat(parts)
        for parts in zip(*loop.batches(loop.shuffled(TRAIN, order), 16), strict=True)
    )
    assert not torch.equal(target, TRAIN[2])
    places = [int((TRAIN[2] == value).nonzero()[0, 0]) for value in target]
    assert sorted(places) == list(range(70))
    assert torch.equal(inputs, TRAIN[0][places]) and torch.equal(kind, TRAIN[1][places])
