"""One trial in a fused pack: its own module, its place in the data, its options step by step."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch.utils import _pytree as pytree

from thrifty.core import derive_seed, step_seed
from thrifty.pack._backend import EpochPlan, Member, UnverifiedError
from thrifty.pack._followed_optimizer import Options
from thrifty.pack._random import seed_step
from thrifty.pack._state import pack_state, unpack_state
from thrifty.pack._task import Task, adapts
from thrifty.pack._trial import TaskTrial, values_at_step
from thrifty.pack.verify import Change, Difference, Watch

from ._feed import Feed, IteratorFeed
from ._registry import UnfusableError
from ._signature import dropout_rates, rate_places, signature


class FeedError(Exception):
    """The batches of one trial cannot be had."""

    def __init__(self, trial: FusedTrial, reason: Exception) -> None:
        super().__init__(str(reason))
        self.trial = trial
        self.reason = reason


WATCH_PARTS = 8
"""All watched values are looked at in so many steps, where user code runs between steps."""


class FusedTrial(TaskTrial):
    """A trial whose parameters are a row of a block.

    Its module keeps views of them, so it can be used by itself.

    Attributes:
        idle_moments: The optimizer's state of parameters that its block does not train, by name.
        layouts: The order of memory that its tensors had before they became a row, by name.
        stays_alone: Whether it must not join a block.
        num_unverified: How many of its last epochs no check has followed yet.
        is_step_verified: Whether a check has passed since it joined its block, and nothing has
            changed since.
        is_evaluation_verified: The same of its metrics.
        solo_evaluation_s: How long its last evaluation alone took.
        difference: What the last check has found; None if it passed.
        time_key: What its time alone depends on.
        refusal_key: Names its structure, as it was when it joined its block, in every process.
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
        self.time_key: Hashable = None
        self.refusal_key = ""
        self._check_at: set[int] = set()
        self._looks_around = False
        self._verified_step = -1
        """The last step of this epoch that was checked."""
        self.tensor_ids: set[int] = set()
        """Identities of its parameters and buffers, while it is in a block."""
        self._ahead: Mapping[str, Any] | None = None
        """The hyper-parameters of the epoch that ``adapt`` was called for before that began."""
        self._watch: Watch | None = None
        self._signature: Hashable | None = None

    def begin(self, member: Member) -> None:
        """Make model and optimizer."""
        super().begin(member)
        self.plan_values = member.values
        self._options: Sequence[Options] = [self.followed.options(member.values)]

    def adapt(self, values: Mapping[str, Any]) -> None:
        """Bring the model up to date with hyper-parameters, once for an epoch.

        Raises:
            UnverifiedError: It is up to date already, but something that its code reads has changed since.
        """
        self._adapt(values)
        self._ahead = None

    def adapt_ahead(self, values: Mapping[str, Any]) -> None:
        """The same before it is known where the trial takes the first step of the epoch.

        ``adapt`` may do what must not be done twice, such as to add a hook, so it is not called again.
        """
        self._adapt(values)
        self._ahead = dict(values)

    def _adapt(self, values: Mapping[str, Any]) -> None:
        if not adapts(self.task) or self._ahead is None or self._ahead != values:
            super().adapt(values)
        elif changed := self.watch.changed():
            raise UnverifiedError(f"{changed.name} has changed since adapt", mismatch=False)

    @property
    def watch(self) -> Watch:
        """The values that the trial's code reads, since they were looked at last."""
        if self._watch is None:
            self._watch = self._new_watch()
        return self._watch

    def _new_watch(self) -> Watch:
        roots = {"task": self.task, "model": self.model}
        return Watch(roots, ignored=rate_places(self.model))

    def new_watch(self) -> Watch:
        """The values that its code reads, as they are now."""
        out = copy(self.watch)
        out.look()
        return out

    @property
    def signature(self) -> Hashable:
        """What trials that do the same have in common; see ``signature``.

        Raises:
            UnfusableError: the model has hooks.
        """
        if self._signature is None:
            self._signature = signature(self.model, attributes=vars(self.task))
        return self._signature

    def look_again(self) -> Change | None:
        """A watched value that has changed, if there is one; from here on it counts as it is now."""
        changed = self.watch.changed()
        if changed:
            # at once: later another trial may have set what it sets
            self._watch = self._new_watch()
            self._signature = None
            self.tensor_ids = set()
        return changed

    def enter(self, *, idle_moments: Mapping[str, Mapping[str, Any]]) -> None:
        """Take a row of a block; until here torch's own optimizer has been used."""
        self.idle_moments = idle_moments
        self.step_index = 0

    def take_moments(self, moments: Mapping[str, Mapping[str, Any]]) -> None:
        """Give torch's own optimizer the options of the last step and a copy of the state.

        Args:
            moments: Of the parameters that were trained in a block, by name.
        """
        self._apply_last_options()
        held = {**self.idle_moments, **moments}
        self.followed.load_moments(unpack_state(pack_state(held)))

    def optimizer_state(self, moments: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """The state of the optimizer as torch's own gives it. Arguments as for ``take_moments``."""
        self._apply_last_options()
        return self.followed.state({**self.idle_moments, **moments})

    def start_fused(self, plan: EpochPlan, feed: Feed, *, tick: int) -> None:
        """Get ready for an epoch; the module has been adapted.

        Raises:
            TaskError: A hyper-parameter that moves is read once, and nothing follows it.
            UnfusableError: Its momentum is zero at some steps only.
        """
        table = self.option_table(plan)
        _check_momentum(table)
        self.plan, self.plan_values = plan, plan.values
        self.is_trained = True
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
        """So many steps begin now, none of them to be checked yet."""
        self.step_index = 0
        self.steps_left = num
        self.first_tick = tick
        self._check_at = set()
        self._looks_around = False
        self._verified_step = -1

    # -- checks --------------------------------------------------------------------------

    def check_at(self, step: int) -> None:
        """Have a step of this epoch checked, unless it is over."""
        if self.step_index <= step < self.step_index + self.steps_left:
            self._check_at.add(step)

    @property
    def is_due(self) -> bool:
        """Whether the next step has to be checked."""
        return not self.is_step_verified or self.step_index in self._check_at

    @property
    def steps_to_check(self) -> int:
        """How many steps there are before one that has to be checked."""
        if self.is_due:
            return 0
        left = [at - self.step_index for at in self._check_at if at >= self.step_index]
        return min(left, default=self.steps_left)

    @property
    def is_verified_here(self) -> bool:
        """Whether the step before this one was checked, so that nothing is left unverified."""
        return self._verified_step == self.step_index - 1

    def look_around(self) -> None:
        """Have this step checked if a watched value has changed since the epoch began.

        The code of a dataset runs between steps. A part of the values is looked at in each step.
        """
        if self._looks_around and self.watch.changed(
            self.step_index % WATCH_PARTS, WATCH_PARTS
        ):
            self.check_at(self.step_index)
            self._watch, self._looks_around = self._new_watch(), False

    def note_check(self, difference: Difference | None) -> None:
        """Take note of what a check of this step has found."""
        self.difference = difference
        self.is_step_verified = difference is None
        if difference is None:
            self.num_unverified = 0
            self._verified_step = self.step_index

    def batch_alone(self, spec: Any) -> Any:
        """A copy of this step's batch, as the task's loss takes it."""
        leaves = self.feed.batch(self.step_index)
        if spec is None:
            return leaves[0]
        return pytree.tree_unflatten([leaf.clone() for leaf in leaves], spec)

    def seed_alone(self) -> None:
        """Seed torch's global stream as the trial alone does before this step."""
        seed_step(step_seed(self._epoch_seed, self.step_index), self.device)

    def apply_options(self) -> None:
        """Give the trial's own optimizer the options of this step."""
        self.followed.apply(self.options())

    @property
    def evaluation_seed(self) -> int:
        """Seeds the random streams before the validation set of this epoch is read."""
        return derive_seed(self.seed, "evaluate", self.plan.epoch)

    # -- steps ---------------------------------------------------------------------------

    def fetch(self) -> None:
        """Has the batch of this step read, so that what goes wrong in its data is known to be this trial's affair.

        Raises:
            FeedError: something went wrong.
        """
        if isinstance(self.feed, IteratorFeed):
            try:
                self.feed.batch(self.step_index)
            except Exception as error:
                raise FeedError(self, error) from error

    @property
    def draw_key(self) -> tuple[Any, ...]:
        """Trials with equal keys draw equal numbers in this step."""
        return (self.step_index, *self._draw_key)

    def seed_step(self) -> None:
        """Puts the generator where the trial's own stream is at this step."""
        self.generator.manual_seed(step_seed(self._epoch_seed, self.step_index))

    def options(self) -> Options:
        """The options of each param group and the clipping norm at this step."""
        return self._options[self.step_index if len(self._options) > 1 else 0]

    def options_now(self) -> tuple[Mapping[str, Any], ...]:
        """The options of each param group at the start of the present epoch."""
        return self._options[0][0]

    @property
    def steady(self) -> bool:
        """Whether its options stay as they are during this epoch."""
        return len(self._options) == 1

    def advance(self) -> None:
        """One step is done."""
        self._ahead = None
        self.step_index += 1
        self.steps_left -= 1

    def option_table(self, plan: EpochPlan) -> Sequence[Options]:
        """The options at each step of an epoch; one entry if they stay as they are."""
        start = self.followed.options(plan.values)
        if self.followed.names.isdisjoint(plan.moving):
            return [start]
        return [
            self.followed.options(values_at_step(plan, step))
            for step in range(self.num_steps(plan.values))
        ]

    def _apply_last_options(self) -> None:
        """Give torch's own optimizer the options of the last step: a block does not use it."""
        if self.step_index:
            self.followed.apply(self._options[min(self.step_index, len(self._options)) - 1])


def _check_momentum(table: Sequence[Options]) -> None:
    """Momentum that is zero in a part of an epoch only is more than rows can do."""
    has_momentum = {tuple(bool(own.get("momentum")) for own in groups) for groups, _ in table}
    if len(has_momentum) > 1:
        raise UnfusableError("its momentum is zero in a part of an epoch")
