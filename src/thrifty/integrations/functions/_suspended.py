"""Calls of users' functions that wait in a thread of their own, while thrifty decides."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn
from weakref import ref

import torch

from thrifty.core import TaskError, error_text, plain_logger


logger = plain_logger(__name__)

END_S = 10.0
"""Seconds that a call has to end after it was told to."""
MOST_ENDS = 3
"""How often a function may catch what ends it."""


class TrialEndedError(BaseException):
    """Ends a function whose trial was stopped; no ``except Exception`` of it catches this."""


def call_of_this_thread() -> SuspendedCall | None:
    """Return the call whose thread this is; None in any other thread."""
    found: ref[SuspendedCall] | None = getattr(threading.current_thread(), "_thrifty_call", None)
    return None if found is None else found()


class SuspendedCall:
    """One call of a function, in a thread that runs only while ``advance`` waits for it.

    Args:
        function: What is called; it calls ``pause`` where it waits.
        name: What messages call it.
        device: The device of the trial.

    Attributes:
        has_begun: Whether ``advance`` was called.
        has_ended: Whether the function has returned or failed.
        is_stopped: Whether it was told to end.
    """

    def __init__(self, function: Callable[[], None], *, name: str, device: torch.device) -> None:
        self.has_begun = self.has_ended = self.is_stopped = False
        self._function, self._name, self._device = function, name, device
        self._thread: threading.Thread | None = None
        self._num_ends = 0
        self._go, self._paused = threading.Event(), threading.Event()
        self._error: BaseException | None = None

    def advance(self) -> None:
        """Let the function run until it pauses or ends.

        Raises:
            Exception: The function has raised it.
            TaskError: It has raised something else, such as ``SystemExit``.
        """
        if self._thread is None:
            self.has_begun = True
            self._thread = threading.Thread(
                target=contextvars.copy_context().run,
                args=(self._call, ThreadState.now()),
                name=f"thrifty-{self._name}",
                daemon=True,
            )
            self._thread._thrifty_call = ref(self)  # type: ignore[attr-defined]
            self._thread.start()
        else:
            self._go.set()
        try:
            self._paused.wait()
        except BaseException:  # such as a second Ctrl-C: nobody waits for the thread any more
            self.is_stopped = True
            raise
        self._paused.clear()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def pause(self) -> None:
        """Wait until ``advance`` is called again; the function calls this."""
        self._paused.set()
        self._go.wait()
        self._go.clear()

    def end(self) -> NoReturn:
        """Leave the function from where it has called; it was told to end.

        Raises:
            TrialEndedError: Always. A function that catches even this, in a loop, waits here for
                ever the third time, since the thread would use a processor until the process ends.
        """
        self._num_ends += 1
        if self._num_ends > MOST_ENDS:
            self.has_ended = True
            self._paused.set()
            threading.Event().wait()
        raise TrialEndedError

    def stop(self) -> None:
        """End the thread: the function finds out where it asks, or at its next pause."""
        if self._thread is None or self.has_ended:
            return
        self.is_stopped = True
        self._go.set()
        until = time.monotonic() + END_S
        while self._thread.is_alive() and not self.has_ended and time.monotonic() < until:
            self._thread.join(0.02)
        if self._thread.is_alive() and not self.has_ended:
            logger.warning(
                "%s was stopped and has not ended within %g s; it goes on in the background until "
                "it reports or asks whether to prune",
                self._name,
                END_S,
            )

    def _call(self, state: ThreadState) -> None:
        try:
            state.enter()
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # each thread has its own
            self._function()
        except TrialEndedError:
            pass
        except BaseException as error:  # noqa: BLE001 (user code may raise anything)
            if not self.is_stopped:
                self._error = (
                    error
                    if isinstance(error, Exception)
                    else TaskError(
                        f"{self._name} has raised {error_text(error)}; raise an Exception"
                    )
                )
        self.has_ended = True
        self._paused.set()


@dataclass(frozen=True, slots=True)
class ThreadState:
    """What torch keeps for each thread, and an objective would have if it were called directly."""

    has_gradients: bool
    device: torch.device
    autocast: Mapping[str, tuple[bool, torch.dtype]]

    @classmethod
    def now(cls) -> ThreadState:
        """Return that of this thread."""
        return cls(
            has_gradients=torch.is_grad_enabled(),
            device=torch.get_default_device(),
            autocast={
                kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in ("cpu", "cuda")
            },
        )

    def enter(self) -> None:
        """Give it to this thread."""
        torch.set_grad_enabled(self.has_gradients)
        if self.device != torch.get_default_device():
            torch.set_default_device(self.device)
        for kind, (is_on, dtype) in self.autocast.items():
            torch.set_autocast_enabled(kind, is_on)
            torch.set_autocast_dtype(kind, dtype)
