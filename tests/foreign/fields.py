"""Neural operators: fields in, fields out."""

import torch

from tests.foreign.specimen import Given, specimen, thirds


@specimen("neuraloperator", "FNO, two fields on a grid", "rg.LastLayerRigidity(model)")
def fno():
    from neuralop.models import FNO

    model = FNO(n_modes=(4, 4), in_channels=1, out_channels=2, hidden_channels=8, n_layers=2)
    for weight in model.parameters():
        weight.data = weight.data.to(torch.complex128 if weight.is_complex() else torch.float64)
    batches = [
        {
            "x": torch.randn(3, 1, 8, 8, dtype=torch.float64),
            "y": torch.randn(3, 2, 8, 8, dtype=torch.float64),
        }
        for _ in range(8)
    ]
    return Given(
        model,
        **thirds(batches),
        readout=["projection.fcs.1.weight", "projection.fcs.1.bias"],
        output=lambda m, b: m(b["x"]),
        targets=-3,
    )
