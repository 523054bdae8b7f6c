"""The fused back-end, which trains trials of one structure as one batched computation."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
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
from thrifty.pack.fused._fusable import (
    UnfusableError,
    check_memory,
    family,
    has_base,
    has_trunk,
    kin,
)
from thrifty.pack.fused._member import ArrayFeed, Feed, FeedError, FusedTrial, IteratorFeed
from thrifty.pack.fused._row_state import steps_taken
from thrifty.pack.fused._step import BlockOptions
from thrifty.pack.fused._tape import BufferPool
from thrifty.pack.fused.optimizers import GroupedOptimizer, grouped_optimizer
from thrifty.pack.task._data import LastingError, samples_of
from thrifty.pack.task._data_contents import Samples
from thrifty.pack.task._step_options import order_of_epoch
from thrifty.pack.task._task import Task
from thrifty.pack.verify import AloneTime, CheckBudget, SoloTimes

from ._dry_runs import DryRuns, Structures, likeness, rows_of


MIN_FILL = 0.4
"""The least share of a wider model's parameters that a model padded to it may have.

Below this, too much of the computation is on zeros.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What the time of a trial's steps depends on.

    Attributes:
        identity: Everything it depends on; equal identities take equal time.
        group: What trials that could be packed with this one have in common.
        kin: A rough description: sizes, but neither activations nor the optimizer.
    """

    identity: Hashable
    group: Hashable
    kin: Hashable


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
        self._default = block
        self._options: dict[Hashable, BlockOptions] = {}
        self._task = task
        self._device = torch.device(device)
        self._buffer_pool = BufferPool()
        self.activations = activation_store(self._device) if activations is None else activations
        self._trials: dict[int, FusedTrial] = {}
        self._blocks: dict[Hashable, list[Block]] = {}
        self._retired: list[Block] = []
        self._home: dict[FusedTrial, Block] = {}
        self._keys: dict[FusedTrial, tuple[Hashable, Hashable, Hashable]] = {}
        self._hosts: dict[Hashable, Hashable] = {}
        """By key, wider trials that these could join, but whose blocks hold one trial each."""
        self.refused = dict(refused or {})
        self.dry_runs = DryRuns(
            {} if structures is None else structures,
            self.refused,
            making_room=self._buffer_pool.emptied,
        )
        self._feeds: dict[Hashable, Feed] = {}
        self.budget = CheckBudget()
        self.solo_times = SoloTimes()

    def stack(self, slot: int, member: Member) -> None:
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
        """Give a prepared trial its slot. Raises as ``stack`` does.

        Args:
            slot: The slot.
            trial: The trial.
            values: Its hyper-parameters.
            epoch: The epoch that it takes next, if it has been trained elsewhere.
        """
        if epoch is not None:
            trial.next_epoch = epoch
        self._place(trial, values)
        self._trials[slot] = trial

    def key(
        self, trial: FusedTrial, values: Mapping[str, Any]
    ) -> tuple[Hashable, Hashable, Hashable]:
        """Return what trials that may be packed with this one have in common.

        Returns:
            The structure with what it holds for all trials, the kind of optimizer, and the batch
            size where that matters.

        Raises:
            UnfusableError: It cannot be packed with any trial.
        """
        _check_usual(trial)
        kind = self._kind(trial, values)
        structure = self.dry_runs.structure(trial, values)
        content = trial.frozen_key(structure.held)
        batch_size = None if structure.padding else trial.batch_size(values)
        return ((self.dry_runs.key(trial), content), kind, batch_size)

    def traits(self, trial: FusedTrial, values: Mapping[str, Any]) -> Traits:
        """Return what the time of a step depends on; equal in every process, and needs no dry run.

        Raises:
            UnfusableError: The model has hooks, or its optimizer has no fused version.
        """
        _check_usual(trial)
        rows = rows_of(trial)
        batch_size = trial.batch_size(values)
        kind, kin_of = self._kind(trial, values), kin(trial.model)
        half_octave = round(2 * math.log2(batch_size))
        # adapters of several ranks are padded to the widest
        alike = (family(trial.model), kin_of) if has_base(trial.model) else trial.signature
        return Traits(
            identity=(trial.signature, kind, batch_size, rows),
            group=(alike, kind, rows),
            kin=(kin_of, half_octave, rows),
        )

    def traits_of(self, key: Hashable) -> Traits:
        """Return the traits of the trials in training under a key."""
        trial = next(t for block in self._blocks[key] for t in block.trials)
        return self.traits(trial, trial.plan_values)

    def trial(self, slot: int) -> FusedTrial:
        """Return the trial in a slot."""
        return self._trials[slot]

    def take(self, slot: int) -> FusedTrial:
        """Take a trial out of its slot, with model and optimizer as they stand."""
        trial = self._trials[slot]
        trial.take_moments(self._home[trial].moments(trial))
        self.release(slot)
        return trial

    def host(self, trial: FusedTrial, values: Mapping[str, Any]) -> Hashable | None:
        """Return the key of wider trials in training that this one may join, padded with zeros.

        It is None if there are none. Trials whose blocks hold one trial each are not joined, but
        the key says that this one's steps are about as fast as theirs.

        Raises:
            UnfusableError: As ``key``.
        """
        key = self.key(trial, values)
        if self._blocks.get(key):
            known = self._hosts.get(key)
            return known if any(b.trials for b in self._blocks.get(known, ())) else None
        size = sum(p.numel() for p in trial.model.parameters())
        for other, blocks in self._blocks.items():
            if any(block.trials for block in blocks) and self._joins(
                trial, values, size=size, other=other
            ):
                return other
        return None

    def configure(self, key: Hashable, options: BlockOptions) -> None:
        """Set how trials with a key are fused, before the first of them is placed."""
        self._options[key] = options

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
        for block in list(self._all_blocks()):
            if not block.trials or any(slot_of[t] in outcomes for t in block.trials):
                continue
            found = _advanced(block)
            shared = {each.number: each for trial in found for each in trial.frozen.values()}
            is_changed = bool(written(shared))
            for trial, outcome in found.items():
                if is_changed and not isinstance(outcome, Exception):
                    outcome = guarded(trial.check_frozen) or outcome
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
        for trial in self._home:
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
        return (self.dry_runs.key(trial), self._kind(trial, values), trial.batch_size(values))

    def _retire_programs(self) -> None:
        """Discard all recordings, since values built into them may differ from those of today."""
        self.dry_runs.clear()
        self._retired += [block for blocks in self._blocks.values() for block in blocks]
        self._blocks.clear()

    def _note(self, trial: FusedTrial, outcome: Outcome) -> None:
        """Record the outcome of an epoch."""
        if isinstance(outcome, UnverifiedError):
            if outcome.mismatch:
                self.refuse(trial.refusal_key, str(outcome))
            trial.difference = None
        elif not isinstance(outcome, Exception) and not trial.is_verified_here:
            trial.num_unverified += 1

    def unstack(self, slot: int) -> State:
        """Return a copy of a member's full state."""
        trial = self._trials[slot]
        return self._home[trial].state(trial)

    def release(self, slot: int) -> None:
        """Free a slot."""
        trial = self._trials.pop(slot, None)
        if trial is not None:
            self._home.pop(trial).remove(trial)
            trial.is_apart = False
            del self._keys[trial]

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
        for block in self._all_blocks():
            if block.trials:  # ``adapt`` may have moved them all to another one
                block.one_step()

    @property
    def keeps_activations(self) -> bool:
        """Whether activations of a frozen trunk are kept for a block."""
        return any(block.keeps_activations for block in self._all_blocks())

    def memory_bytes(self) -> int:
        """Return how many bytes all blocks hold."""
        return self._buffer_pool.num_bytes + sum(
            block.memory_bytes() for block in self._all_blocks()
        )

    # -- which trial is in which block ---------------------------------------------------

    def _all_blocks(self) -> Iterable[Block]:
        self._retired = [block for block in self._retired if block.trials]
        return [*self._retired, *(b for blocks in self._blocks.values() for b in blocks)]

    def _options_of(self, key: Hashable) -> BlockOptions:
        return self._options.get(key, self._default)

    def _joins(
        self, trial: FusedTrial, values: Mapping[str, Any], *, size: int, other: Hashable
    ) -> bool:
        """Return whether padding a trial to the width of those under another key works and pays."""
        structure = self._blocks[other][0].structure
        example = next(t for block in self._blocks[other] for t in block.trials)
        parameters = dict(trial.model.named_parameters())
        if (
            example.batch_size(example.plan_values) != trial.batch_size(values)
            or not structure.layout.holds(parameters)
            or self._kind(example, example.plan_values) != self._kind(trial, values)
            or likeness(example) != likeness(trial)  # reads all settings of both models
            or structure.held != self.dry_runs.structure(trial, values).held
            or trial.frozen_key(structure.held) != example.frozen_key(structure.held)
            or size < MIN_FILL * sum(s.shape.numel() for s in structure.layout.segments)
        ):
            return False
        return self.dry_runs.fits_into(trial, values, structure)

    def _kind(self, trial: FusedTrial, values: Mapping[str, Any]) -> Hashable:
        return grouped_optimizer(trial.followed, values)[1]

    def _place(
        self, trial: FusedTrial, values: Mapping[str, Any], *, host: Hashable | None = None
    ) -> None:
        """Put a trial into a block with a free row.

        Args:
            trial: The trial.
            values: Its hyper-parameters.
            host: The key of the block; by default that of the trial, or of wider trials.

        Raises:
            UnfusableError: It cannot be fused, or shares tensors with another trial.
        """
        self._check_tensors(trial)
        if not trial.is_frozen_intact():  # something has read them as an array, as before writing
            trial.adopt_frozen()
        key = self.key(trial, values)
        if host is None:
            host = self.host(trial, values)
        if host is not None and self._options_of(host).size == 1:
            # In a block of its own, padding would take memory and share nothing.
            self._options[key], self._hosts[key] = self._options_of(host), host
            host = None
        optimizer = self._ready_optimizer(trial, values)
        blocks = self._blocks.setdefault(key if host is None else host, [])
        batch_size = trial.batch_size(values)
        apart = bool(trial.frozen) and has_trunk(trial.model)
        block = next(
            (b for b in blocks if b.takes(batch_size) and (not apart or b.is_beside(trial))), None
        )
        is_first = not blocks
        if block is None:
            options = self._options_of(key if host is None else host)
            block = Block(
                self.dry_runs.structure(trial, values, channels_last=options.channels_last)
                if host is None
                else blocks[0].structure,
                optimizer,
                options=options,
                device=self._device,
                buffer_pool=self._buffer_pool,
                activations=self.activations,
                budget=self.budget,
                solo_times=self.solo_times,
            )
            blocks.append(block)
        block.add(trial)
        trial.is_apart = not block.structure.held
        self.dry_runs.note_placed(trial)
        trial.refusal_key = self.dry_runs.refusal_key(trial)
        self._home[trial], self._keys[trial] = block, key
        if is_first and trial.frozen and block.capacity > 1:
            self._gather_narrower(key)

    def _gather_narrower(self, key: Hashable) -> None:
        """Move trials that have not begun yet into the block of a wider one that has just come.

        Adapters of different ranks come in any order.
        """
        for trial in [t for t in self._home if not t.is_trained and self._keys[t] != key]:
            values, block = trial.plan_values, self._home[trial]
            size = sum(p.numel() for p in trial.model.parameters())
            try:
                if not self._joins(trial, values, size=size, other=key):
                    continue
                trial.take_moments(block.moments(trial))
                self._ready_optimizer(trial, values)
            except UnfusableError:  # it stays where it is
                continue
            block.remove(trial)
            for blocks in self._blocks.values():
                if block in blocks and not block.trials:
                    blocks.remove(block)
            self._place(trial, values, host=key)

    def _check_tensors(self, trial: FusedTrial) -> None:
        """Check that a trial's tensors are its own, so that they can become a row.

        Raises:
            UnfusableError: It shares memory, within its model or with another trial.
        """
        if trial.tensor_ids:
            return
        check_memory([trial.model])
        own = {id(t) for t in (*trial.model.parameters(), *trial.model.buffers())}
        if any(not own.isdisjoint(other.tensor_ids) for other in self._home):
            raise UnfusableError("it shares parameters or buffers with another trial")
        trial.tensor_ids = own

    def _ready_optimizer(self, trial: FusedTrial, values: Mapping[str, Any]) -> GroupedOptimizer:
        """Return the optimizer over rows for a trial whose state fits. Raises as ``key`` does."""
        optimizer, _ = grouped_optimizer(trial.followed, values)
        steps_taken(trial, optimizer, self.dry_runs.structure(trial, values))
        return optimizer

    # -- epochs --------------------------------------------------------------------------

    def _start(self, trial: FusedTrial, plan: EpochPlan) -> dict[str, float]:
        trial.adapt_ahead(plan.values, epoch=plan.epoch)
        if not self._home[trial].holds(trial):
            raise UnfusableError("its parameters or buffers were given other memory in adapt")
        changed = trial.look_again()
        if changed is not None and not changed.is_own:
            self._retire_programs()
            raise UnfusableError(f"{changed.name}, which it reads, has changed")
        if (
            changed
            or not trial.is_frozen_intact()
            or (trial.frozen and not trial.num_unverified)  # others with another base may have come
            or self.dry_runs.have_built_in
            or isinstance(self._task.batch_size, str)
            or self._kind(trial, plan.values) != self._keys[trial][1]
        ):
            self._settle(trial, plan.values)
        num_steps = trial.num_steps(plan.values)
        block = self._home[trial]
        trial.time_key = self._time_key(trial, plan.values)
        trial.start_fused(plan, self._feed(trial, plan), tick=block.start(num_steps))
        block.refresh_numbers(trial)
        block.plan_checks(trial)
        return {}

    def _settle(self, trial: FusedTrial, values: Mapping[str, Any]) -> None:
        """Move a trial to the block where it belongs after its hyper-parameters changed.

        Raises:
            UnfusableError: It can no longer be fused; it stays where it is, so that its state can
                be taken out.
            UnverifiedError: It would have to move, but its last epochs are not verified.
        """
        if self.key(trial, values) != self._keys[trial]:
            if trial.num_unverified:
                raise UnverifiedError(
                    "its hyper-parameters have changed what it computes", mismatch=False
                )
            block = self._home[trial]
            trial.take_moments(block.moments(trial))
            self._check_tensors(trial)
            self._ready_optimizer(trial, values)
            block.remove(trial)
            trial.adopt_frozen()
            if block.structure.held and not block.trials:  # a base that nobody may need again
                for blocks in self._blocks.values():
                    if block in blocks:
                        blocks.remove(block)
            self._place(trial, values)

    def _feed(self, trial: FusedTrial, plan: EpochPlan) -> Feed:
        """Return a feed that trials with the same batches share."""
        batch_size = trial.batch_size(plan.values)
        key: tuple[int, ...] = (*trial.batches_key, trial.seed, plan.epoch, batch_size)
        if trial.source.arrays is None:
            key = (*key, id(self._home[trial]))
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


def _check_usual(trial: FusedTrial) -> None:
    """Raise UnfusableError for a trial whose steps have no fused version."""
    if trial.why_special:
        raise UnfusableError(trial.why_special)


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
