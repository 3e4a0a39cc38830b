"""What threads share, and what each thread has for itself."""

from __future__ import annotations

import threading
from _thread import RLock
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Lock(RLock):  # type: ignore[misc]  # which may be a base class, whatever its stub says
    """A lock that the same thread may take again; a copy or a pickle of it is a new lock."""

    def __reduce__(self) -> tuple[type[Lock], tuple[()]]:
        return Lock, ()


class OfThread(Generic[T]):
    """One value for each thread, made when the thread first asks for it.

    A copy begins without values.

    Args:
        make: Makes a value.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._local = threading.local()

    def __call__(self) -> T:
        """This thread's value."""
        value: T | None = getattr(self._local, "value", None)
        if value is None:
            value = self._make()
            self._local.value = value
        return value

    def __reduce__(self) -> tuple[type[OfThread[T]], tuple[Any]]:
        return OfThread, (self._make,)


class Common:
    """A setting of the whole process for as long as any thread wants it.

    If each thread restored the setting that it met, it would undo what another thread has set. So
    the first thread to arrive enters the context, and the last one to leave exits it.

    Args:
        make: Makes the context manager.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[object]]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._inside = 0  # threads that want the setting now
        self._context: AbstractContextManager[object] | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """The setting, for a with statement."""
        with self._lock:
            if not self._inside:
                self._context = self._make()
                self._context.__enter__()
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside and self._context is not None:
                    self._context.__exit__(None, None, None)
