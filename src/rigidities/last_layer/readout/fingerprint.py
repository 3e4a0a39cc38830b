"""A number that tells two models' weights apart, wherever they live."""

from __future__ import annotations

import zlib

from torch import nn

from ...data.sketch import tensor_hash
from ...models.shadow import unwrapped


def fingerprint(model: nn.Module) -> str:
    """Hash of every parameter and buffer by name: 16 hexadecimal digits.

    The same on every device, and after a lossless change of dtype (float32 to float64).
    """
    model = unwrapped(model)
    total = 0
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        salt = 2 * zlib.crc32(name.encode()) + 1
        total += tensor_hash(tensor) * salt
    return f"{total % (1 << 64):016x}"
