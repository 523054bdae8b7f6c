"""The blocks of the fused back-end: which trials are trained together."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch

from thrifty.pack._backend import UnverifiedError
from thrifty.pack.fused._activations import ActivationStore
from thrifty.pack.fused._block import Block
from thrifty.pack.fused._fusable import UnfusableError, check_memory, has_trunk
from thrifty.pack.fused._member import FusedTrial
from thrifty.pack.fused._row_state import check_moments, steps_taken
from thrifty.pack.fused._step import BlockOptions
from thrifty.pack.fused._structure import Structure
from thrifty.pack.fused._tape import BufferPool
from thrifty.pack.fused.optimizers import GroupedOptimizer, grouped_optimizer
from thrifty.pack.verify import CheckBudget, SoloTimes

from ._dry_runs import DryRuns, likeness


_MIN_FILL = 0.4
"""The least share of a wider model's parameters that a model padded to it may have.

Below this, too much of the computation is on zeros.
"""


def check_usual(trial: FusedTrial) -> None:
    """Raise UnfusableError for a trial whose steps have no fused version."""
    if trial.why_special:
        raise UnfusableError(trial.why_special)


def _same_shapes(structure: Structure, trial: FusedTrial) -> bool:
    """Return whether a trial's tensors that no step trains have a structure's shapes.

    Only trained tensors are padded.
    """
    own, wide = structure.state_of(trial.model), structure.state_of(structure.model)
    return all(own[name].shape == wide[name].shape for name in structure.untrained)


class Blocks:
    """The blocks of a back-end; trials of equal structure share blocks of limited size.

    Args:
        dry_runs: The structures of the trials.
        options: How trials are fused, unless ``configure`` sets something else.
        device: Where they are trained.
        buffer_pool: Memory for what a step computes.
        activations: Where activations of frozen trunks are kept.
        budget: The time that checks have taken.
        solo_times: The times of steps and evaluations of trials alone.

    Attributes:
        home: The block of each trial.
        by_key: Blocks that more trials may join, by what their trials have in common.
    """

    def __init__(
        self,
        dry_runs: DryRuns,
        *,
        options: BlockOptions,
        device: torch.device,
        buffer_pool: BufferPool,
        activations: ActivationStore,
        budget: CheckBudget,
        solo_times: SoloTimes,
    ) -> None:
        self.home: dict[FusedTrial, Block] = {}
        self.by_key: dict[Hashable, list[Block]] = {}
        self._dry_runs = dry_runs
        self._default = options
        self._device = device
        self._buffer_pool = buffer_pool
        self._activations = activations
        self._budget = budget
        self._solo_times = solo_times
        self._options: dict[Hashable, BlockOptions] = {}
        self._retired: list[Block] = []
        self._keys: dict[FusedTrial, tuple[Hashable, Hashable, Hashable]] = {}
        self._hosts: dict[Hashable, Hashable] = {}
        """By key, wider trials that these could join, but whose blocks hold one trial each."""

    def __iter__(self) -> Iterator[Block]:
        """Iterate over the blocks that are used, or may be again."""
        self._retired = [block for block in self._retired if block.trials]
        return iter([*self._retired, *(b for blocks in self.by_key.values() for b in blocks)])

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
        check_usual(trial)
        kind = self.kind(trial, values)
        structure = self._dry_runs.structure(trial, values)
        content = trial.frozen_key(structure.held)
        batch_size = None if structure.padding else trial.batch_size(values)
        return ((self._dry_runs.key(trial), content), kind, batch_size)

    def host(self, trial: FusedTrial, values: Mapping[str, Any]) -> Hashable | None:
        """Return the key of wider trials in training that this one may join, padded with zeros.

        It is None if there are none. Trials whose blocks hold one trial each are not joined, but
        the key says that this one's steps are about as fast as theirs.

        Raises:
            UnfusableError: As ``key``.
        """
        key = self.key(trial, values)
        if self.by_key.get(key):
            known = self._hosts.get(key)
            return known if any(b.trials for b in self.by_key.get(known, ())) else None
        size = sum(p.numel() for p in trial.model.parameters())
        for other, blocks in self.by_key.items():
            if any(block.trials for block in blocks) and self._joins(
                trial, values, size=size, other=other
            ):
                return other
        return None

    def configure(self, key: Hashable, options: BlockOptions) -> None:
        """Set how trials with a key are fused, before the first of them is placed."""
        self._options[key] = options

    def kind(self, trial: FusedTrial, values: Mapping[str, Any]) -> Hashable:
        """Return the kind of a trial's optimizer. Raises as ``key`` does."""
        return grouped_optimizer(trial.followed, values)[1]

    def has_other_kind(self, trial: FusedTrial, values: Mapping[str, Any]) -> bool:
        """Return whether a trial's optimizer is of another kind than when it joined its block."""
        return self.kind(trial, values) != self._keys[trial][1]

    def example(self, key: Hashable) -> FusedTrial:
        """Return a trial in training under a key."""
        return next(trial for block in self.by_key[key] for trial in block.trials)

    def add(
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
            trial.weights.adopt()
        key = self.key(trial, values)
        if host is None:
            host = self.host(trial, values)
        if host is not None and self._options_of(host).size == 1:
            # In a block of its own, padding would take memory and share nothing.
            self._options[key], self._hosts[key] = self._options_of(host), host
            host = None
        optimizer = self._ready_optimizer(trial, values)
        blocks = self.by_key.setdefault(key if host is None else host, [])
        batch_size = trial.batch_size(values)
        apart = bool(trial.frozen) and has_trunk(trial.model)
        block = next(
            (b for b in blocks if b.takes(batch_size) and (not apart or b.is_beside(trial))), None
        )
        is_first = not blocks
        if block is None:
            options = self._options_of(key if host is None else host)
            block = Block(
                self._dry_runs.structure(trial, values, channels_last=options.channels_last)
                if host is None
                else blocks[0].structure,
                optimizer,
                options=options,
                device=self._device,
                buffer_pool=self._buffer_pool,
                activations=self._activations,
                budget=self._budget,
                solo_times=self._solo_times,
            )
            blocks.append(block)
        block.add(trial)
        trial.is_apart = not block.structure.held
        self._dry_runs.note_placed(trial)
        trial.refusal_key = self._dry_runs.refusal_key(trial)
        self.home[trial], self._keys[trial] = block, key
        if is_first and trial.frozen and block.capacity > 1:
            self._gather_narrower(key)

    def settle(self, trial: FusedTrial, values: Mapping[str, Any]) -> None:
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
            block = self.home[trial]
            trial.take_moments(block.moments(trial))
            self._check_tensors(trial)
            self._ready_optimizer(trial, values)
            block.remove(trial)
            trial.weights.adopt()
            if block.structure.held:  # a base that nobody may need again
                self._discard_if_empty(block)
            self.add(trial, values)

    def remove(self, trial: FusedTrial) -> None:
        """Take a trial out of its block."""
        self.home.pop(trial).remove(trial)
        trial.is_apart = False
        del self._keys[trial]

    def retire(self) -> None:
        """Discard all recordings, since values built into them may differ from those of today."""
        self._dry_runs.clear()
        self._retired += [block for blocks in self.by_key.values() for block in blocks]
        self.by_key.clear()

    def _options_of(self, key: Hashable) -> BlockOptions:
        return self._options.get(key, self._default)

    def _joins(
        self, trial: FusedTrial, values: Mapping[str, Any], *, size: int, other: Hashable
    ) -> bool:
        """Return whether padding a trial to the width of those under another key works and pays."""
        structure = self.by_key[other][0].structure
        example = self.example(other)
        parameters = dict(trial.model.named_parameters())
        if (
            example.batch_size(example.plan_values) != trial.batch_size(values)
            or not structure.layout.holds(parameters)
            or self.kind(example, example.plan_values) != self.kind(trial, values)
            or likeness(example) != likeness(trial)  # reads all settings of both models
            or not _same_shapes(structure, trial)
            or structure.held != self._dry_runs.structure(trial, values).held
            or trial.frozen_key(structure.held) != example.frozen_key(structure.held)
            or size < _MIN_FILL * sum(s.shape.numel() for s in structure.layout.segments)
        ):
            return False
        return self._dry_runs.fits_into(trial, values, structure)

    def _gather_narrower(self, key: Hashable) -> None:
        """Move trials that have not begun yet into the block of a wider one that has just come.

        Adapters of different ranks come in any order.
        """
        for trial in [t for t in self.home if not t.is_trained and self._keys[t] != key]:
            values, block = trial.plan_values, self.home[trial]
            size = sum(p.numel() for p in trial.model.parameters())
            try:
                if not self._joins(trial, values, size=size, other=key):
                    continue
                trial.take_moments(block.moments(trial))
                self._ready_optimizer(trial, values)
            except UnfusableError:  # it stays where it is
                continue
            block.remove(trial)
            self._discard_if_empty(block)
            self.add(trial, values, host=key)

    def _discard_if_empty(self, block: Block) -> None:
        for blocks in self.by_key.values():
            if block in blocks and not block.trials:
                blocks.remove(block)

    def _check_tensors(self, trial: FusedTrial) -> None:
        """Check that a trial's tensors are its own, so that they can become a row.

        Raises:
            UnfusableError: It shares memory, within its model or with another trial.
        """
        if trial.tensor_ids:
            return
        check_memory([trial.model])
        own = {id(t) for t in (*trial.model.parameters(), *trial.model.buffers())}
        if any(not own.isdisjoint(other.tensor_ids) for other in self.home):
            raise UnfusableError("it shares parameters or buffers with another trial")
        trial.tensor_ids = own

    def _ready_optimizer(self, trial: FusedTrial, values: Mapping[str, Any]) -> GroupedOptimizer:
        """Return the optimizer over rows for a trial whose state fits. Raises as ``key`` does."""
        optimizer, _ = grouped_optimizer(trial.followed, values)
        structure = self._dry_runs.structure(trial, values)
        steps_taken(trial, optimizer, structure)
        options, _ = trial.followed.options(values)
        check_moments(trial, optimizer, structure, options=options)
        return optimizer
