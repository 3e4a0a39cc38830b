"""The example of Ray gives the fit of one process, and the page shows what it does and prints."""

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
    assert lines_not_in_the_script("ray_fit.py") == []


def test_without_ray_the_script_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SystemExit, match=r'needs Ray.*pip install "rigidities\[ray\]"'):
        runpy.run_path(str(ROOT / "examples" / "ray_fit.py"))


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason='needs Ray: pip install ".[ray]"')
def test_workers_and_merged_tasks_give_the_fit_of_one_process(tmp_path):
    printed = printed_by("ray_fit.py", tmp_path)
    assert_as_shown_and_as_one_process("ray_fit.py", printed)
