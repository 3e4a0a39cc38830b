"""Named results of one state of the code: numbers, and words.

A name is a path, such as "float32/plain, 3 targets/calibrate/full/ridge". What raises an error or
gives a warning leaves words under its name, so that one case that fails takes no other with it.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

RAISED = "/raised"
"""How the name of an error's words ends."""
WARNED = "/warned"
"""How the name of the words of warnings ends."""
_WORDS = "words.json"
"""Entry of a file with all words."""


@dataclass
class Results:
    """Numbers and words by name.

    Attributes:
        numbers: Arrays in the precision in which the library returned them.
        words: Texts.
        about: Which code and which versions made them. It is shown, not compared.
    """

    numbers: dict[str, np.ndarray] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    about: dict[str, str] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write everything into one file of NumPy, the words as JSON in one of its entries."""
        text = json.dumps({"words": self.words, "about": self.about})
        with path.open("wb") as file:
            np.savez_compressed(file, **self.numbers, **{_WORDS: np.array(text)})

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read a file that `save` wrote."""
        with np.load(path) as file:
            numbers = {name: file[name] for name in file.files if name != _WORDS}
            texts = json.loads(str(file[_WORDS]))
        return cls(numbers, texts["words"], texts["about"])


class Record:
    """Writes results under a path of names."""

    def __init__(self, results: Results, path: str = "") -> None:
        self._results = results
        self._path = path

    def _named(self, name: Any) -> str:
        return f"{self._path}/{name}" if self._path else str(name)

    def under(self, name: Any) -> Record:
        """A record whose names begin with this one."""
        return Record(self._results, self._named(name))

    def value(self, name: Any, value: Any) -> None:
        """Record a tensor, an array, a number, a text, or several of them by name or position."""
        path = self._named(name)
        if path in self._results.numbers or path in self._results.words:
            raise KeyError(f"Two results are called {path!r}.")
        if isinstance(value, Tensor):
            self._results.numbers[path] = value.detach().cpu().numpy()
        elif isinstance(value, (np.ndarray, np.generic, bool, int, float)):
            self._results.numbers[path] = np.asarray(value)
        elif isinstance(value, dict):
            for key, entry in value.items():
                self.under(name).value(key, entry)
        elif isinstance(value, (list, tuple)):
            for position, entry in enumerate(value):
                self.under(name).value(position, entry)
        else:
            self._results.words[path] = str(value)

    def attempt(self, name: Any, make: Callable[[], Any]) -> None:
        """Record what a function returns, or the error that it raises."""
        with self._watched(name):
            self.value(name, make())

    def fields(self, owner: Any, names: Iterable[str]) -> None:
        """Record attributes of an object, each by itself."""
        for name in names:
            self.attempt(name, lambda name=name: getattr(owner, name))

    def run(self, name: Any, case: Callable[..., None], *arguments: Any) -> None:
        """Run a function that records results under this name, and the error that ends it."""
        with self._watched(name):
            case(self.under(name), *arguments)

    @contextmanager
    def _watched(self, name: Any) -> Iterator[None]:
        """Turn warnings and errors into words."""
        path = self._named(name)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                yield
            except Exception as error:
                self._results.words[path + RAISED] = f"{type(error).__name__}: {error}"
        if caught:
            self._results.words[path + WARNED] = "\n".join(str(w.message) for w in caught)
