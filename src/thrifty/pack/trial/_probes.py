"""Probes of a task and of its trials before they train.

They find out what a call changes, take a next step and an evaluation, and compare data as other
processes load them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from thrifty.core import StateError, TaskError, derive_seed
from thrifty.pack._backend import EpochPlan
from thrifty.pack._quantized import settled
from thrifty.pack._state import borrowed_streams, seed_everything, stream_positions, torch_streams
from thrifty.pack.identity import places_of
from thrifty.pack.identity._contents import Names
from thrifty.pack.identity._syntax import assigned_to_self
from thrifty.pack.identity._values import Values
from thrifty.pack.task._data import Batch, Source, open_source, steps_of, valid_batches
from thrifty.pack.task._followed_optimizer import FollowedOptimizers
from thrifty.pack.task._sources import Sources, sources_of
from thrifty.pack.task._step_options import names_with_averages
from thrifty.pack.task._streams import check_stream, token_files
from thrifty.pack.task._task import (
    HyperParameters,
    Readings,
    Task,
    hold_batch_size,
    options_of,
    own_task,
    task_identity,
)
from thrifty.pack.trial._plain_evaluation import check_metrics
from thrifty.pack.verify import MadeOnce, Probe, as_it_was, own_tensors, same, stand_in

from ._state_messages import drawn_once, set_by_data, shifted
from ._trial import TaskTrial, TrainableTrial, batch_size_of, check_batches
from ._update import Update


QUICK_S = 1.0
"""The longest loading time in seconds for which data are loaded again for a comparison."""
MAX_FIRST_S = 10 * QUICK_S
"""The longest loading time in seconds for which data are loaded with empty caches, if needed."""
MAX_BYTES = 2**28
"""The most memory in bytes for which arrays are loaded twice."""


def check_data(task: Task, live: TaskTrial) -> None:
    """Load a task's data once more if that is quick, and compare the first batches.

    Args:
        task: The task as the user gave it.
        live: A trial with data.

    Raises:
        StateError: The data differ, so other processes would also train on different data.
    """
    sources = sources_of(task, live.device)
    try:
        _check_data(task, live, sources)
    except StateError:
        # otherwise the next study would find full caches, and nothing to refuse
        sources.forget()
        raise
    sources.is_checked, sources.made = True, None  # it holds the task


def _check_data(task: Task, live: TaskTrial, sources: Sources) -> None:
    if sources.change_while_read:
        return  # a live trial has read them; the comparison of a step names what has changed
    arrays = live.source.arrays or ()
    if sources.load_s > QUICK_S or sum(array.nbytes for array in arrays) > MAX_BYTES:
        return
    hp = HyperParameters(live.readings.first)
    seed_everything(derive_seed(live.seed, "data"))
    before = stream_positions(live.device)
    again = open_source(own_task(task).data(hp), device=live.device)
    after = stream_positions(live.device)
    most = live.source.num_train  # a larger batch would be none if the last one is left out
    size = most if arrays else min(most, live.task.eval_batch_size)
    drawn = sources.drawn(live.source)
    is_due = not sources.is_checked and sources.longest_load_s <= MAX_FIRST_S
    if is_due and drawn != (None if after == before else after):
        _check_kept_data(task, live, sources.made, drawn=drawn, size=size)
    mine = _first(live.source, size=size, seed=live.seed)
    theirs = _first(again, size=size, seed=live.seed)
    for which in range(2):
        if same(mine[which], theirs[which]):
            continue
        if same(mine[which], _first(live.source, size=size, seed=live.seed)[which]):
            raise _differ(task, ("training", "validation")[which])
        # reading the same data twice already differs, which the comparison of a step reports
        return


def _check_kept_data(
    task: Task, live: TaskTrial, made: MadeOnce | None, *, drawn: tuple[Any, ...] | None, size: int
) -> None:
    """Load data as if for the first time, and see whether what the load keeps depends on the seed.

    Args:
        task: The task as the user gave it.
        live: A trial with data.
        made: What loads have kept; None if none has drawn anything.
        drawn: The positions of the streams after that load.
        size: The size of batches to compare.

    Raises:
        StateError: It does.
    """

    def load() -> tuple[tuple[Any, ...] | None, Source]:
        seed_everything(derive_seed(live.seed, "data"))
        before = stream_positions(live.device)
        source = open_source(task.data(HyperParameters(live.readings.first)), device=live.device)
        after = stream_positions(live.device)
        return (None if after == before else after), source

    if made is None:
        raise _differ(task, "training")
    made.take_changed()
    found = made.first_made(load)
    ended, source = found.made
    if found.drawn or ended != drawn:
        raise _differ(task, "training")
    if not found.is_known:  # then only the data show whether they depend on the seed
        pair = [_first(each, size=size, seed=live.seed) for each in (source, found.otherwise[1])]
        if not same(*pair):
            raise _differ(task, "training")


def _first(source: Source, *, size: int, seed: int) -> tuple[Any, Any]:
    """Return a training and a validation batch of a source; None for one that it does not have."""
    seed_everything(seed)
    train = next(iter(source.train_batches(seed=seed, epoch=0, batch_size=size)), None)
    valid, _ = next(iter(source.valid_batches(batch_size=size)), (None, 0))
    return stand_in(train), stand_in(valid)


def _differ(task: Task, which: str) -> StateError:
    return StateError(
        f"{type(task).__name__}.data gives other {which} data each time, for the same seed and the "
        "same hyper-parameters, so trials in other processes would train on others; draw from "
        "torch's, NumPy's or Python's global stream, which thrifty seeds, or from a generator with "
        "a fixed seed"
    )


Trial = TaskTrial | TrainableTrial
Made = TypeVar("Made")

FURTHER_STEPS = 100
"""How many steps a probe takes at least, if time allows.

In short epochs, state outside of the checkpoint that acts less often than this may be missed.
"""


def probe(trial: Trial, plan: EpochPlan, *, trains: bool) -> Probe:
    """Let a trial take one step of an epoch, and evaluate it.

    Args:
        trial: The trial; it cannot be used afterwards.
        plan: The epoch.
        trains: Whether a ``Trainable``, which has no steps, trains the whole epoch.
    """
    if isinstance(trial, TaskTrial):
        return _one_step(trial, plan)
    return _one_epoch(trial, plan) if trains else _no_epoch(trial)


def probe_further(
    trial: TaskTrial, plan: EpochPlan, *, num_steps: int | None = None, limit_s: float
) -> tuple[Probe, int]:
    """Let a trial continue after a probe: to the end of the epoch, and into later ones.

    Args:
        trial: The trial; it cannot be used afterwards.
        plan: The epoch that it was probed in. Later ones have the same values.
        num_steps: How many steps to take (default: an epoch and one more, but at least
            ``FURTHER_STEPS``, as far as the time allows).
        limit_s: How many seconds that may take. It applies only without ``num_steps``.

    Returns:
        The results of the steps, and how many steps there were.
    """
    began = time.perf_counter()
    enough = max(trial.num_steps(plan.values) + 1, FURTHER_STEPS)
    losses: list[torch.Tensor] = []
    metrics: list[Mapping[str, Any]] = []

    def goes_on() -> bool:
        if num_steps is not None:
            return len(losses) < num_steps
        return len(losses) < enough and time.perf_counter() - began < limit_s

    trial.model.train()
    while goes_on():
        if trial.step():
            losses.append(trial.losses[-1])
        else:
            metrics.append(_metrics(trial, plan)[1])
            plan = replace(plan, epoch=plan.epoch + 1)
            trial.start(plan)
    metrics.append(_metrics(trial, plan)[1])
    found = Probe(
        loss=torch.stack(losses) if losses else torch.zeros(0),
        batch=None,
        tensors=stand_in(dict(trial.model.state_dict())),
        moments=trial.optimizers.moments(),
        metrics={
            f"{name} of evaluation {number}": value
            for number, each in enumerate(metrics, start=1)
            for name, value in each.items()
        },
    )
    return found, len(losses)


def _one_step(trial: TaskTrial, plan: EpochPlan) -> Probe:
    """Take one step of an epoch, then compute the metrics of one validation batch."""
    seen: list[Any] = []
    trial.expect_probe()

    trial.start(plan, batches=lambda: _noted(trial.batches(plan), seen))
    trial.step()
    loss = trial.losses[-1]
    batch, metrics = _metrics(trial, plan)
    seen.append(batch)
    return Probe(
        loss=loss,
        batch=seen,
        tensors=stand_in(dict(trial.model.state_dict())),
        moments=trial.optimizers.moments(),
        metrics=metrics,
    )


def _noted(batches: Iterator[Batch], seen: list[Any]) -> Iterator[Batch]:
    """Yield the batches, and note a stand-in for the first one in ``seen``.

    It does not refer to the trial, which holds what it returns: a reference cycle would keep the
    trial until the garbage collector runs, and the workers of its data loader with it.
    """
    for number, batch in enumerate(batches):
        if not number:
            seen.append(stand_in(batch))
        yield batch


def _metrics(trial: TaskTrial, plan: EpochPlan) -> tuple[Any, dict[str, Any]]:
    """Return a stand-in for one validation batch, and its metrics."""
    trial.model.eval()
    seed_everything(derive_seed(trial.seed, "evaluate", plan.epoch))
    with torch.no_grad():
        batches = valid_batches(trial.source, batch_size=trial.task.eval_batch_size)
        batch, _ = next(iter(batches))
        seen = stand_in(batch)
        return seen, dict(trial.metrics(batch))


def _no_epoch(trial: TrainableTrial) -> Probe:
    """Return the state of a trial as it stands.

    It is not evaluated: ``evaluate`` may return what the last ``train`` has computed.
    """
    return Probe(loss=torch.zeros(()), batch=None, tensors=_state_of(trial), moments={}, metrics={})


def _one_epoch(trial: TrainableTrial, plan: EpochPlan) -> Probe:
    """Train a whole epoch, and return its metrics and the state after it."""
    metrics = trial.epoch(plan)
    return Probe(
        loss=torch.zeros(()), batch=None, tensors=_state_of(trial), moments={}, metrics=metrics
    )


def _state_of(trial: TrainableTrial) -> dict[str, Any]:
    """Return the tensors of a trial's state by name, and its other values under one name."""
    state = trial.state()
    return {**state.tensors, "state()": state.tree}


def changes_nothing(call: Callable[[], Any], *, task: Any, model: torch.nn.Module) -> bool:
    """Call a function and return whether task, model and random streams are unchanged.

    The answer is False if that cannot be seen, because a value has no comparable content.
    """
    before = _state(task, model)
    call()
    return before is not None and before == _state(task, model)


def _state(task: Any, model: torch.nn.Module) -> list[Any] | None:
    values = Values(Names(home=""))
    numpy = np.random.get_state(legacy=False)  # noqa: NPY002 (only read, not drawn from)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    streams = [*torch_streams(device), numpy, random.getstate()]
    try:
        content = values.digest([model, streams], path="the model")
    except TaskError:
        return None
    return [content, {key: each.text for key, each in places_of(task).items()}]


def _check_files(task: Task, source: Source) -> None:
    """Refuse token files that the identity of the task does not cover.

    Raises:
        TaskError: A changed file would be taken for the old one.
    """
    if task.version or type(task).identity is not Task.identity:
        return  # the user says what the task is
    files = [file for file in token_files(source) if not file.is_identified]
    if files:
        task_identity(task)
    for file in files:
        if not file.is_identified:
            raise TaskError(
                f"{type(task).__name__}.data makes {file!r} itself, so the identity of the task "
                "does not see what is in the file, and a changed file would be taken for the old "
                "one; make it an attribute of the task, on the class or in __init__, or set version"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskReport:
    """The findings of a dry run.

    Attributes:
        metrics: The metrics that the task reports.
        structural: The hyper-parameters that it reads once, to make data, model or optimizer.
        followed: The hyper-parameters that the optimizer, the batch size or ``adapt`` follows while
            they change.
        pure: Whether ``metrics`` changes neither the model nor the task nor a random stream.
        unread: The hyper-parameters that nothing has read, unless task or model keep the object
            that they can be read from later.
    """

    metrics: frozenset[str]
    structural: frozenset[str]
    followed: frozenset[str]
    pure: bool
    unread: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSize:
    """How much a pass over the training data of a task is.

    Attributes:
        steps: Its number of batches.
        tokens_per_sample: The tokens of a sample, if the data say it.
    """

    steps: int
    tokens_per_sample: int | None


def measure_data(task: Task, hp: HyperParameters, *, batch_size: int, seed: int) -> DataSize:
    """Load the data of a task, and return how much one pass over them is.

    Errors of the task's code propagate.

    Args:
        task: The task; a copy of it loads the data.
        hp: Its hyper-parameters, which record what the data depend on.
        batch_size: The number of samples in a training batch.
        seed: The seed of the random streams.
    """
    with borrowed_streams():
        seed_everything(derive_seed(seed, "data"))
        source = open_source(own_task(task).data(hp), device=torch.device("cpu"))
        return DataSize(
            steps=steps_of(source, batch_size),
            tokens_per_sample=getattr(source, "tokens_per_sample", None),
        )


def inspect_task(
    task: Task,
    values: Mapping[str, Any],
    *,
    seed: int,
    device: str = "cpu",
    moving: Iterable[str] = (),
    train_devices: Iterable[str] = (),
) -> TaskReport:
    """Make data, model and optimizer once, call ``adapt``, and evaluate the first validation batch.

    Errors of the task's code propagate.

    Args:
        task: The task; a copy of it is run.
        values: Hyper-parameters by name.
        seed: The seed of the random streams.
        device: Where the model is made.
        moving: Hyper-parameters that will change during training.
        train_devices: Where trials will be trained, if that is known.

    Raises:
        TaskError: One of ``moving`` is read only once and not followed, the optimizer does not fit
            the model, or one of ``train_devices`` does not support the task's precision.
    """
    where = torch.device(device)
    readings = Readings(type(task).__name__, values, moving=moving)
    options = options_of(task)
    hold_batch_size(task, options, readings)
    check_batches(task, options, values)
    for kind in sorted({torch.device(name).type for name in train_devices}):
        Update(task, options, torch.device(kind))
    own = own_task(task)
    with borrowed_streams():
        seed_everything(derive_seed(seed, "data"))
        source = sources_of(task, where).get(task, readings.once("data"))
        size = batch_size_of(task, values)
        check_stream(source, seed=seed, batch_size=size, num_steps=options.steps_per_epoch)
        _check_files(task, source)
        model = _model_of(own, readings.once("model"), seed=seed, device=where).eval()
        followed = FollowedOptimizers(own.optimizer, model, values)
        readings.note_once("optimizer", followed.read_when_built)
        batch, _ = next(iter(valid_batches(source, batch_size=task.eval_batch_size)))
        found: list[Any] = []
        with as_it_was({"task": own, "model": model}):
            adapted = HyperParameters(values)
            own.adapt(model, adapted)
            with torch.no_grad():
                pure = changes_nothing(
                    lambda: found.append(own.metrics(model, batch)), task=own, model=model
                )
            metrics = check_metrics(found[0], task=type(task).__name__)
            readings.followed |= {*followed.names, *adapted.names_read}
            for option in (task.batch_size, options.accumulate):
                if isinstance(option, str):
                    readings.followed.add(option)
            # check before task and model are restored, which may undo the record of what was read
            readings.check()
            read_once = frozenset(readings.read_once)
            keeps = _keeps_hyperparameters(own, *model.modules(), source)
        followed.check(readings.moving)
    return TaskReport(
        metrics=names_with_averages(metrics, options),
        structural=read_once,
        followed=frozenset(readings.followed),
        pure=pure,
        unread=frozenset(() if keeps else {*values} - read_once - readings.followed),
    )


def _keeps_hyperparameters(*objects: object) -> bool:
    """Return whether an attribute of some objects is a ``HyperParameters``, to be read later."""
    held = (value for each in objects for value in getattr(each, "__dict__", {}).values())
    return any(isinstance(value, HyperParameters) for value in held)


def _model_of(
    task: Task, hp: HyperParameters, *, seed: int, device: torch.device
) -> torch.nn.Module:
    """Make a model; if that fills tables or caches, make it again and compare what both draw.

    Raises:
        StateError: It keeps random numbers for later models.
    """
    kept = MadeOnce({"task": task})
    model, drawn = made_model(task, hp, seed=seed, device=device)
    if kept.take_changed():
        make = partial(made_model, task, HyperParameters(hp), seed=seed, device=device)
        again, drawn_again = make()
        trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
        # what trials share and train is refused with a message of its own
        is_shared = not trained.isdisjoint(map(id, again.parameters()))
        if drawn_again != drawn and not is_shared:
            name = f"{type(task).__name__}.model"
            check_kept(kept, make, own_tensors, drawn=drawn, name=name, task=task)
    return model


def _set_by_data(task: Task, names: Sequence[str]) -> list[str]:
    """Return those attributes of a task among some names that its ``data`` assigns."""
    code = getattr(type(task).data, "__code__", None)
    assigned = frozenset() if code is None else assigned_to_self(code)
    return [name for name in names if name.removeprefix("task.") in assigned]


def made_model(
    task: Task, hp: HyperParameters, *, seed: int, device: torch.device
) -> tuple[torch.nn.Module, tuple[Any, ...]]:
    """Make the model of a trial, and return it with the positions of the streams after that.

    Args:
        task: The trial's own copy of the task.
        hp: Its hyper-parameters.
        seed: The trial's seed.
        device: Where the trial is trained.
    """
    seed_everything(derive_seed(seed, "model"))
    model = settled(task.model(hp).to(device))
    return model, stream_positions(device)


def check_kept(
    kept: MadeOnce,
    make: Callable[[], tuple[Made, Any]],
    values_of: Callable[[Made], Mapping[str, Any]],
    *,
    drawn: Any,
    name: str,
    task: Task | None = None,
) -> None:
    """Check that a model or a trial does not depend on what those before it have kept.

    Args:
        kept: What they keep; its last changes are those of the first one.
        make: Makes one, and returns it with the positions of the streams after that.
        values_of: Returns the values of one by name.
        drawn: The positions of the streams after the first one.
        name: The code that makes them, for messages.
        task: The task whose model is made; None for anything else.

    Raises:
        StateError: It does.
    """
    try:
        found = kept.first_made(make)
        first, positions = found.made
        if found.drawn or positions != drawn:
            raise StateError(drawn_once(name, found.drawn or kept.last_changed))
        mine, theirs = values_of(first), values_of(make()[0])
        differing = [key for key, value in theirs.items() if not same(mine.get(key), value)]
        if differing:  # what differs each time, such as a time, says nothing
            again = values_of(make()[0])
            for key in differing:
                if same(again.get(key), theirs[key]):
                    raise StateError(shifted(name, kept.last_changed, what=key))
    except StateError as error:
        names = [] if task is None else _set_by_data(task, kept.last_changed)
        kept.undo()  # otherwise the next study would find full caches, and nothing to refuse
        if task is not None and names:
            raise StateError(set_by_data(task, names)) from error
        raise
