import numpy as np
import pytest

from tests.support.clusters import cluster, fitted


@pytest.fixture(scope="module")
def one():
    return fitted(2)


@pytest.fixture
def atoms():
    structure = cluster(np.random.default_rng(7))
    structure.numbers, structure.calc = [29, 79, 29, 79], None
    return structure
