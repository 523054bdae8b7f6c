"""A picture of a job: who trained how much, and who waited for whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from thrifty.core import HeteroError, MissingExtraError
from thrifty.perf import SplitChange

from ._report import MembersChanged


if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Step(Protocol):
    """What is drawn of a step; a ``StepReport`` or a ``SimulatedStep``."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the workers."""
        ...

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of each."""
        ...

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds that each worked."""
        ...


def plot_steps(steps: Sequence[Step]) -> Figure:
    """Samples of each worker, and its seconds, over the steps of a job or a simulation (matplotlib).

    Where the lines below lie upon each other nobody waits. Changes of the workers and of the split are marked.

    Args:
        steps: one after the other.

    Raises:
        HeteroError: there are none.
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 (an extra)
    except ImportError as error:
        raise MissingExtraError("matplotlib", extra="plots") from error
    if not steps:
        raise HeteroError("there are no steps to draw")
    names = sorted({name for step in steps for name in step.names})
    figure = Figure(figsize=(8, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    at = range(1, len(steps) + 1)
    sizes = [[_of(step, step.sizes, name) for step in steps] for name in names]
    above.stackplot(at, sizes, labels=names, step="mid", alpha=0.85)
    for name in names:
        seconds = [_of(step, step.busy_s, name) or float("nan") for step in steps]
        below.plot(at, seconds, label=name, linewidth=1.2)
    for number, step in zip(at, steps, strict=True):
        for event in _events(step):
            new = isinstance(event, MembersChanged)
            for axes in (above, below):
                axes.axvline(number, color="black" if new else "grey", linewidth=0.8, alpha=0.6)
    above.set(ylabel="samples of a step", xlim=(1, max(2, len(steps))), ylim=(0, None))
    below.set(ylabel="seconds at work", xlabel="step", ylim=(0, None))
    above.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return figure


def _of(step: Step, values: Sequence[float], name: str) -> float:
    return values[step.names.index(name)] if name in step.names else 0.0


def _events(step: Step) -> Sequence[SplitChange | MembersChanged]:
    """Those of a report, or the one of a simulated step."""
    change = getattr(step, "change", None)
    events: Sequence[SplitChange | MembersChanged] = getattr(
        step, "events", () if change is None else (change,)
    )
    return events
