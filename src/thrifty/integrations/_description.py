"""What users hand in, as text that says whether two of them are the same."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Mapping
from types import CodeType
from typing import Any

import joblib


def described(value: Any) -> str:
    """The same text for the same thing in each process, where there is such a text; never the same for different things.

    Estimators by class and parameters, functions and classes of the user's by their code, data by a digest.

    >>> from sklearn.linear_model import LogisticRegression
    >>> described(LogisticRegression()) == described(LogisticRegression(C=1.0))
    True
    >>> described([lambda x: x + 1]) == described([lambda x: x + 2])
    False
    """
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{k!r}: {described(v)}' for k, v in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(described, value))}]"
    if inspect.isfunction(value):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return (
            f"{_named(value)}({described([value.__defaults__, value.__kwdefaults__, cells])})"
        )
    if hasattr(value, "get_params") and not isinstance(value, type):
        return f"{_named(type(value))}({described(value.get_params(deep=False))})"
    try:
        return f"{_named(type(value))}:{joblib.hash(value)}"
    except (pickle.PicklingError, AttributeError, TypeError):
        return f"{value!r} at {id(value)}"


def _named(what: Any) -> str:
    """A class or function by its name, and by its code where that is the user's."""
    name = f"{what.__module__}.{what.__qualname__}"
    if what.__module__.split(".")[0] in ("builtins", "numpy", "scipy", "sklearn"):
        return name
    if isinstance(what, type):
        members = {
            key: _code(value.__code__)
            for key, value in vars(what).items()
            if inspect.isfunction(value)
        }
        return f"{name}:{joblib.hash(members)}"
    return f"{name}:{_code(what.__code__)}"


def _code(code: CodeType) -> str:
    constants = [_code(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return str(joblib.hash((code.co_code, code.co_names, constants)))
