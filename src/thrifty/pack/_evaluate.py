"""Evaluation of a state that is kept, without training."""

from __future__ import annotations

import torch

from ._backend import Member
from ._task import Task
from ._trial import TaskTrial


def evaluate_state(
    task: Task, member: Member, *, device: torch.device | str = "cpu"
) -> dict[str, float]:
    """Compute the metrics of a trial from its state, as they are computed when it is trained.

    Args:
        task: what was trained.
        member: the state after an epoch; ``epoch`` counts from 0, ``values`` are those in it.
        device: where to evaluate.

    Returns:
        The metrics of the task, without the training loss.
    """
    trial = TaskTrial(task, torch.device(device))
    trial.restore(member)
    return trial.evaluate(member.epoch)
