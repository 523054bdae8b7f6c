"""``thrifty.pack(models, ...)``: several models trained jointly in your own training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from thrifty.core import PackMismatchError, UsageError, derive_seed, plain_logger, step_seed

from ._state import borrowed_streams, seed_everything, seed_step, step_counters
from .fused._block import Block
from .fused._checking import StepCheck
from .fused._dry_run import dry_run
from .fused._fusable import UnfusableError, check_memory, dropout_rates, rate_places, signature
from .fused._member import FusedTrial, IteratorFeed
from .fused._step import BlockOptions
from .fused._tape import BufferPool
from .fused.optimizers import grouped_optimizer
from .task._data import own_copy
from .task._followed_optimizer import FollowedOptimizers
from .task._optimizer import Optimizer
from .task._task import HyperParameters, Task
from .verify import CheckBudget, OwnState, Watch, own_state


logger = plain_logger(__name__)

Loss = Callable[[torch.nn.Module, Any], torch.Tensor]

MAX_RECORDINGS = 3
"""The number of changes in values that models read after which they are trained in turn."""


class Pack:
    """K models in training; made by calling ``thrifty.pack``.

    Each model is compared with itself trained alone at its first step and at random later steps,
    for about 1 % of the training time.

    Attributes:
        models: The models themselves. They can be used at any time: while packed, their parameters
            are views of the pack's memory.
        values: Each model's hyper-parameters; change them between steps as you like.
        fused: Whether they are trained as one computation; None before the first step. If they
            cannot be, they are trained in turn, with the same results, and the log says why.
        checks: How many steps were also taken alone so far, and how many seconds that took.
    """

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        *,
        loss: Loss,
        optimizer: Optimizer,
        values: Sequence[Mapping[str, Any]] | None = None,
        seeds: Sequence[int] | None = None,
    ) -> None:
        if not models:
            raise UsageError("thrifty.pack([]) has nothing to train; give it at least one model")
        for name, given in (("values", values), ("seeds", seeds)):
            if given is not None and len(given) != len(models):
                raise UsageError(
                    f"thrifty.pack: {len(models)} models and {len(given)} {name}; "
                    "give one for each model"
                )
        self.models = list(models)
        self.values = [dict(v) for v in values] if values is not None else [{} for _ in models]
        self.fused: bool | None = None
        self.checks = CheckBudget()
        self._seeds = list(seeds) if seeds is not None else list(range(len(models)))
        self._task = _LossTask(loss, optimizer)
        self._device = _device_of(models[0])
        self._block: Block | None = None
        self._trials: Sequence[_GivenTrial] = [
            _GivenTrial(self._task, model, values=v, seed=s, device=self._device)
            for model, v, s in zip(self.models, self.values, self._seeds, strict=True)
        ]
        self._num_steps = 0
        self._num_recordings = 0
        self._watch: Watch
        self._first_unverified = [0] * len(self.models)

    def step(self, batch: Any = None, *, batches: Sequence[Any] | None = None) -> torch.Tensor:
        """Take one step with every model. Return the losses, shape ``[K]``.

        Random layers draw from a stream determined by the model's seed and the number of the
        step. Each model gets its own copy of its batch.

        Args:
            batch: One batch for all models.
            batches: One batch for each model.

        Raises:
            UsageError: Neither or both were given, or not one batch for each model.
            PackMismatchError: A model differs from itself trained alone, after steps that cannot be
                undone.
        """
        if (batch is None) == (batches is None):
            raise UsageError(
                "Pack.step takes a batch for all, or batches=[...], one for each model"
            )
        if batches is not None and len(batches) != len(self.models):
            raise UsageError(
                f"Pack.step: {len(self.models)} models and {len(batches)} batches; "
                "give one for each model"
            )
        each = [batch] * len(self.models) if batches is None else list(batches)
        with borrowed_streams():
            losses = self._step_fused(each)
            if losses is None:
                losses = self._step_in_turn(each)
        self._num_steps += 1
        return losses

    def __len__(self) -> int:
        return len(self.models)

    def __iter__(self) -> Iterator[torch.nn.Module]:
        return iter(self.models)

    # -- fused ---------------------------------------------------------------------------

    def _step_fused(self, batches: Sequence[Any]) -> torch.Tensor | None:
        """Take one step of all models at once; return None if they are trained in turn."""
        self._look_for_changes()
        if self.fused is None:
            self._fuse(batches[0])
        if self._block is None:
            return None
        first = not any(self._first_unverified)
        before = [own_state(model) for model in self.models] if first else None
        try:
            checks = self._block_step(self._block, batches)
        except Exception as error:
            # a program that cannot be recorded has not run, so there is no step to undo
            if not first and not isinstance(error, UnfusableError):
                raise
            self._unfuse(str(error) or type(error).__name__, back_to=before)
            return None
        failed = [k for k, trial in enumerate(self._trials) if trial.difference is not None]
        if not failed:
            for check in checks:
                self._first_unverified[self._trials.index(check.trial)] = self._num_steps + 1
            return self._block.last_losses()
        reason = str(self._trials[failed[0]].difference)
        if len(checks) < len(self._trials):
            raise PackMismatchError(self._too_late(failed[0], reason))
        states = {check.trial: check.before for check in checks}
        self._unfuse(reason, back_to=[states[trial] for trial in self._trials])
        return None

    def _look_for_changes(self) -> None:
        """Record anew if a value that the models or the loss read has changed since a step."""
        if self._block is None:
            return
        changed = self._watch.changed()
        if changed is None:
            return
        self._unfuse(f"{changed.name}, which they read, has changed", back_to=None)
        self._num_recordings += 1
        if self._num_recordings < MAX_RECORDINGS:
            self.fused = None

    def _fuse(self, batch: Any) -> None:
        """Put the models into one block, if that is possible."""
        self.fused = False
        try:
            block = self._new_block(batch)
        except Exception as error:  # noqa: BLE001 (training in turn will raise any error again)
            self._say(str(error) or type(error).__name__)
            return
        for trial in self._trials:
            trial.look_again()
            block.add(trial)
        self._block = block
        self._watch = self._new_watch()
        self.fused = True

    def _new_watch(self) -> Watch:
        models = {f"model {k}": model for k, model in enumerate(self.models)}
        rates = [place for model in self.models for place in rate_places(model)]
        roots = {"loss": self._task._loss, **models}
        return Watch(roots, ignored=rates, memory=True)

    def _new_block(self, batch: Any) -> Block:
        """Return a block for the models.

        Raises:
            UnfusableError: They cannot be fused. The dry run may also raise anything else.
        """
        if len({signature(t.model, attributes={}) for t in self._trials}) > 1:
            raise UnfusableError("the models differ in structure")
        check_memory(self.models)
        found = [grouped_optimizer(t.followed, t.values) for t in self._trials]
        if len({kind for _, kind in found}) > 1:
            raise UnfusableError("the models' optimizers differ in kind or in parameter groups")
        structure = dry_run(self._task, self.models[0], own_copy(batch))
        partition = self._trials[0].followed.partition
        return Block(
            structure.arranged(partition) if len(partition) > 1 else structure,
            found[0][0],
            options=BlockOptions(size=len(self._trials)),
            device=self._device,
            buffer_pool=BufferPool(),
            budget=self.checks,
            checks_all=True,
        )

    def _block_step(self, block: Block, batches: Sequence[Any]) -> list[StepCheck]:
        feeds: dict[int, IteratorFeed] = {}
        for trial, batch, values in zip(self._trials, batches, self.values, strict=True):
            feed = feeds.setdefault(id(batch), IteratorFeed(iter([batch])))
            trial.ready(feed, values=values, step=self._num_steps, tick=block.start(1))
        # one model, drawn by seed: early on at steps 1, 2, 4, ..., later as often as is affordable
        early = self._num_steps & (self._num_steps - 1) == 0
        if early or self.checks.allows(block.check_s):
            drawn = derive_seed(0, "check", self._num_steps)
            self._trials[drawn % len(self._trials)].check_at(0)
        return block.one_step(checked=True, keeps_states=True)

    def _unfuse(self, reason: str, *, back_to: Sequence[OwnState] | None) -> None:
        """Train in turn from now on, from the present state of each model or from ``back_to``."""
        assert self._block is not None
        for trial, state in zip(self._trials, back_to or (), strict=False):
            self._block.restore(trial, state)
        for trial in self._trials:
            trial.take_moments(self._block.moments(trial))
        for trial in reversed(self._trials):  # the last row first, so that no row moves
            self._block.remove(trial)
            trial.difference = None
        self._block = None
        self.fused = False
        self._say(reason)

    def _too_late(self, index: int, reason: str) -> str:
        return (
            f"model {index} of {len(self.models)} is not what it would be alone: {reason}. The "
            f"first step that was not verified is step {self._first_unverified[index]}; go back to "
            "a state before it and train the models in turn. (Steps count from 0. Something that "
            "the loss or the model reads has changed between steps in a way that cannot be "
            "watched.)"
        )

    def _say(self, reason: str) -> None:
        logger.warning("the models are trained in turn, not fused: %s", reason)

    # -- in turn -------------------------------------------------------------------------

    def _step_in_turn(self, batches: Sequence[Any]) -> torch.Tensor:
        losses = []
        for trial, batch, values in zip(self._trials, batches, self.values, strict=True):
            trial.optimizers.follow(values)
            seed = _seed(trial.seed, self._num_steps)
            seed_everything(seed)
            seed_step(seed, self._device)
            trial.model.train()
            trial.optimizers.zero_grad()
            loss = self._task.loss(trial.model, own_copy(batch))
            loss.backward()  # type: ignore[no-untyped-call]
            trial.optimizers.clip()
            trial.optimizer.step()
            for counter in step_counters(trial.model).values():
                counter += 1
            losses.append(loss.detach())
        return torch.stack(losses)


def pack(
    models: Sequence[torch.nn.Module],
    *,
    loss: Loss,
    optimizer: Optimizer,
    values: Sequence[Mapping[str, Any]] | None = None,
    seeds: Sequence[int] | None = None,
) -> Pack:
    """Pack models, so that one call trains all of them by one step.

    Each model ends up where it would alone, up to rounding. Liu et al., DEEM 2021, call this
    primitive pack. ``thrifty.pack`` is also the package of this function. A type checker sees only
    the package, so in typed code write ``from thrifty.pack import pack``.

    Args:
        models: Plain modules of one structure, each with its own weights, on one device. Models of
            several structures are trained in turn.
        loss: ``loss(model, batch)``, a scalar, as you would write it for one model.
        optimizer: For example ``thrifty.SGD(lr="lr", momentum=0.9)``; a string names an entry of
            ``values``.
        values: Hyper-parameters of each model.
        seeds: The seed of each model's random draws, such as dropout; by default its position.

    >>> import thrifty as th
    >>> models = [torch.nn.Linear(4, 2) for _ in range(8)]
    >>> packed = th.pack(
    ...     models,
    ...     loss=lambda model, batch: model(batch).square().mean(),
    ...     optimizer=th.SGD(lr="lr"),
    ...     values=[{"lr": 0.1 * k} for k in range(8)],
    ... )
    >>> for _ in range(3):
    ...     losses = packed.step(torch.ones(16, 4))
    >>> losses.shape, packed.fused
    (torch.Size([8]), True)

    Raises:
        UsageError: There are no models, or not one entry of ``values`` or ``seeds`` for each.
    """
    return Pack(models, loss=loss, optimizer=optimizer, values=values, seeds=seeds)


class _LossTask(Task):
    """A loss function as a task."""

    def __init__(self, loss: Loss, optimizer: Optimizer) -> None:
        self._loss = loss
        self.optimizer = optimizer

    def data(self, hp: HyperParameters) -> Any:
        raise NotImplementedError  # the caller gives batches step by step

    def model(self, hp: HyperParameters) -> torch.nn.Module:
        raise NotImplementedError  # the caller gives the models

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return self._loss(model, batch)

    def metrics(self, model: torch.nn.Module, batch: Any) -> Mapping[str, Any]:
        return {"loss": self._loss(model, batch)}


class _GivenTrial(FusedTrial):
    """A trial whose model and batches come from the caller."""

    def __init__(
        self,
        task: _LossTask,
        model: torch.nn.Module,
        *,
        values: Mapping[str, Any],
        seed: int,
        device: torch.device,
    ) -> None:
        super().__init__(task, device)
        self.model = model
        self.seed = seed
        self.values = values
        self.optimizers = FollowedOptimizers(task.optimizer, model, values)
        self._options = [self.followed.options(values)]

    def ready(self, feed: IteratorFeed, *, values: Mapping[str, Any], step: int, tick: int) -> None:
        """Prepare for one step."""
        self.feed = feed
        self.rates = dropout_rates(self.model)
        self.begin_steps(1, tick=tick)
        self._own_seed = _seed(self.seed, step)
        self._draw_key = (self._own_seed, *self.rates.items())
        self._options = [self.followed.options(values)]

    def seed_step(self) -> None:
        """Seed the trial's generator as training in turn seeds torch's stream."""
        self.generator.manual_seed(self._own_seed)

    def seed_alone(self) -> None:
        """Seed torch's global stream as training in turn does before this step."""
        seed_step(self._own_seed, self.device)


def _seed(seed: int, step: int) -> int:
    return step_seed(derive_seed(seed, "pack"), step)


def _device_of(model: torch.nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))
