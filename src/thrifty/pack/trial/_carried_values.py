"""Which values a trial carries from epoch to epoch, so that a checkpoint may lack them.

A trial that was compared with its checkpoint says nothing about one that carries more, because a
hyper-parameter has switched on other code, or because it has come to a later epoch.

Some values change nothing yet, but code goes by them. A counter of patience ends a trial after many
epochs; the schedule of an optimizer lowers the rate in one of them. A comparison of a few steps
does not show that a restored trial has lost them.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any

import torch

from thrifty.pack._backend import Member
from thrifty.pack.identity import Place, reach, vars_of
from thrifty.pack.task._data import datasets_of
from thrifty.pack.task._task import SelfDescribing
from thrifty.pack.verify import (
    REST,
    UsedNames,
    content_of,
    contents_of,
    is_unread,
    place_in,
    same,
    used_names,
)

from ._probes import Trial
from ._trial import TaskTrial, TrainableTrial


_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_post_accumulate_grad_hooks",
)


def values_of(trial: Trial) -> dict[str, Any]:
    """Return stand-ins for what a trial may carry beside its state, by name.

    These are attributes of the task, the model, optimizers and data sets, buffers that are not
    persistent, and what ``carriers_of`` returns.
    """
    found = attributes(trial)
    if isinstance(trial, TaskTrial):
        found |= contents_of(datasets_of(trial.source))
    # A Trainable's own networks are in its state as a rule, and cost more to look at.
    return found | carriers_of(trial, own_networks=isinstance(trial, TaskTrial))


def carriers_of(trial: Trial, *, own_networks: bool = True) -> dict[str, Any]:
    """Return stand-ins for what a trial may carry elsewhere than in plain attributes, by name.

    These are hooks, which parameters are trained, the values of networks that the task holds, the
    contents and positions of files, and the state of optimizers within optimizers.

    Args:
        trial: The trial.
        own_networks: Whether values of networks that are attributes of the task count.
    """
    found: dict[str, Any] = {}
    known: set[int] = set()
    if isinstance(trial, TaskTrial):
        found |= _of_module("model", trial.model)
        known |= set(map(id, trial.model.modules()))
        roots = {"model": trial.model, **trial.optimizers.torch, "self": trial.task}
        for name, optimizer in trial.optimizers.torch.items():
            found |= _of_optimizer(name, optimizer)
    else:
        roots = {"self": trial.task}
    for name, value in _held(roots):
        if isinstance(value, torch.nn.Module) and id(value) not in known:
            known |= set(map(id, value.modules()))
            found |= _of_module(name, value)
            if own_networks:
                found |= {
                    f"{name}.{key} (of a network)": content_of(tensor)
                    for key, tensor in value.state_dict(keep_vars=True).items()
                }
        elif isinstance(value, torch.optim.Optimizer) and id(value) not in known:
            known.add(id(value))
            found |= _of_optimizer(name, value)
        elif isinstance(value, io.IOBase):
            found[f"{name} (a file)"] = place_in(value)
    return found


def unlike(live: Mapping[str, Any], restored: Mapping[str, Any]) -> list[str]:
    """Return the names of the values that differ between two results of ``carriers_of``."""
    return [name for name in {**live, **restored} if live.get(name) != restored.get(name)]


def shared_buffers(live: Trial, restored: Trial) -> dict[str, Any]:
    """Return stand-ins for the buffers that a restored trial shares with the live one, by name."""
    if not isinstance(live, TaskTrial) or not isinstance(restored, TaskTrial):
        return {}
    own = set(map(id, live.model.buffers()))
    return {
        f"model.{name} (shared by trials)": content_of(buffer)
        for name, buffer in restored.model.named_buffers()
        if id(buffer) in own
    }


def moved(first: Mapping[str, Any], now: Mapping[str, Any]) -> frozenset[str]:
    """Return the identifiers of the values that differ between two results of ``values_of``.

    >>> sorted(moved({"model.h": None, "self.n": 1}, {"model.h": [0.5], "self.n": 1, "self.m": 0}))
    ['h', 'm']
    """
    names = (name for name in {*first, *now} if first.get(name) != now.get(name))
    return frozenset(identifier(name) + name.partition(" ")[2] for name in names)


def options_of(member: Member) -> frozenset[tuple[str, Any]]:
    """Return those hyper-parameters of a trial that choose between pieces of code.

    These are truth values, texts and None; numbers change how much, and not what.
    """
    values = member.first_values.items()
    return frozenset((n, v) for n, v in values if v is None or isinstance(v, bool | str))


def _of_module(name: str, model: torch.nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        where = f"{name}.{path}" if path else name
        found[f"{where} hooks"] = _num_hooks(module)
        for key in module._non_persistent_buffers_set:
            found[f"{where}.{key}"] = content_of(module._buffers.get(key))
    for path, parameter in model.named_parameters():
        found[f"{name}.{path} requires_grad"] = parameter.requires_grad
        found[f"{name}.{path} hooks"] = _num_hooks(parameter)
    return found


def _of_optimizer(name: str, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the hooks of an optimizer, and the state of optimizers that it holds."""
    found: dict[str, Any] = {f"{name} hooks": _num_hooks(optimizer)}
    for key, inner in vars(optimizer).items():
        if isinstance(inner, torch.optim.Optimizer):
            state = inner.state_dict()
            found[f"{name}.{key} (an optimizer)"] = (
                [content_of(each) for each in state["state"].items()],
                content_of(state["param_groups"]),
            )
    return found


def _held(roots: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of objects and the elements of lists and dicts in them, by name."""
    for root, owner in roots.items():
        for key, value in vars_of(owner).items():
            yield f"{root}.{key}", value
            if type(value) in (list, tuple) and len(value) <= _MAX_ELEMENTS:
                yield from ((f"{root}.{key}[{n}]", each) for n, each in enumerate(value))
            elif type(value) is dict and len(value) <= _MAX_ELEMENTS:
                yield from ((f"{root}.{key}[{k!r}]", each) for k, each in value.items())


_MAX_ELEMENTS = 64


def _num_hooks(owner: Any) -> tuple[int, ...]:
    return tuple(len(getattr(owner, name, None) or ()) for name in _HOOKS)


OF_TASK = ("data", "model", "optimizer", "__init__")
"""Methods of a ``Task`` that run before training."""
OF_TRAINABLE = ("setup", "state", "load_state", "__init__")
"""Methods of a ``Trainable`` that run before training, or only carry its state."""

PLAIN = (bool, int, float, str)
"""Types of variables that no code keeps as a table of what it has computed before."""


OF_FUNCTION = 3
"""How deep objects are looked at that a training function or the like holds."""

_OF_CODE = (" (closure)", " (default)", " (argument)", " (local)")
"""Notes on variables of functions and generators that attributes hold."""


def act_later(
    live: TaskTrial | TrainableTrial,
    names: Sequence[str],
    *,
    restored: TaskTrial | TrainableTrial,
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
        restored: A trial that has lost them, or had to make them anew.
        shared: The variables that trials share.
        first: What ``attributes`` returned when the trial began.
    """
    held = [name for name in names if identifier(name) not in live.task.not_state]
    if not held:
        return []
    used, now, anew = _used_in(live), attributes(live), attributes(restored)
    held = [
        name
        for name in held
        if (name not in first or first[name] != now.get(name))
        and not _is_memo(now.get(name), anew.get(name))
    ]
    tables = {place.name for place in shared if not isinstance(place.get(), PLAIN)}
    return [
        name
        for name in held
        if (name not in tables and _is_used(name, used)) or _is_of_torch(name, live, restored)
    ]


def attributes(trial: TaskTrial | TrainableTrial) -> dict[str, Any]:
    """Return stand-ins for the values of a trial's attributes, by name."""
    if isinstance(trial.task, SelfDescribing):
        return contents_of(trial.task.looked_at(), depth=OF_FUNCTION)
    objects: dict[str, Any] = {"self": trial.task}
    if isinstance(trial, TaskTrial):
        objects |= {"model": trial.model, **trial.optimizers.torch}
    return contents_of(objects)


def unread(
    trial: TaskTrial | TrainableTrial, contents: Mapping[str, Any] | None = None
) -> frozenset[str]:
    """Return the names of what training code may read, and whose content cannot be read whole.

    Args:
        trial: A trial that has trained.
        contents: What ``attributes`` returns for it, if that is known: it costs reading all.
    """
    task = trial.task
    if isinstance(task, SelfDescribing):
        return frozenset(task.unread())
    held = attributes(trial) if contents is None else contents
    found = [name for name, content in held.items() if is_unread(content)]
    if not found:
        return frozenset()
    names = set().union(*(names_in(each.__code__) for each in _code_of(trial)))
    # What an object holds may be read by the code of a package.
    return frozenset(
        name
        for name in found
        if names.intersection(map(identifier, name.split("."))) and not _is_meant(name, task)
    )


def names_in(code: CodeType) -> set[str]:
    """Return the names that code and what is inside it looks up."""
    inside = (names_in(each) for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*inside)


def _is_meant(name: str, task: Any) -> bool:
    return not set(map(identifier, name.split("."))).isdisjoint(task.not_state)


def identifier(name: str) -> str:
    """Return the last identifier in the name of a place.

    >>> [identifier(name) for name in ("model.calls (a buffer)", "self.others[0].slow", "T['n']")]
    ['calls', 'slow', 'T']
    """
    plain = name.partition(" ")[0].partition("['")[0].partition("(")[0]
    return plain.rpartition(".")[2].partition("[")[0]


def _is_memo(now: Any, anew: Any) -> bool:
    """Return whether a mapping has all that another one has, and more.

    Both are stand-ins: a length, followed by pairs of a key and a value.
    """
    if not isinstance(now, list) or not isinstance(anew, list) or len(anew) < 2:
        return False
    if not all(isinstance(each, tuple) for each in (*now[1:], *anew[1:])):
        return False
    pairs = [pair for pair in anew[1:] if pair[0] != REST]
    return all(pair in now[1:] for pair in pairs)


def _is_used(name: str, used: UsedNames) -> bool:
    if name.endswith(_OF_CODE):  # what calls the function does not name its variables
        return True
    own = name.startswith(("self.", "model.", "optimizer.", "task."))
    names = used.attributes if own else used.attributes | used.variables
    return identifier(name) in names


def _used_in(live: TaskTrial | TrainableTrial) -> UsedNames:
    """Return the names that the code of training and evaluation uses."""
    return used_names(_code_of(live))


def _code_of(live: TaskTrial | TrainableTrial) -> list[FunctionType]:
    """Return the user's functions and methods that run in training and evaluation."""
    preparing = OF_TASK if isinstance(live, TaskTrial) else OF_TRAINABLE
    found = [*reach({"self": live.task}, without=preparing).functions]
    if isinstance(live, TaskTrial):
        found += reach({"model": live.model, **live.optimizers.torch}).functions
    bases = type(live.task).__mro__
    left_out = [vars(kind).get(name) for kind in bases for name in preparing]
    functions = (each.value for each in found)
    return [f for f in functions if f not in left_out and f.__name__ != "__init__"]


def _is_of_torch(
    name: str, live: TaskTrial | TrainableTrial, restored: TaskTrial | TrainableTrial
) -> bool:
    """Return whether a value belongs to a schedule or a scaler of torch in another state."""
    owner, other = _owner_of(name, live.task), _owner_of(name, restored.task)
    if not type(owner).__module__.startswith(("torch.optim.", "torch.amp.", "torch.cuda.amp.")):
        return False
    if hasattr(owner, "state_dict") and type(owner) is type(other):
        return not same(owner.state_dict(), other.state_dict())
    return True


def _owner_of(name: str, task: Any) -> Any:
    """Return the object that has an attribute such as ``self.schedule.last_epoch``."""
    root, *path = name.partition(" ")[0].split(".")
    owner: Any = task if root == "self" else None
    for part in path[:-1]:
        owner = vars_of(owner).get(part)
    return None if owner is task else owner
