"""Which values a trial carries from epoch to epoch, so that a checkpoint may lack them.

A comparison of one trial says nothing about another one that carries more: code that a value of a
hyper-parameter switches on, or an epoch that comes later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from thrifty.pack._backend import Member
from thrifty.pack.task._data import datasets_of
from thrifty.pack.verify import content_of, contents_of

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
    persistent, the numbers of hooks, and which parameters are trained.
    """
    found = attributes(trial)
    if isinstance(trial, TaskTrial):
        found |= contents_of(datasets_of(trial.source))
        found |= _of_module("model", trial.model)
        for name, optimizer in trial.optimizers.torch.items():
            found[f"{name} hooks"] = _num_hooks(optimizer)
        return found
    for key, value in vars(trial.task).items():
        if isinstance(value, torch.nn.Module):
            found |= _of_module(f"self.{key}", value)
        elif isinstance(value, torch.optim.Optimizer):
            found[f"self.{key} hooks"] = _num_hooks(value)
    return found


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


def _num_hooks(owner: Any) -> tuple[int, ...]:
    return tuple(len(getattr(owner, name, None) or ()) for name in _HOOKS)
