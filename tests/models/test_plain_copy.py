"""A plain copy of a model outside a job; inside one: `last_layer/test_wrapped_jobs.py`."""

import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from rigidities.models.plain_copy import plain_copy


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
