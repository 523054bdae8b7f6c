"""A plot of a job: each worker's samples and busy time per step."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from thrifty.core import HeteroError, require
from thrifty.perf import SplitChange

from ._job_report import MembersChanged


if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Step(Protocol):
    """The fields of a step that are plotted: a ``StepReport`` or a ``SimulatedStep``."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the workers."""
        ...

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of each worker."""
        ...

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds that each worker was busy."""
        ...


def plot_steps(steps: Sequence[Step]) -> Figure:
    """Plot each worker's samples and busy seconds over the steps of a job (matplotlib).

    Where the lower lines coincide, no worker waits. Vertical lines mark changes of the workers and
    of the split.

    Args:
        steps: Steps of a job or a simulation, in order.

    Raises:
        HeteroError: There are no steps.
        MissingExtraError: matplotlib is not installed.
    """
    require("matplotlib.figure", extra="plots")
    if not steps:
        raise HeteroError("there are no steps to draw")
    names = sorted({name for step in steps for name in step.names})
    library = import_module("thrifty.core._figure")
    figure: Figure = library.NotebookFigure(figsize=(8, 5), layout="constrained")
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
    """Return the events of a report, or the single change of a simulated step."""
    change = getattr(step, "change", None)
    events: Sequence[SplitChange | MembersChanged] = getattr(
        step, "events", () if change is None else (change,)
    )
    return events
