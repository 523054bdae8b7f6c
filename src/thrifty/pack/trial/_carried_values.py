"""Which values a trial carries from epoch to epoch, so that a checkpoint may lack them.

A comparison of one trial says nothing about another one that carries more: code that a value of a
hyper-parameter switches on, or an epoch that comes later.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from thrifty.pack._backend import Member
from thrifty.pack.identity import vars_of
from thrifty.pack.task._data import datasets_of
from thrifty.pack.verify import content_of, contents_of, place_in

from ._later_effects import attributes, identifier
from ._probes import Trial
from ._trial import TaskTrial


_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
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
        hooks = getattr(parameter, "_backward_hooks", None) or ()
        found[f"{name}.{path} requires_grad"] = (parameter.requires_grad, len(hooks))
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
