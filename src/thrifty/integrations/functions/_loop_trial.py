"""What a user's function is given: it suggests values and counts the epochs.

A function that does not hand its epochs over waits in a thread of its own, while thrifty decides
(``SuspendedCall``).
"""

from __future__ import annotations

import contextvars
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, Protocol, TypeVar
from weakref import ref

import torch

from thrifty.core import (
    MAX_ARTIFACT_BYTES,
    TaskError,
    check_hyperparameter_names,
    error_text,
    plain_logger,
)
from thrifty.pack import HyperParameters
from thrifty.pack.task._task import unread, values_of
from thrifty.space import Choice, Domain, Float, Int, Schedule


class PrologueEndedError(BaseException):
    """Ends a function at ``trial.epochs``; no ``except Exception`` of the function catches it."""


class Answers(Protocol):
    """Where the values of suggestions come from."""

    def check(self, name: str, domain: Any) -> None:
        """Take note of what the function asks for; raise a TaskError if there is no answer."""
        ...

    def value(self, name: str) -> Any:
        """Return the value of a hyper-parameter that is read once."""
        ...

    def scheduled(self, name: str) -> Any:
        """Return the value of a scheduled hyper-parameter in the present epoch."""
        ...


class Epochs(Protocol):
    """What happens between the epochs of a trial."""

    def begin(self, state: Any, ignore: Collection[str], *, keep_gradients: bool) -> None:
        """Take the objects whose state is kept, and give them the state of earlier epochs."""
        ...

    def next(self) -> int:
        """Return the number of the epoch to train now."""
        ...

    def set_attribute(self, key: str, value: Any) -> None:
        """Keep a user attribute with the epoch that is trained now."""
        ...

    def log_artifact(
        self, path: str | os.PathLike[str], *, name: str | None, max_bytes: int
    ) -> None:
        """Keep a copy of a file with the epoch that is trained now."""
        ...


class Scheduled:
    """A hyper-parameter that may follow a schedule: ``value`` is its value in this epoch.

    ``float(lr)`` is ``lr.value``.
    """

    __slots__ = ("_answers", "name")

    def __init__(self, name: str, answers: Answers) -> None:
        self.name = name
        self._answers = answers

    @property
    def value(self) -> Any:
        """The value in the epoch that is trained now."""
        return self._answers.scheduled(self.name)

    def __float__(self) -> float:
        return float(self.value)

    def _is_no_number(self, *_: object) -> Any:
        raise TypeError(f"{self.name} may follow a schedule; read {self.name}.value in each epoch")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _is_no_number
    __truediv__ = __rtruediv__ = __pow__ = __rpow__ = __neg__ = _is_no_number
    __lt__ = __le__ = __gt__ = __ge__ = _is_no_number

    def __repr__(self) -> str:
        return f"<scheduled hyper-parameter {self.name!r}; read its .value in each epoch>"


class LoopTrial:
    """One trial of a training function: its hyper-parameters, device and epochs.

    Names and ranges of ``suggest_float``, ``suggest_int`` and ``suggest_categorical`` are those of
    Optuna's trials. All suggestions come before ``epochs``.

    Attributes:
        device: The device to train on.
        seed: The trial's seed, from which the global streams of torch, NumPy and Python are seeded
            before the function begins, and before each epoch.
    """

    def __init__(
        self, answers: Answers, epochs: Epochs, *, seed: int, device: torch.device
    ) -> None:
        self.device = device
        self.seed = seed
        self._answers = answers
        self._epochs = epochs
        self._asked: dict[str, Any] = {}
        self._has_begun = False

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """Return a value between two numbers, both included.

        Args:
            name: The hyper-parameter.
            low: The least value.
            high: The greatest value.
            step: Distance of neighbouring values, counted from ``low``; None for any value.
            log: Whether values are spread evenly on a logarithmic scale.

        Raises:
            TaskError: The name was suggested before with other values, or training has begun.
            SpaceError: The bounds leave no value.
        """
        self._ask(name, Float(low, high, step=step, log=log))
        return float(self._answers.value(name))

    def suggest_int(
        self, name: str, low: int, high: int, *, step: int = 1, log: bool = False
    ) -> int:
        """Return a whole number between two others, both included; see ``suggest_float``."""
        self._ask(name, Int(low, high, step=step, log=log))
        return int(self._answers.value(name))

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """Return one of some numbers, texts, bools or None."""
        self._ask(name, Choice(list(choices)))
        return self._answers.value(name)

    def suggest_schedule(self, name: str, *options: Any) -> Scheduled:
        """Return a hyper-parameter that may change while the trial trains.

        Read its ``value`` in each epoch. Trials share the epochs in which their values agree.

        Args:
            name: The hyper-parameter.
            options: Schedules, whose fields may be domains (``th.Step(th.Float(0.01, 1), [10])``),
                domains, or numbers. A trial has one of them.

        >>> import thrifty as th
        >>> @th.trainable
        ... def train(trial):
        ...     lr = trial.suggest_schedule("lr", 0.1, th.Step(0.1, [2]))
        ...     for epoch in trial.epochs({}):
        ...         yield {"lr": lr.value}
        >>> train.space()
        Space(lr=Choice(options=(0.1, Step(0.1, (2,))), conditions=()))
        """
        if not options:
            raise TaskError(f"suggest_schedule({name!r}): give at least one schedule or value")
        self._ask(name, options[0] if len(options) == 1 else Choice(list(options)))
        return Scheduled(name, self._answers)

    def epochs(
        self, state: Any = None, *, ignore: Collection[str] = (), keep_gradients: bool = False
    ) -> Iterator[int]:
        """Yield the numbers of the epochs to train: 0, 1, ..., or later ones if earlier are known.

        ``yield`` the metrics at the end of each. To stop early, end the function at the top of a
        round; its last metrics then hold for all later epochs. Gradients that no optimizer has used
        yet go into the next epoch. Used ones do so only with ``keep_gradients``.

        Args:
            state: All that training changes: an object with ``state_dict`` and ``load_state_dict``,
                a generator of random numbers, an estimator of scikit-learn, or a dict of these and
                of plain values. They get the state of earlier epochs here.
            ignore: Variables that the loop changes and that are meant not to be in ``state``, such
                as a clock or a progress bar: nothing that is trained depends on them.
            keep_gradients: Whether ``state`` includes gradients that an optimizer has used. Only a
                loop that does not clear them before its first ``backward`` needs that; without it,
                such a loop is refused.

        Raises:
            TaskError: It is called twice, or something in ``state`` cannot be kept.
        """
        if isinstance(ignore, str) or not all(isinstance(each, str) for each in ignore):
            raise TaskError(f"trial.epochs(ignore={ignore!r}): give a list of names of variables")
        if self._has_begun:
            raise TaskError("trial.epochs() is called twice; a trial has one loop over its epochs")
        self._has_begun = True
        self._epochs.begin(state, tuple(ignore), keep_gradients=keep_gradients)
        return iter(self._epochs.next, None)

    def set_user_attr(self, key: str, value: Any) -> None:
        """Keep a fact about the trial beside its metrics, such as a text or a table.

        It is stored with the epoch that is trained now; before ``epochs``, with the first epoch.
        All trials that share the epoch have it, and the last value of a key counts:
        ``TrialResult.user_attrs``. Set it before the ``yield``.

        Args:
            key: Its name.
            value: A text, a number, a bool, None, or a list or dict of these. The attributes of one
                epoch may take 64 KiB as JSON.

        Raises:
            TaskError: The value is no JSON or too large, or the epoch's metrics are yielded
                already.

        >>> import thrifty as th
        >>> @th.trainable
        ... def train(trial):
        ...     width = trial.suggest_int("width", 1, 2)
        ...     trial.set_user_attr("layers", [width, 1])
        ...     for epoch in trial.epochs({}):
        ...         yield {"loss": 1 / width}
        >>> study = th.Study(
        ...     train,
        ...     algorithm=th.GridSearch(max_epochs=1),
        ...     metric="loss",
        ...     mode="min",
        ...     storage="sqlite://",
        ...     name="widths",
        ... )
        >>> study.run(progress=False).best_trial.user_attrs
        {'layers': [2, 1]}
        """
        self._epochs.set_attribute(key, value)

    def log_artifact(
        self,
        path: str | os.PathLike[str],
        name: str | None = None,
        *,
        max_bytes: int = MAX_ARTIFACT_BYTES,
    ) -> None:
        """Keep a copy of a file beside the trial's metrics, such as a picture or a report.

        The copy goes to the study's checkpoint storage, once for equal contents, and the epoch that
        is trained now names it. All trials that share the epoch have it, and the last file of a
        name counts: ``TrialResult.artifacts`` and ``Study.open_artifact``. If the storage is full
        or read-only, the trial goes on without the file, and its artifact says why.

        Args:
            path: The file.
            name: Its name (default: the last part of ``path``).
            max_bytes: Size limit.

        Raises:
            TaskError: The file is missing, a folder or too large, the name is a path, or the
                epoch's metrics are yielded already.

        >>> import pathlib, tempfile
        >>> import thrifty as th
        >>> folder = tempfile.mkdtemp()
        >>> @th.trainable
        ... def train(trial):
        ...     width = trial.suggest_int("width", 1, 2)
        ...     for epoch in trial.epochs({}):
        ...         report = pathlib.Path(tempfile.mkdtemp(), "report.txt")
        ...         _ = report.write_text(f"{width} wide")
        ...         trial.log_artifact(report)
        ...         yield {"loss": 1 / width}
        >>> study = th.Study(
        ...     train,
        ...     algorithm=th.GridSearch(max_epochs=1),
        ...     metric="loss",
        ...     mode="min",
        ...     storage=f"sqlite:///{folder}/t.db",
        ...     name="reports",
        ... )
        >>> _ = study.run(progress=False)
        >>> with study.open_artifact(study.best_trial, "report.txt") as file:
        ...     file.read()
        b'2 wide'
        """
        self._epochs.log_artifact(path, name=name, max_bytes=max_bytes)

    def _ask(self, name: str, domain: Any) -> None:
        if self._has_begun:
            raise TaskError(
                f"{name!r} is suggested after trial.epochs(), when training has begun; move the "
                "suggestion up"
            )
        check_hyperparameter_names([name])
        if self._asked.setdefault(name, domain) != domain:
            raise TaskError(
                f"{name!r} is suggested twice with different values, {self._asked[name]} and "
                f"{domain}; use two names"
            )
        self._answers.check(name, domain)


def is_scheduled(domain: Any) -> bool:
    """Return whether a hyper-parameter may have a schedule."""
    options = domain.options if isinstance(domain, Choice) else (domain,)
    return any(isinstance(option, Schedule) for option in options)


class TrialAnswers:
    """The values of one trial, and which of them it reads once and in each epoch.

    Args:
        first: The hyper-parameters at epoch 0.
        function: The name of the function, for errors.
    """

    def __init__(self, first: HyperParameters, *, function: str) -> None:
        self._first = first
        self._names = frozenset(unread(first))
        self._function = function
        self.present: HyperParameters | None = None
        """The hyper-parameters of the epoch that is trained now; None before the first."""

    def check(self, name: str, domain: Any) -> None:
        """Make certain that the space and the function agree about a hyper-parameter.

        Raises:
            TaskError: The space does not have it, or its value is not one that is asked for.
        """
        if name not in self._names:
            raise TaskError(
                f"{self._function} suggests {name!r}, which is not among this trial's "
                f"hyper-parameters ({', '.join(sorted(self._names))}): it was not suggested when "
                "the space was looked for. Let nothing besides suggested values decide what is "
                "suggested, or give the study a space"
            )
        value = values_of(self._first, [name])[name]
        if isinstance(domain, Domain) and not is_scheduled(domain) and not is_in(domain, value):
            raise TaskError(
                f"{self._function} suggests {name!r} from {domain}, but this trial has {value!r}: "
                "the range differs from that found when the space was inferred. Let it depend on "
                "nothing, or give the study a space"
            )

    def value(self, name: str) -> Any:
        """Return the value at epoch 0; that counts as reading it once."""
        return self._first[name]

    def scheduled(self, name: str) -> Any:
        """Return the value in the present epoch; before the first one, that of epoch 0."""
        return (self._first if self.present is None else self.present)[name]


def is_in(domain: Domain, value: Any) -> bool:
    """Return whether a value is one of a domain."""
    if isinstance(domain, Choice):
        return any(type(value) is type(each) and value == each for each in domain.options)
    assert isinstance(domain, Float | Int)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return domain.low <= value <= domain.high


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


MAX_WAITING = 4
"""Most runs of a process that wait for a decision; each has its network in memory."""


class WaitingRun(Protocol):
    """A run that waits in a thread until it is known whether its trial goes on."""

    key: str

    def stop(self) -> None:
        """End the run."""
        ...


R = TypeVar("R", bound=WaitingRun)


class WaitingRuns(Generic[R]):
    """The latest runs of a process that wait; those before them are ended.

    >>> class Run:
    ...     def __init__(self, key):
    ...         self.key, self.has_ended = key, False
    ...
    ...     def stop(self):
    ...         self.has_ended = True
    >>> runs, waiting = [Run(str(k)) for k in range(MAX_WAITING + 1)], WaitingRuns()
    >>> for run in runs:
    ...     waiting.keep(run)
    >>> [run.has_ended for run in runs]
    [True, False, False, False, False]
    >>> waiting.take("4") is runs[4], waiting.take("4"), len(waiting)
    (True, None, 3)
    """

    def __init__(self) -> None:
        self._runs: OrderedDict[str, R] = OrderedDict()

    def __len__(self) -> int:
        return len(self._runs)

    def keep(self, run: R) -> None:
        """Let a run wait."""
        self._runs[run.key] = run
        self._runs.move_to_end(run.key)
        while len(self._runs) > MAX_WAITING:
            self._runs.popitem(last=False)[1].stop()

    def take(self, key: str) -> R | None:
        """Return a run that goes on here, so no other trial may take it; None: it has ended."""
        return self._runs.pop(key, None)

    def end_all(self) -> None:
        """End all runs that wait."""
        while self._runs:
            self._runs.popitem()[1].stop()
