"""What is found out about a task before it is packed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from thrifty.core import TaskError, derive_seed
from thrifty.pack._random import borrowed_streams, seed_everything
from thrifty.pack.identity import places_of
from thrifty.pack.identity._contents import Names
from thrifty.pack.identity._values import Values
from thrifty.pack.verify import as_it_was

from ._data import valid_batches
from ._followed_optimizer import FollowedOptimizer
from ._hyperparameters import HyperParameters, Readings
from ._metrics import check_metrics
from ._sources import sources_of
from ._task import Task, own_task


def changes_nothing(call: Callable[[], Any], *, task: Any, model: torch.nn.Module) -> bool:
    """Call a function and return whether task, model and random streams are unchanged.

    The answer is False if that cannot be seen, because a value has no comparable content.
    """
    before = _state(task, model)
    call()
    return before is not None and before == _state(task, model)


def _state(task: Any, model: torch.nn.Module) -> list[Any] | None:
    values = Values(Names(home=""))
    numpy = np.random.get_state(legacy=False)  # noqa: NPY002 (only read, not drawn from)
    streams = [torch.get_rng_state(), numpy, random.getstate()]
    try:
        content = values.digest([model, streams], path="the model")
    except TaskError:
        return None
    return [content, {key: text for key, (_, text) in places_of(task).items()}]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskReport:
    """The findings of a dry run.

    Attributes:
        metrics: The metrics that the task reports.
        structural: The hyper-parameters that it reads once, to make data, model or optimizer.
        followed: The hyper-parameters that the optimizer, the batch size or ``adapt`` follows while
            they change.
        pure: Whether ``metrics`` changes neither the model nor the task nor a random stream.
    """

    metrics: frozenset[str]
    structural: frozenset[str]
    followed: frozenset[str]
    pure: bool


def inspect_task(
    task: Task,
    values: Mapping[str, Any],
    *,
    seed: int,
    device: str = "cpu",
    moving: Iterable[str] = (),
) -> TaskReport:
    """Make data, model and optimizer once, call ``adapt``, and evaluate the first validation batch.

    Errors of the task's code propagate.

    Args:
        task: The task; a copy of it is run.
        values: Hyper-parameters by name.
        seed: The seed of the random streams.
        device: Where the model is made.
        moving: Hyper-parameters that will change during training.

    Raises:
        TaskError: One of ``moving`` is read only once and not followed, or the optimizer does not
            fit the model.
    """
    where = torch.device(device)
    readings = Readings(type(task).__name__, values, moving=moving)
    own = own_task(task)
    with borrowed_streams():
        seed_everything(derive_seed(seed, "data"))
        source = sources_of(task, where).get(task, readings.once("data"))
        seed_everything(derive_seed(seed, "model"))
        model = own.model(readings.once("model")).to(where).eval()
        followed = FollowedOptimizer(own.optimizer, model, values)
        readings.note_once("optimizer", followed.read_when_built)
        adapted = HyperParameters(values)
        own.adapt(model, adapted)
        batch, _ = next(iter(valid_batches(source, batch_size=task.eval_batch_size)))
        found: list[Any] = []
        with as_it_was({"task": own, "model": model}):
            with torch.no_grad():
                pure = changes_nothing(
                    lambda: found.append(own.metrics(model, batch)), task=own, model=model
                )
            metrics = check_metrics(found[0], task=type(task).__name__)
            readings.followed |= {*followed.names, *adapted.names_read}
            if isinstance(task.batch_size, str):
                readings.followed.add(task.batch_size)
            # check before task and model are restored, which may undo the record of what was read
            readings.check()
            read_once = frozenset(readings.read_once)
        followed.check(readings.moving)
    return TaskReport(
        metrics=frozenset(metrics),
        structural=read_once,
        followed=frozenset(readings.followed),
        pure=pure,
    )
