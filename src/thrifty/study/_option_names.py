"""Names for plots: options of a choice, short forms, text that matplotlib shows as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any

from thrifty.core import plain_text
from thrifty.space import Choice, Domain, Schedule


def option_names(choice: Choice) -> tuple[str, ...]:
    """Return the options as a user would write them, each different from the others.

    >>> from thrifty.space import Constant, Cosine, Float
    >>> option_names(Choice(["sgd", 1, Constant(0.1), Cosine(Float(0.1, 0.3))]))
    ('sgd', '1', 'Constant(0.1)', 'Cosine(*)')
    """
    return _distinct([_name(option) for option in choice.options])


def short_names(names: Sequence[str], *, limit: int = 22) -> tuple[str, ...]:
    """Shorten each name to about ``limit`` characters, each still different from the others.

    >>> short_names(
    ...     ["Step(0.1, (30, 60, 90), gamma=0.1)", "Step(0.1, (30, 60, 90), gamma=0.3)"], limit=16
    ... )
    ('Step(0.1…ma=0.1)', 'Step(0.1…ma=0.3)')
    """
    return _distinct([shorten(name, limit=limit) for name in names])


def shorten(name: str, *, limit: int) -> str:
    """Return the beginning and the end of a name.

    >>> shorten("Exponential(0.125)", limit=12)
    'Expone….125)'
    """
    if len(name) <= limit:
        return name
    head = limit // 2
    return f"{name[:head]}…{name[head + 1 - limit :]}"


def escaped(name: str) -> str:
    """Escape a name for matplotlib, which would set text between dollar signs as mathematics.

    >>> print(escaped("cost_$"))
    cost_\\$
    """
    return plain_text(name).replace("$", r"\$")


def _name(option: Any) -> str:
    if isinstance(option, str):
        return option or "''"
    if isinstance(option, Domain) and not isinstance(option, Choice):
        ends = option.levels(2)
        return f"{ends[0]:.6g} to {ends[-1]:.6g}"
    return _describe(option)


def _describe(value: Any) -> str:
    """Return a value as a user would write it, with ``*`` for each domain.

    What is picked from a domain is a separate coordinate.
    """
    if isinstance(value, Domain):
        return "*"
    if isinstance(value, tuple):
        inside = ", ".join(_describe(item) for item in value)
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    if not isinstance(value, Schedule):
        return f"{value:.6g}" if isinstance(value, float) else repr(value)
    shown = []
    for each in fields(value):  # type: ignore[arg-type]  # every schedule is a dataclass
        item = getattr(value, each.name)
        if each.default is not MISSING and repr(item) == repr(each.default):
            continue
        shown.append(f"{each.name}={_describe(item)}" if each.kw_only else _describe(item))
    return f"{type(value).__name__}({', '.join(shown)})"


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(
        f"{name} [{index}]" if names.count(name) > 1 else name for index, name in enumerate(names)
    )
