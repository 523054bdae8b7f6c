"""Early checks of the arguments of a study."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from thrifty.core import AlgorithmError, UsageError
from thrifty.run import ExecutorConfig
from thrifty.search import Algorithm

from ._stop import StopWhen


MAX_NAME = 255
MAX_SEED = 2**63 - 1


def checked_name(name: object) -> str:
    """Return the name of a study after checking it.

    Raises:
        UsageError: The name is not a string, is empty or too long, or has characters that a
            database cannot store.
    """
    if not isinstance(name, str):
        raise UsageError(f"name is {name!r}; it must be a text such as 'digits'")
    if not name.strip():
        raise UsageError(f"name is {name!r}; give the study a name such as 'digits'")
    if len(name) > MAX_NAME:
        raise UsageError(f"name has {len(name):,} characters; it may have at most {MAX_NAME}")
    if "\0" in name or not _is_encodable(name):
        raise UsageError(
            f"name is {name!r}; it must not have NULs or characters that UTF-8 cannot encode"
        )
    return name


def checked_seed(seed: object) -> int:
    """Return the seed of a study as an int after checking it.

    Raises:
        UsageError: The seed is not an integer from 0 to 2**63 - 1.
    """
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise UsageError(f"seed is {seed!r}; it must be an integer, 0 or more")
    if not 0 <= seed <= MAX_SEED:
        raise UsageError(f"seed is {seed}; it must be from 0 to 2**63 - 1 ({MAX_SEED:,})")
    return int(seed)


def check_max_epochs(algorithm: Algorithm) -> None:
    """Raise AlgorithmError unless ``max_epochs`` is a positive integer."""
    epochs = getattr(algorithm, "max_epochs", None)
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
        raise AlgorithmError(
            f"{type(algorithm).__name__}.max_epochs is {epochs!r}; it must be an integer, 1 or more"
        )


def check_run(executor: object, stop: object, observers: object) -> None:
    """Raise UsageError for arguments of ``Study.run`` of the wrong kind."""
    if executor is not None and not isinstance(executor, ExecutorConfig):
        raise UsageError(f"executor is {executor!r}; give one such as thrifty.Local(workers=2)")
    if stop is not None and not isinstance(stop, StopWhen):
        raise UsageError(f"stop is {stop!r}; give thrifty.StopWhen(epochs=...) or the like")
    if not isinstance(observers, Iterable) or not all(
        callable(getattr(observer, "on_event", None)) for observer in observers
    ):
        raise UsageError(
            f"observers is {observers!r}; give a list of objects with a method on_event(event)"
        )


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
