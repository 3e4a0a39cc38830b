"""Files: safetensors with a JSON header and a checksum, written atomically, read without code."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import secrets
import stat
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from .._version import __version__
from . import schema

FORMAT = 1
"""Version of the layout below; a file with a larger one is refused."""

_KEY, _CHECKSUM, UNFINISHED = "rigidities", "checksum", "checkpoint"
_HOST = f"{zlib.crc32(platform.node().encode()):08x}"
"""This machine: on a shared file system another's processes cannot be asked after."""

_LEFT_OVER = 3600.0
"""Seconds after which a temporary counts as left behind, whoever wrote it."""

_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RuntimeError)
"""What bytes that are no file or no header may raise (RecursionError is a RuntimeError)."""

_AGAIN = "Save it again from the fitted object."

T = TypeVar("T")


@dataclass(frozen=True)
class Snapshot:
    """A state for files and state dicts: tensors, and a header of anything that JSON can hold.

    The header's "kind" says which table of `schema` they obey. A file holds the tensors on the CPU
    in their own dtype. Errors call the snapshot by its source.
    """

    tensors: dict[str, Tensor]
    header: dict[str, Any]
    source: str = "The snapshot"

    def write(self, path: str | os.PathLike[str]) -> None:
        """Into a file, so that a crash leaves either the old one or the new one.

        The file keeps its permissions, and a link its place: what it points to is replaced.

        Raises:
            ValueError: the contents are not what `schema` says, so that nobody could read them.
        """
        text = self._text()
        try:
            schema.check(self.tensors, json.loads(text), finite=False)  # as it would be read
        except ValueError as error:
            raise ValueError(f"{path} is not written, for nobody could read it: {error}") from error
        target = Path(os.path.realpath(path))
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in self.tensors.items()}
        metadata = {_KEY: text, _CHECKSUM: _checksum(text, plain)}
        write_over(target, *_in_order(save(plain, metadata=metadata)))

    @classmethod
    def read(cls, path: str | os.PathLike[str], holds: str) -> Snapshot:
        """From a file of the kind `holds`; refuses what `read` does, and other kinds."""
        tensors, header = read(path)
        return cls(tensors, header, str(path))._of_kind(holds, finite=False)

    def state(self) -> dict[str, Any]:
        """As plain values and tensors, which `torch.load(weights_only=True)` accepts."""
        return {"tensors": self.tensors, "header": self._text()}

    @classmethod
    def from_state(cls, state: Any, holds: str) -> Snapshot:
        """The snapshot of the kind `holds` that `state` came from.

        A state dict has no checksum, so that its numbers are looked at too.

        Raises:
            ValueError: it came from none, of that kind and this version.
        """
        source = f"The state dict's {holds}"
        if not isinstance(state, dict) or set(state) != {"tensors", "header"}:
            got = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
            raise ValueError(
                f"{source} is damaged: expected a dict of tensors and header, got {got}. {_AGAIN}"
            )
        tensors = state["tensors"]
        if not isinstance(tensors, dict) or not all(
            isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in tensors.items()
        ):
            raise ValueError(f"{source} is damaged: expected tensors by their names. {_AGAIN}")
        snapshot = cls(tensors, _header(state["header"], source), source)
        return snapshot._of_kind(holds, finite=True)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Errors with the contents name the source.

        No code of the user's may run inside: its errors would be taken for those of the contents.
        """
        try:
            yield
        except ValueError as error:
            written_by = schema.written_by(self.header)
            raise ValueError(f"{self.source}: {error} {written_by}") from error

    def part(self, name: str, made: Callable[[dict[str, Any], dict[str, Tensor]], T]) -> T | None:
        """A part made of the header and the tensors under its name; None where there is none."""
        if self.header.get(name) is None:
            return None
        return made(self.header[name], unprefixed(name, self.tensors))

    def to(self, device: torch.device) -> Snapshot:
        """The same with its tensors on another device."""
        return replace(self, tensors={name: t.to(device) for name, t in self.tensors.items()})

    def _text(self) -> str:
        """The header as JSON, with the versions of the format and of the library."""
        return json.dumps({"format": FORMAT, "library": __version__, **self.header})

    def _of_kind(self, holds: str, *, finite: bool) -> Snapshot:
        """This snapshot, which must be of a kind and hold what the kind's table says."""
        unfinished = self.header.get(UNFINISHED) is not None
        if unfinished and holds != UNFINISHED:
            raise ValueError(
                f"{self.source} is an unfinished fit: resume it by fit(..., checkpoint=...)."
            )
        kind = UNFINISHED if unfinished else self.header.get("kind")
        if kind != holds:
            raise ValueError(
                f"{self.source} is of another kind: expected {holds!r}, its header says {kind!r}. "
                "What was saved is read by the load of the class that saved it."
            )
        try:
            schema.check(self.tensors, self.header, finite=finite)
        except ValueError as error:
            raise ValueError(f"{self.source} is damaged or incomplete: {error} {_AGAIN}") from error
        return self


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
            # copies: the file's own memory would follow whoever writes into it
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, *_UNREADABLE) as error:
        raise ValueError(
            f"{path} is truncated, damaged or not a safetensors file ({error}). {_AGAIN}"
        ) from error
    if _KEY not in metadata:
        raise ValueError(
            f"{path} is a safetensors file, but not one of rigidities (its header says nothing of "
            "it). Expected one written by save() of this library."
        )
    header = _header(metadata[_KEY], str(path))
    if metadata.get(_CHECKSUM) != _checksum(metadata[_KEY], tensors):
        raise ValueError(
            f"{path} is damaged: its contents do not fit its checksum. Save it again from the "
            "fitted object, or fetch it anew."
        )
    return tensors, header


def _header(text: Any, source: str) -> dict[str, Any]:
    """The header of a file or a state dict; refused where this version cannot read it."""
    try:
        header: dict[str, Any] = json.loads(text)
        version = header["format"] = int(header["format"])
    except _UNREADABLE as error:
        raise ValueError(f"{source} is damaged: its header is none ({error}). {_AGAIN}") from error
    if version > FORMAT:
        raise ValueError(
            f"{source} has format {version}, and this version reads up to {FORMAT}. "
            f"{schema.written_by(header)}"
        )
    return header


def _checksum(text: str, tensors: dict[str, Tensor]) -> str:
    """SHA-256 over the header's text and every tensor's name, dtype, shape and bytes."""
    total = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        total.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def _in_order(content: bytes) -> tuple[bytes, memoryview]:
    """Header and tensors of a safetensors file, with the metadata sorted by name.

    The package writes metadata in another order each time, and files of one object shall be equal
    byte for byte. A file begins with the length of its header, eight bytes, little endian; the
    header is JSON, filled up with spaces to a multiple of eight bytes.
    """
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, memoryview(content)[end:]


def write_over(target: Path, *content: bytes | memoryview) -> None:
    """Write beside the target, then take its place, with its rights or those the umask leaves."""
    own = _swept(target)
    kept = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
    temporary = target.with_name(f"{own}{_HOST}-{os.getpid()}-{secrets.token_hex(4)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    handle = os.open(temporary, flags, 0o666 if kept is None else 0o600)  # less the umask
    try:
        with os.fdopen(handle, "wb") as file:
            for part in content:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        if kept is not None:
            os.chmod(temporary, kept)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def remove(path: Path) -> None:
    """Remove a file that nobody writes any more, and what killed writers left behind."""
    target = Path(os.path.realpath(path))
    _swept(target, asked=False)  # the killed may have had the number of a process that lives
    target.unlink(missing_ok=True)


def _swept(target: Path, *, asked: bool = True) -> str:
    """Remove a file's temporaries that killed writers left behind; how their names begin."""
    begin = f".{hashlib.sha256(os.fsencode(target.name)).hexdigest()[:16]}."  # names may be long
    own = re.escape(begin) + r"([0-9a-f]{8})-(\d{1,9})-[0-9a-f]{8}\.tmp"
    with contextlib.suppress(OSError):  # not worth a failed save
        for path in list(target.parent.iterdir()):
            if found := re.fullmatch(own, path.name):
                dead = found[1] == _HOST and not (asked and _alive(int(found[2])))
                if dead or time.time() - path.stat().st_mtime > _LEFT_OVER:
                    path.unlink(missing_ok=True)
    return begin


def _alive(process: int) -> bool:
    try:
        if os.name == "posix":  # elsewhere the same call ends a process
            os.kill(process, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)  # another user's lives
    return True


def prefixed(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names with a prefix, as `unprefixed` undoes."""
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def unprefixed(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose name starts with the prefix, without it."""
    start = f"{prefix}."
    return {k[len(start) :]: v for k, v in tensors.items() if k.startswith(start)}
