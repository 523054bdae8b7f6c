"""The fused back-end, which trains trials of one structure as one batched computation."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from thrifty.pack._backend import (
    Backend,
    EpochPlan,
    Member,
    Outcome,
    UnverifiedError,
    guarded,
    no_exits,
    out_of_memory,
)
from thrifty.pack._frozen import written
from thrifty.pack._state import State
from thrifty.pack.fused._activations import ActivationStore, activation_store
from thrifty.pack.fused._block import Block
from thrifty.pack.fused._fusable import UnfusableError, family, has_base, rough_signature
from thrifty.pack.fused._member import ArrayFeed, Feed, FeedError, FusedTrial, IteratorFeed
from thrifty.pack.fused._step import BlockOptions
from thrifty.pack.fused._tape import BufferPool
from thrifty.pack.task._data import LastingError, samples_of
from thrifty.pack.task._data_contents import Samples
from thrifty.pack.task._step_options import order_of_epoch
from thrifty.pack.task._task import Task
from thrifty.pack.verify import AloneTime, CheckBudget, SoloTimes

from ._blocks import Blocks, check_usual
from ._dry_runs import DryRuns, Structures, rows_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What the time of a trial's steps depends on.

    Attributes:
        identity: Everything it depends on; equal identities take equal time.
        group: What trials that could be packed with this one have in common.
        rough_signature: A rough description: sizes, but neither activations nor the optimizer.
    """

    identity: Hashable
    group: Hashable
    rough_signature: Hashable


class FusedBackend(Backend):
    """A back-end with any number of slots; trials of equal structure share blocks of limited size.

    Args:
        task: What the trials train.
        device: Where they are trained.
        block: How trials are fused, unless ``configure`` sets something else.
        structures: The results of earlier dry runs.
        refused: Why some structures are not fused, by ``DryRuns.refusal_key``.
        activations: Where activations of frozen trunks are kept (default: those that all back-ends
            of this process share).

    Attributes:
        dry_runs: The structures of its trials, and which of them fit into others.
        blocks: Its blocks, and which trial is in which of them.
        refused: Why some structures are not fused: a check of them has failed.
        budget: The time that checks have taken.
        solo_times: The times of steps and evaluations of trials alone.
    """

    def __init__(
        self,
        task: Task,
        *,
        device: torch.device | str = "cpu",
        block: BlockOptions = BlockOptions(),
        structures: Structures | None = None,
        refused: Mapping[str, str] | None = None,
        activations: ActivationStore | None = None,
    ) -> None:
        self._task = task
        self._device = torch.device(device)
        self._buffer_pool = BufferPool()
        self.activations = activation_store(self._device) if activations is None else activations
        self._trials: dict[int, FusedTrial] = {}
        self._feeds: dict[Hashable, Feed] = {}
        self.refused = dict(refused or {})
        self.dry_runs = DryRuns(
            {} if structures is None else structures,
            self.refused,
            making_room=self._buffer_pool.emptied,
        )
        self.budget = CheckBudget()
        self.solo_times = SoloTimes()
        self.blocks = Blocks(
            self.dry_runs,
            options=block,
            device=self._device,
            buffer_pool=self._buffer_pool,
            activations=self.activations,
            budget=self.budget,
            solo_times=self.solo_times,
        )

    def put(self, slot: int, member: Member) -> None:
        """Put a trial into a slot.

        Raises:
            UnfusableError: Its model cannot be fused; the message says why.
        """
        trial = self.prepare(member)
        self.place(slot, trial, member.values)

    def prepare(self, member: Member) -> FusedTrial:
        """Return a trial without a slot; if it stays alone, it is adapted when its epoch begins."""
        trial = FusedTrial(self._task, self._device)
        trial.stays_alone = member.alone
        trial.begin(member)
        if not member.alone and not trial.why_special:
            trial.adapt_ahead(member.values, epoch=member.epoch)
            trial.look_again()
        return trial

    def place(
        self, slot: int, trial: FusedTrial, values: Mapping[str, Any], *, epoch: int | None = None
    ) -> None:
        """Give a prepared trial its slot. Raises as ``put`` does.

        Args:
            slot: The slot.
            trial: The trial.
            values: Its hyper-parameters.
            epoch: The epoch that it takes next, if it has been trained elsewhere.
        """
        if epoch is not None:
            trial.next_epoch = epoch
        self.blocks.add(trial, values)
        self._trials[slot] = trial

    def traits(self, trial: FusedTrial, values: Mapping[str, Any]) -> Traits:
        """Return what the time of a step depends on; equal in every process, and needs no dry run.

        Raises:
            UnfusableError: The model has hooks, or its optimizer has no fused version.
        """
        check_usual(trial)
        rows = rows_of(trial)
        batch_size = trial.batch_size(values)
        kind, rough = self.blocks.kind(trial, values), rough_signature(trial.model)
        half_octave = round(2 * math.log2(batch_size))
        # adapters of several ranks are padded to the widest
        alike = (family(trial.model), rough) if has_base(trial.model) else trial.signature
        return Traits(
            identity=(trial.signature, kind, batch_size, rows),
            group=(alike, kind, rows),
            rough_signature=(rough, half_octave, rows),
        )

    def traits_of(self, key: Hashable) -> Traits:
        """Return the traits of the trials in training under a key."""
        trial = self.blocks.example(key)
        return self.traits(trial, trial.plan_values)

    def trial(self, slot: int) -> FusedTrial:
        """Return the trial in a slot."""
        return self._trials[slot]

    def take(self, slot: int) -> FusedTrial:
        """Take a trial out of its slot, with model and optimizer as they stand."""
        trial = self._trials[slot]
        trial.take_moments(self.blocks.home[trial].moments(trial))
        self.release(slot)
        return trial

    def num_steps(self, slot: int, values: Mapping[str, Any]) -> int:
        """Return how many optimizer steps the next epoch has."""
        return self._trials[slot].num_steps(values)

    def step(self, plans: Mapping[int, EpochPlan]) -> Mapping[int, Outcome]:
        """Train every block until one of its trials has ended its epoch."""
        slot_of = {trial: slot for slot, trial in self._trials.items()}
        outcomes: dict[int, Outcome] = {}
        self._feeds.clear()
        for slot, plan in plans.items():
            begun = guarded(partial(self._start, self._trials[slot], plan))
            if isinstance(begun, UnfusableError):
                outcomes[slot] = _left(self._trials[slot], begun, mismatch=False)
            elif isinstance(begun, Exception):
                outcomes[slot] = begun
        for block in list(self.blocks):
            if not block.trials or any(slot_of[t] in outcomes for t in block.trials):
                continue
            found = _advanced(block)
            shared = {each.number: each for trial in found for each in trial.frozen.values()}
            is_changed = bool(written(shared))
            for trial, outcome in found.items():
                if is_changed and not isinstance(outcome, Exception):
                    outcome = guarded(trial.weights.check) or outcome
                if not isinstance(outcome, Exception) and not block.holds(trial):
                    reason = "its parameters or buffers were given other memory while it trained"
                    outcome = UnverifiedError(reason, mismatch=True)
                outcomes[slot_of[trial]] = outcome
                self._note(trial, outcome)
        return outcomes

    def num_unverified(self, slot: int) -> int:
        """Return how many of a member's last epochs have not been followed by a check yet."""
        return self._trials[slot].num_unverified

    def refuse(self, key: str, reason: str) -> None:
        """Fuse no more trials of a structure, for the first reason; check those fused now."""
        self.refused.setdefault(key, reason)
        for trial in self.blocks.home:
            trial.is_step_verified &= trial.refusal_key != key

    def alone_time(self, slot: int, values: Mapping[str, Any]) -> AloneTime | None:
        """Return how long an epoch of a trial takes alone; None while too little was measured."""
        trial = self._trials[slot]
        key = self._time_key(trial, values)
        return self.solo_times.epoch(key, num_steps=trial.num_steps(values))

    def evaluation_s(self, trial: FusedTrial, values: Mapping[str, Any]) -> float | None:
        """Return how long a trial's evaluation takes alone; None if no check has measured it."""
        return self.solo_times.evaluation_s(self._time_key(trial, values))

    def _time_key(self, trial: FusedTrial, values: Mapping[str, Any]) -> Hashable:
        """Return what the time of a trial alone depends on."""
        return (self.dry_runs.key(trial), self.blocks.kind(trial, values), trial.batch_size(values))

    def _note(self, trial: FusedTrial, outcome: Outcome) -> None:
        """Record the outcome of an epoch."""
        if isinstance(outcome, UnverifiedError):
            if outcome.mismatch:
                self.refuse(trial.refusal_key, str(outcome))
            trial.difference = None
        elif not isinstance(outcome, Exception) and not trial.is_verified_here:
            trial.num_unverified += 1

    def state(self, slot: int) -> State:
        """Return a copy of a member's full state."""
        trial = self._trials[slot]
        return self.blocks.home[trial].state(trial)

    def release(self, slot: int) -> None:
        """Free a slot."""
        trial = self._trials.pop(slot, None)
        if trial is not None:
            self.blocks.remove(trial)

    def model(self, slot: int) -> torch.nn.Module:
        """Return the model in a slot; its parameters are views of the pack's."""
        return self._trials[slot].model

    def start(self, plans: Mapping[int, EpochPlan]) -> int:
        """Start epochs without training, and return their number of steps; for measurements."""
        self._feeds.clear()
        for slot, plan in plans.items():
            self._start(self._trials[slot], plan)
        return max(self._trials[slot].steps_left for slot in plans)

    def one_step(self) -> None:
        """Take one step of every block; for measurements."""
        for block in self.blocks:
            if block.trials:  # ``adapt`` may have moved them all to another one
                block.one_step()

    @property
    def keeps_activations(self) -> bool:
        """Whether activations of a frozen trunk are kept for a block."""
        return any(block.keeps_activations for block in self.blocks)

    def memory_bytes(self) -> int:
        """Return how many bytes all blocks hold."""
        return self._buffer_pool.num_bytes + sum(block.memory_bytes() for block in self.blocks)

    def _start(self, trial: FusedTrial, plan: EpochPlan) -> dict[str, float]:
        trial.adapt_ahead(plan.values, epoch=plan.epoch)
        if not self.blocks.home[trial].holds(trial):
            raise UnfusableError("its parameters or buffers were given other memory in adapt")
        changed = trial.look_again()
        if changed is not None and not changed.is_own:
            self.blocks.retire()
            raise UnfusableError(f"{changed.name}, which it reads, has changed")
        if (
            changed
            or not trial.is_frozen_intact()
            or (trial.frozen and not trial.num_unverified)  # others with another base may have come
            or self.dry_runs.have_built_in
            or isinstance(self._task.batch_size, str)
            or self.blocks.has_other_kind(trial, plan.values)
        ):
            self.blocks.settle(trial, plan.values)
        num_steps = trial.num_steps(plan.values)
        block = self.blocks.home[trial]
        trial.time_key = self._time_key(trial, plan.values)
        trial.start_fused(plan, self._feed(trial, plan), tick=block.start(num_steps))
        block.refresh_numbers(trial)
        block.plan_checks(trial)
        return {}

    def _feed(self, trial: FusedTrial, plan: EpochPlan) -> Feed:
        """Return a feed that trials with the same batches share."""
        batch_size = trial.batch_size(plan.values)
        key: tuple[int, ...] = (*trial.batches_key, trial.seed, plan.epoch, batch_size)
        if trial.source.arrays is None:
            key = (*key, id(self.blocks.home[trial]))
        if key not in self._feeds:
            if trial.source.arrays is None:
                # each of the trials that share the batches gets an error of reading them
                batches = LastingError(trial.batches(plan))
                self._feeds[key] = IteratorFeed(batches, seeds=trial.fetch_seeds(plan))
            else:
                order, sizes = order_of_epoch(
                    trial.source,
                    seed=trial.seed,
                    epoch=plan.epoch,
                    batch_size=batch_size,
                    num_steps=trial.step_options.steps_per_epoch,
                )
                self._feeds[key] = ArrayFeed(
                    samples_of(trial.source)[0] or Samples(trial.source.arrays),
                    _sent(order, self._device),
                    sizes,
                )
        return self._feeds[key]


def _sent(order: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Send numbers to a device; this thread does not wait for the work that the device has."""
    return order.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else order


def _advanced(block: Block) -> dict[FusedTrial, Outcome]:
    """Train a block until an epoch of one of its trials ends, and return the outcomes."""
    try:
        with no_exits():
            ended = block.advance()
            return dict(zip(ended, block.finish(ended), strict=True))
    except FeedError as error:
        trial, cause = error.trial, error.reason
        if isinstance(cause, UnfusableError):
            return {trial: _left(trial, cause, mismatch=False)}
        return {trial: cause}
    except UnfusableError as error:
        return {trial: _left(trial, error, mismatch=True) for trial in block.trials}
    except Exception as error:
        if out_of_memory(error):
            raise
        # training each trial alone will show which of them fails
        reason = f"its pack failed with {type(error).__name__}: {error}"
        return {trial: UnverifiedError(reason, mismatch=True) for trial in block.trials}


def _left(trial: FusedTrial, error: UnfusableError, *, mismatch: bool) -> Exception:
    """Return the outcome of a trial that cannot take its next step in a block.

    Nothing of that step has been done.
    """
    if (trial.step_index and trial.steps_left) or trial.num_unverified:
        return UnverifiedError(str(error), mismatch=mismatch)
    return error
