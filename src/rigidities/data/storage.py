"""Files: safetensors with a JSON header, written atomically, read without running code."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

FORMAT = 1
"""Version of the layout below; a file with a larger one is refused."""

_KEY = "rigidities"


def write(path: str | os.PathLike[str], tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    """Write a file so that a crash leaves either the old one or the new one.

    Args:
        path: where to.
        tensors: by name; stored on the CPU in their own dtype.
        header: anything JSON can hold.
    """
    path = Path(path)
    text = json.dumps({"format": FORMAT, **header})
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    content = save(plain, metadata={_KEY: text})
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors (on the CPU) and header of a file.

    Raises:
        FileNotFoundError: no such file.
        ValueError: truncated or damaged, foreign, or written by a newer version.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            header = _header(metadata, path)
            return {name: file.get_tensor(name) for name in file.keys()}, header  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(
            f"{path} is truncated, damaged or not a safetensors file ({error}). "
            "Save it again from the fitted object."
        ) from error


def _header(metadata: dict[str, str], path: Path) -> dict[str, Any]:
    if _KEY not in metadata:
        raise ValueError(
            f"{path} is a safetensors file, but not one of rigidities (its header says nothing of "
            "it). Expected one written by save() of this library."
        )
    try:
        header: dict[str, Any] = json.loads(metadata[_KEY])
        version = int(header["format"])
        if version <= FORMAT and "readout" not in header:
            raise KeyError("readout")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"The header of {path} is damaged ({error}). Save it again.") from error
    if version > FORMAT:
        raise ValueError(
            f"{path} has format {version}, written by rigidities {header.get('library', '?')}; "
            f"this version reads up to {FORMAT}. Upgrade: pip install -U rigidities."
        )
    return header


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def prefixed(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names with a prefix, as `unprefixed` undoes."""
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def unprefixed(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose name starts with the prefix, without it."""
    start = f"{prefix}."
    return {k[len(start) :]: v for k, v in tensors.items() if k.startswith(start)}
