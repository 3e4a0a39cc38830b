"""Two processes with wrapped models and loaders: DDP, FSDP, Lightning, Fabric, Accelerate.

The two are started once and go through all scenes; what each leaves is looked at by the tests.
"""

import copy
import os
import shutil
import tempfile
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import rigidities as rg
from rigidities.models.plain_copy import plain_copy
from tests.support.jobs import share
from tests.support.markdown import block

pytestmark = pytest.mark.xdist_group("processes")
ROWS, SECONDS = 13, 120


def net():
    torch.manual_seed(0)
    layers = nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1)
    return nn.Sequential(*layers).double()


def rows(count=ROWS, seed=1):
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x, x.sum(1, keepdim=True) + 0.1 * x[:, :1] ** 2


def loader(data, **options):
    return DataLoader(TensorDataset(*data), 4, **options)


def steps(model, data, count=2):
    """Train a little, on rows that all processes share."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(count):
        optimizer.zero_grad()
        (model(data[0]) - data[1]).square().mean().backward()
        optimizer.step()


def compared(model, plain, train):
    """The Gram of the job, and of one process with the plain model and all rows."""
    uq = rg.LastLayerRigidity(model).fit(train)
    alone = rg.LastLayerRigidity(plain, process_group=False).fit(rows())
    found = {"gram": uq.gram.matrix, "count": uq.gram.count, "alone": alone.gram.matrix}
    gathered = uq.predict(train, gather=True).mean
    return found | {"std": uq.predict(rows()[0]).std, "gathered": gathered.flatten().sort().values}


def padded(data):
    sampler = DistributedSampler(TensorDataset(*data), shuffle=True)
    return loader(data, sampler=sampler)


def ddp(rank):
    """A model whose buffers every call would broadcast, and a process with fewer batches."""
    model = DistributedDataParallel(net())
    steps(model, rows(8))
    plain, calls = copy.deepcopy(model.module), []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    model.train()
    found = compared(plain if rank else model, plain, padded(rows()))  # either form of the model
    short = share(rows(4, seed=2), rank, 2) if rank else loader(rows(9, seed=3))
    uq = rg.LastLayerRigidity(model).fit(short)
    uq.calibrate(share(rows(40, seed=4), rank, 2), method="paper")
    if rank:
        uq(rows()[0])  # by one process alone
        uq.predict(rows()[0])
    return found | {"calls": calls, "count of uneven": uq.gram.count, "scale": uq.scale}


def synchronised(rank):
    """Batch norms that talk to each other in training."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(net())
    model.train()
    own_rows = share(rows(), rank, 2)
    return compared(model, net(), own_rows if rank else loader(own_rows))


def fsdp(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model, plain, mesh = net(), net(), init_device_mesh("cpu", (2,))
    model[3].weight.requires_grad_(False)
    model.register_forward_hook(lambda module, inputs, output: 2 * output)
    casting = MixedPrecisionPolicy(torch.float32, output_dtype=torch.float64)
    fully_shard(model[3], mesh=mesh, mp_policy=casting, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    model.eval()(rows()[0])  # which leaves weights gathered and cast
    before = plain_copy(model)
    with pytest.raises(TypeError, match="full state dict of torch"):
        rg.LastLayerRigidity(model)
    steps(model.train(), share(rows(8), rank, 2))
    after = plain_copy(model)
    local = after.eval()(rows()[0]) if rank else None  # one process alone
    found = compared(after, copy.deepcopy(after), padded(rows()))
    return found | {
        "classes": [type(module) for module in before.modules()],
        "plain classes": [type(module) for module in plain.modules()],
        "same": _same(before, plain),
        "frozen": not before[3].weight.requires_grad,
        "trained": not _same(after, plain),
        "weights": all(torch.equal(p.full_tensor(), q) for p, q in _pairs(model, after)),
        "hooked": torch.equal(before.eval()(rows()[0]), 2 * plain.eval()(rows()[0])),
        "local": local is None or len(local) == ROWS,
        "compiles": not hasattr(before, "_is_fsdp_managed_module"),
        "of the page": _same(_plain_of_the_page(model), after),
    }


def _plain_of_the_page(model):
    """What the block of docs/processes.md makes of a sharded model."""
    names = {"model": model, "Network": net}
    exec(block("processes.md", "FSDP"), names)
    return names["plain"]


def fsdp1(rank):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(net(), device_id=torch.device("cpu"))
    steps(model, share(rows(8), rank, 2))
    with pytest.raises(TypeError, match="full state dict"):
        plain_copy(model)
    with pytest.raises(TypeError, match="spread over processes"):
        rg.LastLayerRigidity(model)
    plain = _plain_of_the_page(model)
    return compared(plain, copy.deepcopy(plain), padded(rows()))


def lightning(rank):
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.nn.functional import mse_loss

    from rigidities.lightning import SUFFIX, RigidityCallback

    class Regressor(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net()

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, index):
            return mse_loss(self.net(batch[0]), batch[1])

        def validation_step(self, batch, index):
            self.log("loss", self.training_step(batch, index), sync_dist=True)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

        def on_fit_end(self):
            model = plain_copy(self)
            self.found = compared(model, model.net, self.trainer.train_dataloader)
            self.uq = rg.LastLayerRigidity(model).fit(self.trainer.train_dataloader)
            self.uq.calibrate(self.trainer.val_dataloaders, method="paper")

    quiet = {"logger": False, "enable_progress_bar": False}
    kept = ModelCheckpoint(tempfile.mkdtemp(), monitor="loss", mode="max")  # the first one's folder
    callback = RigidityCallback(every_best=True, calibrate={"method": "paper"})
    trainer = lightning.Trainer(
        strategy="ddp",
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        enable_model_summary=False,
        callbacks=[callback, kept],
        **quiet,
    )
    module = Regressor()
    trainer.fit(module, loader(rows(), shuffle=True), loader(rows(31, seed=5)))
    alone = rg.LastLayerRigidity(module.uq.model, process_group=False).fit(rows())
    alone.calibrate(rows(31, seed=5), method="paper")
    model = plain_copy(module.net)
    later = compared(model, model, trainer.train_dataloader)
    scales = module.uq.scale, alone.scale
    same = Regressor()
    same.load_state_dict(torch.load(kept.best_model_path, weights_only=True)["state_dict"])
    best = rg.LastLayerRigidity(same, process_group=False).fit(rows())
    best.calibrate(rows(31, seed=5), method="paper")
    read = rg.LastLayerRigidity.load(kept.best_model_path + SUFFIX, same)
    torch.distributed.barrier()
    shutil.rmtree(kept.dirpath, ignore_errors=True)
    bars = [uq.predict(rows()[0]).std for uq in (best, callback.uq, read)]
    return module.found | {"later": later["gram"], "scales": scales, "bars": bars}


def fabric(rank):
    import lightning

    one = lightning.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    one.launch()
    model = one.setup(net())
    train = one.setup_dataloaders(loader(rows(), shuffle=True))
    return compared(model, net(), train)


def accelerated(rank):
    from accelerate import Accelerator, DataLoaderConfiguration

    model, train = Accelerator(cpu=True).prepare(net(), loader(rows(), shuffle=True))
    assert type(model) is DistributedDataParallel
    dispatching = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True)
    )
    with pytest.raises((TypeError, RuntimeError), match="not prepared"):
        rg.LastLayerRigidity(model).fit(dispatching.prepare(loader(rows())))
    return compared(model, net(), train)


SCENES = [ddp, synchronised, fsdp1, lightning, fabric, accelerated]
if hasattr(torch.distributed.fsdp, "fully_shard"):  # since torch 2.6
    SCENES.append(fsdp)
JOINT = [scene.__name__ for scene in SCENES]


def _pairs(one, other):
    return zip(one.parameters(), other.parameters(), strict=True)


def _same(one, other):
    buffers = zip(one.buffers(), other.buffers(), strict=True)
    return all(torch.equal(a, b) for a, b in [*_pairs(one, other), *buffers])


def play(rank, folder):
    """All scenes, on one of the processes."""
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    environment |= {"GROUP_RANK": 0, "TORCHELASTIC_RUN_ID": "none", "ACCELERATE_USE_CPU": "true"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}  # unused: the group is there
    os.environ |= {name: str(value) for name, value in environment.items()}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of those packages
    place = {"init_method": f"file://{folder}/meeting", "rank": rank, "world_size": 2}
    dist.init_process_group("gloo", **place, timeout=timedelta(seconds=SECONDS))
    found = {scene.__name__: scene(rank) for scene in SCENES}
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    torch.multiprocessing.spawn(play, (folder,), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.mark.thorough
@pytest.mark.parametrize("scene", JOINT)
def test_two_processes_fit_what_one_would(found, scene):
    first, second = (one[scene] for one in found)
    assert first["count"] == second["count"] == ROWS
    assert torch.equal(first["gram"], second["gram"])
    assert torch.equal(first["std"], second["std"])
    assert torch.equal(first["gathered"], second["gathered"]) and len(first["gathered"]) == ROWS
    scale = first["alone"].abs().max()
    assert float((first["gram"] - first["alone"]).abs().max() / scale) < 1e-12


def test_a_wrapped_model_is_never_called_through_its_wrapper(found):
    for one in found:
        assert one["ddp"]["calls"] == [] and one["ddp"]["count of uneven"] == 11
    assert torch.equal(found[0]["ddp"]["scale"], found[1]["ddp"]["scale"])


@pytest.mark.skipif(fsdp not in SCENES, reason="fully_shard came with torch 2.6")
def test_a_sharded_model_is_copied_whole_and_trains_on(found):
    facts = "same", "frozen", "trained", "weights", "hooked", "local", "compiles", "of the page"
    for one in (one["fsdp"] for one in found):
        assert [name for name in facts if not one[name]] == []
        assert one["classes"] == one["plain classes"]


def test_lightning_fits_and_calibrates_in_a_hook_and_fits_after_training(found):
    assert torch.equal(found[0]["lightning"]["later"], found[0]["lightning"]["gram"])
    torch.testing.assert_close(*found[0]["lightning"]["scales"], rtol=1e-9, atol=0)


def test_the_callback_of_lightning_makes_in_two_processes_what_one_would(found):
    for one in found:
        best, *others = one["lightning"]["bars"]
        for bars in others:
            torch.testing.assert_close(bars, best, rtol=1e-8, atol=0)
