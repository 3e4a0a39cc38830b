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


class Molecule(nn.Module):
    """An energy, which is a sum over atoms, and a gap, which is a mean; each by its own head."""

    def __init__(self, names: tuple[str, str]) -> None:
        super().__init__()
        self.names = names
        self.body = nn.Linear(3, 12)
        self.energy = nn.Linear(12, 1)
        self.gap = nn.Linear(12, 1)
        self.double().requires_grad_(requires_grad=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x)) * mask[..., None]
        energy = (self.energy(hidden) * mask[..., None]).sum(1)
        gap = self.gap(hidden.sum(1) / mask.sum(1, keepdim=True))
        by_name = {"energy": energy, "gap": gap}
        return torch.cat([by_name[name] for name in self.names], 1)


def molecules(model: Molecule, rows: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Structures of two to six atoms; the energies have five units per atom."""
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 6, 3, generator=made, dtype=torch.float64)
    counts = torch.randint(2, 7, (rows,), generator=made)
    mask = (torch.arange(6) < counts[:, None]).double()
    noise = 0.1 * torch.randn(rows, 2, generator=made, dtype=torch.float64)
    energy = model.names.index("energy")
    y = model(x, mask) + (noise if energy == 0 else noise.flip(1))
    y[:, energy] += 5 * counts
    return x, mask, y


def test_of_a_sum_and_a_mean_only_the_sum_counts_per_atom_in_any_order():
    bars = []
    for names in (("energy", "gap"), ("gap", "energy")):
        torch.manual_seed(0)
        model = Molecule(names)
        uq = rg.LastLayerRigidity(model).fit(molecules(model, 400, 1))
        uq.calibrate(molecules(model, 200, 2))
        forecast = uq.calibration_report.calibration.head.forecast
        energy, gap = names.index("energy"), names.index("gap")
        assert bool(forecast.extent_weight[energy].any())
        assert not bool(forecast.extent_weight[gap].any())
        x, mask, _ = molecules(model, 100, 3)
        std = uq.predict((x, mask)).std
        bars.append(std[:, [energy, gap]])
        torch.testing.assert_close(uq.freeze()(x, mask)[1], std)
    torch.testing.assert_close(bars[0], bars[1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_readout_that_sums_is_noticed_where_a_target_is_known_for_one_size_only(order):
    torch.manual_seed(6)
    model = Signs(2)

    def given(rows: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        x, mask, y = noisy(rows, seed, model)
        y[mask.sum(1) != 4, order[0]] = math.nan
        return x, mask, y

    def loss(output: Tensor, target: Tensor) -> Tensor:
        known = target.isfinite()
        return torch.where(known, output - target.nan_to_num(), 0.0).square().sum(-1) / 2

    uq = rg.LastLayerRigidity(model).fit(given(600, 1), loss=loss).calibrate(given(400, 2))
    assert uq.calibration_report.calibration.head.forecast.extent_weight is not None
