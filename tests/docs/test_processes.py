"""The example of several processes, started as its first lines say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "processes.py"


@pytest.mark.thorough
def test_two_processes_of_torchrun_use_every_row_once_and_write_one_file(tmp_path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launch, str(EXAMPLE), str(tmp_path / "uq.safetensors")]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "4001 rows in the fit, 1001 in the calibration"
    inside = int(re.search(r"cover (\d+)% of 1001 test rows", second)[1])
    assert 84 <= inside <= 95
    assert (tmp_path / "uq.safetensors").is_file()
