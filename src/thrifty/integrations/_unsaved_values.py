"""Finds attributes of models, callbacks and Trainers that change, and whether code reads them.

``_lost_values`` then tries out whether such a value matters from one epoch to the next.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch

from thrifty.pack.identity import is_own, reach, vars_of
from thrifty.pack.verify import UsedNames, content_of, used_names


_MAX_DEPTH = 2
"""How deep objects of the user's classes are searched within attributes."""

_RECORDED = ("log", "log_dict")
"""Functions whose values are metrics of the trial."""

_CARRIERS = frozenset({
    "__init__", "state", "state_dict", "load_state_dict", "on_save_checkpoint",
    "on_load_checkpoint",
})  # fmt: skip
"""Methods that run before training, or only carry state."""

_NOT_VALUES = frozenset({
    "training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set",
    "_is_full_backward_hook", "losses", "pass_seed", "first_pass",
})  # fmt: skip
"""Attributes that are state, that every module has, or that the adapters set."""

_SCALAR = (bool, int, float, str, type(None))
_WITH_STATE = ("torch.optim.lr_scheduler", "torch.amp", "torch.cuda.amp")
_LARGE_LIBRARIES = ("torch", "transformers", "peft")
"""Libraries whose modules have many attributes, of which only plain values may matter."""


class Value(NamedTuple):
    """A stand-in for a value, and the identifiers by which code may use it.

    Attributes:
        content: The stand-in.
        names: The value counts as used if code uses one of these; empty: always.
    """

    content: Any
    names: frozenset[str]


Values = dict[str, Value]


def values_of(owners: Mapping[str, Any]) -> Values:
    """Return stand-ins for what a checkpoint may lack, by name.

    These are plain attributes of modules, callbacks and Trainers, buffers that are not persistent,
    and which parameters are trained. Attributes that the code of libraries assigns are left out,
    and so are objects of library classes.

    >>> layer = torch.nn.Linear(1, 1, bias=False)
    >>> sorted(values_of({"model": layer}))
    ['model.in_features', 'model.out_features', 'model.weight (requires_grad)']
    """
    found: Values = {}
    for name, owner in owners.items():
        if not isinstance(owner, torch.nn.Module):
            _note(name, owner, found=found)
            continue
        for path, module in owner.named_modules():
            if is_whole_metric(module) and all(module._persistent.values()):
                continue
            where = f"{name}.{path}" if path else name
            _note(where, module, found=found, path=path)
            for key in module._non_persistent_buffers_set:
                names = frozenset({key, *path.split(".")} - {""})
                found[f"{where}.{key}"] = Value(content_of(module._buffers.get(key)), names)
        for path, parameter in owner.named_parameters():
            key = f"{name}.{path} (requires_grad)"
            found[key] = Value(parameter.requires_grad, frozenset())
    return found


def is_whole_metric(part: Any) -> bool:
    """Return whether an object is a metric of torchmetrics whose values say all of it.

    Those that collect predictions have lists, and those that average count their updates.
    """
    states, merged = vars(part).get("_defaults"), vars(part).get("_reductions")
    if not (isinstance(states, dict) and isinstance(merged, dict) and hasattr(part, "persistent")):
        return False
    known = all(getattr(each, "__name__", "") in _MERGED for each in merged.values())
    return known and all(isinstance(each, torch.Tensor) for each in states.values())


_MERGED = frozenset({"dim_zero_sum", "dim_zero_max", "dim_zero_min"})


def owners_of(callbacks: Sequence[Any], **others: Any) -> dict[str, Any]:
    """Return the objects whose values may be lost, by names for messages.

    Callbacks of library classes keep their own state.

    Args:
        callbacks: The callbacks of a Trainer.
        others: The model, and the Trainer if its class may be the user's.
    """
    owners = {
        name: each
        for name, each in others.items()
        if isinstance(each, torch.nn.Module) or _is_of_user(each)
    }
    for each in callbacks:
        if _is_of_user(each):
            name = type(each).__name__
            count = sum(key.partition("[")[0] == name for key in owners)
            owners[f"{name}[{count}]" if count else name] = each
    return owners


def _note(where: str, owner: Any, *, found: Values, path: str = "", depth: int = 0) -> None:
    kind: Any = type(owner)
    own = _is_of_user(owner)
    left_out = _assigned_by_libraries(kind) if own else _NOT_VALUES
    only_plain = not own and kind.__module__.partition(".")[0] in _LARGE_LIBRARIES
    held = frozenset(path.split(".")) - {""}
    for key, value in vars_of(owner).items():
        if key in left_out or not isinstance(key, str) or key.endswith("_hooks"):
            continue
        names = frozenset({key}) if own else held | {key}
        if isinstance(value, _SCALAR):
            found[f"{where}.{key}"] = Value((type(value).__name__, repr(value)), names)
        elif not only_plain:
            found[f"{where}.{key}"] = Value(_stand_in(value), names)
            is_walked = _is_of_user(value) and not isinstance(value, torch.nn.Module)
            if depth < _MAX_DEPTH and is_walked:
                _note(f"{where}.{key}", value, found=found, depth=depth + 1)


def _stand_in(value: Any) -> Any:
    """Return a stand-in for a value; modules, schedules and scalers are known by their state."""
    module = type(value).__module__
    if isinstance(value, torch.nn.Module) or module.startswith(_WITH_STATE):
        state = getattr(value, "state_dict", None)
        return content_of(dict(state()) if state is not None else None)
    return None if isinstance(value, FunctionType | MethodType) else content_of(value)


def _is_of_user(thing: Any) -> bool:
    """Return whether the user has written the class of an object, or one that it inherits from."""
    kind: Any = type(thing)
    return _is_written(kind)


@functools.lru_cache(maxsize=1024)
def _is_written(kind: Any) -> bool:
    return any(is_own(each) for each in kind.__mro__)


@functools.lru_cache(maxsize=128)
def _assigned_by_libraries(kind: Any) -> frozenset[str]:
    """Return the names of the attributes that a class's bases in libraries assign."""
    found = set(_NOT_VALUES)
    for base in kind.__mro__:
        if base is not object and not is_own(base):
            for member in vars(base).values():
                for function in _functions_of(member):
                    found.update(_stored_in(function.__code__))
    return frozenset(found)


def _functions_of(member: Any) -> Iterator[FunctionType]:
    each: Any
    for each in (
        getattr(member, "__wrapped__", member), getattr(member, "__func__", None),
        getattr(member, "fget", None), getattr(member, "fset", None),
    ):  # fmt: skip
        if isinstance(each, FunctionType):
            yield each


def _stored_in(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname == "STORE_ATTR":
            yield instruction.argval
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _stored_in(each)


def _user_classes(owners: Mapping[str, Any]) -> frozenset[type]:
    found: set[Any] = set()
    for owner in owners.values():
        parts = owner.modules() if isinstance(owner, torch.nn.Module) else (owner,)
        for part in parts:
            found.add(type(part))
            if _is_of_user(part):
                found.update(map(type, vars_of(part).values()))
    return frozenset(kind for kind in found if _is_written(kind))


@functools.lru_cache(maxsize=16)
def _used_by(classes: frozenset[type]) -> UsedNames:
    """Return the names that the code of some classes uses."""
    functions = [each.value for each in reach(sorted(classes, key=repr)).functions]
    left_out = [vars(kind).get(n) for one in classes for kind in one.__mro__ for n in _CARRIERS]
    kept = [f for f in functions if f not in left_out and f.__name__ not in _CARRIERS]
    return used_names(kept, recorded=_RECORDED)


def in_use(
    changed: Values, owners: Mapping[str, Any], *, excused: Collection[str]
) -> tuple[str, ...]:
    """Return the names of those values that the user's code uses, and that may not differ."""
    if not changed:
        return ()
    used = _used_by(_user_classes(owners))
    return tuple(
        name
        for name, value in changed.items()
        if (not value.names or value.names & used.attributes)
        and not value.names & frozenset(excused)
    )
