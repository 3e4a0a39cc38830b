"""One rank of a job of torchrun in which the second rank fails: torchrun_job.py FOLDER SCENES.

What a rank raises in each scene is written to a file of its own. After the last scene, in which the
second rank may be killed, the error ends the process.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import rigidities as rg


def batches(rank, scene, folder):
    """The rows of a rank; the second one does not come to its end."""
    generator = torch.Generator().manual_seed(rank)
    for number in range(4):
        x = torch.randn(16, 3, generator=generator)
        yield x, x.sum(1, keepdim=True)
        if rank == 1 and number == 1:
            (folder / f"failing {scene}").touch()
            _fail(scene)
        if rank != 1 and scene == "killed while others read":
            while not (folder / f"failing {scene}").exists():
                time.sleep(0.01)
            time.sleep(0.2)


def _fail(scene):
    if scene.startswith("killed"):
        time.sleep(1 if "wait" in scene else 0)
        os.kill(os.getpid(), signal.SIGKILL)
    if scene == "raises":
        raise OSError("the file is gone")
    if scene == "interrupted":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)


def fit(scene, rank, folder):
    """One fit of all ranks; the error of this one, if any, which it also writes down."""
    torch.manual_seed(rank if scene == "other weights" else 0)
    uq = rg.LastLayerRigidity(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)))
    mixed = scene == "other options" and rank == 1
    try:
        uq.fit(batches(rank, scene, folder), precision="mixed" if mixed else "double")
    except BaseException as error:
        (folder / f"{scene} {rank}").write_text(str(error))
        return error
    return None


def main(folder, scenes):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, when the first rank has ended
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    errors = [fit(scene, dist.get_rank(), folder) for scene in scenes]
    if errors[-1] is not None:
        raise errors[-1]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
