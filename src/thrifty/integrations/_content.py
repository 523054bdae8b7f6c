"""Descriptions of estimators and data that differ whenever their content differs."""

from __future__ import annotations

import pickle
from typing import Any

import joblib

from ._description import Describe


def by_content(value: Any, describe: Describe) -> str:
    """Describe estimators by class and parameters, other objects by a digest of their content.

    Different objects never have the same description.

    >>> from sklearn.linear_model import LogisticRegression
    >>> from thrifty.integrations._description import described
    >>> described(LogisticRegression(), otherwise=by_content) == described(
    ...     LogisticRegression(C=1.0), otherwise=by_content
    ... )
    True
    """
    kind = describe(type(value))
    if hasattr(value, "get_params"):
        return f"{kind}({describe(value.get_params(deep=False))})"
    try:
        return f"{kind}:{joblib.hash(value)}"
    except (pickle.PicklingError, AttributeError, TypeError):
        return f"{value!r} at {id(value)}"
