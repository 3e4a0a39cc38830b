"""What trainers, compilers and quantisers hand back."""

import torch
from torch import nn

from tests.foreign.specimen import Given, specimen, thirds


def net():
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))


def pairs(dtype=torch.float64, batches=16):
    return [
        (torch.randn(8, 4, dtype=dtype), torch.randn(8, 2, dtype=dtype)) for _ in range(batches)
    ]


def first(model, batch):
    return model(batch[0])


@specimen("lightning", "LightningModule after Trainer.fit", "rg.LastLayerRigidity(model)")
def lightning():
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net()

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, _):
            return nn.functional.mse_loss(self(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    model, data = Module().double(), thirds(pairs())
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", log_every_n_steps=1, **dict.fromkeys(quiet, False)
    )
    trainer.fit(model, torch.utils.data.DataLoader(data["train"], batch_size=None))
    return Given(model, **data, readout=["net.2.weight", "net.2.bias"], output=first)


@specimen("skorch", "NeuralNetRegressor", "rg.LastLayerRigidity(model.module_)")
def skorch():
    from skorch import NeuralNetRegressor

    data = thirds(pairs())
    regressor = NeuralNetRegressor(net().double(), max_epochs=2, verbose=0)
    x, y = (torch.cat(part).numpy() for part in zip(*data["train"], strict=True))
    regressor.fit(x, y)
    return Given(
        regressor.module_,
        **data,
        readout=["2.weight", "2.bias"],
        output=first,
        extra={"model": regressor},
    )


@specimen("accelerate", "a model prepared for bf16", "rg.LastLayerRigidity(model)")
def mixed_precision():
    from accelerate import Accelerator

    net = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 1))
    model = Accelerator(mixed_precision="bf16", cpu=True).prepare(net)
    batches = [(torch.randn(16, 4), torch.randn(16, 1)) for _ in range(16)]
    names = ["2.weight", "2.bias"]
    return Given(model, **thirds(batches), readout=names, output=lambda m, b: m(b[0]))


@specimen("accelerate", "the same with units after the head", "rg.LastLayerRigidity(model)")
def mixed_precision_units():
    from accelerate import Accelerator

    class Units(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()

        def forward(self, x):
            return self.net(x).float() * 2 + 1

    model = Accelerator(mixed_precision="bf16", cpu=True).prepare(Units())
    names = ["net.2.weight", "net.2.bias"]
    return Given(model, **thirds(pairs(torch.float32)), readout=names, output=first)


@specimen("torch", "a model from torch.compile", "rg.LastLayerRigidity(model)")
def compiled():
    model = torch.compile(net().double(), backend="aot_eager")
    names = ["_orig_mod.2.weight", "_orig_mod.2.bias"]
    return Given(model, **thirds(pairs()), readout=names, output=first)


@specimen("torch", "a model compiled in place, model.compile()", "rg.LastLayerRigidity(model)")
def compiled_in_place():
    model = net().double()
    model.compile(backend="aot_eager")
    return Given(model, **thirds(pairs()), readout=["2.weight", "2.bias"], output=first)


@specimen("torch", "TorchScript", "rg.LastLayerRigidity(model, features=lambda m, x: m.trunk(x))")
def scripted():
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.head = net()[:2], nn.Linear(16, 2, bias=False)

        def forward(self, x):
            return self.head(self.trunk(x))

    model = torch.jit.script(Halves().double())
    return Given(model, **thirds(pairs()), readout=["head.weight"], output=first)


@specimen(
    "torch",
    "dynamic int8 quantisation",
    "rg.LastLayerRigidity(model, features=lambda m, x: m[:2](x))",
)
def quantised():
    model = torch.ao.quantization.quantize_dynamic(net(), {nn.Linear}, dtype=torch.qint8)
    return Given(
        model,
        **thirds(pairs(torch.float32)),
        readout=[],
        output=first,
        rows=lambda m, b: m[:2](b[0]),
    )


@specimen("torchao", "int8 weights", "rg.LastLayerRigidity(model, features=lambda m, x: m[:2](x))")
def weights_in_int8():
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = net()
    quantize_(model, Int8WeightOnlyConfig())
    return Given(
        model,
        **thirds(pairs(torch.float32)),
        readout=[],
        output=first,
        rows=lambda m, b: m[:2](b[0]),
    )
