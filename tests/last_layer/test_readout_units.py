"""Units inside the rooms `last_layer.readout` and `models` that no public name shows.

Everything else about readouts is said by public names in the other files. Whoever rewrites these
rooms may replace what stands here.
"""

from dataclasses import replace

import pytest
import torch
from rigidities.last_layer.readout import layers
from torch import nn

import rigidities as rg
from rigidities.data.feed import Feed
from rigidities.data.output_layout import OutputLayout
from rigidities.last_layer.ensemble.members import Members
from tests.support.nets import Net, fitted, trained
from tests.support.readouts import features_of, fitted_on
from tests.support.refusals import refused


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_model_too_large_to_be_copied_in_float64_is_judged_as_it_is(dtype, monkeypatch):
    monkeypatch.setattr("rigidities.models.double.LARGEST_COPY", 0)
    torch.manual_seed(0)
    x = torch.randn(8, 5).to(dtype)
    neighbours = 0.9 * torch.eye(3) + 0.05 * (torch.ones(2).diag(1) + torch.ones(2).diag(-1))
    widths = []
    for mixing in (neighbours, 2 * torch.eye(3)):
        model = Net(lambda m, x: m.head(x) @ m.mixing, head=nn.Linear(5, 3), mixing=mixing)
        widths.append(features_of(fitted_on(model.to(dtype), x), x).shape[-1])
    # Float32 tells that one row of features serves all targets; else every weight has a column.
    assert widths == ([18, 6] if dtype == torch.float32 else [18, 18])


def test_batches_in_different_orders_are_not_joined():
    output, flipped = torch.randn(6, 3), torch.tensor([2, 1, 0])
    half = torch.Size((3, 3))
    layout = OutputLayout(half, half, order=flipped)
    remedy = ". Predict batch by batch."
    same = replace(layout, order=layout.order.clone())  # as from another process
    joined = OutputLayout.join([layout, same], output, remedy)
    assert torch.equal(joined.rows(output), output.flip(-1))
    other = replace(layout, order=layout.order.flip(0))
    refused("different orders.*batch by batch", OutputLayout.join, [layout, other], output, remedy)


def test_an_ensemble_for_a_model_with_other_targets_is_refused():
    net, other = trained(), fitted(trained(targets=3))
    deviations = fitted(net).ensemble(4).deviations
    binding = other._fit.require_state().binding
    ens = rg.last_layer.Ensemble(binding, Feed(other.model), Members(deviations))
    refused(r"gives 3 targets with 25 features here.*has 1 with 25", ens, net.test[0])


# --- layers that novelty watches ----------------------------------------------------------------


def test_parts_projected_by_other_seeds_are_no_one_fit(monkeypatch):
    model = nn.Sequential(nn.Linear(300, 4), nn.Tanh(), nn.Linear(4, 1))
    x, y = torch.randn(200, 300), torch.randn(200, 1)
    first = rg.LastLayerRigidity(model).fit(x[:100], y[:100], novelty=True)
    monkeypatch.setattr(layers, "SEED", 5)
    monkeypatch.setattr(layers.Layer.__init__, "__defaults__", (5, False))
    second = rg.LastLayerRigidity(model).fit(x[100:], y[100:], novelty=True)
    refused("seed", first.merge, second)


def test_wide_rows_are_projected_the_same_way_everywhere():
    """The order and the signs come from whole numbers: these are pinned."""
    order, signs = layers._deal(1000, layers.SEED)
    assert sorted(order.tolist()) == list(range(1000))
    assert order[:6].tolist() == [898, 285, 625, 910, 38, 617]
    assert signs[:6].tolist() == [1, 1, -1, 1, 1, 1]
    x = torch.randn(500, 1000, dtype=torch.float64)
    rows = layers._projected(x, layers.Layer("x", "", 0, 1000))
    assert rows.shape == (500, layers.WIDEST)
    # lengths are kept on average
    ratio = rows.square().sum(1) / x.square().sum(1)
    assert abs(float(ratio.mean()) - 1) < 0.02
    by_hand = torch.zeros(500, layers.WIDEST, dtype=torch.float64)
    for place, column in enumerate(order.tolist()):
        by_hand[:, place % layers.WIDEST] += signs[place] * x[:, column]
    torch.testing.assert_close(rows, by_hand)
