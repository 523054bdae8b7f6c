"""Ray Tune's search spaces as spaces of thrifty, and configurations as Ray nests them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from thrifty.core import SpaceError
from thrifty.space import Choice, Domain, Float, Int, Space


def ray_space(param_space: Mapping[str, Any]) -> Space:
    """Return the space of a ``param_space`` of Ray Tune.

    ``tune.uniform``, ``loguniform``, ``quniform``, ``randint``, ``lograndint``, ``qrandint``,
    ``choice`` and ``grid_search`` become domains; domains and schedules of thrifty stay. Values
    that are no domains become choices of one. Nested dictionaries become names with slashes.
    The function gets lists for lists, and for tuples, too.

    Args:
        param_space: What a ``tune.Tuner`` gets.

    Raises:
        SpaceError: It has a domain that thrifty lacks, such as ``tune.randn``, an empty
            dictionary, or a key that is no text or has a slash; the message names it.

    >>> ray_space({"lr": Float(0.1, 0.3), "model": {"width": 8}}).names
    ('lr', 'model/width')
    """
    if not isinstance(param_space, Mapping):
        raise SpaceError(f"ray_space({param_space!r}): give the dictionary that a Tuner gets")
    return Space(**dict(_flat(param_space, "")))


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by names with slashes as nested dictionaries.

    >>> nested({"lr": 0.1, "model/width": 8, "model/depth": 2})
    {'lr': 0.1, 'model': {'width': 8, 'depth': 2}}
    """
    out: dict[str, Any] = {}
    for name, value in values.items():
        *parents, last = name.split("/")
        place = out
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = _lists(value)
    return out


def _lists(value: Any) -> Any:
    """Return a value with lists for tuples, which are what a space keeps of lists."""
    return [_lists(each) for each in value] if isinstance(value, tuple) else value


def _flat(given: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Domain]]:
    for key, value in given.items():
        name = f"{prefix}{key}"
        if not isinstance(key, str) or "/" in key:
            raise SpaceError(f"the key {key!r} of the param_space must be a text without slashes")
        if isinstance(value, Mapping) and not value:
            raise SpaceError(f"{name!r} of the param_space is an empty dictionary; leave it out")
        if isinstance(value, Mapping):
            if set(value) == {"grid_search"}:
                yield name, Choice(list(value["grid_search"]))
            else:
                yield from _flat(value, f"{name}/")
        else:
            yield name, _domain(name, value)


def _domain(name: str, value: Any) -> Domain:
    if isinstance(value, Domain):
        return value
    kinds = {f"{kind.__module__}.{kind.__name__}" for kind in type(value).__mro__}
    if "ray.tune.search.sample.Domain" not in kinds:
        return Choice([value])
    kind, sampler, step = type(value).__name__, value.get_sampler(), None
    law = type(sampler).__name__
    if law == "Quantized":
        step, sampler = sampler.q, sampler.sampler
        law = type(sampler).__name__
    if kind == "Categorical" and step is None:
        return Choice(list(value.categories))
    if kind in ("Float", "Integer") and "Uniform" in law and (step is None or "Log" not in law):
        log = "Log" in law
        if kind == "Float":
            return Float(value.lower, value.upper, log=log, step=step)
        # Ray's whole numbers end before their upper bound, unless they are quantised.
        high = value.upper if step is not None else value.upper - 1
        return Int(value.lower, high, log=log, step=1 if step is None else int(step))
    raise SpaceError(
        f"{name!r} of the param_space is a {kind} of Ray with the sampler {law.strip('_')}"
        f"{'' if step is None else f' in steps of {step}'}, which thrifty lacks; give it a domain "
        "of thrifty, such as thrifty.Float(0.1, 1.0)"
    )
