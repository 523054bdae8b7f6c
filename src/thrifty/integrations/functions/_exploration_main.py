"""The main program of a process that finds out what a training function or an objective suggests.

What an objective suggests is found by running it until it trains.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from thrifty.core import Artifacts, Attributes, TaskError, error_text, error_traceback
from thrifty.core._child import fork_ignoring_interrupts, parent_of
from thrifty.pack._state import seed_everything
from thrifty.space import Domain

from ._exploration import Effort, explore, first_value, mark_child
from ._function_state import Kept
from ._loop_trial import LoopTrial, PrologueEndedError, TrialEndedError
from ._objective import Objective, ObjectiveTask, ObjectiveTrial, is_pruned


def main(arguments: list[str]) -> None:
    """Load one function, and send what it suggests, or why that cannot be said."""
    connection = parent_of(arguments)
    mark_child()
    sys.path[:] = connection.recv()
    code = connection.recv_bytes()
    try:
        task = pickle.loads(code)
        # Keep looks at all objects from scanning torch and the task, which takes 0.3 s each time.
        gc.freeze()
        if isinstance(task, ObjectiveTask):
            asker = ObjectiveAsker(task.function, name=task.name)
            connection.send(explore(asker.suggested, effort=OBJECTIVE_EFFORT))
        else:
            connection.send(explore(partial(suggested, task.function)))
    except TaskError as error:
        connection.send(str(error))
    except ObjectiveFailedError as error:
        connection.send(f"{task.name} fails before it has reported or returned anything: {error}")
    except BaseException as error:  # noqa: BLE001 (user code may raise anything)
        connection.send(
            f"a training function fails before trial.epochs() with {error_text(error)}; mend it:\n"
            f"{error_traceback(error)}"
        )


def suggested(
    function: Any, answers: Mapping[str, Any], otherwise: Callable[[Any], Any] = first_value
) -> list[tuple[str, Any, Any]]:
    """Run a function up to its loop, and return its suggestions: name, domain and answer.

    Args:
        function: The function.
        answers: Answers by name.
        otherwise: Gives the answer for a domain, for other names.

    Raises:
        TaskError: It has no loop, or what it gives to ``trial.epochs`` cannot be kept.
    """
    asked, loop = _Asked(answers, otherwise), _NoEpochs()
    seed_everything(0)
    trial = LoopTrial(asked, loop, seed=0, device=torch.device("cpu"))
    has_returned = False
    try:
        next(function(trial))
    except PrologueEndedError:
        pass
    except StopIteration:
        has_returned = True
    except BaseException:
        # The function may turn what ends it into an error of its own.
        if not loop.is_reached:
            raise
    if has_returned and not loop.is_reached:
        raise TaskError(
            f"{getattr(function, '__qualname__', function)} returns before a loop over "
            f"trial.epochs(), with {asked.answers}; write the loop in the function itself (a call "
            "of an inner function that yields runs nothing), and begin it for all values"
        )
    if not loop.is_reached:
        raise TaskError(
            f"{getattr(function, '__qualname__', function)} does not go through trial.epochs(); "
            "write `for epoch in trial.epochs(state):` with a yield at the end of each round"
        )
    return asked.suggestions


class _Asked:
    """Answers suggestions, and records each of them."""

    def __init__(self, given: Mapping[str, Any], otherwise: Callable[[Any], Any]) -> None:
        self._given = given
        self._otherwise = otherwise
        self._values: dict[str, Any] = {}
        self.suggestions: list[tuple[str, Any, Any]] = []

    def check(self, name: str, domain: Any) -> None:
        """Choose an answer when a name comes for the first time."""
        if name not in self._values:
            value = self._given[name] if name in self._given else self._otherwise(domain)
            self._values[name] = value
            self.suggestions.append((name, domain, value))

    @property
    def answers(self) -> str:
        """The answers so far, as a text."""
        return ", ".join(f"{n}={v!r}" for n, v in self._values.items()) or "no suggestions"

    def value(self, name: str) -> Any:
        """Return the answer."""
        return self._values[name]

    def scheduled(self, name: str) -> Any:
        """Return the answer: that of epoch 0."""
        return self._values[name]


class _NoEpochs:
    """Ends a function where its loop would begin."""

    def __init__(self) -> None:
        self.is_reached = False

    def begin(self, state: Any, ignore: Collection[str], *, keep_gradients: bool) -> None:
        """End it, if its state can be kept."""
        Kept(state)
        self.is_reached = True
        raise PrologueEndedError

    def next(self) -> int:
        """Return no epoch; a loop never begins."""
        raise PrologueEndedError

    def set_attribute(self, key: str, value: Any) -> None:
        """Check the attribute, and drop it: this run only finds out what is suggested."""
        Attributes().set(key, value)

    def log_artifact(
        self, path: str | os.PathLike[str], *, name: str | None, max_bytes: int
    ) -> None:
        """Check the file, and keep no copy of it."""
        Artifacts().log(path, name=name, max_bytes=max_bytes, keep=False)


FIRST_S = 30.0
"""Seconds in which an objective has to suggest something."""
QUIET_S = 3.0
"""Seconds without a suggestion after which its first run is taken to train."""
EXIT_S = 0.1
LEAST_QUIET_S = 0.3
"""The same for later runs, unless the first one took longer between two suggestions."""


OBJECTIVE_EFFORT = Effort(most_values=16, num_random=0, tries_all=False)
"""Each run may train for a while, and write files: only what decides a condition is tried."""


class ObjectiveFailedError(Exception):
    """An objective has failed before it has reported anything."""


class ObjectiveAsker:
    """Runs an objective with different answers, each time in a process that is then killed.

    An objective does not say where its suggestions end and its training begins. So a run ends when
    it reports, returns, or has suggested nothing for a while.

    Args:
        function: The objective.
        name: What errors call it.
        clock: Returns seconds.
    """

    def __init__(
        self, function: Objective, *, name: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._function = function
        self._name = name
        self._clock = clock
        self._longest: float | None = None
        """The longest time before a suggestion in the first run; None before it."""

    def suggested(
        self, answers: Mapping[str, Any], otherwise: Callable[[Any], Any] = first_value
    ) -> list[tuple[str, Any, Any]]:
        """Return the suggestions of one run: name, domain and answer.

        Args:
            answers: Answers by name.
            otherwise: Gives the answer for a domain, for other names.

        Raises:
            ObjectiveFailedError: It has failed.
            TaskError: It has suggested nothing in half a minute.
        """
        reader, writer = os.pipe()
        pid = fork_ignoring_interrupts()
        if not pid:
            os.close(reader)
            asked = _SentAnswers(answers, otherwise, Connection(writer, readable=False))
            _run_and_exit(self._function, asked)
        os.close(writer)
        connection = Connection(reader, writable=False)
        try:
            return self._received(connection)
        finally:
            connection.close()
            _end(pid)

    def _received(self, connection: Connection) -> list[tuple[str, Any, Any]]:
        found: list[tuple[str, Any, Any]] = []
        last, longest = self._clock(), 0.0
        while connection.poll(self._patience_s(is_first_answer=not found)):
            try:
                message = connection.recv()
            except EOFError:  # it has ended its process
                break
            if message is None:
                break
            if isinstance(message, str):
                if found:
                    break  # its trials say why, if they fail, too
                raise ObjectiveFailedError(message)
            now = self._clock()
            last, longest = now, max(longest, now - last)
            found.append(message)
        else:
            if not found and self._longest is None:
                raise TaskError(
                    f"{self._name} has suggested nothing in {FIRST_S:g} s; suggest values before "
                    "what takes long, or give optimize() a space"
                )
        if self._longest is None:
            self._longest = longest
        return found

    def _patience_s(self, *, is_first_answer: bool) -> float:
        if self._longest is None:
            return FIRST_S if is_first_answer else QUIET_S
        return max(LEAST_QUIET_S, 3.0 * self._longest)


def _end(pid: int) -> None:
    """End a process that still trains; one that does not has a moment to exit."""
    until = time.monotonic() + EXIT_S
    while time.monotonic() < until:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)  # not waited for yet, so the number is still its own
    os.waitpid(pid, 0)


def _run_and_exit(function: Objective, asked: _SentAnswers) -> None:
    """Run the objective in this process, a copy of another one, and end the process."""
    connection = asked.connection
    try:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)  # what it prints comes again when it is trained
        os.dup2(silence, 2)
        seed_everything(0)
        function(ObjectiveTrial(asked, number=-1))
        connection.send(None)
    except TrialEndedError:
        connection.send(None)
    except BaseException as error:  # noqa: BLE001 (user code may raise anything)
        connection.send(None if is_pruned(error) else error_text(error))
    finally:
        os._exit(0)


class _SentAnswers:
    """Answers suggestions, and sends each of them to the other process."""

    def __init__(
        self, given: Mapping[str, Any], otherwise: Callable[[Any], Any], connection: Connection
    ) -> None:
        self._given = given
        self._otherwise = otherwise
        self.connection = connection

    def suggest(self, name: str, domain: Domain) -> Any:
        """Return the answer."""
        value = self._given[name] if name in self._given else self._otherwise(domain)
        self.connection.send((name, domain, value))
        return value

    def report(self, value: float, *, step: int) -> None:
        """End the run: it trains."""
        raise TrialEndedError

    def should_prune(self) -> bool:
        """Return False."""
        return False


if __name__ == "__main__":
    main(sys.argv[1:])
