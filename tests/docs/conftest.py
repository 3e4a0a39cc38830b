import pytest
import torch


@pytest.fixture
def plain_torch():
    """Pages and examples may set the default precision and the seed."""
    before = torch.get_default_dtype()
    with torch.random.fork_rng():
        yield
    torch.set_default_dtype(before)
