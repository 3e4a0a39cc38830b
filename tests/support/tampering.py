"""Files whose contents were changed on purpose."""

import json

from safetensors import safe_open
from safetensors.torch import save_file

from rigidities.data import storage


def rewrite(path, change):
    """Let `change(tensors, header)` change the contents; the checksum is made to fit them."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        header = json.loads(file.metadata()["rigidities"])
    change(tensors, header)
    text = json.dumps(header)
    metadata = {"rigidities": text, "checksum": storage._checksum(text, tensors)}
    save_file(tensors, path, metadata=metadata)


def flipped(content, bit):
    """Bytes with one bit changed."""
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)
