"""Cases for tests with several parameters, without the product of all their values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from allpairspy import AllPairs


def pairwise(
    *, unless: Callable[..., bool] | None = None, **values: Sequence[Any]
) -> pytest.MarkDecorator:
    """Parametrize a test so that each two values of different parameters meet in some case.

    Args:
        unless: Given the parameters of a case by name, returns whether to leave the case out.
        values: The values of each parameter.
    """
    names = [*values]

    def allowed(places: Sequence[int]) -> bool:
        if unless is None or len(places) < len(names):
            return True
        return not unless(**_case(values, places))

    cases = AllPairs([range(len(each)) for each in values.values()], filter_func=allowed)
    return pytest.mark.parametrize(
        names, [tuple(_case(values, places).values()) for places in cases]
    )


def _case(values: dict[str, Sequence[Any]], places: Sequence[int]) -> dict[str, Any]:
    return {name: each[place] for (name, each), place in zip(values.items(), places, strict=True)}
