"""Advice on arguments that have another name in other libraries."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar


_P = ParamSpec("_P")
_R = TypeVar("_R")


def with_advice(advice: Mapping[str, str]) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Let a function say what to write instead of an argument of another library.

    Args:
        advice: What to write, by the name of an argument that the function does not have.

    >>> @with_advice({"direction": 'mode="min"'})
    ... def search(*, mode): ...
    >>> search(direction="minimize")
    Traceback (most recent call last):
    TypeError: search() has no argument 'direction'; write mode="min" instead
    """

    def decorated(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            for name in kwargs:
                if name in advice:
                    called = function.__qualname__.removesuffix(".__init__")
                    raise TypeError(
                        f"{called}() has no argument {name!r}; write {advice[name]} instead"
                    )
            return function(*args, **kwargs)

        return checked

    return decorated
