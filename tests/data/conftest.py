"""A small trained net, with error bars of the paper's form."""

from typing import Any

import pytest

import rigidities as rg
from tests.support.nets import Trained, trained


@pytest.fixture(scope="module")
def net() -> Trained:
    return trained(steps=20)


@pytest.fixture(scope="module")
def uq(net: Trained) -> Any:
    uq = rg.LastLayerRigidity(net.model).fit(net.train)
    uq.calibrate(net.valid, method=rg.Paper(ridge=0.1))
    return uq
