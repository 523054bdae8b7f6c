"""Studies small enough for tests."""

from __future__ import annotations

import signal

from thrifty.core import EpochDone
from thrifty.pack import Task
from thrifty.run import Local
from thrifty.search import Algorithm, GridSearch
from thrifty.space import Choice, Constant, Linear, MultiStep, Space, Step, Warmup
from thrifty.store import Store
from thrifty.study import Storage, Study
from thrifty.testing import LineTask


SOLO = Local(pack="solo")
SPACE = Space(
    lr=Choice([Constant(0.1), Step(0.1, [2]), Step(0.1, [2, 4])]),
    width=Choice([0, 4]),
    dropout=Choice([0.2, MultiStep([0.2, 0.0], milestones=[3])]).when(width=4),
)

WIDE = Space(
    lr=Choice([
        Constant(0.1),
        Step(0.1, [2]),
        Step(0.1, [2, 4]),
        Step(0.1, [4], gamma=0.5),
        Linear(0.1),
        Warmup(1, Step(0.1, [3])),
    ]),
    width=Choice([0, 4]),
    dropout=Choice([0.2, MultiStep([0.2, 0.0], milestones=[3])]).when(width=4),
)
"""Schedules of more families, in twice as many trials."""


class Sized(LineTask):
    """Task that also reports the model's size and the line's distance from the origin."""

    def metrics(self, model, batch):
        x, _ = batch
        size = float(sum(p.numel() for p in model.parameters()))
        return {**super().metrics(model, batch), "size": size, "offset": model(x).mean()}


class Count:
    """Observer that counts trained epochs."""

    def __init__(self) -> None:
        self.epochs = 0

    def on_event(self, event) -> None:
        self.epochs += isinstance(event, EpochDone)


class StopAfter:
    """Observer that presses Ctrl-C after a given number of epochs."""

    def __init__(self, epochs: int) -> None:
        self._left = epochs

    def on_event(self, event) -> None:
        if isinstance(event, EpochDone):
            self._left -= 1
            if self._left == 0:  # once: a second signal would stop the study at once
                signal.raise_signal(signal.SIGINT)


def trained(study: Study, **options) -> int:
    """Run a study and return how many epochs it trained."""
    count = Count()
    observers = [count, *options.pop("observers", ())]
    study.run(progress=False, observers=observers, executor=SOLO, **options)
    return count.epochs


def make_study(
    folder,
    *,
    task: Task | None = None,
    space: Space = SPACE,
    algorithm: Algorithm | None = None,
    name: str = "s",
    seed: int = 0,
    **options,
) -> Study:
    return Study(
        task or LineTask(),
        space,
        algorithm=algorithm or GridSearch(max_epochs=6),
        metric=options.pop("metric", "mse"),
        mode=options.pop("mode", "min"),
        storage=options.pop("storage", Storage(url=f"sqlite:///{folder}/t.db")),
        name=name,
        seed=seed,
        **options,
    )


def records(study: Study):
    """Return all that a study leaves behind, comparable: without times and workers."""
    with Store.open(study.storage.url, create=False) as store:
        info = store.studies.get(study.name)
        plan = store.plans.load(info.plan)
        trials = store.studies.load(info.id).trials
    return (
        info.state,
        trials,
        [(e.node, e.epoch, e.metrics) for e in plan.epochs],
        [(n.node, n.parent, n.start) for n in plan.nodes],
    )
