"""Checks of options that algorithms and samplers share."""

from __future__ import annotations

from thrifty.core import AlgorithmError


def check_counts(owner: object, **named: object) -> None:
    """Raise AlgorithmError unless every given option is a whole number of at least 1."""
    for name, value in named.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise AlgorithmError(
                f"{type(owner).__name__}({name}={value!r}): {name} must be a whole number, 1 "
                "or more"
            )


def check_halving(owner: object, *, eta: object, min_epochs: int, max_epochs: int) -> None:
    """Raise AlgorithmError unless there are rungs from ``min_epochs`` to ``max_epochs``."""
    name = type(owner).__name__
    check_counts(owner, eta=eta, min_epochs=min_epochs, max_epochs=max_epochs)
    if eta == 1:
        raise AlgorithmError(f"{name}(eta=1): no trial would ever be dropped; use 2 or more")
    if min_epochs > max_epochs:
        raise AlgorithmError(
            f"{name}(min_epochs={min_epochs}, max_epochs={max_epochs}): min_epochs must not exceed "
            "max_epochs; lower it or train longer"
        )


def check_shares(owner: object, **named: object) -> None:
    """Raise AlgorithmError unless every given option is a number from 0 to 1."""
    for name, value in named.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and 0 <= value <= 1):  # type: ignore[operator]
            raise AlgorithmError(
                f"{type(owner).__name__}({name}={value!r}): {name} must be a number from 0 to 1"
            )
