"""Training of one model on unequal workers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from thrifty.core import (
    Clock,
    DivergedError,
    HeteroError,
    PeerLostError,
    SystemClock,
    derive_seed,
    plain_logger,
    step_seed,
)
from thrifty.perf import StepCurve

from ._job import REFUSED, HeteroOptions, Note, StepReport, SummedNotes
from ._loss_check import Inspector, LossCheck
from ._rendezvous import Rendezvous
from ._samples import Collate, Place, PublicAndPrivate, Share
from .training._learner import Learner, Loss, Objective, Pass, Reduction, Weight, settings_digest
from .workers._measure import Meter, StepTimer, device_of
from .workers._membership import FixedMembership, Membership, sums_block


_log = plain_logger("thrifty.hetero")


class HeteroTrainer:
    """Trains one model on workers of unequal speed, with the result of one process.

    A fixed global batch is split by measured speed, so that no worker waits for another. Worker
    ``i`` weights its loss by ``b_i / B``, so the sum of all gradients is that of the whole batch,
    whatever the split (plain averaging, as Horovod's in Stannis, would overweight the few samples
    of a slow worker). Step times travel with the gradients: all workers know them and run the same
    policy, so there is no coordinator. If a worker is lost during a step, the others train the step
    again. The worker that has trained most steps sends its state to the others.

    While it trains, the trainer checks that the loss may be split: at the first step, after a
    change of workers, and at random steps within 1 % of the time. A loss whose parts do not add up
    is an error.

    Dropout and other draws are a function of (seed, epoch, step, first sample of the share): the
    same distribution as in one process, but other draws. This holds for draws from torch's, NumPy's
    and Python's global streams, in the data set, the model and the loss, and for generators that a
    data set or ``collate`` keeps.

    Where the exchange of gradients takes longer than some workers save, they stand by: the others
    train without them, and they report no steps until they are called back, at the latest when
    ``run`` ends on the others. Then they get the others' state.

    You may freeze, unfreeze or replace parameters between two steps, in the same way on all
    workers.

    Args:
        model: A plain model on this worker's device.
        optimizer: Optimizer of the model's parameters.
        dataset: Map-style data set that every worker can read.
        loss: Function from a model and a batch to a scalar.
        global_batch: Samples of one step, over all workers.
        seed: Seed of the sample order and of random draws.
        members: How workers find each other (default: the workers that torchrun started).
        private: A data set that only this worker can read. Its samples never leave it.
        collate: Function from a list of samples to a batch.
        drop_last: Leave out the last step of an epoch if it has fewer samples than the others.
        reduction: Whether ``loss`` is a mean over the batch or a sum.
        weight: Weight of a batch in that mean, such as its number of tokens or the sum of its class
            weights (default: its number of samples).
        meter: Energy meter of this worker, whose readings are reported.
        options: Other options.
        clock: Clock to measure with (default: the machine's).

    Attributes:
        steps: Steps trained.
        clip_norm: Norm to clip gradients to, initially that of the options. A new value takes
            effect at the next step.

    Raises:
        HeteroError: ``global_batch`` is below 1, there are no samples, with ``drop_last`` too few
            for a step, or no trainable parameters.

    >>> model = nn.Linear(2, 1)
    >>> data = torch.utils.data.TensorDataset(torch.randn(32, 2), torch.randn(32, 1))
    >>> trainer = HeteroTrainer(
    ...     model,
    ...     torch.optim.SGD(model.parameters(), lr=0.1),
    ...     data,
    ...     global_batch=16,
    ...     seed=0,
    ...     loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    ... )
    >>> [report.sizes for report in trainer.run(epochs=1)]
    [(16,), (16,)]
    """

    def __init__(  # noqa: PLR0913 -- all but three are keyword-only
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        dataset: Dataset[Any],
        *,
        loss: Loss,
        global_batch: int,
        seed: int = 0,
        members: Membership | None = None,
        private: Dataset[Any] | None = None,
        collate: Collate | None = None,
        drop_last: bool = False,
        reduction: Reduction = "mean",
        weight: Weight | None = None,
        meter: Meter | None = None,
        options: HeteroOptions | None = None,
        clock: Clock | None = None,
    ) -> None:
        if global_batch < 1:
            raise HeteroError(f"`global_batch` must be at least 1, got {global_batch}")
        self.steps = 0
        self._options = options or HeteroOptions()
        self.clip_norm = self._options.clip_norm
        samples = PublicAndPrivate(dataset, private, collate)
        _check_fill_a_step(samples, global_batch, drop_last=drop_last and private is None)
        self._members = members or FixedMembership(device=device_of(model))
        self._learner = Learner(
            model,
            optimizer,
            samples,
            objective=Objective(loss=loss, reduction=reduction, weight=weight),
            sum_=self._sum_in_pass if self._options.batch_norm == "global" else None,
            bucket_cap_mb=self._options.bucket_cap_mb,
            micro_batch=self._options.micro_batch,
        )
        clock = clock or SystemClock()
        self._inspector = Inspector(
            LossCheck(model, self._learner.objective, device=self._learner.device, collate=collate),
            self._learner,
            seed=seed,
            clock=clock,
            enabled=self._options.verify,
        )
        self._workers = Rendezvous(
            self._members,
            self,
            rejoin_state=self._rejoin_state,
            load_rejoin_state=self._load_rejoin_state,
            on_change=self._inspector.restart,
            learner=self._learner,
            batch=global_batch,
            seed=seed,
            options=self._options,
            clock=clock,
        )
        self._timer = StepTimer(clock=clock, meter=meter)
        self._global_batch = global_batch
        self._drop_last = drop_last
        self._seed = seed
        self._place = Place()
        self._refusal = ""

    @property
    def split(self) -> tuple[int, ...]:
        """Samples in a step of each worker that trains; empty before the first one."""
        return self._workers.allocation.split if self._workers.group.met else ()

    @property
    def curves(self) -> tuple[StepCurve, ...]:
        """Current speed curves of the workers that train; empty before the first step."""
        return self._workers.curves

    @property
    def bytes_per_step(self) -> int:
        """Bytes that a worker sends at each step: gradients and the control numbers beside them."""
        return self._learner.gradients.num_bytes

    def run(self, *, epochs: int) -> Iterator[StepReport]:
        """Train until ``epochs`` epochs are complete, and report each step.

        Work that the caller does between two reports (schedulers, logging, saving) does not count
        as training time.

        A worker that stands by reports nothing meanwhile. When the others end, or leave their loops
        early, it gets their state and ends, too.

        Args:
            epochs: Total number of epochs, including those of a loaded state.

        Raises:
            DivergedError: The loss is no longer finite.
            TooFewWorkersError: Not enough workers are left.
        """
        workers = self._workers
        workers.begin()
        try:
            while self._continues(epochs):
                report = self._try_step()
                if report is None:
                    continue
                yield report
                if not workers.group.stands_by and self._is_at_end():
                    self._place = Place(epoch=self._place.epoch + 1)
        except GeneratorExit:
            workers.release()
            raise
        except Exception as error:
            workers.fail(error)
            raise
        workers.release()

    def state(self) -> dict[str, Any]:
        """Return everything needed to resume, equal on all workers.

        Returns:
            Nested dicts and lists of tensors and plain values.
        """
        return {
            **self._learner.state(),
            "steps": self.steps,
            "epoch": self._place.epoch,
            "public": self._place.public,
            "private": dict(self._place.private),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state`` returned; call this before the first step."""
        self._learner.load_state(state)
        self.steps = int(state["steps"])
        self._place = Place(
            epoch=int(state["epoch"]),
            public=int(state["public"]),
            private={str(name): int(num) for name, num in state["private"].items()},
        )

    def close(self) -> None:
        """Leave the other workers."""
        try:
            self._workers.release()
        finally:
            self._members.close()

    def _continues(self, epochs: int) -> bool:
        # A worker that stands by does not know how far the others are.
        workers = self._workers
        return not workers.stopped and (workers.group.stands_by or self._place.epoch < epochs)

    def _is_at_end(self) -> bool:
        """Return whether the epoch has no step left."""
        allocation = self._workers.allocation
        return allocation.left(self._place) < (sum(allocation.split) if self._drop_last else 1)

    def _try_step(self) -> StepReport | None:
        """Train one step; return None if a worker was lost during it, or this one stood by."""
        workers = self._workers
        try:
            if not workers.trains_next():
                return None
            if self._is_at_end():
                # The lost worker's private samples are gone, and nothing else is left of this
                # epoch.
                self._place = Place(epoch=self._place.epoch + 1)
                return None
            return self._step()
        except PeerLostError as error:
            _log.warning("step %d: %s", self.steps + 1, error)
            self._learner.undo()
            workers.meet(broken=True)
            return None

    def _step(self) -> StepReport | None:
        workers = self._workers
        self._timer.begin()
        shares = workers.allocation.shares(self._place)
        sizes = tuple(len(share) for share in shares)
        check = self._inspector.begin(self.steps, largest=max(sizes))
        summed, probed = self._exchange(shares, check=check)
        if any(summed.news):
            # Discard the sums: the step is trained again, or training ends.
            self._learner.undo()
            self._follow(summed.news)
            return None
        loss = self._normalise(summed, batch_size=sum(sizes))
        if len(set(summed.settings)) > 1:
            self._share_settings()
        self._update(loss=loss)
        workers.allocation.advance(self._place, shares)
        names, rank = workers.group.view.names, workers.group.view.rank
        if check:
            self._inspector.end(check_s=summed.check_s, step_s=max(summed.busy_s))
        if summed.buffers and not all(sizes):
            self._share_buffers(sizes)
        self._timer.end(check_s=self._inspector.seconds)
        workers.observe(summed, sizes, probed=probed, checked=check)
        return StepReport(
            epoch=self._place.epoch,
            step=self.steps,
            loss=loss,
            rank=rank,
            names=names,
            sizes=sizes,
            share=shares[rank],
            busy_s=summed.busy_s,
            step_s=self._timer.step_s,
            joules=summed.joules,
            events=workers.take_events(),
            check_s=summed.check_s,
        )

    def _sum_in_pass(self, tensor: Tensor) -> None:
        """Sum over all workers during a pass; the time does not count as work of this one."""
        if not sums_block(tensor.device):
            self._members.all_reduce(tensor)
            return
        self._learner.synchronise()  # its own work until here does count
        with self._timer.summing():
            self._members.all_reduce(tensor)

    def _exchange(self, shares: Sequence[Share], *, check: bool) -> tuple[SummedNotes, int]:
        """Sum gradients and notes over the workers; also return the number of probed samples."""
        sizes = tuple(len(share) for share in shares)
        share = shares[self._workers.group.view.rank]
        self._refusal = self._learner.refusal()
        news = REFUSED if self._refusal else self._learner.news()
        done = self._learner.backward(
            # A changed model is only trained after all workers know of the change.
            Share(public=()) if news else share,
            batch_size=sum(sizes),
            seed=self._draws(share),
            begin=self._members.begin_all_reduce,
            inspect=self._inspector.inspect if check else None,
        )
        probed = 0 if news else self._probe(sizes)
        busy_s = self._timer.busy_s(check_s=self._inspector.seconds)
        self._refusal = self._refusal or self._inspector.finding
        self._note(done, busy_s=busy_s, news=REFUSED if self._refusal else news)
        self._learner.gradients.reduce(self._members.begin_all_reduce)
        summed = SummedNotes.read(self._learner.gradients.control)
        self._timer.summed(check_s=self._inspector.seconds)
        return summed, probed

    def _note(self, done: Pass, *, busy_s: float, news: int) -> None:
        Note(
            busy_s=busy_s,
            news=news,
            settings=self._settings_digest() if self._workers.standby.has_stood_by else 0,
            joules=self._timer.joules(busy_s),
            loss=done.loss,
            weight=done.weight,
            check_s=self._inspector.seconds,
            buffers=done.buffers,
            whole_s=self._timer.summed_s,
        ).write(self._learner.gradients.control, rank=self._workers.group.view.rank)

    def _follow(self, news: Sequence[int]) -> None:
        """Agree on a change that a worker has reported.

        Raises:
            HeteroError: A loss or a layer cannot be split, or workers train different parameters.
        """
        group = self._workers.group
        names = group.view.names
        if REFUSED in news:
            source, said = news.index(REFUSED), {"why": self._refusal}
            group.share(lambda: said, said.update, source=source)
            raise HeteroError(f"{said['why']} (found by worker {names[source]})")
        if len(set(news)) > 1:
            changed = [name for name, what in zip(names, news, strict=True) if what]
            raise HeteroError(
                f"after step {self.steps}, workers {', '.join(changed)} of {', '.join(names)} "
                "train other parameters than before, and not all of them the same ones; freeze, "
                "unfreeze and replace parameters after the same step on all workers"
            )
        self._workers.make_room()
        # Each worker has initialised a new parameter differently.
        group.share_state()
        self._inspector.restart()

    def _normalise(self, summed: SummedNotes, *, batch_size: int) -> float:
        """Divide gradient and loss by the weight of the global batch; return the loss."""
        if not self._learner.objective.has_weights:
            return summed.loss
        factor = batch_size / summed.weight if summed.weight else math.nan
        self._learner.gradients.scale(factor)
        return summed.loss * factor

    def _share_buffers(self, sizes: Sequence[int]) -> None:
        """Send the buffers that a forward pass has changed to workers without a share."""
        source = next(rank for rank, size in enumerate(sizes) if size)
        learner = self._learner
        try:
            self._workers.group.share(learner.buffers, learner.load_buffers, source=source)
        except PeerLostError as error:
            self._workers.meet_after(error)

    def _settings(self) -> dict[str, Any]:
        return {"clip_norm": self.clip_norm, "groups": self._learner.settings()}

    def _settings_digest(self) -> int:
        return settings_digest(self._settings())

    def _share_settings(self) -> None:
        """Take over learning rates and other settings from a worker that has never stood by.

        A schedule in the caller's loop has missed the steps of a worker that stood by.
        """

        def take(settings: Mapping[str, Any]) -> None:
            self.clip_norm = settings["clip_norm"]
            self._learner.load_settings(settings["groups"])

        source = self._workers.standby.constant[0]
        self._workers.group.share(self._settings, take, source=source)

    def _update(self, *, loss: float) -> None:
        if not math.isfinite(loss):
            raise DivergedError(
                f"the loss of step {self.steps + 1} is {loss}: try a smaller learning rate"
            )
        growth = self._options.growth
        with self._timer.updating():
            self._learner.update(
                lr_factor=1.0
                if growth is None
                else growth.factor(
                    batch=self._workers.allocation.batch, base=self._global_batch, step=self.steps
                ),
                clip_norm=self.clip_norm,
            )
        self.steps += 1

    def _probe(self, sizes: Sequence[int]) -> int:
        num = self._workers.allocation.probe(self.steps)
        if num and not sizes[self._workers.group.view.rank]:
            self._learner.rehearse(num)
            self._learner.gradients.zero()
        return num

    def _rejoin_state(self) -> dict[str, Any]:
        """Return what a worker that has stood by needs to train the next step."""
        return {
            "state": self.state(),
            "buffers": self._learner.buffers(),
            "clip_norm": self.clip_norm,
            "next_check": self._inspector.next_step,
        }

    def _load_rejoin_state(self, state: Mapping[str, Any]) -> None:
        """Take over what ``_rejoin_state`` returned on another worker."""
        self.load_state(state["state"])
        self._learner.load_buffers(state["buffers"])
        self.clip_norm = state["clip_norm"]
        self._inspector.next_step = state["next_check"]

    def _draws(self, share: Share) -> int:
        view = self._workers.group.view
        whose = view.names[view.rank] if share.private else "public"
        first = (share.private or share.public or (0,))[0]
        return step_seed(
            derive_seed(self._seed, "draws", whose, self._place.epoch) + first, self.steps
        )


def balance(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Dataset[Any],
    *,
    epochs: int,
    **options: Any,
) -> Iterator[StepReport]:
    """Train on unequal workers and report each step; close the trainer at the end.

    This is a shorthand for ``HeteroTrainer(...).run(epochs=...)``.

    Args:
        model: See ``HeteroTrainer``.
        optimizer: See ``HeteroTrainer``.
        dataset: See ``HeteroTrainer``.
        epochs: Number of epochs to train.
        options: ``loss``, ``global_batch`` and other arguments of ``HeteroTrainer``.

    >>> model = nn.Linear(2, 1)
    >>> data = torch.utils.data.TensorDataset(torch.randn(32, 2), torch.randn(32, 1))
    >>> def loss(model, batch):
    ...     return (model(batch[0]) - batch[1]).square().mean()
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> len(list(balance(model, sgd, data, loss=loss, global_batch=16, epochs=2)))
    4
    """
    trainer = HeteroTrainer(model, optimizer, dataset, **options)
    try:
        yield from trainer.run(epochs=epochs)
    finally:
        trainer.close()


def _check_fill_a_step(samples: PublicAndPrivate, global_batch: int, *, drop_last: bool) -> None:
    """Raise an error if there are no samples to train on.

    Args:
        samples: The samples.
        global_batch: Samples of one step.
        drop_last: Whether steps of fewer samples are left out.
    """
    if not samples.num_public + samples.num_private:
        raise HeteroError("there are no samples to train on")
    if drop_last and samples.num_public < global_batch:
        raise HeteroError(
            f"with drop_last=True, {samples.num_public} samples are not one step of "
            f"{global_batch}; lower the batch size, or leave drop_last out"
        )
