"""A training function as a task: its loop stays as it is."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from types import FrameType
from typing import Any

import torch

from thrifty.core import Artifacts, Attributes, TaskError, derive_seed
from thrifty.pack import HyperParameters, Logged, SelfDescribing
from thrifty.pack._state import seed_everything, stream_positions
from thrifty.pack.trial._left_gradients import gradients_noted
from thrifty.pack.trial._plain_evaluation import as_number, check_metrics
from thrifty.space import Space

from ._exploration import explored
from ._function_state import Kept, content_mark, how_to_keep
from ._locals import Locals
from ._loop_trial import LoopTrial, PrologueEndedError, TrialAnswers


TrainingFunction = Callable[[LoopTrial], Generator[Mapping[str, Any], None, None]]


def trainable(function: TrainingFunction) -> TrainableFunction:
    """Make a task of a training function: a generator function that keeps its loop.

    The function gets a ``LoopTrial``. It suggests values, makes what it needs, goes through
    ``trial.epochs(state)``, and yields its metrics at the end of each epoch. thrifty keeps the
    state of each object in ``state``, and restores it after the part before the loop has run again.
    So epochs that several trials have in common are trained once, as for any task.

    A study of it needs no space: the values that the function suggests are the space. They are
    found by running the part before the loop with different answers, in a process of its own.

    Args:
        function: The generator function; its only argument is the trial.

    Raises:
        TaskError: It is no generator function, or takes other arguments.

    >>> import thrifty as th
    >>> @th.trainable
    ... def train(trial):
    ...     lr = trial.suggest_schedule("lr", 0.1, th.Step(0.1, [2]))
    ...     point = {"x": 1.0}
    ...     for epoch in trial.epochs(point):
    ...         point["x"] -= lr.value * 2 * point["x"]
    ...         yield {"loss": point["x"] ** 2}
    >>> study = th.Study(
    ...     train,
    ...     algorithm=th.GridSearch(max_epochs=4),
    ...     metric="loss",
    ...     mode="min",
    ...     storage="sqlite://",
    ...     name="square",
    ... )
    >>> _ = study.run(progress=False)
    >>> study.savings.trial_epochs, study.savings.unique_epochs
    (8, 6)
    """
    if not inspect.isgeneratorfunction(function):
        raise TaskError(
            f"@trainable: {_name_of(function)} is no generator function; write `def "
            "train(trial):` with `yield {...metrics...}` at the end of each epoch"
        )
    parameters = inspect.signature(function).parameters.values()
    required = [p for p in parameters if p.default is p.empty and p.kind != p.VAR_KEYWORD]
    if len(required) != 1 or required[0].kind in {required[0].KEYWORD_ONLY}:
        raise TaskError(
            f"@trainable: {_name_of(function)} must take one argument, the trial; give others a "
            "default"
        )
    return TrainableFunction(function)


class TrainableFunction(SelfDescribing):
    """The task that ``trainable`` makes of a function."""

    preparation = "prologue"
    mend = (
        "if it is a result of training, keep it in the dict that trial.epochs() gets; if it is a "
        "setting that is the same for all trials, set it where its module or this file is "
        "imported, and not in the function; if it depends on the trial, set it at the top of each "
        "round and set it back before the yield, or give the value to an object that the function "
        "makes"
    )
    internals = frozenset({"_run", "_metrics"})

    def __init__(self, function: TrainingFunction) -> None:
        self.function = function

    def __repr__(self) -> str:
        return f"<trainable function {self.name}>"

    def __reduce__(self) -> Any:
        name = getattr(self.function, "__qualname__", "")
        if self.module != "__main__" and _found(self.module, name) is self:
            return _found, (self.module, name)
        return TrainableFunction, (self.function,)

    def __copy__(self) -> TrainableFunction:
        # Pickle names the object in its module, but each trial is an object of its own.
        return TrainableFunction(self.function)

    @property
    def name(self) -> str:  # type: ignore[override]
        """The name of the function."""
        return _name_of(self.function)

    @property
    def module(self) -> str:  # type: ignore[override]
        """Name of the module that defines the function."""
        function = self.function
        while isinstance(function, partial):
            function = function.func
        return str(function.__module__)

    def space(self) -> Space:
        """Return the values that the function suggests, found in a process of its own.

        Raises:
            TaskError: The function fails before its loop, or has no loop.
            SpaceError: A name has different ranges for different answers.
        """
        return explored(self)

    # -- one trial -----------------------------------------------------------------------

    def setup(self, hp: HyperParameters, *, seed: int, device: torch.device) -> None:
        """Take the trial's values; the function begins with the first epoch."""
        self._run = _Run(self.function, hp, seed=seed, device=device)
        self._metrics: Mapping[str, Any] = {}

    def load_state(self, state: Any) -> None:
        """Take the state of earlier epochs, for ``trial.epochs``, and what was yielded last."""
        self._run.restore(state)
        self._metrics = self._run.last

    def train(self, epoch: int, hp: HyperParameters) -> None:
        """Let the function train one epoch, up to its ``yield``.

        A function that has ended trains nothing: its last metrics hold for all later epochs.

        Raises:
            TaskError: It does not yield once in each epoch, or changes its state afterwards.
        """
        self._metrics = self._run.epoch(epoch, hp)

    def evaluate(self) -> Mapping[str, Any]:
        """Return what the function has yielded."""
        return self._metrics

    def state(self) -> Any:
        """Return the state of what the function has given to ``trial.epochs``."""
        return self._run.state()

    def take_logged(self) -> Logged:
        """Return the user attributes and artifacts of the last epoch; each only once."""
        return self._run.take_logged()

    def drawn(self) -> tuple[Any, ...] | None:
        """Return the positions of the seeded streams when the loop began; runs up to there."""
        self._run.run_prologue()
        return self._run.drawn

    def unread(self) -> list[str]:
        """Return the variables that later epochs read, and whose content nothing can see whole."""
        return self._run.unread()

    def looked_at(self) -> Mapping[str, Any]:
        """Return the function and its run, whose variables trials may carry."""
        return {"self.function": self.function, "self": self._run.generator}

    @property
    def model(self) -> torch.nn.Module | None:
        """The network in the state of the trial; None if there is none, or more than one."""
        return self._run.model


_NUM_CHECKED = 3
"""The number of epochs after which variables are checked; later, only before a state is kept."""


class _Run:
    """One run of a function: its generator, and what lies between its epochs."""

    def __init__(
        self, function: TrainingFunction, hp: HyperParameters, *, seed: int, device: torch.device
    ) -> None:
        self._name = _name_of(function)
        self._seed, self._device = seed, device
        self._answers = TrialAnswers(hp, function=self._name)
        trial = LoopTrial(self._answers, self, seed=seed, device=device)
        self._generator: Any = function(trial)  # a generator, whose type has no ``gi_frame``
        self._locals: Locals | None = None
        """The function's variables when its loop began."""
        self._ignored: Collection[str] = ()
        self._kept: Kept | None = None
        """What the function has given to ``trial.epochs``; None before."""
        self._restored: Mapping[str, Any] | None = None
        self._gradients: Mapping[str, Any] = {}
        """The gradients of plain tensors, as restored."""
        self._held: Sequence[str] = ()
        """Marks of parts of kept objects, in the state; none if the loop does not read them."""
        self._only_prologue = False
        self._num_checked = 0
        self._epoch, self._hp = 0, hp
        self._is_due = False
        """Whether the loop has to go on to the next epoch before it yields."""
        self._last: dict[str, Any] = {}
        """The metrics of the last epoch."""
        self._marks: tuple[Any, ...] | None = None
        """The marks of the state at the last yield."""
        self._has_ended = False
        self._attributes, self._artifacts = Attributes(), Artifacts()
        self._is_in_loop = False
        """Whether the function has begun its first epoch."""
        self.drawn: tuple[Any, ...] | None = None
        """The positions of the seeded streams when the loop began."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self._restored, self._gradients = state["kept"], state.get("gradients", {})
        self._last, self._has_ended = dict(state["last"]), bool(state["ended"])
        self._held = state.get("held", ())

    def state(self) -> dict[str, Any]:
        """Return the state after the last epoch.

        Raises:
            TaskError: A variable that is not in it has changed and is read again.
        """
        self._check_locals()
        state = {"kept": self._restored, "last": self._last, "ended": self._has_ended}
        gradients = self._gradients
        if self._kept is not None:
            state["kept"], gradients = self._kept.state(), self._kept.gradients()
        if self._kept is not None and self._locals is not None:
            is_read = self._locals.reads_held
            self._held = [content_mark(each) for each in self._kept.held()] if is_read else ()
        added = {"gradients": gradients, "held": list(self._held)}
        return state | {name: each for name, each in added.items() if each}

    @property
    def last(self) -> Mapping[str, Any]:
        """The metrics of the last epoch, as the trial reports them."""
        return dict(self._last)

    @property
    def generator(self) -> Any:
        """The function as it runs."""
        return self._generator

    def unread(self) -> list[str]:
        """Return the variables that looks could not see whole."""
        return [] if self._locals is None else self._locals.unread

    def run_prologue(self) -> None:
        """Run the function up to its loop if it has not come there yet; it cannot go on."""
        if self._kept is None:
            self._only_prologue = True
            seed_everything(derive_seed(self._seed, "model"))
            with suppress(PrologueEndedError, StopIteration):
                next(self._generator)

    @property
    def model(self) -> torch.nn.Module | None:
        """The network in the state; the function runs up to its loop if it has not yet."""
        self.run_prologue()
        return None if self._kept is None else self._kept.model

    def epoch(self, epoch: int, hp: HyperParameters) -> Mapping[str, Any]:
        """Train an epoch, and return what the function yields."""
        if self._has_ended:
            return self._last
        if self._kept is None:
            seed_everything(derive_seed(self._seed, "model"))
        self._epoch, self._hp, self._is_due = epoch, hp, True
        try:
            before = _modes()
            with gradients_noted():
                metrics = next(self._generator)
        except StopIteration as end:
            self._end(end.value)
            return self._last
        if _modes() != before:
            self._generator.close()  # it ends the context, which would go on in this process
            raise TaskError(
                f"{self._name} yields within a context such as torch.no_grad() or autocast, or has "
                "switched gradients off; end the context before the yield"
            )
        if self._is_due:
            raise TaskError(
                f"{self._name} yields outside of the loop over trial.epochs(), or twice in one "
                f"epoch ({epoch}); yield the metrics once in each round"
            )
        found = check_metrics(metrics, task=self._name, method="yield")
        self._last = {name: as_number(value) for name, value in found.items()}
        self._kept_now().check()
        self._marks = self._kept_now().marks()
        if self._num_checked < _NUM_CHECKED:
            self._num_checked += 1
            self._check_locals()
        return self._last

    def set_attribute(self, key: str, value: Any) -> None:
        """Keep a user attribute with the epoch that is trained now.

        What the prologue sets belongs to the first epoch of the trial. A run that goes on from a
        state runs the prologue anew, and drops it: the loop may have set another value since.

        Raises:
            TaskError: The value cannot be kept, or the function has yielded already.
        """
        self._check_is_in_time("set_user_attr", key)
        (self._attributes if self._keeps_logged else Attributes()).set(key, value)

    def log_artifact(
        self, path: str | os.PathLike[str], *, name: str | None, max_bytes: int
    ) -> None:
        """Keep a copy of a file with the epoch that is trained now, as ``set_attribute`` does.

        Raises:
            TaskError: The file cannot be kept, or the function has yielded already.
        """
        self._check_is_in_time("log_artifact", str(path))
        self._artifacts.log(path, name=name, max_bytes=max_bytes, keep=self._keeps_logged)

    def take_logged(self) -> Logged:
        """Return the user attributes and artifacts of the last epoch."""
        return Logged(attributes=self._attributes.take(), artifacts=self._artifacts.take())

    @property
    def _keeps_logged(self) -> bool:
        """Whether what is said now counts: in the loop, and before it where a trial begins."""
        return self._is_in_loop or self._restored is None

    def _check_is_in_time(self, method: str, what: str) -> None:
        """Refuse what is said after the yield, when the epoch has ended.

        Raises:
            TaskError: The function has yielded already.
        """
        if self._is_in_loop and self._is_due:
            raise TaskError(
                f"{self._name} calls trial.{method}({what!r}, ...) after its yield, when the "
                "epoch has ended, so a trial that goes on from there would not have it; call it "
                "before the yield"
            )

    def _end(self, returned: object) -> None:
        """The function has ended by itself, as after its own early stopping.

        Args:
            returned: What it has returned.

        Raises:
            TaskError: It has not trained at all, returns its metrics, has changed its state since
                it yielded, or has ended where a restored trial would not.
        """
        if self._kept is None:
            raise TaskError(
                f"{self._name} returns before its loop over trial.epochs(), so this trial has no "
                "metrics; to give up on some values, yield poor metrics in the loop, or raise an "
                "error, which fails the trial"
            )
        if isinstance(returned, Mapping):
            raise TaskError(
                f"{self._name} returns its metrics in epoch {self._epoch}, where they are lost; "
                "yield them at the end of the round, and return nothing"
            )
        if not self._last:
            raise TaskError(
                f"{self._name} leaves its loop in epoch {self._epoch}, before its first yield, so "
                "this trial has no metrics; yield the metrics of an epoch before you break or "
                "return"
            )
        if self._is_due:
            raise TaskError(
                f"{self._name} ends after its yield, when the state of the epoch has been kept, so "
                "a trial that goes on from there would not end; decide it at the top of the loop "
                '(if state["bad_epochs"] > patience: return)'
            )
        self._check_marks()
        self._has_ended = True

    def _kept_now(self) -> Kept:
        assert self._kept is not None
        return self._kept

    def _check_marks(self) -> None:
        if self._marks is not None and self._marks != self._kept_now().marks():
            raise TaskError(
                f"{self._name} changes its state after the yield, when the state of the epoch has "
                "been kept; do everything (such as scheduler.step()) before the yield"
            )

    def _check_locals(self) -> None:
        """Refuse variables that would be lost: a restored trial runs the function anew.

        Raises:
            TaskError: There is one.
        """
        frame = self._generator.gi_frame
        if self._locals is None or frame is None:
            return
        if self._generator.gi_yieldfrom is not None:
            raise TaskError(
                f"{self._name} goes through trial.epochs() in an inner generator, whose variables "
                "nothing can see; write the loop in the function itself"
            )
        if found := list(self._lost(self._locals, frame)):
            raise TaskError("\n".join(found))  # all at once: each costs a run of the study

    def _lost(self, known: Locals, frame: FrameType) -> Iterator[str]:
        """Yield what is wrong with each variable that would be lost, and how to keep it."""
        for name in known.changed():
            if name not in self._ignored:
                yield (
                    f"{self._name} changes an attribute or a hook of {name!r} that is not in its "
                    "state_dict, so a trial that goes on from there would not have it. Keep it in "
                    "the dict that trial.epochs() gets, or in a buffer of the module; or, if "
                    "nothing that is trained depends on it, say trial.epochs(state, "
                    f"ignore=[{name!r}])"
                )
        lost = known.lost(frame, ignore=self._ignored)
        for name in lost:
            value = frame.f_locals.get(name, frame.f_globals.get(name))
            yield (
                f"{self._name} changes the variable {name!r} in its loop and reads it in a later "
                "epoch, but it is not in the state, so a trial that goes on from there would not "
                f"have it. {how_to_keep(name, value)}; or, if nothing that is trained depends on "
                f"it, say trial.epochs(state, ignore=[{name!r}])"
            )
        for name in known.iterators(frame, ignore=[*self._ignored, *lost]):
            yield (
                f"{self._name} goes through the iterator {name!r} over several epochs; a trial "
                "that goes on from a state begins with it anew. Make it in each epoch; or, if "
                "nothing that is trained depends on it, say trial.epochs(state, "
                f"ignore=[{name!r}])"
            )

    # -- what `trial.epochs` does ----------------------------------------------------------

    def begin(self, state: Any, ignore: Collection[str], *, keep_gradients: bool) -> None:
        """Take the objects whose state is kept, and give them the state of earlier epochs."""
        kept = Kept(state, keep_gradients=keep_gradients)
        if self._restored is not None:
            kept.load(self._restored, self._gradients)
            self._check_held(kept)
        self._kept, self._ignored = kept, ignore
        self.drawn = stream_positions(self._device)
        if self._only_prologue:
            raise PrologueEndedError

    def _check_held(self, kept: Kept) -> None:
        """Check that objects of the user's own have got all parts back that the loop reads.

        Raises:
            TaskError: One has not.
        """
        held = kept.held()
        same = [content_mark(each) == mark for each, mark in zip(held, self._held, strict=False)]
        if not self._held or (all(same) and len(held) == len(self._held)):
            return
        lost = {
            type(each).__name__ for each, is_same in zip(held, same, strict=False) if not is_same
        }
        what = " and ".join(sorted(lost)) or "some"
        raise TaskError(
            f"{self._name} reads networks or optimizers that are parts of an object in the dict "
            f"that trial.epochs() gets, but load_state_dict of this object does not bring back "
            f"{what} as it was. Return all parts from its state_dict and load them, or put each of "
            "them into the dict, too"
        )

    def next(self) -> int:
        """Return the number of the epoch to train now.

        Raises:
            TaskError: The function has not yielded, or has changed its state since it has.
        """
        if not self._is_due:
            raise TaskError(
                f"{self._name} goes on without a yield in epoch {self._epoch}; yield the metrics "
                "once in each round of its loop, in the function itself: a call of an inner "
                "function that yields runs nothing"
            )
        self._check_marks()
        if self._locals is None and self._generator.gi_frame is not None:
            kept = self._kept_now()
            self._locals = Locals(self._generator.gi_frame, kept=kept.values, held=kept.held())
        self._kept_now().clear_gradients()
        self._is_due, self._is_in_loop = False, True
        self._answers.present = self._hp  # only now, so that reads before the loop are known
        seed_everything(derive_seed(self._seed, "epoch", self._epoch))
        return self._epoch


def _modes() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
        len(torch.overrides._get_current_function_mode_stack()),  # type: ignore[no-untyped-call]
        len(torch.utils._python_dispatch._get_current_dispatch_mode_stack()),
    )


def _name_of(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__qualname__", repr(function))


def _found(module: str, name: str) -> Any:
    """Return what a module has under a qualified name; None if it has nothing there."""
    try:
        found: Any = import_module(module)
    except ImportError:  # a file that was loaded by its path
        return None
    for part in name.split("."):
        found = getattr(found, part, None)
    return found
