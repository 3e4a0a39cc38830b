"""Work done by many threads at once."""

import sys
import threading
from collections.abc import Callable

THREADS = 8


def storm(work: Callable[[int], object]) -> None:
    """The work of so many threads at once, switched between as often as can be; its errors."""
    errors: list[Exception] = []
    interval = sys.getswitchinterval()

    def guarded(number: int) -> None:
        try:
            work(number)
        except Exception as error:
            errors.append(error)

    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=guarded, args=(i,)) for i in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    if errors:
        raise errors[0]
