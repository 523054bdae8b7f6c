"""The main program of a process that finds out what a training function suggests."""

from __future__ import annotations

import gc
import os
import pickle
import sys
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch

from thrifty.core import Artifacts, Attributes, TaskError, error_text, error_traceback
from thrifty.core._child import parent_of
from thrifty.pack._state import seed_everything

from ._exploration import explore, first_value, mark_child
from ._function_state import Kept
from ._loop_trial import LoopTrial, PrologueEndedError
from ._objective import ObjectiveTask
from ._objective_suggestions import OBJECTIVE_EFFORT, ObjectiveAsker, ObjectiveFailedError


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

    def begin(self, state: Any, ignore: Collection[str]) -> None:
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


if __name__ == "__main__":
    main(sys.argv[1:])
