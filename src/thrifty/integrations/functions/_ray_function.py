"""A training function of Ray Tune as a task: it runs unchanged, and waits at each report.

A report with a checkpoint is a state that any process can go on from, as the function itself does
with ``tune.get_checkpoint()``. Without checkpoints, only the process that has begun a trial can.
"""

from __future__ import annotations

import copy
import math
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import CellType, CodeType
from typing import Any

import numpy as np
import torch

from thrifty.core import (
    CheckpointError,
    StateError,
    TaskError,
    derive_seed,
    error_text,
    plain_logger,
)
from thrifty.pack import HyperParameters, SelfDescribing
from thrifty.pack._state import seed_everything
from thrifty.pack.trial._plain_evaluation import as_number
from thrifty.space import Space

from ._loop_trial import SuspendedCall, WaitingRuns, call_of_this_thread
from ._ray_space import nested


logger = plain_logger(__name__)

RayTrainingFunction = Callable[[dict[str, Any]], Any]
_COMPARED = 5
"""Epochs that are trained to compare a trial that goes on from a checkpoint."""


class RayFunction(SelfDescribing):
    """The task of a training function of Ray Tune, which is not changed.

    The function takes a configuration and calls ``ray.tune.report(metrics, checkpoint=...)`` after
    each epoch, or returns its metrics once. An epoch of thrifty is a report. The study's metrics
    are the numbers in the reports. Hyper-parameters whose names have slashes become nested
    dictionaries: ``model/width`` is ``config["model"]["width"]``. ``ray_space`` makes a space of
    Ray's.

    A trial goes on in the process that has begun it, in a thread that waits at its reports, and is
    trained from its start anywhere else. So its results are those of an uninterrupted training.

    With ``resumes``, any process goes on from a reported checkpoint, as the function itself does
    with ``tune.get_checkpoint()``: at rungs, on other workers, after a kill. Then it must report a
    checkpoint each time, and the checkpoint must be complete. Before a process goes on from one for
    the first time, it trains five epochs of the same configuration anew, and four of them again
    from the checkpoint of the first; if a report differs, an error says so. What shows later, such
    as a scheduler whose place is not saved and whose next step comes after ten epochs, is not seen.
    Configurations that differ in a text, a bool or in which numbers are zero are compared each.

    Random numbers of torch, NumPy and Python come from streams that are seeded at the beginning,
    and again for each later epoch: when ``report`` or ``get_checkpoint`` returns. So call
    ``get_checkpoint`` after what draws numbers has been made, such as the model.

    Ray gives each trial a process of its own. Here trials take turns in one, so it is an error if a
    trial changes a global number, a text or a list of them.

    Args:
        function: The training function.
        resumes: Whether trials go on from its checkpoints in other processes, too.

    Raises:
        TaskError: It is no function.

    >>> import thrifty as th
    >>> def train(config):
    ...     return {"loss": (config["x"] - 0.3) ** 2}
    >>> study = th.Study(
    ...     th.RayFunction(train),
    ...     th.Space(x=th.Float(0.0, 1.0)),
    ...     algorithm=th.RandomSearch(max_epochs=1, num_trials=20),
    ...     metric="loss",
    ...     mode="min",
    ...     storage="sqlite://",
    ...     name="parabola",
    ... )
    >>> study.run(progress=False).best_trial.value < 0.05
    True
    """

    preparation = "prologue"
    mend = "save it in the checkpoint that the function reports, and restore it from there"
    internals = frozenset({"_run", "_metrics", "_new_run", "_kind"})

    def __init__(self, function: RayTrainingFunction, *, resumes: bool = False) -> None:
        if not callable(function):
            raise TaskError(f"RayFunction({function!r}): give a function of a configuration")
        self.function = function
        self.can_resume = bool(resumes)

    def __repr__(self) -> str:
        return f"<function of Ray Tune {self.name}>"

    @property
    def name(self) -> str:  # type: ignore[override]
        """The name of the function."""
        function = _innermost(self.function)
        return str(getattr(function, "__qualname__", None) or type(function).__name__)

    @property
    def module(self) -> str:  # type: ignore[override]
        """Name of the module that defines the function."""
        function = _innermost(self.function)
        return str(getattr(function, "__module__", None) or type(function).__module__)

    def space(self) -> Space:
        """Raise an error: a function of Ray does not say what it can be given.

        Raises:
            TaskError: Always.
        """
        raise TaskError(
            f"{self.name} is a function of Ray Tune, which does not know its hyper-parameters; "
            "give the study a space, such as thrifty.ray_space(param_space)"
        )

    # -- one trial -----------------------------------------------------------------------

    def setup(self, hp: HyperParameters, *, seed: int, device: torch.device) -> None:
        """Take the trial's values; the function begins with the first epoch."""
        values = {name: hp[name] for name in hp}
        self._new_run = partial(
            _Run, self.function, name=self.name, values=values, seed=seed, device=device
        )
        kinds = tuple(sorted((name, _kind_of(value)) for name, value in values.items()))
        self._kind = (self.module, self.name, kinds, str(device))
        _check_shared(self.function, self.name)
        self._run: _Run | None = self._new_run()
        if self.can_resume:  # its thread would wait for ever once nobody has the trial
            weakref.finalize(self, self._run.stop)
        self._metrics: Mapping[str, float] = {}

    def load_state(self, state: Any) -> None:
        """Go on from a reported checkpoint, or with the run that has waited in this process.

        Raises:
            CheckpointError: There is neither.
        """
        self._metrics = state["metrics"]
        if state["ended"]:
            self._run = None
            return
        if "files" in state:
            assert self._run is not None
            self._verify()
            self._run.restore(state["files"], metrics=self._metrics, num_reports=state["reports"])
            return
        waiting = WAITING.take(state["run"])
        if waiting is None:
            raise CheckpointError(
                f"the run of {self.name} that has reported {state['reports']} times has ended with "
                "its process; only with RayFunction(function, resumes=True) does it go on from "
                "the checkpoints that it reports"
            )
        self._run = waiting

    def train(self, epoch: int, hp: HyperParameters) -> None:
        """Let the function run to its next report, or to its end.

        Raises:
            TaskError: It has reported no numbers, no checkpoint where it goes on from them, or has
                not asked for the one that it was to go on from.
        """
        if self._run is None:
            return
        WAITING.take(self._run.key)  # it goes on here
        _check_shared(self.function, self.name)
        self._run.advance(epoch)
        self._metrics = self._run.metrics
        if self._run.has_ended:
            if not self._metrics:
                raise TaskError(
                    f"{self.name} has ended and reported nothing; call tune.report(metrics), or "
                    "return them"
                )
            self._run = None
        elif self.can_resume and self._run.files is None:
            raise TaskError(
                f"report {self._run.num_reports} of {self.name} has no checkpoint, and thrifty may "
                "stop a trial after any; report one each time, or leave resumes=True out"
            )

    def evaluate(self) -> Mapping[str, float]:
        """Return the numbers that were reported last."""
        return self._metrics

    def state(self) -> Any:
        """Return the files of the last checkpoint, or the name of a run that waits."""
        found: dict[str, Any] = {"ended": self._run is None, "metrics": dict(self._metrics)}
        if self._run is None:
            return found
        found["reports"] = self._run.num_reports
        if self.can_resume:
            found["files"] = dict(self._run.files or {})
        else:
            found["run"] = self._run.key
            WAITING.keep(self._run)
        return found

    def _verify(self) -> None:
        """Compare a trial that goes on from a checkpoint with one that was not interrupted.

        This is done once in a process for each kind of configuration.

        Raises:
            StateError: They differ.
        """
        if self._kind in _VERIFIED:
            return
        whole, part = self._new_run(), self._new_run()
        try:
            whole.advance(0)
            if whole.has_ended or whole.files is None:
                return
            files = whole.files
            part.restore(files, metrics=whole.metrics, num_reports=1)
            for epoch in range(1, _COMPARED):
                whole.advance(epoch)
                part.advance(epoch)
                if not _same(whole.metrics, part.metrics) or whole.has_ended != part.has_ended:
                    self._judge(whole, part, files, epoch=epoch)
                    break
                if whole.has_ended:
                    break
        except StateError:
            raise
        except Exception as error:
            raise StateError(
                f"{self.name} cannot go on from its checkpoint: {error_text(error)}; {self.mend}"
            ) from error
        finally:
            whole.stop()
            part.stop()
        _VERIFIED.add(self._kind)

    def _judge(
        self, whole: _Run, part: _Run, files: Mapping[str, torch.Tensor], *, epoch: int
    ) -> None:
        """Find out whether results differ by what the checkpoint lacks, or each time.

        Raises:
            StateError: The checkpoint lacks something.
        """
        again = self._new_run()
        try:
            again.restore(files, metrics={}, num_reports=1)
            for each in range(1, epoch + 1):
                again.advance(each)
        finally:
            again.stop()
        noise = _apart(part.metrics, again.metrics)
        if noise and _apart(whole.metrics, part.metrics) <= 10 * noise:
            logger.warning(
                "%s gives other results each time, by %.2g, so its checkpoints cannot be checked",
                self.name,
                noise,
            )
            return
        name = next(
            (n for n, value in whole.metrics.items() if part.metrics.get(n) != value), "its end"
        )
        raise StateError(
            f"{self.name} keeps state outside of its checkpoint: after epoch {epoch + 1}, {name!r} "
            f"is {whole.metrics.get(name)} if it was not interrupted, and {part.metrics.get(name)} "
            f"if it goes on from the checkpoint of epoch 1; {self.mend}. If it is all there, call "
            "tune.get_checkpoint() after what draws random numbers, such as making the model, and "
            "split data with a generator of its own; or leave resumes=True out"
        )


_VERIFIED: set[tuple[Any, ...]] = set()
"""Kinds of configurations whose checkpoints were found to be complete in this process."""


class _Run:
    """One call of a function, with what Ray calls its session.

    Attributes:
        key: A name that no other run has.
        metrics: The numbers of the last report.
        files: The files of the checkpoint of the last report, by path; None if it had none.
        num_reports: How often the trial has reported, before it was restored, too.
    """

    def __init__(
        self,
        function: RayTrainingFunction,
        *,
        name: str,
        values: Mapping[str, Any],
        seed: int,
        device: torch.device,
    ) -> None:
        self.key = secrets.token_hex(8)
        self.metrics: dict[str, float] = {}
        self.files: dict[str, torch.Tensor] | None = None
        self.num_reports = 0
        self._function, self._values = function, values
        self._name, self._seed = name, seed
        self._call = SuspendedCall(self._called, name=name, device=device)
        self._folder = ""
        self._given: dict[str, torch.Tensor] | None = None
        """The files of the checkpoint to go on from."""
        self._was_asked = False
        self._epoch = 0

    @property
    def has_ended(self) -> bool:
        """Whether the function has returned."""
        return self._call.has_ended

    def restore(
        self, files: Mapping[str, torch.Tensor], *, metrics: Mapping[str, float], num_reports: int
    ) -> None:
        """Let the function go on from a checkpoint when it begins."""
        self._given = self.files = dict(files)
        self.metrics, self.num_reports = dict(metrics), num_reports

    def advance(self, epoch: int) -> None:
        """Let the function run until it reports or ends; see ``SuspendedCall.advance``."""
        self._epoch = epoch
        if self._call.has_begun:
            self.seed_epoch()
        else:
            seed_everything(derive_seed(self._seed, "model"))
        before = self.num_reports
        with _session_of(self):
            self._call.advance()
        if self._given is not None and not self._was_asked and self.num_reports > before:
            raise TaskError(
                f"{self._name} has reported without asking for the checkpoint that it was to go on "
                "from; call tune.get_checkpoint() before the first epoch, or leave resumes=True out"
            )

    def seed_epoch(self) -> None:
        """Seed the random streams of an epoch after the first."""
        seed_everything(derive_seed(self._seed, "epoch", self._epoch))

    def stop(self) -> None:
        """End the thread: the function finds out at its next report."""
        with _session_of(self):
            self._call.stop()

    # -- in the function's thread ----------------------------------------------------------

    def report(self, metrics: Mapping[str, Any], checkpoint: Any) -> None:
        """Take a report, and wait until the trial goes on."""
        # The thread of a run that was stopped, and goes on, may come here, too.
        caller = call_of_this_thread() or self._call
        if caller is not self._call or caller.is_stopped:
            caller.end()
        self._take(metrics)
        self.files = None if checkpoint is None else _files_of(checkpoint)
        self._call.pause()
        if self._call.is_stopped:
            self._call.end()

    def checkpoint(self) -> Any:
        """Return the checkpoint to go on from, as Ray does; None if there is none."""
        if self._given is None:
            return None
        from ray.tune import Checkpoint  # noqa: PLC0415 (a session exists only where Ray does)

        self._was_asked = True
        place = Path(self.folder()) / "checkpoint"
        for name, data in self._given.items():
            file = place / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data.numpy().tobytes())
        place.mkdir(exist_ok=True)
        self.seed_epoch()
        return Checkpoint.from_directory(str(place))

    def folder(self) -> str:
        """Return a folder of the trial, which goes with it."""
        if not self._folder:
            self._folder = tempfile.mkdtemp(prefix="thrifty-ray-")
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder

    def _called(self) -> None:
        found = self._function(nested(self._values))
        if isinstance(found, Mapping):
            self._take(found)
        elif found is not None:
            raise TaskError(
                f"{self._name} has returned {type(found).__name__}; a function of Ray Tune returns "
                "its metrics or nothing"
            )

    def _take(self, metrics: Mapping[str, Any]) -> None:
        numbers = {}
        for name, value in metrics.items():
            try:
                numbers[str(name)] = as_number(value)
            except (TypeError, ValueError, TaskError):
                continue  # texts and lists, which Ray only shows
        if not numbers:
            raise TaskError(
                f"{self._name} has reported no number: {dict(metrics)!r}; report the metric of the "
                "study"
            )
        self.num_reports += 1
        self.metrics = numbers


class _Session:
    """What Ray's functions find behind ``tune.report``, ``get_checkpoint`` and ``get_context``."""

    world_rank = None
    """None is what Ray has in a trial of Tune."""
    experiment_name = "thrifty"
    trial_resources = None
    metadata: Mapping[str, Any] = {}

    def __init__(self, run: _Run) -> None:
        self._run = run
        self.trial_id = self.run_id = run.key
        self.trial_name = f"trial_{run.key}"

    @property
    def loaded_checkpoint(self) -> Any:
        """The checkpoint to go on from."""
        return self._run.checkpoint()

    @property
    def trial_dir(self) -> str:
        """A folder that goes with the trial."""
        return self._run.folder()

    def report(self, metrics: Mapping[str, Any], checkpoint: Any = None, **_: Any) -> None:
        """Take a report."""
        self._run.report(metrics, checkpoint)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name} is not among what thrifty.RayFunction gives a function of Ray Tune; it has "
            "report, get_checkpoint, and of get_context() the trial's id, name and folder"
        )


@contextmanager
def _session_of(run: _Run) -> Iterator[None]:
    """Let Ray's functions find a run while its thread runs."""
    try:
        from ray.train._internal import session as ray_session  # noqa: PLC0415 (an extra)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        yield  # a function that only returns its metrics does not need it
        return
    before = ray_session._session
    ray_session._session = _Session(run)  # type: ignore[assignment]
    try:
        yield
    finally:
        ray_session._session = before


def _files_of(checkpoint: Any) -> dict[str, torch.Tensor]:
    """Return the content of the files of a checkpoint, by path."""
    found = {}
    with checkpoint.as_directory() as folder:
        root = Path(folder)
        for file in sorted(root.rglob("*")):
            if file.is_file():
                data = np.frombuffer(file.read_bytes(), dtype=np.uint8).copy()
                found[file.relative_to(root).as_posix()] = torch.from_numpy(data)
    return found


def _kind_of(value: Any) -> str:
    """Return what a value chooses between ways of training by: itself, or whether it is zero."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"zero: {value == 0}" if is_number else repr(value)


_NUMBERS: dict[tuple[int, str], tuple[Any, Any]] = {}
"""Variables that functions share between trials, as they were when the first trial was made.

What holds a variable is kept with it, so that no other one gets its id.
"""


def _check_shared(function: Any, name: str) -> None:
    """Refuse a function whose trials have changed a global or enclosing variable that it reads.

    Functions that it calls by a global name are looked at, too.

    Raises:
        StateError: They have.
    """
    for place, variable, value in _shared(_innermost(function), set()):
        _, before = _NUMBERS.setdefault((id(place), variable), (place, copy.deepcopy(value)))
        if before != value and not (before != before and value != value):
            raise StateError(
                f"{name} has changed the variable {variable!r} from {before!r} to {value!r}, and "
                "other trials read it. Ray gives each trial a process of its own; here they take "
                "turns in one, so keep it in a local variable"
            )


def _shared(function: Any, seen: set[int]) -> Iterator[tuple[Any, str, Any]]:
    """Yield numbers, texts and lists of them that outlive a call: place, name and value."""
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType) or id(function) in seen:
        return
    seen.add(id(function))
    cells = zip(code.co_freevars, function.__closure__ or (), strict=False)
    found: list[tuple[Any, str, Any]] = [
        (cell, n, cell.cell_contents) for n, cell in cells if cell != CellType()
    ]
    names, waiting = set(code.co_names), list(code.co_consts)
    while waiting:  # functions within the function
        inner = waiting.pop()
        if isinstance(inner, CodeType):
            names.update(inner.co_names)
            waiting += inner.co_consts
    own = function.__globals__
    found += [(own, n, own[n]) for n in sorted(names & own.keys())]
    for place, name, value in found:
        if _is_plain(value):
            yield place, name, value
        else:
            yield from _shared(value, seen)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple | set | dict):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int | float | str | bool | None)


def _same(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    return one.keys() == other.keys() and all(
        value == other[name] or (math.isnan(value) and math.isnan(other[name]))
        for name, value in one.items()
    )


def _apart(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """Return the largest difference of two reports; infinite if they have other metrics."""
    if one.keys() != other.keys():
        return math.inf
    found = [abs(value - other[name]) for name, value in one.items()]
    return max((each for each in found if not math.isnan(each)), default=0.0)


def _innermost(function: Any) -> Any:
    while isinstance(function, partial):
        function = function.func
    return function


WAITING: WaitingRuns[_Run] = WaitingRuns()
"""The runs of this process without checkpoints that may go on."""
