"""Evaluation of a saved state, without training."""

from __future__ import annotations

import torch

from thrifty.pack._backend import Member
from thrifty.pack.task._task import Task

from ._trial import TaskTrial


def evaluate_state(
    task: Task, member: Member, *, device: torch.device | str = "cpu"
) -> dict[str, float]:
    """Compute the metrics of a trial from its state, as they are computed during training.

    Args:
        task: The task that was trained.
        member: The state after an epoch; ``epoch`` counts from 0, and ``values`` are the
            hyper-parameters in that epoch.
        device: The device to evaluate on.

    Returns:
        The metrics of the task, without the training loss.
    """
    trial = TaskTrial(task, torch.device(device))
    trial.restore(member)
    return trial.evaluate(member.epoch)
