"""An Optuna objective as a task: it runs unchanged, and waits at each of its reports."""

from __future__ import annotations

import math
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from thrifty.core import (
    MAX_ARTIFACT_BYTES,
    Artifacts,
    Attributes,
    CheckpointError,
    DivergedError,
    StateError,
    TaskError,
    derive_seed,
    error_text,
    fingerprint,
    plain_logger,
)
from thrifty.pack import HyperParameters, Logged, SelfDescribing
from thrifty.pack._state import Streams, seed_everything
from thrifty.pack.task._task import unread
from thrifty.space import Choice, Domain, Float, Int, Space

from ._exploration import any_value, explored
from ._loop_trial import SuspendedCall, WaitingRuns, is_in


logger = plain_logger(__name__)

Objective = Callable[[Any], float]

VALUE = "value"
"""The metric of an objective."""
UNFINISHED = "unfinished"
"""The metric that is 0 once an objective has returned its value, and 1 before.

What it reports may be something else than what it returns, so the two are not compared.
"""


class ObjectiveTrial:
    """What an objective is given: the part of Optuna's ``Trial`` that objectives use.

    Attributes:
        number: A number that belongs to the configuration. thrifty counts trials in the process
            that drives the study, and trains equal configurations once.
        params: The values that were suggested so far.
        user_attrs: What ``set_user_attr`` was given.
    """

    def __init__(self, run: Suggests, *, number: int) -> None:
        self.number = number
        self.params: dict[str, Any] = {}
        self.user_attrs: dict[str, Any] = {}
        self._run = run
        self._domains: dict[str, Domain] = {}
        self._fresh, self._files = Attributes(), Artifacts()

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """Return a value between two numbers, both included."""
        if low == high:
            return float(self._suggested(name, Choice([float(low)])))
        return float(self._suggested(name, Float(low, high, step=step, log=log)))

    def suggest_int(
        self, name: str, low: int, high: int, *, step: int = 1, log: bool = False
    ) -> int:
        """Return a whole number between two others, both included."""
        low, high, step = int(low), int(high), int(step)  # Optuna takes 1.0, too
        if low == high:
            return int(self._suggested(name, Choice([low])))
        return int(self._suggested(name, Int(low, high, step=step, log=log)))

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """Return one of some numbers, texts, bools or None."""
        given = list(choices)
        domain = Choice(given)
        value = self._suggested(name, domain)
        # A space has tuples for lists; the objective gets what it has given.
        same = (type(each) is type(value) and each == value for each in domain.options)
        return next(each for each, is_it in zip(given, same, strict=True) if is_it)

    def suggest_uniform(self, name: str, low: float, high: float) -> float:
        """Return ``suggest_float(name, low, high)``; older objectives of Optuna call it."""
        return self.suggest_float(name, low, high)

    def suggest_loguniform(self, name: str, low: float, high: float) -> float:
        """Return ``suggest_float(name, low, high, log=True)``."""
        return self.suggest_float(name, low, high, log=True)

    def suggest_discrete_uniform(  # noqa: PLR0917 (Optuna's)
        self, name: str, low: float, high: float, q: float
    ) -> float:
        """Return ``suggest_float(name, low, high, step=q)``."""
        return self.suggest_float(name, low, high, step=q)

    def report(self, value: float, step: int) -> None:
        """Report an intermediate value; the objective waits until it may go on.

        Args:
            value: The value, by which trials are compared that have reported as often.
            step: Its step; a second report of a step is ignored.

        Raises:
            TaskError: The value is not a number.
        """
        self._run.report(_number(value, what=f"trial.report({value!r}, ...)"), step=int(step))

    def should_prune(self) -> bool:
        """Return whether the trial was stopped, so that the objective should end."""
        return self._run.should_prune()

    def set_user_attr(self, key: str, value: Any) -> None:
        """Keep a fact about the trial, as a JSON value; numbers become metrics of the trial, too.

        It is stored with the epoch that the next report ends, or the end of the objective.

        Raises:
            TaskError: The value is no JSON, or the attributes of one epoch take more than 64 KiB.
        """
        self.user_attrs[key] = self._fresh.set(key, value)

    def log_artifact(
        self,
        path: str | os.PathLike[str],
        name: str | None = None,
        *,
        max_bytes: int = MAX_ARTIFACT_BYTES,
    ) -> None:
        """Keep a copy of a file with the epoch that the next report ends; see ``LoopTrial``.

        Raises:
            TaskError: The file is missing, a folder or too large, or the name is a path.
        """
        self._files.log(path, name=name, max_bytes=max_bytes)

    def take_logged(self) -> Logged:
        """Return the user attributes and artifacts since the last call."""
        return Logged(attributes=self._fresh.take(), artifacts=self._files.take())

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"trial.{name} is not among what thrifty.optimize gives an objective; it has suggest_*,"
            " report, should_prune, params, number, user_attrs, set_user_attr and log_artifact"
        )

    def _suggested(self, name: str, domain: Domain) -> Any:
        if name not in self.params:
            self._domains[name] = domain
            self.params[name] = self._run.suggest(name, domain)
        elif self._domains[name] != domain:
            raise TaskError(
                f"{name!r} is suggested twice with different values, {self._domains[name]} and "
                f"{domain}; use two names"
            )
        return self.params[name]


class Suggests(Protocol):
    """What is behind an ``ObjectiveTrial``."""

    def suggest(self, name: str, domain: Domain) -> Any:
        """Return the value of a hyper-parameter that is asked for the first time."""
        ...

    def report(self, value: float, *, step: int) -> None:
        """Take an intermediate value."""
        ...

    def should_prune(self) -> bool:
        """Return whether the trial was stopped."""
        ...


class ObjectiveTask(SelfDescribing):
    """The task of an objective: an epoch ends at each of its reports, the last one at its end.

    A call of the objective runs in a thread of its own, which waits while thrifty decides whether
    the trial goes on. It cannot go on from a state in a file. In the process that has begun it, its
    thread goes on; anywhere else the trial is trained from its start.

    Args:
        function: The objective.
        num_epochs: The number of reports of a trial that are compared, and its end.
        catch: Errors that only fail a trial; others end the study.
    """

    preparation = "objective"
    mend = "an objective has no state"
    internals = frozenset({"_run", "_logged"})
    can_resume = False

    def __init__(
        self, function: Objective, *, num_epochs: int, catch: tuple[type[Exception], ...]
    ) -> None:
        self.function = function
        self.num_epochs = num_epochs
        self.catch = catch

    def __repr__(self) -> str:
        return f"<objective {self.name}>"

    @property
    def name(self) -> str:  # type: ignore[override]
        """The name of the objective."""
        return str(getattr(self.function, "__qualname__", None) or type(self.function).__name__)

    @property
    def module(self) -> str:  # type: ignore[override]
        """Name of the module that defines the objective."""
        return str(getattr(self.function, "__module__", None) or type(self.function).__module__)

    def space(self) -> Space:
        """Return the values that the objective suggests, found in processes of their own.

        Raises:
            TaskError: It fails before it suggests anything.
            SpaceError: A name has different ranges for different answers.
        """
        return explored(self)

    # -- one trial -----------------------------------------------------------------------

    def setup(self, hp: HyperParameters, *, seed: int, device: torch.device) -> None:
        """Take the trial's values; the objective begins with the first epoch."""
        self._run: ObjectiveRun | None = ObjectiveRun(
            self.function, hp, name=self.name, seed=seed, device=device
        )
        self._ended: Mapping[str, float] | None = None
        self._logged = Logged()

    def load_state(self, state: Any) -> None:
        """Go on with the run that has waited in this process since it made the state.

        Raises:
            CheckpointError: No run of this process has.
        """
        if state["ended"]:
            self._run, self._ended = None, state["metrics"]
            return
        waiting = WAITING.take(state["run"])
        if waiting is None:
            raise CheckpointError(
                f"the run of {self.name} that has reported {state['reports']} times has ended with "
                "its process, and an objective cannot go on from a state"
            )
        self._run = waiting

    def train(self, epoch: int, hp: HyperParameters) -> None:
        """Let the objective run to its next report; in the last epoch, to its end.

        Raises:
            DivergedError: It has pruned itself.
            TaskError: It has returned no number.
            StateError: It has raised an error that is not caught.
        """
        if self._run is None:
            return
        WAITING.take(self._run.key)  # it goes on here
        try:
            self._run.advance(to_end=epoch + 1 >= self.num_epochs)
        except (TaskError, DivergedError):
            raise
        except Exception as error:
            if isinstance(error, self.catch):
                raise
            raise StateError(
                f"{self.name} has raised {error_text(error)}, which is not in catch="
            ) from error
        self._logged = self._run.take_logged()
        if self._run.has_ended:
            self._ended = self._run.metrics()
            self._run = None

    def evaluate(self) -> Mapping[str, float]:
        """Return the reported value, or what the objective has returned."""
        if self._run is not None:
            return self._with_end(self._run.metrics())
        assert self._ended is not None
        return self._with_end(self._ended)

    def _with_end(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        if self.num_epochs == 1:
            return metrics
        return {**metrics, UNFINISHED: float(self._run is not None)}

    def take_logged(self) -> Logged:
        """Return the user attributes and artifacts of the last epoch; each only once."""
        found, self._logged = self._logged, Logged()
        return found

    def state(self) -> Any:
        """Return the metrics of a run that has ended, or the name of one that waits."""
        if self._run is None:
            return {"ended": True, "metrics": dict(self.evaluate())}
        WAITING.keep(self._run)
        return {"ended": False, "run": self._run.key, "reports": self._run.num_reports}


class ObjectiveRun:
    """One call of an objective, in a thread that runs only while ``advance`` waits for it.

    The global random streams belong to the objective while it runs: they go on from one report to
    the next as if nothing else drew from them.

    Attributes:
        key: A name that no other run has.
        num_reports: How often it has reported.
    """

    def __init__(
        self,
        function: Objective,
        hp: HyperParameters,
        *,
        name: str,
        seed: int,
        device: torch.device,
    ) -> None:
        self.key = secrets.token_hex(8)
        self.num_reports = 0
        self._function, self._name = function, name
        self._hp, self._names = hp, frozenset(unread(hp))
        self._seed = seed
        number = int(fingerprint({each: repr(unread(hp)[each]) for each in self._names})[:6], 16)
        self._trial = ObjectiveTrial(self, number=number)
        self._call = SuspendedCall(self._run, name=name, device=device)
        self._streams: Streams | None = None
        self._to_end = self._was_let_go = False
        self._value = math.nan
        self._steps: set[int] = set()
        self._drawn: dict[str, Any] = {}
        """Values of hyper-parameters that the space does not have."""

    @property
    def has_ended(self) -> bool:
        """Whether it has returned or failed."""
        return self._call.has_ended

    def advance(self, *, to_end: bool) -> None:
        """Let the objective run until it reports or ends.

        Args:
            to_end: Whether its reports are ignored from now on, so that it runs to its end.

        Raises:
            Exception: The objective has raised it.
        """
        self._to_end = to_end
        if not self._call.has_begun:
            seed_everything(derive_seed(self._seed, "model"))
        else:
            assert self._streams is not None
            self._streams.restore()
        try:
            self._call.advance()
        finally:
            self._streams = Streams.now()

    def stop(self) -> None:
        """End the thread: the objective finds out at ``should_prune``, or at its report."""
        self._call.stop()

    def metrics(self) -> dict[str, float]:
        """Return the last value, numbers among the user's attributes, and drawn values."""
        numbers = {**self._drawn, **self._trial.user_attrs}
        return {
            **{name: float(value) for name, value in numbers.items() if _is_number(value)},
            VALUE: self._value,
        }

    def take_logged(self) -> Logged:
        """Return the user attributes and artifacts since the last call."""
        return self._trial.take_logged()

    # -- in the objective's thread ---------------------------------------------------------

    def suggest(self, name: str, domain: Domain) -> Any:
        """Return the trial's value, or draw one if the space does not have the name.

        Raises:
            TaskError: The trial's value is not one that is asked for.
        """
        if name not in self._names:
            return self._draw(name, domain)
        value = self._hp[name]
        if not is_in(domain, value):
            raise TaskError(
                f"{self._name} suggests {name!r} from {domain}, but this trial has {value!r}: the "
                "range differs from that found when the space was inferred. Let it depend on "
                "nothing, or use another name for each range"
            )
        return value

    def report(self, value: float, *, step: int) -> None:
        """Keep the value, and wait until the trial goes on."""
        if self._call.is_stopped:
            if self._was_let_go:
                _DEAF.add(self._name)
            self._call.end()
        if step in self._steps:
            return
        self._steps.add(step)
        if self._to_end:
            return
        self._value = value
        self.num_reports += 1
        self._call.pause()
        if self._call.is_stopped and self._name in _DEAF:
            self._call.end()
        self._was_let_go = self._call.is_stopped

    def should_prune(self) -> bool:
        """Return whether the trial was stopped while it waited."""
        return self._call.is_stopped

    def _draw(self, name: str, domain: Domain) -> Any:
        seed = derive_seed(self._seed, "late", name, self._trial.number)
        value = any_value(domain, rng=np.random.default_rng(seed))
        self._drawn[name] = value
        if name not in _SAID:
            _SAID.add(name)
            logger.warning(
                "%s suggests %r, which it did not suggest when its hyper-parameters were looked "
                "for. Its value is drawn at random, and shown among the metrics if it is a number. "
                "To have it searched, suggest it before what takes long",
                self._name,
                name,
            )
        return value

    def _run(self) -> None:
        try:
            self._value = _number(self._function(self._trial), what=f"{self._name} returns")
        except Exception as error:
            if not is_pruned(error):
                raise
            raise DivergedError(
                f"{self._name} has pruned itself after {self.num_reports} reports, although "
                "thrifty did not say so"
            ) from error


_SAID: set[str] = set()
"""Names that were suggested late, and about which the log has said so."""
_DEAF: set[str] = set()
"""Objectives that do not ask whether to prune; they are ended at their report."""


def is_pruned(error: BaseException) -> bool:
    """Return whether an error is Optuna's ``TrialPruned``; Optuna need not be installed."""
    return any(kind.__name__ == "TrialPruned" for kind in type(error).__mro__)


def _is_number(value: Any) -> bool:
    if isinstance(value, int):
        return abs(value) <= sys.float_info.max
    return isinstance(value, float | np.number) and math.isfinite(value)


def _number(value: Any, *, what: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TaskError(f"{what} {value!r}; give a number") from None


WAITING: WaitingRuns[ObjectiveRun] = WaitingRuns()
"""The runs of this process whose state is kept, and which may go on."""
