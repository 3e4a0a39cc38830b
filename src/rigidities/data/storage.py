"""Files: safetensors with a JSON header, written atomically, read without running code."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

FORMAT = 2
"""Version of the layout below; a file with a larger one is refused. The first named no noise and no
law."""

_KEY = "rigidities"

T = TypeVar("T")


@dataclass(frozen=True)
class Snapshot:
    """A state for files and state dicts: tensors, and a header of anything that JSON can hold.

    A file holds the tensors on the CPU in their own dtype.
    """

    tensors: dict[str, Tensor]
    header: dict[str, Any]

    def write(self, path: str | os.PathLike[str]) -> None:
        """Into a file, so that a crash leaves either the old one or the new one."""
        path = Path(path)
        text = json.dumps({"format": FORMAT, **self.header})
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in self.tensors.items()}
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

    @classmethod
    def read(cls, path: str | os.PathLike[str], holds: str) -> Snapshot:
        """From a file.

        Args:
            path: of the file.
            holds: a key that the header must have.

        Raises:
            FileNotFoundError: no such file.
            ValueError: truncated or damaged, foreign, or written by a newer version.
        """
        tensors, header = read(path)
        if holds not in header:
            raise ValueError(
                f"{path} is damaged, or of another kind: it holds no {holds!r}. What was saved is "
                "read by the load of the class that saved it."
            )
        return cls(tensors, header)

    def part(self, name: str, made: Callable[[dict[str, Any], dict[str, Tensor]], T]) -> T | None:
        """A part made of the header and the tensors under its name; None where there is none.

        Raises:
            ValueError: it holds what this version does not know.
        """
        if self.header[name] is None:
            return None
        try:
            return made(self.header[name], unprefixed(name, self.tensors))
        except ValueError as error:
            raise ValueError(f"{error} {_remedy(self.header)}") from error

    def state(self) -> dict[str, Any]:
        """As plain values and tensors, which `torch.load(weights_only=True)` accepts."""
        return {"tensors": self.tensors, "header": json.dumps(self.header)} if self.header else {}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Snapshot:
        """The snapshot that `state` came from."""
        return cls(state["tensors"], json.loads(state["header"])) if state else cls({}, {})


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
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"The header of {path} is damaged ({error}). Save it again.") from error
    if version > FORMAT:
        raise ValueError(
            f"{path} has format {version}, and this version reads up to {FORMAT}. {_remedy(header)}"
        )
    return header


def _remedy(header: dict[str, Any]) -> str:
    library = header.get("library", "?")
    return f"It was written by rigidities {library}: pip install 'rigidities>={library}'."


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
