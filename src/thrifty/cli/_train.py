"""Common code of ``run`` and ``resume``."""

from __future__ import annotations

from thrifty.run import Local
from thrifty.study import StopWhen, Study

from ._show import show_results


def train(
    study: Study,
    *,
    workers: int | None,
    threads: int | None,
    epoch_timeout: float | None,
    quiet: bool,
    stop_epochs: int | None,
    stop_seconds: float | None,
    target: float | None,
) -> None:
    """Run a study and show its results."""
    given = (stop_epochs, stop_seconds, target)
    stop = (
        StopWhen(epochs=stop_epochs, seconds=stop_seconds, target=target)
        if any(value is not None for value in given)
        else None
    )
    executor = Local(workers=workers, threads=threads, epoch_timeout=epoch_timeout)
    study.run(executor=executor, stop=stop, progress=not quiet)
    show_results(study)
