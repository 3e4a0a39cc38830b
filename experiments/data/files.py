"""Where data files lie, whether they are whole, and the cache that downloads go to.

A file is looked for in `places` and its SHA-256 is compared with the published one, or with the one
that `seal` wrote beside a file that was made here. `store` writes a downloaded set to the cache.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

VARIABLE = "RIGIDITIES_DATA"
"""The environment variable that names the folder of the data sets."""

OFFLINE = "RIGIDITIES_OFFLINE"
"""The environment variable that forbids downloads where it is set."""

BESIDE = Path(__file__).resolve().parents[3] / "shared" / "data"
"""A folder beside the project that may hold the data sets."""

SHA256 = {
    "california_housing.npz": "4a7c0d289f8077b966225c41e3f0937994f09af4dfaf7ad502f8abc8573aea14",
    "qm9.npz": "ba908b1683e78a040be218a9618548808eb7d76dd1da301611eb4a6d0c89f502",
    "uci_concrete.npz": "9a54bba9d08f19045c0ddcac06dbcb47efcd24b6f8762d2f190eee11caff55c2",
    "uci_energy.npz": "ad7dfd650d8f033a9f9174be9a91c85d3766d513ac7882f9fad71b8f23234c3c",
    "uci_kin8nm.npz": "4ddc9061ef889a2b2b4fbd2cde1832e684507a99881d266be63e010df3a5b7ef",
    "uci_naval.npz": "cb768fe17cf19078794a67c5c1eb8ac69cea0cd0af75978421f043d67cfb49e6",
    "uci_power.npz": "cad2e72e10490131a35e5479eb5d9abe0d73ff6a388c3568f0cf65fe9a23470e",
    "uci_protein.npz": "a3965e532458c9e5e4f5ae17010fe856f421e9534b65705d5a7040c8b07c70a9",
    "uci_wine.npz": "f6d688132315476c2a95250c90a9930fa915959d6ecfe96f5e228671d6b581ab",
    "uci_yacht.npz": "311899f232e8eabf5b2a741197f39bfb463b72649ed21d50af0f5069b0dd628f",
    "weatherAUS.csv": "573fd715cd69fcacc4df32024d823b450ae3edaae7e8ff2eeb623adbed424014",
    "year_msd_sample1176.npz": "62ef23a8fe148656621f45fa12ed96214198480d80141c40e69e6f1aae4253db",
}
"""SHA-256 of the published files, uncompressed where the name ends in .gz."""


class DataError(Exception):
    """Data cannot be read; the message says what to do."""


class MissingDataError(DataError, FileNotFoundError):
    """A file is nowhere and could not be fetched."""


class MissingPackageError(DataError, ImportError):
    """A package is missing without which the data cannot be fetched or read."""


class ChecksumError(DataError, ValueError):
    """The checksum of a file is not the expected one."""


class FormatError(DataError, ValueError):
    """The contents of a file do not have the expected form."""


# --- where ---------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """The user's folder for downloads and kept results."""
    base = os.environ.get("XDG_CACHE_HOME")
    if not base and os.name == "nt":
        base = os.environ.get("LOCALAPPDATA")
    if base:
        return Path(base) / "rigidities"
    return Path.home() / ".cache" / "rigidities"


def places(folder: str | Path | None = None) -> list[Path]:
    """Where a file is looked for, in this order.

    Args:
        folder: The only place; by default the folder of the environment variable `VARIABLE`,
            ``shared/data`` beside the project, and the cache.
    """
    if folder is not None:
        return [Path(folder)]
    default_places = [BESIDE, cache_folder()]
    variable = os.environ.get(VARIABLE)
    if variable:
        return [Path(variable), *default_places]
    return default_places


def find(names: Sequence[str], folder: str | Path | None = None) -> Path | None:
    """The first file that has one of the names; None where there is none."""
    for place in places(folder):
        for name in names:
            path = place / name
            if path.is_file():
                return path
    return None


def digest(names: Sequence[str]) -> str:
    """The sha256 of the file that has one of the names; empty where there is none (yet)."""
    path = find(names)
    if path is None:
        return ""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def absence(
    names: Sequence[str], folder: str | Path | None, remedy: str, reason: str | None = None
) -> str:
    """What is missing, where it was looked for, why it was not fetched, and what to do.

    Args:
        names: Names that the file may have.
        folder: The only folder that was looked in; None for `places`.
        remedy: How the file can be had, the end of a sentence.
        reason: Why it was not fetched, a sentence.
    """
    wanted = " or ".join(names)
    where = ", ".join(map(str, places(folder)))
    if folder is None:
        message = f"{wanted} is in none of these folders: {where}."
        advice = f"Set {VARIABLE}, or --data of the experiments, to the folder that holds it"
    else:
        message = f"{wanted} is not in the folder given: {where}."
        advice = f"Give the folder that holds it, or none, and set {VARIABLE} to it"
    if reason:
        message = f"{message} {reason}"
    return f"{message} {advice}, or {remedy}"


# --- whether whole -------------------------------------------------------------------------------


def contents(path: Path, *, check: bool = True) -> bytes:
    """The bytes of a file, uncompressed if its name ends in .gz.

    Their SHA-256 has to be the published one or that of the file ``<name>.sha256`` beside (which
    `seal` writes). A file that has neither is not checked.

    Args:
        path: The file.
        check: Whether the checksum is compared.

    Raises:
        ChecksumError: The checksum is another; the message has the remedy.
    """
    raw = path.read_bytes()
    if path.suffix == ".gz":
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, zlib.error) as error:
            raise ChecksumError(
                f"{path} cannot be uncompressed ({error}). Delete it and get it again."
            ) from error
    expected = known_checksums(path)
    if check and expected:
        checksum = hashlib.sha256(raw).hexdigest()
        if checksum not in expected:
            raise ChecksumError(
                f"Expected sha256 {' or '.join(expected)} of {path}, got {checksum}. Delete it and "
                "get it again, or pass check=False if the file is meant to differ."
            )
    return raw


def known_checksums(path: Path) -> list[str]:
    """The published checksum of a file, and the one stored beside it, as far as there are any."""
    checksums = []
    published = SHA256.get(path.name.removesuffix(".gz"))
    if published:
        checksums.append(published)
    seal_file = _seal(path)
    if seal_file.is_file():
        # The first word is the checksum, the second the name of the file.
        checksums += seal_file.read_text(encoding="ascii").split()[:1]
    return checksums


def seal(path: Path, *, name: str | None = None) -> Path:
    """Write the SHA-256 of a file that was made here beside it.

    Args:
        path: The file.
        name: The name under which it is sealed, where it is to be moved; its own by default.

    Returns:
        The file with the checksum.
    """
    target = path.with_name(name or path.name)
    seal_file = _seal(target)
    checksum = hashlib.sha256(contents(path, check=False)).hexdigest()
    seal_file.write_text(f"{checksum}  {target.name}\n", encoding="ascii")
    return seal_file


def _seal(path: Path) -> Path:
    """The file beside another that holds its checksum."""
    return path.with_name(path.name + ".sha256")


def fields(path: Path, required: Sequence[str], *, check: bool = True) -> dict[str, np.ndarray]:
    """All arrays of an npz file.

    Args:
        path: The file.
        required: Names of arrays that have to be there.
        check: Whether the checksum of the file is compared.

    Raises:
        FormatError: It is no such file, or an array is missing.
    """
    raw = contents(path, check=check)
    try:
        with np.load(io.BytesIO(raw)) as stored:
            arrays = dict(stored)
    except (ValueError, EOFError, zipfile.BadZipFile, AttributeError, TypeError) as error:
        raise FormatError(f"Expected an npz file without objects at {path}: {error}") from error
    require(arrays, required, path)
    return arrays


def require(arrays: Mapping[str, np.ndarray], required: Sequence[str], path: Path) -> None:
    """Refuse a file that lacks a required array."""
    absent = [name for name in required if name not in arrays]
    if absent:
        raise FormatError(f"Expected {', '.join(required)} in {path}; missing {absent}.")


# --- the cache -----------------------------------------------------------------------------------


def store(name: str, make: Callable[[], Mapping[str, np.ndarray]]) -> Path:
    """Make arrays and keep them in the cache as an npz file with its checksum.

    The folder is tried before the arrays are made, and the file appears whole or not at all.

    Args:
        name: The name of the file.
        make: Makes the arrays.

    Raises:
        FileNotFoundError: The cache cannot be written to.
    """
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=name, suffix=".part")
    except OSError as error:
        raise MissingDataError(
            f"{name} is not here and cannot be downloaded: {folder} cannot be written to ({error})."
            f" Set XDG_CACHE_HOME to a folder that can, or {VARIABLE} to the folder with the file."
        ) from error
    unfinished = Path(temporary)
    path = folder / name
    try:
        with os.fdopen(handle, "wb") as stream:
            np.savez_compressed(stream, **make())
        seal(unfinished, name=name)
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        if not path.exists():
            _seal(path).unlink(missing_ok=True)
        raise
    return path
