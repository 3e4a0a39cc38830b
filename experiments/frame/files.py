"""Files of the experiments: where results are kept, and how a file is written whole."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from experiments.data.files import cache_folder
from experiments.frame.outcome import plain


def kept_folder(experiment: str) -> Path:
    """The folder of the user's cache that holds what an experiment keeps."""
    return cache_folder() / "experiments" / experiment


def kept_file(experiment: str, name: str, settings: Any, suffix: str) -> Path:
    """Where a kept result lies: ``<name>-<digest of name and settings><suffix>``.

    Args:
        experiment: The experiment that keeps the result.
        name: What the result is, in a few words.
        settings: Everything that the result depends on besides the code, as `plain` accepts it:
            arguments and the checksums of data. Other settings are another file.
        suffix: The ending of the file, such as ".json".
    """
    question = json.dumps([name, plain(settings)], sort_keys=True)
    short_digest = hashlib.sha256(question.encode()).hexdigest()[:16]
    readable_name = "".join(char if char.isalnum() else "-" for char in name)
    return kept_folder(experiment) / f"{readable_name}-{short_digest}{suffix}"


def replace(path: Path, content: bytes) -> None:
    """Write a file whole or not at all: an interruption leaves the old file as it was."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
