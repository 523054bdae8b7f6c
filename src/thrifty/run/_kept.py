"""Evaluation of epochs that another plan has trained, from their stored states."""

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
        task: The trained task; its metrics may have changed since.
        ref: The checkpoint, with the training loss of its last epoch.
        member: The same state, with the hyper-parameters of that epoch.
        device: Device to evaluate on.
        worker: Name of the worker.
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
    """Return a finished write, for a state whose file exists already."""
    future: Future[CheckpointRef | None] = Future()
    future.set_result(None)
    return future
