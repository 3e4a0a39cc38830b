"""The default bars follow the number of terms of a sum, where heads without a bias hide it."""

import math

import pytest
import torch
from torch import Tensor, nn

import rigidities as rg


class Signs(nn.Module):
    """Sums of features that do not tell how many there are; a mask leaves some out."""

    def __init__(self, targets: int = 1, units: tuple[float, ...] = (1.0,)) -> None:
        super().__init__()
        self.head = nn.Linear(4, targets, bias=False)
        self.units = torch.tensor(units).double()
        self.double()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return (self.head(x) * mask[..., None]).sum(1) * self.units


def noisy(rows: int, seed: int, model: Signs) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of 1 to 12 terms whose noise grows with their number."""
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 12, 4, generator=made, dtype=torch.float64)
    counts = torch.randint(1, 13, (rows,), generator=made)
    mask = (torch.arange(12) < counts[:, None]).double()
    mean = model(x, mask).detach()
    noise = torch.randn(mean.shape, generator=made, dtype=torch.float64)
    return x, mask, mean + (0.25 * counts[:, None]).exp() * noise * model.units


@pytest.mark.parametrize(
    "made",
    [Signs, lambda: Signs(2), lambda: Signs(2, (1.0, 50.0))],
    ids=["one target", "two targets", "targets in units of their own"],
)
def test_the_default_bars_follow_the_counts(made):
    torch.manual_seed(6)
    model = made()
    uq = rg.LastLayerRigidity(model).fit(noisy(2000, 1, model))
    uq.calibrate(noisy(1000, 2, model))
    x, mask, _ = noisy(500, 3, model)
    p, counts = uq.predict((x, mask)), mask.sum(1)
    for few, many in ((2, 6), (5, 12)):
        ratio = p.std[counts == many].mean(0) / p.std[counts == few].mean(0)
        expected = torch.full_like(ratio, math.exp(0.25 * (many - few)))
        # Bars that do not follow the counts would have ratios of 1.7 and 1.5 for 2.7 and 5.8.
        torch.testing.assert_close(ratio, expected, rtol=0.3, atol=0)


def test_a_mask_that_the_first_batch_does_not_show_does_no_harm():
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 1, bias=False)
            self.double()

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.head(x) * mask

    torch.manual_seed(7)
    x, y = torch.randn(4, 200, 4).double(), torch.randn(4, 200, 1).double()
    masks = [torch.ones(200, 1).double(), *(torch.rand(3, 200, 1).double() + 0.5)]
    train, valid = [(x[0], masks[0], y[0]), (x[1], masks[1], y[1])], (x[2], masks[2], y[2])
    uq = rg.LastLayerRigidity(Masked()).fit(train)
    uq.calibrate([valid])
    assert bool(uq.predict([(x[3], masks[3])]).std.isfinite().all())
