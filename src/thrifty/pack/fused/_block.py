"""A block: up to C trials of one structure, trained as one batched computation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from thrifty.pack._backend import Outcome, guarded
from thrifty.pack._state import State, pack_state
from thrifty.pack._trial import TRAIN_LOSS, check_finite

from ._denormals import denormals_flushed
from ._evaluation import evaluate_packed
from ._feed import ArrayFeed
from ._loss_history import LossHistory
from ._masks import draw_masks
from ._member import FusedTrial
from ._options import BlockOptions
from ._programs import Bound, Programs
from ._row_state import RowState
from ._structure import Structure
from ._tape import Arena
from ._whole import evaluate_whole, whole_step
from .optimizers import GroupedOptimizer


WHOLE_CAPACITY = 64
"""Trials that share whole batches stand in one block, however many of them are best computed at once: batches are made once for it."""


class Block:
    """Rows of flat state; the trials in it stand in the first ones.

    A trial takes a row and leaves it again without anything being rebuilt; the last trial moves up into the gap.
    """

    def __init__(
        self,
        structure: Structure,
        optimizer: GroupedOptimizer,
        *,
        options: BlockOptions,
        device: torch.device,
        arena: Arena,
    ) -> None:
        self.structure = structure
        self.capacity = max(options.size, WHOLE_CAPACITY) if structure.whole else options.size
        self.trials: list[FusedTrial] = []
        self._options = options
        self._state = RowState(structure, optimizer, capacity=self.capacity, device=device)
        self._programs = Programs(
            structure, self._state, options=options, device=device, arena=arena
        )
        self._losses = LossHistory(self.capacity, dtype=structure.layout.dtype, device=device)

    # -- who is in it ------------------------------------------------------------------

    def takes(self, batch_size: int) -> bool:
        """Whether there is a free row, and batches are near enough in size that padding does not cost more than it saves."""
        sizes = [batch_size, *(t.batch_size(t.plan_values) for t in self.trials)]
        return len(self.trials) < self.capacity and max(
            sizes
        ) <= self._options.max_padding * min(sizes)

    def add(self, trial: FusedTrial) -> None:
        """A trial takes the next row; its module's tensors become views of it."""
        self._state.put(trial, len(self.trials))
        self.trials.append(trial)

    def remove(self, trial: FusedTrial) -> None:
        """A trial leaves; its module keeps its values."""
        row = self.trials.index(trial)
        self._state.release(trial)
        last = self.trials.pop()
        if last is not trial:
            self._state.move(last, len(self.trials), row)
            self._losses.move(len(self.trials), row)
            self.trials[row] = last

    def state(self, trial: FusedTrial) -> State:
        """A copy of a trial's full state, in the form that the trial alone would give."""
        return pack_state({
            "model": dict(trial.model.state_dict()),
            "optimizer": trial.optimizer_state(self.moments(trial)),
        })

    def moments(self, trial: FusedTrial) -> dict[str, dict[str, Any]]:
        """The optimizer's state of a trial's trained parameters by name; views, not copies."""
        return self._state.moments(trial, self.trials.index(trial))

    def memory_bytes(self) -> int:
        """What it holds: state, batches, and buffers of its tapes that no other block uses."""
        held = [*self._state.tensors(), *self._programs.tensors()]
        return sum(t.numel() * t.element_size() for t in held)

    # -- training ----------------------------------------------------------------------

    def start(self, num_steps: int) -> int:
        """Makes room for the losses of an epoch that begins now; the tick it begins at."""
        self._losses.make_room(num_steps)
        return self._losses.tick

    def advance(self) -> list[FusedTrial]:
        """Trains all trials until at least one has ended its epoch; those that have."""
        with torch.no_grad(), denormals_flushed():
            while num := min(trial.steps_left for trial in self.trials):
                if self._in_step():
                    self._steps_together(num)
                else:
                    self.one_step()
        return [trial for trial in self.trials if not trial.steps_left]

    @torch.no_grad()
    def one_step(self) -> None:
        """One step of all trials."""
        if self.structure.whole:
            losses = whole_step(
                self.structure, self._state, self.trials, at_once=self._options.size
            )
            self._updater()()
            self._losses.note(losses)
            for trial in self.trials:
                trial.advance()
            return
        shared = self._shares()
        reading = self.trials[:1] if shared else self.trials
        for trial in reading:
            trial.fetch()
        num_rows = [t.feed.num_rows(t.step_index) for t in reading]
        # batches that differ are padded to the largest there is, not to the largest of this step: few tapes do
        longest = max(num_rows)
        padded = min(num_rows) < longest
        if padded:
            longest = max(longest, *(t.feed.rows_at_most for t in reading))
        bound = self._bound(shared=shared, padded=padded, num_rows=longest)
        _put_batches(bound, reading, shared=shared, num_rows=num_rows)
        if bound.draws:
            draw_masks(bound.draws, self.trials, num_rows=num_rows if padded else None)
        bound.tape()
        self._updater()()
        self._note_losses(bound)
        for trial in self.trials:
            trial.advance()

    def last_losses(self) -> torch.Tensor:
        """The losses of the last step, a copy. Shape ``[number of trials]``."""
        return self._losses.last(len(self.trials))

    def _in_step(self) -> bool:
        """Whether all trials have batches of equal sizes from here on, and nothing to draw at random."""
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
        """Some steps of trials that are in step, everything that does not change taken out of the loop."""
        trials = self.trials
        feed = trials[0].feed
        assert isinstance(feed, ArrayFeed)
        shared = self._shares()
        first = trials[0].step_index
        reading = trials[:1] if shared else trials
        orders = torch.stack([t.feed.rest(t.step_index) for t in reading])  # type: ignore[union-attr]
        steady = all(trial.steady for trial in trials)
        update = self._updater()
        begin = 0
        for step in range(first, first + num):
            end = begin + feed.sizes[step]
            bound = self._bound(shared=shared, padded=False, num_rows=end - begin)
            bound.gather(feed.arrays, orders[:, begin:end].reshape(-1))
            bound.tape.run()
            if not steady:
                update = self._updater()
            update()
            self._note_losses(bound)
            begin = end
            for trial in trials:
                trial.advance()

    def _shares(self) -> bool:
        """Whether all trials see the very same batch."""
        feed, step = self.trials[0].feed, self.trials[0].step_index
        return self.structure.sharing and all(
            t.feed is feed and t.step_index == step for t in self.trials
        )

    def _bound(self, *, shared: bool, padded: bool, num_rows: int) -> Bound:
        """The program of a step; all trials of a block have one source, so rows of their batches have one shape."""
        one = self.trials[0]
        return self._programs.training(
            self.capacity if self._options.fixed else len(self.trials),
            shared=shared,
            padded=padded,
            num_rows=num_rows,
            row_shapes=one.feed.row_shapes(one.step_index),
        )

    def _updater(self) -> Callable[[], None]:
        """One update of each trial, with its options as they are now."""
        return self._state.updater([trial.options() for trial in self.trials])

    def _note_losses(self, bound: Bound) -> None:
        losses = bound.tape.outputs[0]
        assert losses is not None
        self._losses.note(losses[: len(self.trials)])

    # -- the end of an epoch -------------------------------------------------------------

    def finish(self, trials: Sequence[FusedTrial]) -> list[Outcome]:
        """Training losses and metrics of trials that have ended their epoch."""
        losses = {trial: guarded(partial(self._loss, trial)) for trial in trials}
        alive = [trial for trial in trials if isinstance(losses[trial], Mapping)]
        metrics = self._evaluate(alive) if alive else {}
        return [_joined(losses[trial], metrics.get(trial)) for trial in trials]

    def _loss(self, trial: FusedTrial) -> Mapping[str, float]:
        loss = self._losses.mean(self.trials.index(trial), since=trial.first_tick)
        check_finite(loss, epoch=trial.plan.epoch)
        return {TRAIN_LOSS: loss}

    def _evaluate(self, trials: Sequence[FusedTrial]) -> Mapping[FusedTrial, Outcome]:
        """All at once where that works, most of them want it, and it pays; otherwise one by one."""
        source = self.trials[0].source
        if (
            self.structure.fused_metrics
            and all(t.source is source for t in self.trials)
            and 2 * len(trials) > len(self.trials)
        ):
            size = len(self.trials)
            if self.structure.whole:
                found = evaluate_whole(
                    self.structure,
                    self._state,
                    source,
                    size=size,
                    at_once=self._options.size,
                )
            else:
                found = evaluate_packed(
                    self._programs,
                    source,
                    size=size,
                    batch_size=self.structure.task.eval_batch_size,
                )
            if found is not None:
                return {trial: found[self.trials.index(trial)] for trial in trials}
        return {trial: guarded(partial(trial.evaluate, trial.plan.epoch)) for trial in trials}


def _put_batches(
    bound: Bound, trials: Sequence[FusedTrial], *, shared: bool, num_rows: Sequence[int]
) -> None:
    """Puts this step's batches where the tape reads them."""
    feed = trials[0].feed
    if isinstance(feed, ArrayFeed) and bound.rows is None:
        # one gather for all: their rows lie one after the other
        parts = [t.feed.index(t.step_index) for t in trials]  # type: ignore[union-attr]
        bound.gather(feed.arrays, parts[0] if shared else torch.cat(parts))
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
