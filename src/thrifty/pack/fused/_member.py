"""One trial of a fused pack: its module, its batches and its options at each step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch.utils import _pytree as pytree

from thrifty.core import derive_seed, step_seed
from thrifty.pack._backend import EpochPlan, Member, UnverifiedError
from thrifty.pack._state import named_tensors, pack_state, seed_everything, seed_step, unpack_state
from thrifty.pack.task._data import Batch
from thrifty.pack.task._data_contents import Samples
from thrifty.pack.task._followed_optimizer import Options
from thrifty.pack.task._step_options import offsets_of
from thrifty.pack.task._task import Task, adapts
from thrifty.pack.trial._trial import TaskTrial, values_at_step
from thrifty.pack.verify import Change, Difference, Watch

from ._fusable import UnfusableError, dropout_rates, rate_places, signature


class ArrayFeed:
    """Batches by index into arrays on the device, for any step in any order."""

    def __init__(self, samples: Samples, order: torch.Tensor, sizes: Sequence[int]) -> None:
        self.samples = samples
        self._order = order
        self._offsets = offsets_of(sizes)
        self._parts: tuple[torch.Tensor, ...] = torch.split(order, list(sizes))
        self.sizes = tuple(sizes)
        self.rows_at_most = max(self.sizes)
        self._row_shapes = tuple((tuple(array.shape[1:]), array.dtype) for array in samples.arrays)

    def num_rows(self, step: int) -> int:
        """Return the number of rows in the batch of a step."""
        return self.sizes[step]

    def rest(self, step: int) -> torch.Tensor:
        """Return the row indices of this step and all later ones, in order."""
        return self._order[self._offsets[step] :]

    def index(self, step: int) -> torch.Tensor:
        """Return the row indices of the batch of a step."""
        return self._parts[step]

    def row_shapes(self, step: int) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Return the shape of a row and the dtype of each tensor."""
        return self._row_shapes

    def batch(self, step: int) -> list[torch.Tensor]:
        """Return the tensors of the batch of a step."""
        return [array[self._parts[step]] for array in self.samples.arrays]


class IteratorFeed:
    """Batches from an iterator, one after the other."""

    sizes = ()  # unknown in advance

    def __init__(
        self, batches: Iterator[Batch], *, seeds: Callable[[int], int] | None = None
    ) -> None:
        self._seeds = seeds
        self._batches = batches
        self._step = -1
        self.rows_at_most = 0  # unknown in advance
        self._leaves: list[Any] = []
        self._has_more: bool | None = None

    def num_rows(self, step: int) -> int:
        """Return the number of rows in the batch of a step."""
        return len(self.batch(step)[0])

    def row_shapes(self, step: int) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Return the shape of a row and the dtype of each tensor."""
        return tuple((tuple(leaf.shape[1:]), leaf.dtype) for leaf in self.batch(step))

    def batch(self, step: int) -> list[torch.Tensor]:
        """Return the tensors of a batch; ask for steps in order, each any number of times."""
        while self._step < step:
            if self._seeds is not None:
                seed_everything(self._seeds(self._step + 1))
            self._leaves = pytree.tree_leaves(next(self._batches))
            self._step += 1
        return self._leaves

    def has_more(self) -> bool:
        """Return whether there is a batch after the last one that was asked for."""
        if self._has_more is None:
            if self._seeds is not None:  # a generator may draw after its last batch
                seed_everything(self._seeds(self._step + 1))
            self._has_more = next(self._batches, None) is not None
        return self._has_more


Feed = ArrayFeed | IteratorFeed


class FeedError(Exception):
    """Error raised when a batch of one trial cannot be read."""

    def __init__(self, trial: FusedTrial, reason: Exception) -> None:
        super().__init__(str(reason))
        self.trial = trial
        self.reason = reason


class FusedTrial(TaskTrial):
    """A trial whose parameters are one row of a block.

    Its module holds views of that row, so the module can be used by itself.

    Attributes:
        idle_moments: Optimizer state of the parameters that its block does not train, by name.
        layouts: Memory layout that each tensor had before it became part of a row, by name.
        stays_alone: Whether the trial must not join a block.
        next_epoch: The epoch that it takes after the present one, or first.
        num_unverified: Number of its most recent epochs that no check has followed yet.
        is_step_verified: Whether a check has passed since the trial joined its block, with no
            change since then.
        is_evaluation_verified: The same for its metrics.
        solo_evaluation_s: Seconds that its last evaluation alone took.
        difference: Difference that the last check found; None if it passed.
        doubt: Why its steps in its block must not count; "" if they may.
        time_key: Key of everything that the trial's time alone depends on.
        refusal_key: Name of its structure when it joined its block, the same in every process.
        held: Names of the tensors that its block holds for all trials; None outside of a block.
        is_apart: Whether it is in a block that holds nothing for all trials.
        is_narrow: Whether it is padded, because its model is narrower than its block's structure.
    """

    feed: Feed
    rates: Mapping[str, float]
    idle_moments: Mapping[str, Mapping[str, Any]]
    layouts: Mapping[str, torch.Tensor]

    def __init__(self, task: Task, device: torch.device) -> None:
        super().__init__(task, device)
        self.generator = torch.Generator(device=device)
        self.step_index = 0
        self.steps_left = 0
        self.first_tick = 0
        self.stays_alone = False
        self.num_unverified = 0
        self.is_step_verified = False
        self.is_evaluation_verified = False
        self.solo_evaluation_s = 0.0
        self.difference: Difference | None = None
        self.doubt = ""
        self.time_key: Hashable = None
        self.refusal_key = ""
        self.held: frozenset[str] | None = None
        self.is_apart = False
        self.is_narrow = False
        self._check_at: set[int] = set()
        self._looks_around = False
        self._verified_step = -1
        """Last step of this epoch that was checked; -1 if there is none."""
        self.tensor_ids: set[int] = set()
        """Identities (``id``) of its parameters and buffers while it is in a block."""
        self._ahead: Mapping[str, Any] | None = None
        """Hyper-parameters of an epoch that the model was adapted to before the epoch began."""
        self._watch: Watch | None = None
        self._signature: Hashable | None = None

    def begin(self, member: Member) -> None:
        """Build the model and the optimizer."""
        super().begin(member)
        self.plan_values = member.values
        self.next_epoch = member.epoch
        self._options: Sequence[Options] = ()
        if not self.why_special:
            self._options = [self.followed.options(member.values)]

    def adapt(self, values: Mapping[str, Any], *, epoch: int) -> None:
        """Adapt the model to the hyper-parameters of an epoch, once per epoch.

        Raises:
            UnverifiedError: The model is adapted already (see ``adapt_ahead``), but a value that
                its code reads has changed since then.
        """
        self._adapt(values, epoch=epoch)
        self._ahead = None

    def adapt_ahead(self, values: Mapping[str, Any], *, epoch: int) -> None:
        """Adapt the model before it is known where the trial takes the epoch's first step.

        The task's ``adapt`` may do things that must not happen twice, such as adding a hook.
        When the epoch begins, it is therefore not called again.
        """
        self._adapt(values, epoch=epoch)
        self._ahead = dict(values)

    def _adapt(self, values: Mapping[str, Any], *, epoch: int) -> None:
        if not adapts(self.task) or self._ahead is None or self._ahead != values:
            super().adapt(values, epoch=epoch)
            if not self.is_frozen_intact():
                self.weights.adopt(only=self.held)
        elif changed := self.watch.changed():
            raise UnverifiedError(f"{changed.name} has changed since adapt", mismatch=False)

    @property
    def watch(self) -> Watch:
        """The watch over the values that the trial's code reads, since the last look at them."""
        if self._watch is None:
            self._watch = self._new_watch()
        return self._watch

    def _new_watch(self) -> Watch:
        roots = {"task": self.task, "model": self.model}
        return Watch(roots, ignored=rate_places(self.model))

    def new_watch(self) -> Watch:
        """Return a watch over the values that the trial's code reads, starting from now."""
        out = copy(self.watch)
        out.look()
        return out

    @property
    def signature(self) -> Hashable:
        """Key that is equal for trials that compute the same; see ``_fusable.signature``.

        Raises:
            UnfusableError: The model has hooks.
        """
        if self._signature is None:
            self._signature = signature(self.model, attributes=vars(self.task))
        return self._signature

    def frozen_key(self, names: Collection[str]) -> Hashable:
        """Return a key that is equal for trials whose tensors of these names are equal.

        Raises:
            UnfusableError: One of them is no longer a fresh model's.
        """
        own = named_tensors(self.model)
        out = []
        for name in sorted(names):
            shared = self.frozen.get(name)
            if shared is None or name not in own or not shared.equals(own[name]):
                raise UnfusableError(f"{name}, which was frozen, has changed")
            out.append(shared.number)
        return tuple(out)

    def frozen_content(self) -> Hashable:
        """Return a key of all its frozen tensors; None if it shares none with other trials."""
        return tuple(sorted(each.number for each in self.frozen.values())) or None

    def is_frozen_intact(self) -> bool:
        """Return whether what it shares with other trials has not been written to."""
        if not self.frozen and not self.held:
            return True
        own = named_tensors(self.model)
        names = self.frozen.keys() & own.keys() if self.held is None else self.held
        lent = self.frozen
        return all(n in lent and n in own and lent[n].is_in(own[n]) for n in names)

    def look_again(self) -> Change | None:
        """Return a changed watched value, or None; then watch from the present values on."""
        changed = self.watch.changed()
        if changed:
            # build the new watch now: later, another trial may have set the same values
            self._watch = self._new_watch()
            self._signature = None
            self.tensor_ids = set()
        return changed

    def enter(self, *, idle_moments: Mapping[str, Mapping[str, Any]]) -> None:
        """Take a row of a block, which replaces torch's own optimizer from here on."""
        self.idle_moments = idle_moments
        self.step_index = 0

    def take_moments(self, moments: Mapping[str, Mapping[str, Any]]) -> None:
        """Give torch's own optimizer the options of the last step and a copy of the state.

        Args:
            moments: Optimizer state of the parameters that were trained in a block, by name.
        """
        self._apply_last_options()
        held = {**self.idle_moments, **moments}
        self.followed.load_moments(unpack_state(pack_state(held)))

    def optimizer_state(self, moments: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Return the optimizer's state in the form that torch's own optimizer gives.

        The argument is that of ``take_moments``.
        """
        self._apply_last_options()
        return self.followed.state({**self.idle_moments, **moments})

    def start_fused(self, plan: EpochPlan, feed: Feed, *, tick: int) -> None:
        """Prepare for an epoch, after the module has been adapted.

        Args:
            plan: The epoch.
            feed: The batches of the epoch.
            tick: The block's step counter at which the epoch begins.

        Raises:
            TaskError: A hyper-parameter that changes during training is read only once, so that
                nothing follows the change.
            UnfusableError: The momentum is zero at only some of the steps.
        """
        table = self.option_table(plan)
        _check_momentum(table)
        self.plan, self.plan_values = plan, plan.values
        self.next_epoch = plan.epoch + 1
        self.note_trained()
        self.feed = feed
        self.rates = dropout_rates(self.model)
        self.begin_steps(self.num_steps(plan.values), tick=tick)
        self._looks_around = isinstance(feed, IteratorFeed)
        self._epoch_seed = derive_seed(self.seed, "epoch", plan.epoch)
        self._draw_key = (self._epoch_seed, *self.rates.items())
        self._options = table
        self._note_followed()
        self.readings.check_epoch(plan)

    def begin_steps(self, num: int, *, tick: int) -> None:
        """Begin ``num`` steps, none of which has a check requested yet."""
        self.step_index = 0
        self.steps_left = num
        self.first_tick = tick
        self._check_at = set()
        self._looks_around = False
        self._verified_step = -1

    # -- checks --------------------------------------------------------------------------

    def check_at(self, step: int) -> None:
        """Request a check of a step of this epoch, unless that step is over."""
        if self.step_index <= step < self.step_index + self.steps_left:
            self._check_at.add(step)

    @property
    def is_due(self) -> bool:
        """Whether the next step has to be checked."""
        return not self.is_step_verified or self.step_index in self._check_at

    @property
    def is_suspect(self) -> bool:
        """Whether its results in the block must not count."""
        return self.difference is not None or bool(self.doubt)

    @property
    def steps_to_check(self) -> int:
        """Number of steps to take before one that has to be checked."""
        if self.is_due:
            return 0
        left = [at - self.step_index for at in self._check_at if at >= self.step_index]
        return min(left, default=self.steps_left)

    @property
    def is_verified_here(self) -> bool:
        """Whether the previous step was checked, so that no step is left unverified."""
        return self._verified_step == self.step_index - 1

    def look_around(self) -> None:
        """Request a check of this step if a watched value has changed since the last step.

        The code of a dataset runs between steps and may change values.
        """
        if self._looks_around and self.watch.changed():
            self.check_at(self.step_index)
            self._watch = self._new_watch()  # what has changed may hold other objects now

    def note_check(self, difference: Difference | None) -> None:
        """Record the result of a check of this step; ``difference`` is None if it passed."""
        self.difference = difference
        self.is_step_verified = difference is None
        if difference is None:
            self.num_unverified = 0
            self._verified_step = self.step_index

    def batch_alone(self, spec: Any) -> Any:
        """Return this step's batch in the form that the task's loss takes.

        It is a copy, except for a whole batch (``spec`` is None).
        """
        leaves = self.feed.batch(self.step_index)
        if spec is None:
            return leaves[0]
        return pytree.tree_unflatten([leaf.clone() for leaf in leaves], spec)

    def seed_alone(self) -> None:
        """Seed torch's global random stream as the trial alone does before this step."""
        seed_step(step_seed(self._epoch_seed, self.step_index), self.device)

    def apply_options(self) -> None:
        """Give the trial's own optimizer the options of this step."""
        self.followed.apply(self.options())

    @property
    def evaluation_seed(self) -> int:
        """Seed of the random streams for reading the validation set of this epoch."""
        return derive_seed(self.seed, "evaluate", self.plan.epoch)

    # -- steps ---------------------------------------------------------------------------

    def fetch(self) -> None:
        """Read the batch of this step, so that an error in the data is attributed to this trial.

        Raises:
            FeedError: Reading the batch failed, or there are fewer or more batches than expected,
                which only plain training allows; then its reason is an UnfusableError.
        """
        if not isinstance(self.feed, IteratorFeed):
            return
        wrong = ""
        try:
            self.feed.batch(self.step_index)
            if self.steps_left == 1 and self.feed.has_more():
                wrong = "more"
        except StopIteration:
            wrong = "fewer"
        except Exception as error:
            raise FeedError(self, error) from error
        if wrong:
            raise FeedError(
                self,
                UnfusableError(
                    f"its data have {wrong} batches in an epoch than num_train and batch_size say"
                ),
            )

    @property
    def draw_key(self) -> tuple[Any, ...]:
        """Key of the random draws in this step: trials with equal keys draw equal numbers."""
        return (self.step_index, *self._draw_key)

    def seed_step(self) -> None:
        """Set the generator to the trial's own random stream at this step."""
        self.generator.manual_seed(step_seed(self._epoch_seed, self.step_index))

    def options(self) -> Options:
        """Return the options of each param group and the clipping norm at this step."""
        return self._options[self.step_index if len(self._options) > 1 else 0]

    def options_now(self) -> tuple[Mapping[str, Any], ...]:
        """Return the options of each param group at the start of the present epoch."""
        return self._options[0][0]

    @property
    def steady(self) -> bool:
        """Whether the options are constant during this epoch."""
        return len(self._options) == 1

    def advance(self) -> None:
        """Count one finished step."""
        self._ahead = None
        self.step_index += 1
        self.steps_left -= 1

    def option_table(self, plan: EpochPlan) -> Sequence[Options]:
        """Return the options at each step of an epoch; a single entry if they are constant."""
        start = self.followed.options(plan.values)
        if self.followed.names.isdisjoint(plan.moving):
            return [start]
        return [
            self.followed.options(values_at_step(plan, step))
            for step in range(self.num_steps(plan.values))
        ]

    def _apply_last_options(self) -> None:
        """Give torch's own optimizer the options of the last step, as a block bypasses it."""
        if self.step_index:
            self.followed.apply(self._options[min(self.step_index, len(self._options)) - 1])


def _check_momentum(table: Sequence[Options]) -> None:
    """Raise UnfusableError for momentum that is zero at only some steps: rows cannot do that."""
    has_momentum = {tuple(bool(own.get("momentum")) for own in groups) for groups, _ in table}
    if len(has_momentum) > 1:
        raise UnfusableError("its momentum is zero in a part of an epoch")
