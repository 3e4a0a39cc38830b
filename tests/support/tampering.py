"""Files and state dicts whose contents were changed on purpose."""

import json

from safetensors import safe_open
from safetensors.torch import save_file

from rigidities.data import storage


def contents(path):
    """Tensors, header and checksum of a file."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    return tensors, json.loads(metadata["rigidities"]), metadata["checksum"]


def sealed(tensors, header):
    """A state dict's entry of such contents, whose list of tensors and checksum fit them."""
    text = json.dumps({**header, "tensors": storage._listed(tensors)})
    return {"tensors": tensors, "header": text, "checksum": storage._checksum(text, tensors)}


def rewrite(path, change):
    """Let `change(tensors, header)` change a file as if the library had written it so."""
    tensors, header, _ = contents(path)
    change(tensors, header)
    state = sealed(tensors, header)
    metadata = {"rigidities": state["header"], "checksum": state["checksum"]}
    save_file(tensors, path, metadata=metadata)


def damage(path, change):
    """Let `change(tensors, header)` change a file, whose checksum stays as it was."""
    tensors, header, checksum = contents(path)
    change(tensors, header)
    metadata = {"rigidities": json.dumps(header), "checksum": checksum}
    save_file(tensors, path, metadata=metadata)


def damaged_state(state, change):
    """A state dict's entry that `change(tensors, header)` has changed; its checksum stays."""
    tensors, header = dict(state["tensors"]), json.loads(state["header"])
    change(tensors, header)
    return {**state, "tensors": tensors, "header": json.dumps(header)}


def resealed_state(state, change):
    """A state dict's entry, changed as if the library had made it so."""
    tensors, header = dict(state["tensors"]), json.loads(state["header"])
    change(tensors, header)
    return sealed(tensors, header)


def flipped(content, bit):
    """Bytes with one bit changed."""
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)
