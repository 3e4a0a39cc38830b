"""Units inside the rooms `last_layer.readout` and `models` that no public name shows.

Everything else about readouts is said by public names in the other files. Whoever rewrites these
rooms may replace what stands here.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

from rigidities.data.output_layout import OutputLayout
from tests.support.nets import Net
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
