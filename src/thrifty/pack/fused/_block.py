"""A block: up to C trials of one structure, trained as one batched computation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from thrifty.pack._backend import Outcome, guarded
from thrifty.pack._state import State, pack_state
from thrifty.pack._trial import TRAIN_LOSS, check_finite

from ._compiled import compiled
from ._denormals import denormals_flushed
from ._feed import ArrayFeed, IteratorFeed
from ._member import FusedTrial
from ._randomness import Draw, fill
from ._structure import Structure, Variant
from ._tape import Arena, Tape, bind, captured
from .optimizers import RowOptimizer, Rows, clip_rows


MAX_PACKED_EVALUATION = 2**22
"""Elements of packed validation batches beyond which there is nothing to gain over one trial after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bound:
    """A program bound to a block: where its inputs have to be put. ``gathered`` is the batch with all trials' rows in one."""

    tape: Tape
    batch: tuple[torch.Tensor, ...]
    gathered: tuple[torch.Tensor, ...]
    rows: torch.Tensor | None
    draws: tuple[Draw, ...]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOptions:
    """How one structure is fused.

    ``size`` is the number of trials to a block; ``channels_last`` the order of images in memory; ``compile`` sends training steps through
    ``torch.compile``, ``cuda_graphs`` captures them. The latter two keep a block's steps at its full size, so that
    trials may come and go without anything being made again.
    """

    size: int = 8
    channels_last: bool = False
    compile: bool = False
    cuda_graphs: bool = False

    @property
    def fixed(self) -> bool:
        """Whether free rows are trained along, for nothing."""
        return self.compile or self.cuda_graphs


class FeedError(Exception):
    """The batches of one trial cannot be had."""

    def __init__(self, trial: FusedTrial, reason: Exception) -> None:
        super().__init__(str(reason))
        self.trial = trial
        self.reason = reason


class Block:
    """Rows of flat state; the trials in it stand in the first ones.

    A trial takes a row and leaves it again without anything being rebuilt; the last trial moves up into the gap.
    """

    def __init__(
        self,
        structure: Structure,
        optimizer: RowOptimizer,
        *,
        options: BlockOptions,
        device: torch.device,
        arena: Arena,
    ) -> None:
        self.structure = structure
        self.capacity = capacity = options.size
        self._options = options
        self.trials: list[FusedTrial] = []
        self._optimizer = optimizer
        self._device = device
        self._arena = arena
        layout = structure.layout
        shape = (capacity, layout.width)

        def zeros() -> torch.Tensor:
            return torch.zeros(shape, dtype=layout.dtype, device=device)

        self._rows = Rows(
            parameters=zeros(),
            gradients=zeros(),
            moments={name: zeros() for name in optimizer.moments},
            steps=[0] * capacity,
        )
        self._mask: torch.Tensor | None = None
        self._others: list[torch.Tensor] = []  # frozen parameters and buffers, [C, *shape]
        self._bound: dict[Variant, _Bound] = {}
        self._quick: dict[tuple[int, bool, bool, int], _Bound] = {}
        self._history = torch.zeros(0, capacity, dtype=layout.dtype, device=device)
        self._tick = 0

    # -- who is in it ------------------------------------------------------------------

    def add(self, trial: FusedTrial) -> None:
        """A trial takes the next row; its module's tensors become views of it."""
        row = len(self.trials)
        own = {**dict(trial.model.named_parameters()), **dict(trial.model.named_buffers())}
        if not self._others:
            self._others = [
                own[name].detach().new_zeros((self.capacity, *own[name].shape))
                for name in (*self.structure.frozen, *self.structure.buffers)
            ]
        with torch.no_grad():
            self._rows.parameters[row].zero_()
            self._note_width(trial, row)
            views = self._row_views(trial, self._rows.parameters[row])
            for segment, view in zip(self.structure.layout.segments, views, strict=True):
                view.copy_(own[segment.name])
            for name, other in zip(self._other_names, self._others, strict=True):
                other[row].copy_(own[name])
        self._load_moments(trial, row)
        self.trials.append(trial)
        self._attach(trial, row)

    def remove(self, trial: FusedTrial) -> None:
        """A trial leaves; its module keeps its values."""
        row = self.trials.index(trial)
        self._detach(trial)
        last = len(self.trials) - 1
        if row != last:
            with torch.no_grad():
                self._rows.move(last, row)
                if self._mask is not None:
                    self._mask[row].copy_(self._mask[last])
                for other in self._others:
                    other[row].copy_(other[last])
                self._history[:, row].copy_(self._history[:, last])
            self.trials[row] = self.trials[last]
            self._attach(self.trials[row], row)
        self.trials.pop()

    def state(self, trial: FusedTrial) -> State:
        """A copy of a trial's full state, in the form that the trial alone would give."""
        return pack_state({
            "model": dict(trial.model.state_dict()),
            "optimizer": self.moments(trial),
        })

    def _row_views(self, trial: FusedTrial, row: torch.Tensor) -> Iterator[torch.Tensor]:
        """The tensors of a row that are the trial's: corners, if its model is narrower than the block's."""
        shapes = {name: p.shape for name, p in trial.model.named_parameters()}
        return self.structure.layout.row_views(row, shapes)

    def _note_width(self, trial: FusedTrial, row: int) -> None:
        """Gradients beyond a narrower model's own tensors are zeroed, so that what lies there stays zero."""
        layout = self.structure.layout
        narrow = any(
            p.shape != s.shape
            for s, p in zip(
                layout.segments,
                (dict(trial.model.named_parameters())[s.name] for s in layout.segments),
                strict=True,
            )
        )
        if narrow and self._mask is None:
            self._mask = torch.ones_like(self._rows.gradients)
        if self._mask is not None:
            self._mask[row].fill_(0.0 if narrow else 1.0)
            if narrow:
                for view in self._row_views(trial, self._mask[row]):
                    view.fill_(1.0)

    @property
    def _other_names(self) -> tuple[str, ...]:
        return (*self.structure.frozen, *self.structure.buffers)

    def _attach(self, trial: FusedTrial, row: int) -> None:
        parameters = dict(trial.model.named_parameters())
        views = self._row_views(trial, self._rows.parameters[row])
        for segment, view in zip(self.structure.layout.segments, views, strict=True):
            parameters[segment.name].data = view
            parameters[segment.name].grad = None
        buffers = dict(trial.model.named_buffers())
        for name, other in zip(self._other_names, self._others, strict=True):
            (parameters.get(name) if name in parameters else buffers[name]).data = other[row]  # type: ignore[union-attr]

    def _detach(self, trial: FusedTrial) -> None:
        for tensor in (*trial.model.parameters(), *trial.model.buffers()):
            tensor.data = tensor.data.clone()

    # -- moments, as torch's optimiser keeps them -----------------------------------------

    def _load_moments(self, trial: FusedTrial, row: int) -> None:
        self._rows.clear(row)
        state = trial.optimizer.state_dict()["state"]
        if not state:
            return
        layout = self.structure.layout
        numbers = self._numbers(trial)
        for name, moment in self._rows.moments.items():
            views = self._row_views(trial, moment[row])
            for segment, view in zip(layout.segments, views, strict=True):
                held = state.get(numbers[segment.name], {}).get(name)
                if held is not None:
                    view.copy_(held)
        first = next(iter(state.values()))
        self._rows.steps[row] = int(first["step"]) if "step" in first else 1

    def moments(self, trial: FusedTrial) -> dict[int, dict[str, Any]]:
        """The optimiser's state of a trial by number of the parameter; views, not copies."""
        row = self.trials.index(trial)
        steps = self._rows.steps[row]
        if not steps:
            return {}
        layout, numbers = self.structure.layout, self._numbers(trial)
        kept = self._optimizer.kept(trial.options_now())
        views = {
            name: list(self._row_views(trial, moment[row]))
            for name, moment in self._rows.moments.items()
            if name in kept
        }
        return {
            numbers[segment.name]: {
                **({"step": torch.tensor(float(steps))} if self._optimizer.counts else {}),
                **{name: views[name][i] for name in views},
            }
            for i, segment in enumerate(layout.segments)
        }

    def _numbers(self, trial: FusedTrial) -> dict[str, int]:
        """Parameters are numbered in the order that the optimiser was given them."""
        return {name: i for i, (name, _) in enumerate(trial.model.named_parameters())}

    # -- training ----------------------------------------------------------------------

    def start(self, num_steps: int) -> int:
        """Makes room for the losses of an epoch that begins now; the tick it begins at."""
        if num_steps > len(self._history):
            longer = self._history.new_zeros(2 * num_steps, self.capacity)
            ticks = range(max(0, self._tick - len(self._history)), self._tick)
            for tick in ticks:
                longer[tick % len(longer)] = self._history[tick % len(self._history)]
            self._history = longer
        return self._tick

    def advance(self) -> list[FusedTrial]:
        """Trains all trials until at least one has ended its epoch; those that have."""
        with torch.no_grad(), denormals_flushed():
            while num := min(trial.steps_left for trial in self.trials):
                if self._in_step():
                    self._steps_together(num)
                else:
                    self.one_step()
        return [trial for trial in self.trials if not trial.steps_left]

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
        trials, size = self.trials, len(self.trials)
        feed = trials[0].feed
        assert isinstance(feed, ArrayFeed)
        shared = self._shares()
        first = trials[0].step_index
        orders = torch.stack([
            t.feed.rest(t.step_index) for t in trials[: 1 if shared else size]
        ])
        steady = all(trial.steady for trial in trials)
        update = self._updater()
        rows = self.capacity if self._options.fixed else size
        begin = 0
        for step in range(first, first + num):
            end = begin + feed.sizes[step]
            bound = self._bind(rows, shared=shared, longest=end - begin, padded=False)
            index = orders[:, begin:end].reshape(-1)
            for array, target in zip(feed.arrays, bound.gathered, strict=True):
                torch.index_select(array, 0, index, out=target[: len(index)])
            bound.tape.run()
            if not steady:
                update = self._updater()
            update()
            self._note_losses(bound.tape)
            begin = end
            for trial in trials:
                trial.advance()

    def _fetch(self, trials: Sequence[FusedTrial]) -> None:
        """Has the batches of this step read, so that what goes wrong in the data of one trial is known to be its."""
        for trial in trials:
            if isinstance(trial.feed, IteratorFeed):
                try:
                    trial.feed.batch(trial.step_index)
                except Exception as error:
                    raise FeedError(trial, error) from error

    def _shares(self) -> bool:
        """Whether all trials see the very same batch."""
        feed, step = self.trials[0].feed, self.trials[0].step_index
        return self.structure.sharing and all(
            t.feed is feed and t.step_index == step for t in self.trials
        )

    def _note_losses(self, tape: Tape) -> None:
        losses, size = tape.outputs[0], len(self.trials)
        assert losses is not None
        self._history[self._tick % len(self._history), :size].copy_(losses[:size])
        self._tick += 1

    def _updater(self) -> Callable[[], None]:
        """One update of each trial, with its options as they are now."""
        options = [trial.options() for trial in self.trials]
        limits = [limit for _, limit in options]
        clips = any(limit is not None for limit in limits)
        step = self._optimizer.stepper(self._rows, [each for each, _ in options])
        if self._mask is None and not clips:
            return step
        gradients = self._rows.gradients[: len(options)]
        mask = None if self._mask is None else self._mask[: len(options)]

        def update() -> None:
            if mask is not None:
                gradients.mul_(mask)
            if clips:
                clip_rows(gradients, limits)
            step()

        return update

    @torch.no_grad()
    def one_step(self) -> None:
        """One step of all trials."""
        trials, size = self.trials, len(self.trials)
        shared = self._shares()
        self._fetch(trials[:1] if shared else trials)
        num_rows = [t.feed.num_rows(t.step_index) for t in (trials[:1] if shared else trials)]
        # batches that differ are padded to the largest there is, not to the largest of this step: few tapes do
        longest = max(num_rows)
        padded = min(num_rows) < longest
        if padded:
            longest = max(longest, *(t.feed.rows_at_most for t in trials))
        bound = self._bind(
            self.capacity if self._options.fixed else size,
            shared=shared,
            longest=longest,
            padded=padded,
        )
        self._put_batch(bound, shared=shared, num_rows=num_rows)
        if bound.draws:
            self._draw(bound.draws, num_rows=None if bound.rows is None else num_rows)
        bound.tape()
        self._updater()()
        self._note_losses(bound.tape)
        for trial in trials:
            trial.advance()

    def last_losses(self) -> torch.Tensor:
        """The losses of the last step, a copy. Shape ``[number of trials]``."""
        return self._history[(self._tick - 1) % len(self._history), : len(self.trials)].clone()

    def _bind(self, size: int, *, shared: bool, longest: int, padded: bool) -> _Bound:
        """The tape for a step; all trials of a block have one source, so its arrays have one shape."""
        feed = self.trials[0].feed
        key = (size, shared, padded, longest)
        if key in self._quick and isinstance(feed, ArrayFeed):
            return self._quick[key]
        variant = Variant(
            size=size,
            training=True,
            shared=shared,
            padded=padded,
            batch=tuple(
                ((longest, *shape), dtype)
                for shape, dtype in feed.shapes(self.trials[0].step_index)
            ),
        )
        bound = self._quick[key] = self._bound.get(variant) or self._make(variant)
        return bound

    def _make(self, variant: Variant) -> _Bound:
        """Records the program of a variant if need be, and binds it to the first rows."""
        lead = () if variant.shared else (variant.size,)
        batch = tuple(
            self._laid_out(torch.zeros((*lead, *shape), dtype=dtype, device=self._device))
            for shape, dtype in variant.batch
        )
        dtype = self.structure.layout.dtype
        rows = None
        if variant.padded:
            rows = torch.ones(
                variant.size, variant.batch[0][0][0], dtype=dtype, device=self._device
            )
        size, layout = variant.size, self.structure.layout
        trained = list(layout.views(self._rows.parameters[:size]))
        others = [other[:size] for other in self._others]
        # recording runs the model once: not on the live running statistics
        recorded = self.structure.recorded(
            variant, batch=batch, rows=rows, state=[*trained, *[o.clone() for o in others]]
        )
        draws = tuple(
            Draw(noise=torch.zeros_like(d.noise), path=d.path, p=d.p) for d in recorded.draws
        )
        gradients = layout.views(self._rows.gradients[:size])
        inputs = [*batch, *([] if rows is None else [rows]), *trained, *others]
        noises = [d.noise for d in draws]
        wanted = dict(enumerate(gradients, start=1)) if variant.training else {}
        if self._options.compile and variant.training:
            tape = compiled(recorded.program, inputs, draws=noises, destinations=wanted)
        else:
            tape = bind(
                recorded.program, inputs, draws=noises, destinations=wanted, arena=self._arena
            )
        if self._options.cuda_graphs and variant.training:
            tape = self._captured(tape, others)
        bound = _Bound(
            tape=tape,
            batch=batch,
            gathered=batch if variant.shared else tuple(t.flatten(0, 1) for t in batch),
            rows=rows,
            draws=draws,
            names=recorded.names,
        )
        self._bound[variant] = bound
        return bound

    def _captured(self, tape: Tape, others: Sequence[torch.Tensor]) -> Tape:
        """As a CUDA graph; the run that warms up must not count in the running statistics."""
        before = [other.clone() for other in others]
        tape()
        out = captured(tape)
        for other, value in zip(others, before, strict=True):
            other.copy_(value)
        return out

    def _laid_out(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.structure.channels_last and tensor.dim() == 4:
            return tensor.contiguous(memory_format=torch.channels_last)
        return tensor

    def memory_bytes(self) -> int:
        """What it holds: state, batches, and buffers of its tapes that no other block uses."""
        held = [
            self._rows.parameters,
            self._rows.gradients,
            *self._rows.moments.values(),
            *self._others,
        ]
        for bound in self._bound.values():
            held += [*bound.batch, *[draw.noise for draw in bound.draws]]
        return sum(t.numel() * t.element_size() for t in held)

    def _put_batch(self, bound: _Bound, *, shared: bool, num_rows: Sequence[int]) -> None:
        """Puts this step's batches where the tape reads them."""
        trials = self.trials[:1] if shared else self.trials
        feed = trials[0].feed
        if isinstance(feed, ArrayFeed) and bound.rows is None:
            # one gather for all: their rows lie one after the other
            parts = [t.feed.index(t.step_index) for t in trials]  # type: ignore[union-attr]
            index = parts[0] if shared else torch.cat(parts)
            for array, target in zip(feed.arrays, bound.gathered, strict=True):
                torch.index_select(array, 0, index, out=target[: len(index)])
            return
        for k, trial in enumerate(trials):
            batch = trial.feed.batch(trial.step_index)
            for leaf, target in zip(batch, bound.batch, strict=True):
                (target if shared else target[k])[: num_rows[k]].copy_(leaf)
        if bound.rows is not None:
            bound.rows.zero_()
            for k, num in enumerate(num_rows):
                bound.rows[k, :num] = 1.0 / num

    def _draw(self, draws: Sequence[Draw], *, num_rows: Sequence[int] | None) -> None:
        """Each trial's masks; trials at the same place of the same stream have the same ones."""
        first: dict[Any, int] = {}
        same = [
            first.setdefault((t.draw_key, num_rows and num_rows[k]), k)
            for k, t in enumerate(self.trials)
        ]
        drawing = [k for k in range(len(same)) if same[k] == k]
        for k in drawing:
            self.trials[k].seed_step()
        for draw in draws:
            for k in drawing:
                fill(
                    Draw(noise=draw.noise[k : k + 1], path=draw.path, p=draw.p),
                    generators=[self.trials[k].generator],
                    rates=[self.trials[k].rates],
                    num_rows=None if num_rows is None else [num_rows[k]],
                )
            for k, source in enumerate(same):
                if source != k:
                    draw.noise[k].copy_(draw.noise[source])

    # -- the end of an epoch -------------------------------------------------------------

    def finish(self, trials: Sequence[FusedTrial]) -> list[Outcome]:
        """Training losses and metrics of trials that have ended their epoch."""
        losses = {trial: guarded(partial(self._loss, trial)) for trial in trials}
        alive = [trial for trial in trials if isinstance(losses[trial], Mapping)]
        metrics = self._evaluate(alive) if alive else {}
        return [_joined(losses[trial], metrics.get(trial)) for trial in trials]

    def _loss(self, trial: FusedTrial) -> Mapping[str, float]:
        ticks = torch.arange(trial.first_tick, self._tick, device=self._device)
        losses = self._history[ticks % len(self._history), self.trials.index(trial)]
        loss = float(losses.mean())
        check_finite(loss, epoch=trial.plan.epoch)
        return {TRAIN_LOSS: loss}

    def _evaluate(self, trials: Sequence[FusedTrial]) -> Mapping[FusedTrial, Outcome]:
        one_source = len({id(trial.source) for trial in self.trials}) == 1
        if self.structure.fused_metrics and one_source and 2 * len(trials) > len(self.trials):
            found = self._evaluate_packed()
            if found is not None:
                return {trial: found[self.trials.index(trial)] for trial in trials}
        return {trial: guarded(partial(trial.evaluate, trial.plan.epoch)) for trial in trials}

    def _evaluate_packed(self) -> Sequence[Mapping[str, float]] | None:
        """The metrics of all trials at once; None where batches are too large for that to pay."""
        size = len(self.trials)
        task, source = self.structure.task, self.trials[0].source
        sums: dict[str, torch.Tensor] = {}
        num_seen = 0
        for batch, num in source.valid_batches(batch_size=task.eval_batch_size):
            leaves = [
                leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)
            ]
            if size * sum(leaf.numel() for leaf in leaves) > MAX_PACKED_EVALUATION:
                return None
            variant = Variant(
                size=size,
                training=False,
                shared=True,
                padded=False,
                batch=tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves),
            )
            bound = self._bound.get(variant) or self._make(variant)
            for leaf, target in zip(leaves, bound.batch, strict=True):
                target.copy_(leaf)
            with torch.no_grad():
                bound.tape()
            for name, value in zip(bound.names, bound.tape.outputs, strict=True):
                assert value is not None
                sums[name] = sums[name] + value * num if name in sums else value * num
            num_seen += num
        table = {name: total.tolist() for name, total in sums.items()}
        return [
            {name: values[k] / num_seen for name, values in table.items()} for k in range(size)
        ]


def _joined(loss: Outcome, metrics: Outcome | None) -> Outcome:
    if isinstance(loss, Mapping) and isinstance(metrics, Mapping):
        return {**loss, **metrics}
    return metrics if isinstance(metrics, Exception) else loss
