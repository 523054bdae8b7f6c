"""A check that a task's data are the same each time they are loaded, as other processes do."""

from __future__ import annotations

from typing import Any

from thrifty.core import StateError, derive_seed
from thrifty.pack._random import seed_everything
from thrifty.pack.task._data import Source, open_source
from thrifty.pack.task._hyperparameters import HyperParameters
from thrifty.pack.task._sources import sources_of
from thrifty.pack.task._task import Task, own_task
from thrifty.pack.verify import same, stand_in

from ._trial import TaskTrial


QUICK_S = 1.0
"""The longest loading time in seconds for which data are loaded again for a comparison."""
MAX_BYTES = 2**28
"""The most memory in bytes for which arrays are loaded twice."""


def check_data(task: Task, live: TaskTrial) -> None:
    """Load a task's data once more if that is quick, and compare the first batches.

    Args:
        task: The task as the user gave it.
        live: A trial with data.

    Raises:
        StateError: The data differ, so other processes would also train on different data.
    """
    sources = sources_of(task, live.device)
    arrays = live.source.arrays or ()
    if sources.load_s > QUICK_S or sum(array.nbytes for array in arrays) > MAX_BYTES:
        return
    hp = HyperParameters(live.readings.first)
    seed_everything(derive_seed(live.seed, "data"))
    again = open_source(own_task(task).data(hp), device=live.device)
    size = live.source.num_train if arrays else live.task.eval_batch_size
    mine = _first(live.source, size=size, seed=live.seed)
    theirs = _first(again, size=size, seed=live.seed)
    for which in range(2):
        if same(mine[which], theirs[which]):
            continue
        if same(mine[which], _first(live.source, size=size, seed=live.seed)[which]):
            raise _differ(task, ("training", "validation")[which])
        # reading the same data twice already differs, which the comparison of a step reports
        return


def _first(source: Source, *, size: int, seed: int) -> tuple[Any, Any]:
    """Return a training and a validation batch of a source."""
    seed_everything(seed)
    train = next(iter(source.train_batches(seed=seed, epoch=0, batch_size=size)))
    valid, _ = next(iter(source.valid_batches(batch_size=size)))
    return stand_in(train), stand_in(valid)


def _differ(task: Task, which: str) -> StateError:
    return StateError(
        f"{type(task).__name__}.data gives other {which} data each time, for the same seed and the "
        "same hyper-parameters, so trials in other processes would train on others; draw from "
        "torch's, NumPy's or Python's global stream, which thrifty seeds, or from a generator with "
        "a fixed seed"
    )
