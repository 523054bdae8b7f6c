"""Values outside of a checkpoint that change nothing yet, but that code goes by.

A counter of patience ends a trial after many epochs; the schedule of an optimizer lowers the rate
in one of them. A comparison of a few steps does not show that a restored trial has lost them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from thrifty.pack.identity import Place, reach, vars_of
from thrifty.pack.verify import contents_of, used_names

from ._trial import TaskTrial, TrainableTrial


PREPARING = ("data", "model", "optimizer", "setup", "state", "load_state", "__init__")
"""Methods of a task that run before training, or only carry its state."""

PLAIN = (bool, int, float, str)
"""Types of variables that no code keeps as a table of what it has computed before."""


def act_later(
    live: TaskTrial | TrainableTrial,
    names: Sequence[str],
    *,
    shared: Iterable[Place],
    first: Mapping[str, Any],
) -> list[str]:
    """Return those values that code uses, so that a trial which has lost them may part later.

    A value that is only counted, noted or shown is not used, and one that is as it was when the
    trial began is no state (the name of a file, the time of a start). A table that trials share may
    be a memo, which a restored trial has filled anew with the same results.

    Args:
        live: A trial that has them.
        names: Names of values outside of its checkpoint.
        shared: The variables that trials share.
        first: What ``attributes`` returned when the trial began.
    """
    held = [name for name in names if identifier(name) not in live.task.not_state]
    if not held:
        return []
    used, now = _used_in(live), attributes(live)
    held = [name for name in held if name not in first or first[name] != now.get(name)]
    tables = {place.name for place in shared if not isinstance(place.get(), PLAIN)}
    return [
        name
        for name in held
        if (name not in tables and identifier(name) in used) or _is_of_torch(live, name)
    ]


def attributes(trial: TaskTrial | TrainableTrial) -> dict[str, Any]:
    """Return stand-ins for the values of a trial's attributes, by name."""
    objects: dict[str, Any] = {"self": trial.task}
    if isinstance(trial, TaskTrial):
        objects |= {"model": trial.model, **trial.optimizers.torch}
    return contents_of(objects)


def identifier(name: str) -> str:
    """Return the last identifier in the name of a place.

    >>> [identifier(name) for name in ("model.calls (a buffer)", "self.others[0].slow", "T['n']")]
    ['calls', 'slow', 'T']
    """
    plain = name.partition(" ")[0].partition("['")[0].partition("(")[0]
    return plain.rpartition(".")[2].partition("[")[0]


def _used_in(live: TaskTrial | TrainableTrial) -> frozenset[str]:
    """Return the names that the code of training and evaluation uses."""
    found = [*reach({"self": live.task}, without=PREPARING).functions]
    if isinstance(live, TaskTrial):
        found += reach({"model": live.model, **live.optimizers.torch}).functions
    functions = (each.value for each in found)
    return used_names(each for each in functions if each.__name__ not in PREPARING)


def _is_of_torch(live: TaskTrial | TrainableTrial, name: str) -> bool:
    """Return whether a value belongs to an object of torch such as a schedule or a scaler."""
    root, *path = name.partition(" ")[0].split(".")
    if root != "self" or len(path) < 2:
        return False
    owner: Any = live.task
    for part in path[:-1]:
        owner = vars_of(owner).get(part)
    return type(owner).__module__.startswith(("torch.optim.", "torch.amp.", "torch.cuda.amp."))
