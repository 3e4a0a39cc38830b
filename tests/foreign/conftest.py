"""What some libraries ask of the torch beside them, before any of them is imported."""

import importlib.util
import logging
import os
from pathlib import Path

import pytest
import torch
import torch.utils.data.dataloader as dataloader

from tests.foreign import zoo
from tests.foreign.table import Row, write

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", MPLBACKEND="Agg")
logging.disable(logging.WARNING)

torch.serialization.add_safe_globals([slice])  # e3nn 0.4.4 keeps slices in a file
if not hasattr(dataloader, "T_co"):  # by which schnetpack 2.1.1 knows a private name
    dataloader.T_co = dataloader._T_co


def _torchvision_without_operators() -> object:
    """Wheels of torchvision made for CUDA do not load beside a CPU build of torch.

    Without their operators, which no classifier uses, not even the import works.
    """
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return None
    try:
        torch.ops.load_library(str(Path(found.origin).parent / "_C.so"))
    except OSError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return library
    return None


KEPT = _torchvision_without_operators()


@pytest.fixture(autouse=True)
def plain_torch(tmp_path, monkeypatch):
    """Builders may set the default precision and the seed, and leave files behind."""
    monkeypatch.chdir(tmp_path)
    before = torch.get_default_dtype()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield
    torch.set_default_dtype(before)


@pytest.fixture(scope="session")
def table():
    """Rows of specimens that passed; a run in which all did writes them into the page."""
    rows: list[Row] = []
    yield rows
    if len(rows) == len(zoo.SPECIMENS):
        write(rows)
