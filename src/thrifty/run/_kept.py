"""Epochs that are not trained, because another plan has: their states are loaded and evaluated."""

from __future__ import annotations

import time
from concurrent.futures import Future

from thrifty.core import CheckpointRef, EpochDone
from thrifty.pack import TRAIN_LOSS, Member, Task, evaluate_state


def evaluated(
    task: Task, ref: CheckpointRef, member: Member, *, device: str, worker: str
) -> EpochDone:
    """Evaluate a state that another plan has trained.

    Args:
        task: what was trained; its metrics may have changed since.
        ref: the state, with the training loss of its last epoch.
        member: the same state, with the hyper-parameters in that epoch.
        device: where to evaluate.
        worker: the name of the worker.
    """
    assert ref.train_loss is not None
    began = time.perf_counter()
    metrics = {TRAIN_LOSS: ref.train_loss, **evaluate_state(task, member, device=device)}
    seconds = time.perf_counter() - began
    return EpochDone(
        node=ref.node,
        epoch=ref.epoch,
        metrics=metrics,
        seconds=seconds,
        seconds_alone=seconds,
        worker=worker,
        evaluated=True,
    )


def nothing_to_write() -> Future[CheckpointRef | None]:
    """The write of a state whose file is there already."""
    future: Future[CheckpointRef | None] = Future()
    future.set_result(None)
    return future
