"""How far a run is and when it will end."""

from __future__ import annotations

from collections.abc import Callable


class Pace:
    """Counts steps and estimates the time left.

    The rate is taken from the first step that this process finished on, so that what happens once
    (compilation, building the first plan) does not count, while evaluations and checkpoints do.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.total_steps = 0
        self.done_steps = 0
        self._began_seconds = clock()
        self._first: tuple[int, float] | None = None

    def start(self, total_steps: int, first_step: int = 0) -> None:
        """Begins a run of `total_steps` steps, of which `first_step` are done."""
        self.total_steps = total_steps
        self.done_steps = first_step
        self._began_seconds = self._clock()
        self._first = None

    def advance(self, step: int) -> None:
        """Notes that `step` steps are done."""
        self.done_steps = step
        if self._first is None:
            self._first = (step, self._clock())

    @property
    def is_done(self) -> bool:
        """Whether the last step is done."""
        return self.done_steps >= self.total_steps

    @property
    def elapsed_seconds(self) -> float:
        """Time since start."""
        return self._clock() - self._began_seconds

    @property
    def eta_seconds(self) -> float | None:
        """Time left at the rate so far; None until there are two points to take a rate from."""
        if self.is_done:
            return 0.0
        if self._first is None or self.done_steps <= self._first[0]:
            return None
        step, seconds = self._first
        rate_seconds = (self._clock() - seconds) / (self.done_steps - step)
        return rate_seconds * (self.total_steps - self.done_steps)
