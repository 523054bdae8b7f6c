"""One trial, step by step in plain PyTorch: of a task, or of a ``Trainable``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from thrifty.core import (
    DivergedError,
    StateError,
    TaskError,
    derive_seed,
    freed_at_once,
    plain_logger,
    step_seed,
)
from thrifty.pack._backend import EpochPlan, Member
from thrifty.pack._frozen import FrozenTensor, frozen_of, unshare_before_steps
from thrifty.pack._quantized import settled
from thrifty.pack._state import (
    State,
    check_dense,
    is_composite,
    pack_state,
    seed_everything,
    seed_step,
    step_counters,
    stream_positions,
    unpack_state,
)
from thrifty.pack.task._data import Batch, Source
from thrifty.pack.task._followed_optimizer import FollowedOptimizer, FollowedOptimizers
from thrifty.pack.task._optimizer import Optimizer
from thrifty.pack.task._sources import sources_of
from thrifty.pack.task._step_options import (
    StepOptions,
    epoch_batches,
    epoch_length,
    parts_of_batch,
    with_prefix,
)
from thrifty.pack.task._streams import check_stream, token_files, trial_stream
from thrifty.pack.task._task import (
    HyperParameters,
    Logged,
    Readings,
    SelfDescribing,
    Task,
    Trainable,
    adapts,
    hold_batch_size,
    options_of,
    own_task,
)
from thrifty.pack.task._trial_stream import TrialStream
from thrifty.pack.trial._plain_evaluation import as_number, check_metrics
from thrifty.pack.verify import Watch

from ._left_gradients import gradients_noted
from ._networks import NetworkFlags, reads_gradients
from ._plain_evaluation import EvaluationParts, evaluated, evaluating
from ._update import Update
from ._weights import SharedWeights


logger = plain_logger(__name__)

TRAIN_LOSS = "train_loss"
"""The metric that every task has: the mean training loss of the epoch."""


class TaskTrial:
    """A model, its optimizer and its position in the data.

    ``start`` an epoch, call ``step`` until no batch is left, then ``finish`` the epoch.
    """

    model: torch.nn.Module
    weights: SharedWeights
    """The model's weights, of which trials share the frozen ones."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self._owner = task
        # a copy: what the task stores for one trial (say, in ``adapt``) must not reach others
        self.task = own_task(task)
        self.device = device
        self.is_trained = False
        """Whether the trial has begun an epoch."""
        self._is_loaded = False
        self.step_options = options_of(task)
        self._stream: TrialStream | None = None
        self._files: dict[str, str] = {}

    def begin(self, member: Member) -> None:
        """Make model and optimizer, and load the member's state if there is one.

        Raises:
            TaskError: A hyper-parameter that changes is read only once and not followed, the model
                has lazy layers, or the device does not support the task's precision.
        """
        first = member.first_values
        self.seed = member.seed
        self.readings = Readings(type(self._owner).__name__, first, moving=member.moving)
        hold_batch_size(self._owner, self.step_options, self.readings)
        seed_everything(derive_seed(member.seed, "data"))
        self._sources = sources_of(self._owner, self.device)
        hp = self.readings.once("data")
        self.source: Source = self._sources.get(self._owner, hp, user=self)
        self.source_number = self._sources.number_of(self.source)
        """A number unique to its data among those of all trials, past ones included."""
        check_stream(
            self.source,
            seed=self.seed,
            batch_size=self.batch_size(first),
            num_steps=self.step_options.steps_per_epoch,
        )
        self._stream = trial_stream(self.source)
        self._files = {str(n): file.digest for n, file in enumerate(token_files(self.source))}
        seed_everything(derive_seed(member.seed, "model"))
        known = frozen_of(self._owner, self.device)
        with freed_at_once(known.num_bytes):  # a base that equals a known one is dropped
            self.model = settled(self.task.model(self.readings.once("model")).to(self.device))
            self._check_model()
            self.weights = SharedWeights(self.model, known, name=type(self._owner).__name__)
        self.drawn = stream_positions(self.device)
        """How far the seeded streams have come after the model was made."""
        self._update = Update(self.task, self.step_options, self.device)
        self._update.prepare(self.model)
        self.optimizers = FollowedOptimizers(self.task.optimizer, self.model, first)
        if self.weights.frozen and self.device.type == "cuda":
            for optimizer in self.optimizers.torch.values():
                unshare_before_steps(optimizer)
        self.readings.note_once("optimizer", self.optimizers.read_when_built)
        self._note_followed()
        if not adapts(self.task):
            self.readings.check()
        self.optimizers.check(member.moving)
        if member.state is not None:
            self.load(member.state)

    def _check_model(self) -> None:
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            if is_lazy(tensor):
                raise TaskError(
                    f"{type(self._owner).__name__}.model returns a lazy layer whose {name!r} has "
                    "no shape yet; give the layer its sizes, or run the model on a batch before "
                    "you return it"
                )
        if any(map(is_composite, (*self.model.parameters(), *self.model.buffers()))):
            for name, value in self.model.state_dict().items():
                check_dense(value, path=f"model.{name}")

    def restore(self, member: Member) -> None:
        """Make model and optimizer as they were at the end of an epoch.

        Args:
            member: The state at the end of that epoch, and the values in it.
        """
        self.begin(replace(member, state=None))
        # load the state only after ``adapt``: it already contains what ``adapt`` did to parameters
        self.adapt(member.values, epoch=member.epoch)
        if member.state is not None:
            self.load(member.state)

    def load(self, state: State) -> None:
        """Load a state into model and optimizer.

        Frozen parameters of a fresh model that have changed since are taken from the state's base.

        Raises:
            StateError: A frozen parameter is not what it was when the state was saved, and the base
                cannot be read.
        """
        self._is_loaded = True
        held = unpack_state(state)
        self.weights.load(held["model"], held.get("frozen", {}), base=state.base)
        self.optimizers.load(held["optimizer"])
        self._update.load(held, self.model)
        self._load_data_state(held)

    def note_trained(self) -> None:
        """Note that an epoch begins.

        Raises:
            TaskError: It is the first one of a new trial, and files have changed that the task's
                identity names. A trial that goes on has what it needs of them in its checkpoint.
        """
        if not self.is_trained and not self._is_loaded:
            self._owner.__thrifty_unchanged__()
        self.is_trained = True

    @property
    def frozen(self) -> Mapping[str, FrozenTensor]:
        """Frozen parameters and buffers that it shares with other trials, by name."""
        return self.weights.frozen

    def data_state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the data: a stream's state, digests of token files."""
        stream = {} if self._stream is None else {"stream": self._stream.state()}
        return {**stream, **({"token files": self._files} if self._files else {})}

    def _load_data_state(self, held: Mapping[str, Any]) -> None:
        """Restore what ``data_state`` returned.

        Raises:
            StateError: A token file has changed since, or the data were no stream.
        """
        name = type(self._owner).__name__
        if held.get("token files", self._files) != self._files:
            raise StateError(
                f"a token file of {name} has changed since the checkpoint was written, so a trial "
                "would go on with other tokens; restore the file, or start a new study"
            )
        if self._stream is not None:
            if "stream" not in held:
                raise StateError(
                    f"the checkpoint of {name} holds no position of its stream, because its data "
                    "were no stream when it was written; start a new study"
                )
            self._stream.load(held["stream"])

    def expect_probe(self) -> None:
        """Let a stream go on in epochs that were trained before; the trial is only probed now."""
        if self._stream is not None:
            self._stream.is_probed = True

    @property
    def batches_key(self) -> tuple[int, ...]:
        """A key that is equal for trials that get equal batches for equal seeds and epochs."""
        # a stream with a state has to be read by each trial itself
        return (id(self.source), *(() if self._stream is None else (id(self),)))

    def new_watch(self) -> Watch:
        """Return a watch of the values that the trial's code reads, as they are now."""
        return Watch({"task": self.task, "model": self.model})

    @property
    def adapts(self) -> bool:
        """Whether the task overrides ``adapt``."""
        return adapts(self.task)

    @property
    def why_special(self) -> str:
        """Why no fused version of its steps exists; "" if its steps are the usual ones."""
        if self.step_options.why_special:
            return self.step_options.why_special
        return "" if self.optimizers.is_single else "it has several optimizers"

    @property
    def followed(self) -> FollowedOptimizer:
        """The only optimizer; ``why_special`` says if there are several."""
        return self.optimizers.only

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer, if there is only one."""
        return self.followed.torch

    @property
    def spec(self) -> Optimizer:
        """The specification of the optimizer."""
        return self.followed.spec

    def adapt(self, values: Mapping[str, Any], *, epoch: int) -> None:
        """Bring the model up to date with hyper-parameters that may have changed.

        ``Task.adapt`` may draw, for example new weights of a layer. What it draws must not depend
        on where the trial is trained and on what was drawn before.
        """
        hp = HyperParameters(values)
        if self.adapts:
            seed_everything(derive_seed(self.seed, "adapt", epoch))
        self.task.adapt(self.model, hp)
        if self.adapts:
            settled(self.model)  # it may have made new layers
        self.readings.followed |= hp.names_read

    def _note_followed(self) -> None:
        self.readings.followed |= self.optimizers.names
        for option in (self.task.batch_size, self.step_options.accumulate):
            if isinstance(option, str):
                self.readings.followed.add(option)

    def batch_size(self, values: Mapping[str, Any]) -> int:
        """Return the number of rows of a batch.

        Raises:
            TaskError: It is not a positive integer, or follows an unknown hyper-parameter.
        """
        return batch_size_of(self.task, values)

    def num_steps(self, values: Mapping[str, Any]) -> int:
        """Return how many optimizer steps an epoch has.

        Raises:
            TaskError: It has none, because ``drop_last`` is set and no batch is full.
        """
        return epoch_length(
            self.source,
            seed=self.seed,
            batch_size=self.batch_size(values),
            num_steps=self.step_options.steps_per_epoch,
        )

    def state(self) -> State:
        """Return a copy of everything that is needed to continue."""
        return self.as_state({
            **self.weights.state(),
            "optimizer": self.optimizers.state(),
            **self._update.state(self.model, self.optimizers),
            **self.data_state(),
        })

    def as_state(self, parts: Mapping[str, Any]) -> State:
        """Return a copy of parts as a state, with the base that ``weights.state`` has left out."""
        return pack_state(parts, base=self.weights.base() if "frozen" in parts else None)

    def batches(self, plan: EpochPlan) -> Iterator[Batch]:
        """Return the batches of an epoch.

        Raises:
            StateError: The data have changed while several trials read them.
            TaskError: The data read an attribute of the task that this trial has changed.
        """
        self._sources.check(self._owner, self.source, own=self.task)
        size = self.batch_size(plan.values)
        if self._stream is not None:
            num = self.num_steps(plan.values)
            return self._stream.epoch(plan.epoch, batch_size=size, num=num)
        return epoch_batches(
            self.source,
            seed=self.seed,
            epoch=plan.epoch,
            batch_size=size,
            num_steps=self.step_options.steps_per_epoch,
        )

    def fetch_seeds(self, plan: EpochPlan) -> Callable[[int], int] | None:
        """Return the seed for reading each batch; None for data in memory, which is only sliced."""
        if self.source.arrays is not None:
            return None
        return partial(step_seed, derive_seed(self.seed, "fetch", plan.epoch))

    def start(
        self, plan: EpochPlan, *, batches: Callable[[], Iterator[Batch]] | None = None
    ) -> None:
        """Prepare for an epoch.

        Args:
            plan: The epoch.
            batches: Returns the batches of ``plan`` (default: ``batches``, the method). It is
                called after the model is adapted, so that user code always runs in one order.

        Raises:
            TaskError: A hyper-parameter that changes is read only once and not followed.
        """
        self.plan = plan
        self.note_trained()
        self.adapt(plan.values, epoch=plan.epoch)
        self.optimizers.follow(plan.values)
        self.optimizers.check(plan.moving)
        self._note_followed()
        self.readings.check_epoch(plan)
        self._is_moving = not self.optimizers.names.isdisjoint(plan.moving)
        self._part_size = self._rows_of_a_part(plan.values)
        self._batches = self.batches(plan) if batches is None else batches()
        self._fetch_seeds = self.fetch_seeds(plan)
        self._counters = list(step_counters(self.model).values())
        self._epoch_seed = derive_seed(self.seed, "epoch", plan.epoch)
        seed_everything(self._epoch_seed)
        self.model.train()
        self.losses: list[torch.Tensor] = []
        """The losses of the steps of this epoch."""

    def step(self) -> bool:
        """Take one step, and return False if the epoch has no batch left."""
        batch = self.next_batch()
        if batch is None:
            return False
        self.update(batch)
        return True

    @property
    def seeds_each_batch(self) -> bool:
        """Whether all streams are seeded before each batch is read, not only once an epoch."""
        return self._fetch_seeds is not None

    def next_batch(self) -> Batch | None:
        """Return the batch of the next update; None if the epoch has no batch left."""
        if self._fetch_seeds is not None:
            # what a data set draws must not depend on earlier draws from the streams
            seed_everything(self._fetch_seeds(len(self.losses)))
        return next(self._batches, None)

    def update(self, batch: Batch) -> None:
        """Update the parameters with one batch."""
        step = len(self.losses)
        if self._is_moving:
            self.optimizers.follow(values_at_step(self.plan, step))
        seed_step(step_seed(self._epoch_seed, step), self.device)
        loss = self._update.step(
            self.model, batch, optimizers=self.optimizers, part_size=self._part_size
        )
        for counter in self._counters:
            counter += 1
        self.losses.append(loss)

    def finish(self) -> Mapping[str, float]:
        """Return the metrics of the epoch.

        Raises:
            DivergedError: The training loss is not finite.
            StateError: Something has changed the memory that it shares with other trials.
            TaskError: A model or data have read a hyper-parameter that changes and is not followed.
        """
        self.readings.check_epoch(self.plan)
        self.weights.check()
        loss = mean_loss(self.losses)
        self.check_finite(loss)
        self._update.end_epoch(self.model, self.plan.epoch + 1, optimizers=self.optimizers)
        return {TRAIN_LOSS: loss, **self.evaluate(self.plan.epoch)}

    def check_finite(self, loss: float) -> None:
        """Check the training loss of the epoch.

        Raises:
            DivergedError: It is not finite.
        """
        if math.isfinite(loss):
            return
        advice = "a smaller learning rate, a warm-up or clip_norm may help"
        if number := self._batch_without_labels():
            advice = (
                f"in batch {number} of the epoch nothing counts (loss_weight is 0, as where all "
                "labels are -100), so the mean loss is 0 / 0; leave such samples out"
            )
        raise DivergedError(f"the training loss of epoch {self.plan.epoch + 1} is {loss}; {advice}")

    def _batch_without_labels(self) -> int:
        """Return the number of the first batch of the epoch in which nothing counts, from 1; or 0.

        Its mean loss is 0 / 0. Only batches of data in memory are looked at.
        """
        if self.source.arrays is None:
            return 0
        with suppress(Exception):  # the code of the user; what is raised is about the loss
            for number, batch in enumerate(self.batches(self.plan), start=1):
                if self.task.loss_weight(batch) == 0:
                    return number
        return 0

    def epoch(self, plan: EpochPlan) -> Mapping[str, float]:
        """Train and evaluate a whole epoch."""
        self.start(plan)
        while self.step():
            pass
        return self.finish()

    def evaluate(self, epoch: int) -> dict[str, float]:
        """Return the task's metrics over the validation set, also with averaged weights."""
        found = self._evaluate(self.model, epoch)
        out = dict(found)
        for prefix, model in self._update.averaged().items():
            out |= with_prefix(found if model is None else self._evaluate(model, epoch), prefix)
        return out

    def averaged_model(self, average: str) -> torch.nn.Module:
        """Return the model with averaged weights; the model itself while no weights count.

        Args:
            average: Which average: ``"ema"`` or ``"swa"``.

        Raises:
            TaskError: The task has no such average.
        """
        models = self._update.averaged()
        if f"{average}_" not in models:
            has = ", ".join(repr(prefix.removesuffix("_")) for prefix in models) or "none"
            raise TaskError(
                f"{type(self._owner).__name__} has no average {average!r} of its weights (it has: "
                f"{has}); set average = thrifty.EMA(...) or thrifty.SWA(...) before you train"
            )
        model = models[f"{average}_"]
        return self.model if model is None else model

    def metrics(self, batch: Batch) -> Mapping[str, Any]:
        """Return what the task's ``metrics`` returns for a batch."""
        with self._update.forward():
            return self.task.metrics(self.model, self._update.cast(batch))

    def _evaluate(self, model: torch.nn.Module, epoch: int) -> dict[str, float]:
        return evaluated(self._evaluating(model, epoch))

    def evaluating(self, epoch: int) -> EvaluationParts | None:
        """Return the evaluation in parts, or None if averaged weights are evaluated, too."""
        return None if self._update.averaged() else self._evaluating(self.model, epoch)

    def _evaluating(self, model: torch.nn.Module, epoch: int) -> EvaluationParts:
        return evaluating(
            self.task,
            model,
            source=self.source,
            seed=derive_seed(self.seed, "evaluate", epoch),
            cast=self._update.cast,
            forward=self._update.forward,
        )

    def _rows_of_a_part(self, values: Mapping[str, Any]) -> int:
        size = self.batch_size(values)
        return size // check_batches(self.task, self.step_options, values)


def mean_loss(losses: Sequence[torch.Tensor]) -> float:
    """Return the mean of the losses of an epoch; half precision would keep three digits of it."""
    stacked = torch.stack(tuple(losses))
    return float((stacked.float() if stacked.element_size() == 2 else stacked).mean())


def values_at_step(plan: EpochPlan, step: int) -> dict[str, Any]:
    """Return all hyper-parameters at one step of an epoch."""
    return {**plan.values, **{name: values[step] for name, values in plan.moving.items()}}


def check_batches(task: Task, options: StepOptions, values: Mapping[str, Any]) -> int:
    """Return into how many parts a batch is split.

    Raises:
        TaskError: The batch size or the number of parts is invalid, or they do not fit together.
    """
    if options.accumulate == 1:
        return 1
    size = batch_size_of(task, values)
    return parts_of_batch(task, options, values, batch_size=size)


def batch_size_of(task: Task, values: Mapping[str, Any]) -> int:
    """Return the batch size of a task under some hyper-parameters; see ``TaskTrial.batch_size``."""
    size = task.batch_size
    if isinstance(size, str):
        if size not in values:
            raise TaskError(
                f"the task's batch_size follows hyper-parameter {size!r}, which the search space "
                f"does not have (it has: {', '.join(values)}); add it or give batch_size a number"
            )
        size = values[size]
    if int(size) != size or size < 1:
        raise TaskError(f"batch_size is {size!r}; it must be a positive integer")
    return int(size)


def evaluate_state(
    task: Task, member: Member, *, device: torch.device | str = "cpu"
) -> dict[str, float]:
    """Compute the metrics of a trial from its state, as they are computed during training.

    Args:
        task: The task that was trained.
        member: The state after an epoch; ``epoch`` counts from 0, and ``values`` are the
            hyper-parameters in that epoch.
        device: The device to evaluate on.

    Returns:
        The metrics of the task, without the training loss.
    """
    trial = TaskTrial(task, torch.device(device))
    trial.restore(member)
    return trial.evaluate(member.epoch)


class TrainableTrial:
    """One trial of a task that owns its loop."""

    adapts = False
    """Whether thrifty adapts the model between epochs; a ``Trainable`` does so in ``train``."""

    def __init__(self, task: Trainable, device: torch.device) -> None:
        # a copy, since one instance is one trial and a pack has several trials
        self.task = own_task(task)
        self.is_trained = False
        """Whether the trial has begun an epoch."""
        self.logged = Logged()
        """User attributes and artifacts of the last epoch."""
        self._device = device
        # Others keep the flags of their networks themselves, or make them anew in each epoch.
        self._keeps_flags = not isinstance(task, SelfDescribing) and not hasattr(
            task, "_thrifty_internals"
        )
        self.unrestored: frozenset[str] = frozenset()
        """The names of gradients in the state for which a restored trial has no parameter."""

    @property
    def model(self) -> torch.nn.Module:
        """The model of the trainable, if its attribute ``model`` is one.

        Raises:
            TaskError: It is not.
        """
        model = getattr(self.task, "model", None)
        if isinstance(model, torch.nn.Module):
            return model
        raise TaskError(
            f"{self._name} has no model to load: its attribute `model` is no torch.nn.Module. Keep "
            "the network there, or save what you need with trial.log_artifact in a training "
            "function; load_state of an instance takes the trial's state"
        )

    def begin(self, member: Member) -> None:
        """Set up the trainable, and load the member's state if there is one."""
        seed_everything(derive_seed(member.seed, "model"))
        self._seed = member.seed
        self._name, preparation = type(self.task).__name__, "setup"
        if isinstance(self.task, SelfDescribing):
            self._name, preparation = self.task.name, self.task.preparation
        self._readings = Readings(self._name, member.first_values, moving=member.moving)
        hp = self._readings.once(preparation)
        self.task.setup(hp, seed=member.seed, device=self._device)
        self._drawn = stream_positions(self._device)
        if member.state is not None:
            own, flags = _without_flags(member.state)
            self.task.load_state(unpack_state(own))
            if flags is not None:
                self.unrestored = self._flags().load(unpack_state(flags)[_FLAGS])

    def _flags(self) -> NetworkFlags:
        return NetworkFlags({"self": self.task}, leave_out=self.task.not_state)

    @property
    def drawn(self) -> tuple[Any, ...] | None:
        """How far the seeded streams had come after the preparation; None if that is unknown."""
        return self.task.drawn() if isinstance(self.task, SelfDescribing) else self._drawn

    def num_steps(self, values: Mapping[str, Any]) -> int:
        """Return 1: thrifty does not see the steps within an epoch."""
        return 1

    def state(self) -> State:
        """Return a copy of everything that is needed to continue."""
        own = pack_state(self.task.state())
        if not self._keeps_flags:
            return own
        flags = self._flags()
        if not flags.modules and not flags.tensors:
            return own
        keeps_used = reads_gradients(self.task)
        return _with_flags(own, pack_state({_FLAGS: flags.read(keeps_used=keeps_used)}))

    def epoch(self, plan: EpochPlan) -> Mapping[str, float]:
        """Train and evaluate a whole epoch.

        Raises:
            TaskError: A hyper-parameter that changes is read in ``setup``, but not in ``train``.
                Only a call of ``train`` shows this; its epoch is not reported.
        """
        seed_everything(derive_seed(self._seed, "epoch", plan.epoch))
        hp = HyperParameters(plan.values)
        self.is_trained = True
        with gradients_noted():
            self.task.train(plan.epoch, hp)
        self._readings.followed |= hp.names_read
        self._readings.check_epoch(plan)
        metrics = check_metrics(self.task.evaluate(), task=self._name, method="evaluate")
        if isinstance(self.task, SelfDescribing):
            self.logged = self.task.take_logged()
        return {name: as_number(value) for name, value in metrics.items()}


_FLAGS = "flags of networks"


def _with_flags(own: State, flags: State) -> State:
    """Return the state of a ``Trainable`` with that of its networks' flags."""
    # All keys of the tensors of flags begin with ``_FLAGS``, as they are packed under that name.
    tensors = {**own.tensors, **flags.tensors}
    return State(tensors=tensors, tree={"state": own.tree, _FLAGS: flags.tree})


def _without_flags(state: State) -> tuple[State, State | None]:
    """Return what ``_with_flags`` was given; None for a state of earlier versions."""
    if not isinstance(state.tree, Mapping) or _FLAGS not in state.tree:
        return state, None
    flags = State(tensors=state.tensors, tree=state.tree[_FLAGS])
    return State(tensors=state.tensors, tree=state.tree["state"]), flags
