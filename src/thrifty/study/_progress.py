"""Live progress of a run: stage forest, trials, best so far, time left, epochs saved."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Self

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress as RichProgress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from thrifty.core import Clock, EpochDone, plain_text

from ._ledger import Ledger


REDRAW_S = 0.1


class _TwoLines(RichProgress):
    """A progress bar with a line of details below it; both fit a terminal of 80 columns."""

    detail = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        if self.detail:
            yield Text(f"  {self.detail}", no_wrap=True, overflow="ellipsis")


class Progress:
    """A progress display on the terminal; without one, a line is printed now and then."""

    def __init__(self, name: str, ledger: Ledger, *, clock: Clock) -> None:
        self._metric = plain_text(ledger.goals.metrics[0])
        self._ledger = ledger
        self._clock = clock
        self._bar = _TwoLines(
            SpinnerColumn(),
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("unique epochs"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}", markup=False),
            console=_console(),
            refresh_per_second=8,
        )
        self._task = self._bar.add_task(plain_text(name), total=None, left="")
        self._drawn = 0.0
        self._began = clock.monotonic()
        self._done_before: int | None = None

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar.console.is_jupyter:
            self._bar.refresh()  # in a notebook, stopping does not draw the last state
        self._bar.stop()

    def on_event(self, event: object) -> None:
        """Redraw after an epoch, at most every ``REDRAW_S`` seconds, and at the end."""
        now, ledger = self._clock.monotonic(), self._ledger
        if not isinstance(event, EpochDone):
            return
        if self._done_before is None:
            self._done_before = ledger.plan.num_epochs_done - 1
        finished = ledger.plan.num_epochs_done >= ledger.plan.num_epochs_needed
        if now - self._drawn >= REDRAW_S or finished:
            self._drawn = now
            self._draw(ledger, elapsed_s=now - self._began)

    def _draw(self, ledger: Ledger, *, elapsed_s: float) -> None:
        plan, history = ledger.plan, ledger.history
        done, needed = plan.num_epochs_done, plan.num_epochs_needed
        trained = done - (self._done_before or 0)
        left_s = (needed - done) * elapsed_s / max(trained, 1)
        best = (
            ""
            if ledger.best_value is None
            else f"  best {self._metric} {ledger.best_value:.4g}"
        )
        saved = ledger.trial_epochs - min(done, ledger.trial_epochs)
        failed = f" ({len(ledger.errors)} failed)" if ledger.errors else ""
        self._bar.detail = f"{len(history)} trials{failed}{best}  {saved:,} epochs saved"
        self._bar.update(
            self._task,
            completed=done,
            total=max(needed, done),
            left=f"about {left_s:.0f} s left" if needed > done else "",
        )


def _console() -> Console:
    """Return the console of the progress display.

    In a notebook rich needs ipywidgets. Without them it would warn and show nothing, so the bar is
    printed once, at the end, as on any other output that is not a terminal.
    """
    console = Console(stderr=True)
    if console.is_jupyter and find_spec("ipywidgets") is None:
        return Console(stderr=True, force_jupyter=False)
    return console
