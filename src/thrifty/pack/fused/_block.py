"""Blocks of up to C trials of one structure, trained as one batched computation."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from thrifty.core import derive_seed, plain_logger
from thrifty.pack._backend import Outcome, UnverifiedError, guarded
from thrifty.pack._state import State
from thrifty.pack.trial._trial import TRAIN_LOSS
from thrifty.pack.verify import CheckBudget, Difference, OwnState, SoloTimes

from ._activations import ActivationStore
from ._binding import Bound
from ._checking import StepCheck
from ._evaluation import Evaluation, whole_step
from ._member import ArrayFeed, FusedTrial
from ._programs import Programs
from ._randomness import draw_masks
from ._row_state import RowState
from ._shared_operations import SharedOperations
from ._step import BlockOptions, LossHistory
from ._structure import Structure
from ._tape import BufferPool
from .optimizers import GroupedOptimizer


logger = plain_logger(__name__)

NUM_TIMED = 3
"""How many trials take a checked step without sharing operations.

The time of a step alone is estimated from at least three of them.
"""

WHOLE_CAPACITY = 64
"""Minimum capacity of a block whose trials share whole batches.

Such trials are kept in one block, so that each batch is made only once, even if fewer trials at a
time are faster to compute.
"""


class Block:
    """Rows of flat state, the first of which hold the trials of the block.

    A trial takes a row and leaves it without anything being rebuilt: the last trial moves into the
    gap.

    Args:
        structure: What the trials have in common.
        optimizer: The optimizer that updates their rows.
        options: How the trials are fused.
        device: The device on which they train.
        buffer_pool: Memory for buffers, shared with other blocks.
        activations: Where activations of a frozen trunk are kept (default: nowhere).
        budget: Time budget of checks.
        solo_times: Collects the times of steps and evaluations alone (default: a new collection).
        checks_all: Whether all trials also take the first step of a new program alone, rather than
            only one of them.

    Attributes:
        trials: The trials of the block, by row.
        check_s: Seconds that the last check took.
    """

    def __init__(  # noqa: PLR0913 -- what blocks of a back-end share; these are keywords
        self,
        structure: Structure,
        optimizer: GroupedOptimizer,
        *,
        options: BlockOptions,
        device: torch.device,
        buffer_pool: BufferPool,
        budget: CheckBudget,
        solo_times: SoloTimes | None = None,
        checks_all: bool = False,
        activations: ActivationStore | None = None,
    ) -> None:
        self.structure = structure
        self.capacity = max(options.size, WHOLE_CAPACITY) if structure.whole else options.size
        self.trials: list[FusedTrial] = []
        self._options = options
        self._state = RowState(structure, optimizer, capacity=self.capacity, device=device)
        self._programs = Programs(
            structure,
            self._state,
            options=options,
            device=device,
            buffer_pool=buffer_pool,
            activations=activations,
        )
        self._losses = LossHistory(self.capacity, dtype=structure.layout.dtype, device=device)
        self._budget = budget
        self._solo_times = SoloTimes() if solo_times is None else solo_times
        self._evaluation = Evaluation(
            structure,
            self._state,
            self._programs,
            budget=budget,
            solo_times=self._solo_times,
            at_once=options.size,
        )
        self._checks_all = checks_all
        self.check_s = 0.0

    # -- membership --------------------------------------------------------------------

    def takes(self, batch_size: int) -> bool:
        """Return whether a trial of this batch size can join.

        The block needs a free row, and batch sizes must be so close that padding costs less than it
        saves.
        """
        sizes = [batch_size, *(t.batch_size(t.plan_values) for t in self.trials)]
        return len(self.trials) < self.capacity and max(sizes) <= self._options.max_padding * min(
            sizes
        )

    def is_beside(self, trial: FusedTrial) -> bool:
        """Return whether another trial sees the batches that all trials of the block see.

        A frozen trunk computes these once for all of them.
        """

        def batches(one: FusedTrial) -> Hashable:
            return one.seed, one.next_epoch, one.batch_size(one.plan_values)

        return all(batches(each) == batches(trial) for each in self.trials)

    def add(self, trial: FusedTrial) -> None:
        """Give a trial the next row; the tensors of its module become views of that row."""
        trial.is_step_verified = trial.is_evaluation_verified = False
        trial.doubt = ""
        self._state.put(trial, len(self.trials))
        self.trials.append(trial)
        self._programs.is_active = True

    def remove(self, trial: FusedTrial) -> None:
        """Remove a trial; its module keeps its values."""
        row = self.trials.index(trial)
        self._state.release(trial)
        last = self.trials.pop()
        self._programs.is_active = bool(self.trials)
        if last is not trial:
            self._state.move(last, len(self.trials), row)
            self._losses.move(len(self.trials), row)
            self.trials[row] = last

    def state(self, trial: FusedTrial) -> State:
        """Return a copy of a trial's full state, in the form that the trial alone would give."""
        return trial.as_state({
            **trial.weights.state(),
            "optimizer": trial.optimizer_state(self.moments(trial)),
            **trial.data_state(),
        })

    def moments(self, trial: FusedTrial) -> dict[str, dict[str, Any]]:
        """Return the optimizer state of a trial's trained parameters by name, as views."""
        return self._state.moments(trial, self.trials.index(trial))

    def holds(self, trial: FusedTrial) -> bool:
        """Return whether the trial's module computes with the tensors that the block trains."""
        return self._state.holds(trial, self.trials.index(trial))

    def restore(self, trial: FusedTrial, state: OwnState) -> None:
        """Restore a trial to another state."""
        self._state.restore(trial, self.trials.index(trial), state)

    @property
    def keeps_activations(self) -> bool:
        """Whether activations of its frozen trunk are kept."""
        return self._programs.keeps_activations

    def memory_bytes(self) -> int:
        """Return the bytes of the block's state, batches and random numbers."""
        held = [*self._state.tensors(), *self._programs.tensors()]
        return sum(t.numel() * t.element_size() for t in held)

    # -- training ----------------------------------------------------------------------

    def start(self, num_steps: int) -> int:
        """Make room for the losses of an epoch that begins now and return its first tick."""
        self._losses.make_room(num_steps)
        return self._losses.tick

    def refresh_numbers(self, trial: FusedTrial) -> None:
        """Take over numbers of a trial's model that ``adapt`` may have changed."""
        self._state.refresh_numbers(trial, self.trials.index(trial))

    def plan_checks(self, trial: FusedTrial) -> None:
        """Choose the steps of an epoch, which begins now, at which a trial is checked."""
        last = trial.steps_left - 1
        if trial.plan.verify or self._budget.allows(self.check_s):
            trial.check_at(last)
        # besides the checks that are never skipped, check one step of the epoch, drawn by seed
        if last > 1 and self._budget.allows(2 * self.check_s):
            drawn = derive_seed(trial.seed, "check", trial.plan.epoch)
            trial.check_at(drawn % last)

    def advance(self) -> list[FusedTrial]:
        """Train all trials until at least one ends its epoch or fails a check; return those."""
        with torch.no_grad():
            while num := min(trial.steps_left for trial in self.trials):
                num = min(num, *(trial.steps_to_check for trial in self.trials))
                if num and self._in_step():
                    self._steps_together(num)
                else:
                    self.one_step(checked=True)
                self._note_doubt()
                if any(trial.is_suspect for trial in self.trials):
                    break
        return [t for t in self.trials if not t.steps_left or t.is_suspect]

    @torch.no_grad()
    def one_step(self, *, checked: bool = False, keeps_states: bool = False) -> list[StepCheck]:
        """Take one step of all trials, and return the checks of this step.

        Args:
            checked: Whether trials that are due also take the step alone.
            keeps_states: Whether the checks keep the states before the step. Together these are as
                large as the state of the block.
        """
        began = time.perf_counter()
        bound = None if self.structure.whole else self._ready(checked=checked)
        due = self._due(bound) if checked else []
        checks = [StepCheck(t, self._state, self.trials.index(t)) for t in due]
        losses = self._gradients(bound)
        if checks:
            losses = losses.clone()  # they may lie in a buffer, but gradients do not
            with self._programs.without_buffers():
                for check in checks:
                    check.note_gradients()
                self._update(losses)
                self._judge(checks, losses, bound)
                if not keeps_states:
                    for check in checks:
                        check.release()
        else:
            self._update(losses)
        self._budget.trained_s += time.perf_counter() - began - sum(c.seconds for c in checks)
        for trial in self.trials:
            trial.advance()
        return checks

    def _update(self, losses: torch.Tensor) -> None:
        """Update each trial by its gradients, and note the losses of the step."""
        self._updater()()
        self._losses.note(losses)

    def _due(self, bound: Bound | None) -> list[FusedTrial]:
        """Return the trials that also take this step alone: at least one for each new program."""
        due = [trial for trial in self.trials if trial.is_due]
        if bound is None or bound.is_checked:
            return due
        if self._checks_all:
            return due or list(self.trials)
        # a new program keeps present values as constants, and another trial may have set them
        moved = [trial for trial in self.trials if trial.watch.changed()]
        firsts = [self.trials[rows.start] for rows in bound.rows_apart]
        if len(firsts) == 1 and due:
            firsts = []
        if bound.variant.padded:  # one whose rows are all real would not show what padding does
            firsts.append(min(self.trials, key=lambda t: t.feed.num_rows(t.step_index)))
        return list(dict.fromkeys([*firsts, *due, *moved]))

    def _judge(
        self, checks: Sequence[StepCheck], losses: torch.Tensor, bound: Bound | None
    ) -> None:
        """Let each trial that is due take the step alone, compare, and record the result."""
        judge = partial(
            StepCheck.judge,
            structure=self.structure,
            is_current=None if bound is None else partial(self._programs.is_current, bound),
        )
        shares = len(checks) > NUM_TIMED + 1 and self._programs.keeps_activations and self._shares()
        operations = SharedOperations(self.trials[0].device) if shares else None
        found: list[Difference | None] = []
        for place, check in enumerate(checks):
            loss = losses[self.trials.index(check.trial)]
            shared = operations if place >= NUM_TIMED else None
            keeps = operations is not None and not place
            found.append(judge(check, loss, operations=shared, keeps=keeps))
        if operations is not None and not checks[0].repeats(self.structure, operations):
            logger.info("trials over one trunk take their steps alone without sharing operations")
            found[NUM_TIMED:] = [
                judge(check, losses[self.trials.index(check.trial)]) for check in checks[NUM_TIMED:]
            ]
        for check, difference in zip(checks, found, strict=True):
            check.trial.note_check(difference)
            self._budget.spend(check.seconds)
            self.check_s = check.seconds
            if difference is not None:
                # the other trials may have the same defect, so check them at their next step
                for trial in self.trials:
                    trial.is_step_verified &= trial.difference is not None
            elif check.solo_s is not None:
                self._solo_times.note_step(check.trial.time_key, check.solo_s)
        if bound is not None and checks:
            bound.is_checked = all(c.trial.difference is None for c in checks)

    def _gradients(self, bound: Bound | None) -> torch.Tensor:
        """Compute the gradients of the step whose inputs are ready; return the losses, ``[K]``."""
        if bound is None:
            return whole_step(self.structure, self._state, self.trials, at_once=self._options.size)
        self._programs.prepare(bound)
        bound.run()
        return self._losses_of(bound)

    def _ready(self, *, checked: bool) -> Bound:
        """Return the program of the next step, with batches and masks copied to its inputs.

        If a trial is checked in this step, kept activations are compared with new ones, too.
        """
        shared = self._shares()
        reading = self.trials[:1] if shared else self.trials
        for trial in reading:
            trial.fetch()
        for trial in self.trials:
            trial.look_around()
        num_rows = [t.feed.num_rows(t.step_index) for t in reading]
        # Pad batches to the largest of the epoch, not of this step, so that few tapes suffice.
        longest = max(num_rows)
        padded = min(num_rows) < longest
        if padded:
            longest = max(longest, *(t.feed.rows_at_most for t in reading))
        bound = self._bound(shared=shared, padded=padded, num_rows=longest)
        verify = checked and any(trial.is_due for trial in self.trials)
        _put_batches(bound, reading, shared=shared, num_rows=num_rows, verify=verify)
        self._programs.prepare(bound)
        if bound.draws:
            draw_masks(bound.draws, self.trials, num_rows=num_rows if padded else None)
        return bound

    def last_losses(self) -> torch.Tensor:
        """Return a copy of the losses of the last step, ``[number of trials]``."""
        return self._losses.last(len(self.trials))

    def _in_step(self) -> bool:
        """Return whether all trials have equal batch sizes from here on and no random draws."""
        one = self.trials[0]
        return (
            self.structure.draws_nothing
            and isinstance(one.feed, ArrayFeed)
            and all(
                t.feed.sizes[t.step_index :] == one.feed.sizes[one.step_index :]
                for t in self.trials
            )
        )

    def _steps_together(self, num: int) -> None:
        """Take ``num`` steps of trials that are in step (``_in_step``).

        Everything that does not change is hoisted out of the loop.
        """
        trials = self.trials
        feed = trials[0].feed
        assert isinstance(feed, ArrayFeed)
        shared = self._shares()
        first = trials[0].step_index
        reading = trials[:1] if shared else trials
        orders = torch.stack([
            t.feed.rest(t.step_index)  # type: ignore[union-attr]
            for t in reading
        ])
        steady = all(trial.steady for trial in trials)
        update = self._updater()
        begin = 0
        began = time.perf_counter()
        for step in range(first, first + num):
            end = begin + feed.sizes[step]
            bound = self._bound(shared=shared, padded=False, num_rows=end - begin)
            if not bound.is_checked:
                trials[0].check_at(step)
                break
            bound.gather(feed.samples, orders[:, begin:end].reshape(-1))
            self._programs.prepare(bound)
            bound.run()
            if not steady:
                update = self._updater()
            update()
            self._losses.note(self._losses_of(bound))
            begin = end
            for trial in trials:
                trial.advance()
        self._budget.trained_s += time.perf_counter() - began

    def _shares(self) -> bool:
        """Return whether all trials see the same batch and may read a single copy of it."""
        feed, step = self.trials[0].feed, self.trials[0].step_index
        return self.structure.sharing and all(
            t.feed is feed and t.step_index == step for t in self.trials
        )

    def _bound(self, *, shared: bool, padded: bool, num_rows: int) -> Bound:
        """Return the program of a step.

        All trials of a block have the same data source, so the rows of their batches have one
        shape.
        """
        one = self.trials[0]
        return self._programs.training(
            self.capacity if self._options.fixed else len(self.trials),
            shared=shared,
            padded=padded,
            num_rows=num_rows,
            row_shapes=one.feed.row_shapes(one.step_index),
        )

    def _updater(self) -> Callable[[], None]:
        """Return a function that updates each trial with its present options."""
        return self._state.updater([trial.options() for trial in self.trials])

    def _losses_of(self, bound: Bound) -> torch.Tensor:
        assert bound.tape is not None
        losses = bound.tape.outputs[0]
        assert losses is not None
        return losses[: len(self.trials)]

    # -- the end of an epoch -------------------------------------------------------------

    def finish(self, trials: Sequence[FusedTrial]) -> list[Outcome]:
        """Return training losses and metrics of trials that have ended their epoch.

        The outcome of a trial is an exception instead if it failed; UnverifiedError if its results
        cannot be trusted.
        """
        losses = {trial: guarded(partial(self._loss, trial)) for trial in trials}
        alive = [trial for trial in trials if isinstance(losses[trial], Mapping)]
        metrics = self._evaluation.evaluate(alive, self.trials) if alive else {}
        self._programs.look_at_samples()
        self._note_doubt()
        return [
            UnverifiedError(trial.doubt, mismatch=False)
            if trial.doubt and not isinstance(losses[trial], Exception)
            else _joined(losses[trial], metrics.get(trial))
            for trial in trials
        ]

    def _note_doubt(self) -> None:
        """Note for all trials if kept activations were wrong that they have been trained with."""
        if doubt := self._programs.take_doubt():
            for trial in self.trials:
                trial.doubt = doubt

    def _loss(self, trial: FusedTrial) -> Mapping[str, float]:
        if trial.difference is not None:
            raise UnverifiedError(str(trial.difference), mismatch=True)
        if trial.doubt:
            raise UnverifiedError(trial.doubt, mismatch=False)
        loss = self._losses.mean(self.trials.index(trial), since=trial.first_tick)
        if not math.isfinite(loss):
            # checks cannot tell at which step it began: all non-finite steps look the same
            epoch = trial.plan.epoch + 1
            raise UnverifiedError(f"the loss of epoch {epoch} is {loss} in a pack", mismatch=False)
        return {TRAIN_LOSS: loss}


def _put_batches(
    bound: Bound,
    trials: Sequence[FusedTrial],
    *,
    shared: bool,
    num_rows: Sequence[int],
    verify: bool,
) -> None:
    """Copy this step's batches to where the tape reads them."""
    feed = trials[0].feed
    if isinstance(feed, ArrayFeed) and bound.rows is None:
        # one gather for all trials, as their rows lie one after the other
        parts = [t.feed.index(t.step_index) for t in trials]  # type: ignore[union-attr]
        index = parts[0] if shared else torch.cat(parts)
        bound.gather(feed.samples, index, verify=verify)
        return
    for k, trial in enumerate(trials):
        batch = trial.feed.batch(trial.step_index)
        for leaf, target in zip(batch, bound.batch, strict=True):
            (target if shared else target[k])[: num_rows[k]].copy_(leaf)
    bound.weigh(num_rows)


def _joined(loss: Outcome, metrics: Outcome | None) -> Outcome:
    if isinstance(loss, Mapping) and isinstance(metrics, Mapping):
        return {**loss, **metrics}
    return metrics if isinstance(metrics, Exception) else loss
