"""A check whether a call changes a task, a model or a random stream."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from thrifty.core import TaskError

from .identity import places_of
from .identity._names import Names
from .identity._values import Values


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
