"""Images: classifiers with a regression head, and maps of pixels."""

import torch

from tests.foreign.specimen import Given, specimen, thirds


def pictures(size=32, outputs=1, batches=16, rows=4):
    return [
        (
            torch.randn(rows, 3, size, size, dtype=torch.float64),
            torch.randn(rows, outputs, dtype=torch.float64),
        )
        for _ in range(batches)
    ]


def first(model, batch):
    return model(batch[0])


@specimen("timm", "ViT", "rg.LastLayerRigidity(model)")
def vision_transformer():
    import timm

    shape = {"img_size": 32, "patch_size": 16, "embed_dim": 24, "depth": 2, "num_heads": 2}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=2, **shape).double()
    names = ["head.weight", "head.bias"]
    return Given(model, **thirds(pictures(outputs=2)), readout=names, output=first)


@specimen("timm", "ConvNeXt", "rg.LastLayerRigidity(model)")
def convnext():
    import timm

    shape = {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 24)}
    model = timm.create_model("convnext_atto", num_classes=1, **shape).double()
    names = ["head.fc.weight", "head.fc.bias"]
    return Given(model, **thirds(pictures()), readout=names, output=first)


@specimen("torchvision", "ResNet-18", "rg.LastLayerRigidity(model)")
def resnet():
    from torchvision.models import resnet18

    model = resnet18(num_classes=1).double()
    model.fc = torch.nn.Linear(512, 1).double()
    names = ["fc.weight", "fc.bias"]
    return Given(model, **thirds(pictures(batches=12)), readout=names, output=first)


@specimen(
    "torchvision",
    "LR-ASPP, a value for each pixel",
    'rg.LastLayerRigidity(model, output="out")',
)
def pixels():
    from torchvision.models.segmentation import lraspp_mobilenet_v3_large

    model = lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=1)
    batches = [
        (
            torch.randn(1, 3, 16, 16, dtype=torch.float64),
            torch.randn(1, 1, 16, 16, dtype=torch.float64),
        )
        for _ in range(8)
    ]
    heads = [f"classifier.{part}_classifier" for part in ("low", "high")]
    names = [f"{head}.{kind}" for head in heads for kind in ("weight", "bias")]
    return Given(
        model.double(),
        **thirds(batches),
        readout=names,
        output=lambda m, b: m(b[0])["out"],
        targets=-3,
    )
