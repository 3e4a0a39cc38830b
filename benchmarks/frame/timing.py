"""Seconds of tasks that take turns, and the ratios of tasks timed in the same round.

Every round times each task once and begins with another one, so that a slow moment of the machine
hits all tasks alike. A ratio is formed round by round and summarised by its median.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

__all__ = ["Ratio", "Task", "Timings", "clocked", "figure", "interleaved"]

Task = Callable[[], object]


@dataclass(frozen=True)
class Ratio:
    """Median and quartiles of per-round ratios, and the ratio of the fastest rounds of each task.

    Noise only ever adds to a time, so the fastest rounds tell best what the code itself takes.
    """

    median: float
    lower: float
    upper: float
    rounds: int
    fastest: float | None = None

    @classmethod
    def of(cls, values: list[float]) -> Ratio:
        """Summarise one ratio per round; a single round has no spread."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, lower, upper, len(values))

    def __str__(self) -> str:
        spread = f"{figure(self.lower)} to {figure(self.upper)}"
        if self.fastest is None:
            return f"{figure(self.median)} ({spread})"
        return f"{figure(self.median)} ({spread}; fastest {figure(self.fastest)})"


@dataclass(frozen=True)
class Timings:
    """Seconds per task, one entry a round; entry i of every task comes from round i."""

    seconds: Mapping[str, list[float]]

    def ratio(self, task: str, base: str, *, factor: float = 1.0) -> Ratio:
        """``factor * seconds[task] / seconds[base]``, round by round."""
        pairs = zip(self.seconds[task], self.seconds[base], strict=True)
        by_round = Ratio.of([factor * seconds / unit for seconds, unit in pairs])
        return replace(by_round, fastest=factor * self.minimum(task) / self.minimum(base))

    def difference(self, more: str, less: str, base: str, *, factor: float = 1.0) -> Ratio:
        """``factor * (seconds[more] - seconds[less]) / seconds[base]``, round by round."""
        rounds = zip(self.seconds[more], self.seconds[less], self.seconds[base], strict=True)
        return Ratio.of([factor * (longer - shorter) / unit for longer, shorter, unit in rounds])

    def medians(self) -> dict[str, float]:
        """Median seconds of all tasks, by name."""
        return {task: self.median(task) for task in self.seconds}

    def median(self, task: str) -> float:
        """Median seconds of one task."""
        return statistics.median(self.seconds[task])

    def minimum(self, task: str) -> float:
        """Seconds of one task in its fastest round."""
        return min(self.seconds[task])


def clocked(task: Task) -> float:
    """Seconds that one call takes."""
    start = time.perf_counter()
    task()
    return time.perf_counter() - start


def interleaved(tasks: Mapping[str, Task], *, rounds: int, warmups: int = 1) -> Timings:
    """Time every task once a round, starting each round with another task.

    Args:
        tasks: By name. A task that returns a ``float`` has timed itself (in another process, or
            leaving out its preparation); the seconds of the others are those of the call.
        rounds: How often each task is timed.
        warmups: Untimed rounds before.
    """
    names = list(tasks)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-warmups, rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            elapsed = _seconds(tasks[name])
            if number >= 0:
                seconds[name].append(elapsed)
    return Timings(seconds)


def _seconds(task: Task) -> float:
    """Seconds of one call, or those that the task itself gives back."""
    # A collection in the middle of one task would be charged to that task alone.
    gc.collect()
    gc.disable()
    try:
        start = time.perf_counter()
        answer = task()
        elapsed = time.perf_counter() - start
    finally:
        gc.enable()
    if isinstance(answer, float):  # the task has timed itself
        return answer
    return elapsed


def figure(value: float) -> str:
    """About three significant digits, without an exponent where none is needed."""
    size = abs(value)
    if size >= 100:
        return f"{value:.0f}"
    if size >= 0.1:
        return f"{value:.2f}"
    return f"{value:.2g}"
