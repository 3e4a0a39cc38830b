"""Files: safetensors with a JSON header and a checksum, written atomically; reading runs no code.

A `Snapshot` is what goes into a file or a state dict: tensors by name, and a header that JSON can
hold. Writing adds to the header the versions of the format and of the library and a list of the
tensors, and stores a checksum over the header and the tensors beside it. Reading refuses whatever
is not exactly what was written: it is damaged, foreign, of another version or of another kind. So
a header and tensors that pass were written by this library, and those who need them read them by
name.

The metadata of a file has two entries, "rigidities" and "checksum". The first is the header: its
"kind", "format" and "library", the dtype and shape of each of its "tensors", and what the class
adds that is saved. The second is SHA-256 over the header's text and the bytes of all tensors.
"""

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

FORMAT = 3
"""Version of what files contain; a file with another one is refused."""

_HEADER_KEY = "rigidities"
_CHECKSUM_KEY = "checksum"

_HOST = f"{zlib.crc32(platform.node().encode()):08x}"
"""This machine, in the names of temporary files. On a shared file system, one cannot ask whether a
process of another machine is alive."""

_STALE_AFTER = 3600.0
"""Seconds after which a temporary file counts as left behind, whichever process wrote it."""

_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RuntimeError)
"""Errors from bytes that are not a safetensors file or a header (RecursionError is a RuntimeError).
"""

_AGAIN = "Save it again from the fitted object, or copy it again."

T = TypeVar("T")


@dataclass(frozen=True)
class Snapshot:
    """A state for files and state dicts.

    Attributes:
        tensors: The tensors by name. A file holds them on the CPU, in their own dtype.
        header: Anything that JSON can hold. Its "kind" says what the snapshot is of.
        source: What error messages call the snapshot.
    """

    tensors: dict[str, Tensor]
    header: dict[str, Any]
    source: str = "The snapshot"

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a file, so that a crash leaves either the old one or the new one.

        The file keeps its permissions. A symbolic link stays, and the file it points to is
        replaced.
        """
        target = Path(os.path.realpath(path))
        text = self._header_text()
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in self.tensors.items()}
        metadata = {_HEADER_KEY: text, _CHECKSUM_KEY: _checksum(text, plain)}
        file_header, file_tensors = _with_sorted_metadata(save(plain, metadata=metadata))
        write_over(target, file_header, file_tensors)

    @classmethod
    def read(cls, path: str | os.PathLike[str], holds: str) -> Snapshot:
        """Read a file of a kind.

        Args:
            path: The file.
            holds: The kind that it must be of.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: It is damaged, foreign, of another version, or of another kind.
        """
        tensors, header = read(path)
        return cls(tensors, header, str(path))._of_kind(holds)

    def state(self) -> dict[str, Any]:
        """Plain values and tensors, which `torch.load(weights_only=True)` accepts."""
        text = self._header_text()
        return {"tensors": self.tensors, "header": text, "checksum": _checksum(text, self.tensors)}

    @classmethod
    def from_state(cls, state: Any, holds: str) -> Snapshot:
        """The snapshot from what `state` returned.

        Args:
            state: What `state` returned.
            holds: The kind that it must be of.

        Raises:
            ValueError: It is damaged, of another version, or of another kind.
        """
        source = f"The state dict's {holds}"
        if not isinstance(state, dict) or not {"tensors", "header"} <= set(state):
            got = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
            raise ValueError(
                f"{source} is damaged: expected a dict of tensors and header, got {got}. {_AGAIN}"
            )
        tensors = state["tensors"]
        if not isinstance(tensors, dict) or not all(
            isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in tensors.items()
        ):
            raise ValueError(f"{source} is damaged: expected tensors by their names. {_AGAIN}")
        header = _verified_header(state["header"], tensors, state.get("checksum"), source)
        return cls(tensors, header, source)._of_kind(holds)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """A context to read the snapshot in, whose errors name the source.

        A missing entry becomes a ValueError that names it. No user code may run inside: its errors
        would be blamed on the contents of the file.
        """
        try:
            yield
        except KeyError as error:
            raise ValueError(
                f"{self.source} lacks {error}, which this version needs. {_written_by(self.header)}"
            ) from error
        except TypeError as error:  # another entry than a class takes
            raise ValueError(
                f"{self.source} is not as this version needs it: {error}. "
                f"{_written_by(self.header)}"
            ) from error
        except ValueError as error:
            raise ValueError(f"{self.source}: {error} {_written_by(self.header)}") from error

    def part(self, name: str, make: Callable[[dict[str, Any], dict[str, Tensor]], T]) -> T | None:
        """An object made of one part of the snapshot; None where there is no such part.

        Args:
            name: The part's name in the header, and the prefix of its tensors.
            make: A function of the part's header entry and the part's tensors.
        """
        if self.header.get(name) is None:
            return None
        return make(self.header[name], unprefixed(name, self.tensors))

    def to(self, device: torch.device) -> Snapshot:
        """The same snapshot with its tensors on another device."""
        tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        return replace(self, tensors=tensors)

    def _header_text(self) -> str:
        """The header as JSON, with the versions and the list of tensors."""
        header = {
            **self.header,
            "format": FORMAT,
            "library": __version__,
            "tensors": _listed(self.tensors),
        }
        return json.dumps(header)

    def _of_kind(self, holds: str) -> Snapshot:
        """This snapshot, after a check of its kind."""
        kind = self.header.get("kind")
        if kind != holds:
            raise ValueError(
                f"{self.source} is of another kind: expected {holds!r}, its header says {kind!r}. "
                "Load the file with the class that saved it."
            )
        return self


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors (on the CPU) and header of a file.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is truncated, damaged, foreign, or written by another version.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # Copies: a tensor in the file's own memory would change with the file.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, *_UNREADABLE) as error:
        raise ValueError(
            f"{path} is truncated, damaged or not a safetensors file ({error}). {_AGAIN}"
        ) from error
    if _HEADER_KEY not in metadata:
        raise ValueError(
            f"{path} is a safetensors file, but not one of rigidities (its header does not "
            "mention rigidities). Expected a file written by save() of this library."
        )
    header = _verified_header(
        metadata[_HEADER_KEY], tensors, metadata.get(_CHECKSUM_KEY), str(path)
    )
    return tensors, header


def _verified_header(
    text: Any, tensors: dict[str, Tensor], checksum: str | None, source: str
) -> dict[str, Any]:
    """The header of a file or a state dict that is exactly what was written.

    Args:
        text: The header as JSON.
        tensors: All tensors that came with it.
        checksum: The checksum that came with it.
        source: What error messages call the file or the state dict.

    Raises:
        ValueError: The text is no header, this version cannot read it, or header and tensors do
            not match the header's list or the checksum.
    """
    try:
        header: dict[str, Any] = json.loads(text)
        version = int(header["format"])
    except _UNREADABLE as error:
        raise ValueError(
            f"{source} is damaged: its header cannot be read ({error}). {_AGAIN}"
        ) from error
    if version > FORMAT:
        raise ValueError(
            f"{source} has format {version}, but this version only reads format {FORMAT}. "
            f"{_written_by(header)}"
        )
    if version < FORMAT:
        raise ValueError(
            f"{source} was written by an earlier version of rigidities: it has format {version}, "
            f"and this version only reads format {FORMAT}. Fit again, and save it anew."
        )
    _check_listed(header.get("tensors"), _listed(tensors), source)
    if checksum != _checksum(text, tensors):
        raise ValueError(f"{source} is damaged: its contents do not match its checksum. {_AGAIN}")
    return header


def _written_by(header: dict[str, Any]) -> str:
    """A sentence that says which version of the library wrote a file, and how to install it."""
    library = header.get("library", "?")
    return f"It was written by rigidities {library}: pip install 'rigidities>={library}'."


def _listed(tensors: dict[str, Tensor]) -> dict[str, str]:
    """The dtype and shape of each tensor as text, such as "float64 (25, 25)", by name."""
    listed = {}
    for name, tensor in sorted(tensors.items()):
        dtype = str(tensor.dtype).removeprefix("torch.")
        listed[name] = f"{dtype} {tuple(tensor.shape)}"
    return listed


def _check_listed(expected: Any, got: dict[str, str], source: str) -> None:
    """Refuse tensors that are not those that a header lists; the first difference is named."""
    if not isinstance(expected, dict):
        raise ValueError(f"{source} is damaged: its header lists no tensors. {_AGAIN}")
    for name in sorted(expected.keys() | got.keys()):
        if name not in got:
            raise ValueError(
                f"{source} is damaged: it lacks the tensor {name!r}, {expected[name]}. {_AGAIN}"
            )
        if name not in expected:
            raise ValueError(
                f"{source} is damaged: it has a tensor {name!r}, which its header does not list. "
                f"{_AGAIN}"
            )
        if expected[name] != got[name]:
            raise ValueError(
                f"{source} is damaged: the tensor {name!r} must be {expected[name]}, got "
                f"{got[name]}. {_AGAIN}"
            )


def _checksum(text: str, tensors: dict[str, Tensor]) -> str:
    """SHA-256 over the header's text, which lists names, dtypes and shapes, and every tensor."""
    total = hashlib.sha256(text.encode())
    for _, tensor in sorted(tensors.items()):
        if not tensor.is_meta:  # a tensor of the meta device has no bytes
            content = tensor.detach().cpu().contiguous()
            total.update(content.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def _with_sorted_metadata(content: bytes) -> tuple[bytes, memoryview]:
    """Header and tensors of a safetensors file, with the metadata sorted by name.

    The safetensors package writes metadata in a different order each time, and files of the same
    object should be equal byte for byte. A file begins with the length of its header in eight
    bytes, little endian. The header is JSON, padded with spaces to a multiple of eight bytes.

    Args:
        content: The whole file, as `safetensors` makes it.
    """
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, memoryview(content)[end:]


def write_over(target: Path, *content: bytes | memoryview) -> None:
    """Write a temporary file beside the target, then move it to the target's place.

    The target keeps its permissions; a new file gets those that the umask leaves.

    Args:
        target: The file to write.
        content: What to write, in consecutive pieces.
    """
    _remove_left_over(target)
    permissions = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
    unique = f"{_HOST}-{os.getpid()}-{secrets.token_hex(4)}"
    temporary = target.with_name(f"{_temporary_prefix(target)}{unique}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    # A new file gets 0666 less the umask. The replacement of an old file is private until it has
    # the old file's permissions.
    handle = os.open(temporary, flags, 0o666 if permissions is None else 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            for piece in content:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        if permissions is not None:
            os.chmod(temporary, permissions)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _temporary_prefix(target: Path) -> str:
    """The start of the names of a file's temporaries: a hash, since the file's name may be long."""
    digest = hashlib.sha256(os.fsencode(target.name)).hexdigest()
    return f".{digest[:16]}."


def _remove_left_over(target: Path) -> None:
    """Remove a file's temporaries that killed writers left behind."""
    pattern = re.escape(_temporary_prefix(target)) + r"([0-9a-f]{8})-(\d{1,9})-[0-9a-f]{8}\.tmp"
    with contextlib.suppress(OSError):  # not worth a failed save
        for path in list(target.parent.iterdir()):
            match = re.fullmatch(pattern, path.name)
            if match is None:
                continue
            host = match[1]
            process = int(match[2])
            abandoned = host == _HOST and not _is_alive(process)
            if abandoned or time.time() - path.stat().st_mtime > _STALE_AFTER:
                path.unlink(missing_ok=True)


def _is_alive(process: int) -> bool:
    """Whether a process of this machine is alive; True where that cannot be found out."""
    try:
        if os.name == "posix":  # on other systems the same call ends the process
            os.kill(process, 0)
    except OSError as error:
        # Any other error, such as a lack of permission, means that the process is alive.
        return not isinstance(error, ProcessLookupError)
    return True


def prefixed(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors with a prefix before their names; `unprefixed` undoes it."""
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def unprefixed(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names start with the prefix, under their names without it."""
    start = f"{prefix}."
    return {
        name.removeprefix(start): tensor
        for name, tensor in tensors.items()
        if name.startswith(start)
    }
