"""Tiny tasks, and a clock that only a test advances."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from thrifty.pack import SGD, ArrayData, HyperParameters, Task


class LineTask(Task):
    """A task that fits a line through 32 points; an epoch takes a millisecond.

    Its metric is ``mse``. It reads ``lr`` and, where the space has them, ``width`` (a hidden
    layer) and ``dropout``.
    """

    optimizer = SGD(lr="lr", momentum=0.9)
    batch_size = 8

    def data(self, hp: HyperParameters) -> ArrayData:
        """Return 32 points on a line."""
        x = torch.linspace(-1, 1, 32)[:, None]
        return ArrayData(train=(x, 2 * x + 1), valid=(x, 2 * x + 1))

    def model(self, hp: HyperParameters) -> torch.nn.Module:
        """Return a linear model, or a network with one hidden layer."""
        width = hp.get("width", 0)
        if not width:
            return torch.nn.Linear(1, 1)
        return torch.nn.Sequential(
            torch.nn.Linear(1, width),
            torch.nn.Tanh(),
            torch.nn.Dropout(hp.get("dropout", 0.0)),
            torch.nn.Linear(width, 1),
        )

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Return the mean squared error."""
        x, y = batch
        return torch.nn.functional.mse_loss(model(x), y)

    def metrics(self, model: torch.nn.Module, batch: Any) -> Mapping[str, Any]:
        """Return the mean squared error as ``mse``."""
        return {"mse": self.loss(model, batch)}

    def adapt(self, model: torch.nn.Module, hp: HyperParameters) -> None:
        """Let dropout follow a schedule."""
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = hp.get("dropout", 0.0)


class UnspeakableError(Exception):
    """An error whose text cannot be read."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


_ERRORS: Mapping[str, Callable[[], BaseException]] = {
    "raise": lambda: RuntimeError("the task's own error"),
    "exit": lambda: SystemExit(3),
    "interrupt": KeyboardInterrupt,
    "odd text": lambda: RuntimeError("half a pair \ud800, nothing \0, \x1b[31mred"),
    "huge text": lambda: RuntimeError("x" * 5_000_000),
    "no text": UnspeakableError,
}


class FaultyTask(LineTask):
    """A ``LineTask`` that fails in the epochs where hyper-parameter ``fault`` names a fault.

    - ``"raise"`` raises an error, ``"nan"`` makes the loss NaN.
    - ``"exit"`` calls ``sys.exit()``, ``"interrupt"`` raises KeyboardInterrupt.
    - ``"odd text"`` raises an error whose text no database takes, ``"huge text"`` one with
      megabytes of text, ``"no text"`` one whose text cannot be read.
    - ``"hang"`` never returns.
    - ``"die"`` kills the process. If ``fuse`` names a file, the process dies only if the file
      exists, and deletes it first: it dies only once.

    Inject a fault with ``fault=MultiStep(["", "raise"], milestones=[3])``.
    """

    def __init__(self, *, fuse: str = "") -> None:
        self._fuse = fuse
        self._fault = ""

    def __thrifty_identity__(self) -> Mapping[str, Any]:
        """Return nothing, because the fuse is not part of what is trained."""
        return {}

    def _legacy_identity(self) -> Mapping[str, str]:
        return {**super()._legacy_identity(), "attributes": ""}

    def adapt(self, model: torch.nn.Module, hp: HyperParameters) -> None:
        """Set the fault of this epoch: faults are hyper-parameters that follow a schedule."""
        super().adapt(model, hp)
        self._fault = hp.get("fault", "")

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Return the mean squared error, unless a fault is active."""
        if model.training and self._fault in _ERRORS:
            raise _ERRORS[self._fault]()
        if model.training and self._fault == "hang":
            threading.Event().wait()
        if model.training and self._fault == "die" and (not self._fuse or self._burn()):
            os.kill(os.getpid(), signal.SIGKILL)
        loss = super().loss(model, batch)
        return loss * float("nan") if model.training and self._fault == "nan" else loss

    def _burn(self) -> bool:
        try:
            Path(self._fuse).unlink()
        except FileNotFoundError:
            return False
        return True


class VirtualClock:
    """A clock that shows the time that a test sets.

    >>> clock = VirtualClock(100.0)
    >>> clock.advance(5.0)
    >>> clock.now(), clock.monotonic()
    (105.0, 5.0)
    >>> clock.jump(-50.0)
    >>> clock.now(), clock.monotonic()
    (55.0, 5.0)
    """

    def __init__(self, now: float = 0.0) -> None:
        self._began = now
        self._now = now

    def now(self) -> float:
        """Return the seconds since the epoch."""
        return self._now

    def monotonic(self) -> float:
        """Return the seconds since the clock was made."""
        return self._now - self._began

    def jump(self, seconds: float) -> None:
        """Set the date, as an administrator or a time server does; no time passes."""
        self._now += seconds
        self._began += seconds

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._now += seconds
