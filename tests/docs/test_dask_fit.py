"""The example of Dask gives the fit of one process, and the page shows what it does and prints."""

import runpy
import sys
from importlib.util import find_spec

import pytest

from tests.support.cluster_scripts import (
    ROOT,
    assert_as_shown_and_as_one_process,
    lines_not_in_the_script,
    printed_by,
)


def test_the_page_shows_code_of_the_script():
    assert lines_not_in_the_script("dask_fit.py") == []


def test_without_dask_the_script_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "dask", None)
    with pytest.raises(SystemExit, match=r'needs Dask.*pip install "rigidities\[dask\]"'):
        runpy.run_path(str(ROOT / "examples" / "dask_fit.py"))


@pytest.mark.slow
@pytest.mark.skipif(find_spec("dask") is None, reason='needs Dask: pip install ".[dask]"')
def test_merged_fits_of_partitions_are_the_fit_of_one_process(tmp_path):
    printed = printed_by("dask_fit.py", tmp_path)
    assert_as_shown_and_as_one_process("dask_fit.py", printed)
