"""``thrifty.pack(models, ...)``: several models trained jointly in a loop of your own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from thrifty.core import UsageError, derive_seed, plain_logger, step_seed

from ._counters import step_counters
from ._hyperparameters import HyperParameters
from ._optimizer import Optimizer
from ._random import borrowed_streams, seed_step
from ._task import Task
from .fused._block import Block
from .fused._denormals import denormals_flushed
from .fused._dry_run import dry_run
from .fused._feed import IteratorFeed
from .fused._member import FusedTrial
from .fused._options import BlockOptions
from .fused._registry import UnfusableError
from .fused._signature import dropout_rates, signature
from .fused._tape import Arena
from .fused.optimizers import optimizer_for


logger = plain_logger(__name__)

Loss = Callable[[torch.nn.Module, Any], torch.Tensor]


class Pack:
    """K models in training; made by calling ``thrifty.pack``.

    Attributes:
        models: the models themselves. They can be used at any time: while packed, their parameters are views of the pack's.
        values: each model's hyper-parameters; change them between steps as you like.
        fused: whether they are trained as one computation; None before the first step. Where that does not work they
            are trained one after the other, with the same results, and the log says why.
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
            raise UsageError(
                "thrifty.pack([]) has nothing to train; give it at least one model"
            )
        for name, given in (("values", values), ("seeds", seeds)):
            if given is not None and len(given) != len(models):
                raise UsageError(
                    f"thrifty.pack: {len(models)} models and {len(given)} {name}; give one for each model"
                )
        self.models = list(models)
        self.values = [dict(v) for v in values] if values is not None else [{} for _ in models]
        self.fused: bool | None = None
        self._seeds = list(seeds) if seeds is not None else list(range(len(models)))
        self._task = _LossTask(loss, optimizer)
        self._device = _device_of(models[0])
        self._block: Block | None = None
        self._trials = [
            _GivenTrial(self._task, model, values=v, seed=s, device=self._device)
            for model, v, s in zip(self.models, self.values, self._seeds, strict=True)
        ]
        self._num_steps = 0

    def step(self, batch: Any = None, *, batches: Sequence[Any] | None = None) -> torch.Tensor:
        """One update of every model: on ``batch``, or each on its own of ``batches``. Returns the losses, ``[K]``.

        Random layers draw from a stream named by the model's seed and the number of the step.

        Raises:
            UsageError: neither or both were given, or not one batch for each model.
        """
        if (batch is None) == (batches is None):
            raise UsageError(
                "Pack.step takes a batch for all, or batches=[...], one for each model"
            )
        if batches is not None and len(batches) != len(self.models):
            raise UsageError(
                f"Pack.step: {len(self.models)} models and {len(batches)} batches; give one for each model"
            )
        each = [batch] * len(self.models) if batches is None else list(batches)
        with borrowed_streams():
            if self.fused is None:
                self._fuse(each[0])
            losses = self._step_fused(each) if self.fused else self._step_plain(each)
        self._num_steps += 1
        return losses

    def __len__(self) -> int:
        return len(self.models)

    def __iter__(self) -> Iterator[torch.nn.Module]:
        return iter(self.models)

    def _fuse(self, batch: Any) -> None:
        first = self._trials[0]
        try:
            whole = {signature(t.model, attributes={}) for t in self._trials}
            if len(whole) > 1:
                raise UnfusableError("the models differ in structure")
            kinds = [optimizer_for(t.spec, t.spec.resolve(t.values)) for t in self._trials]
            if len({kind for _, kind in kinds}) > 1:
                raise UnfusableError("the models' optimisers differ in kind")
            structure = dry_run(self._task, first.model, batch)
        except UnfusableError as error:
            logger.warning("the models are trained one after the other, not fused: %s", error)
            self.fused = False
            return
        self._block = Block(
            structure,
            kinds[0][0],
            options=BlockOptions(size=len(self._trials)),
            device=self._device,
            arena=Arena(),
        )
        for trial in self._trials:
            self._block.add(trial)
        self.fused = True

    def _step_fused(self, batches: Sequence[Any]) -> torch.Tensor:
        assert self._block is not None
        feeds: dict[int, IteratorFeed] = {}
        for trial, batch, values in zip(self._trials, batches, self.values, strict=True):
            feed = feeds.setdefault(id(batch), IteratorFeed(iter([batch])))
            trial.ready(feed, values=values, step=self._num_steps, tick=self._block.start(1))
        with denormals_flushed():
            self._block.one_step()
        return self._block.last_losses()

    def _step_plain(self, batches: Sequence[Any]) -> torch.Tensor:
        losses = []
        for trial, batch, values in zip(self._trials, batches, self.values, strict=True):
            for group in trial.optimizer.param_groups:
                group.update(trial.spec.resolve(values))
            seed_step(_seed(trial.seed, self._num_steps), self._device)
            trial.model.train()
            trial.optimizer.zero_grad(set_to_none=True)
            loss = self._task.loss(trial.model, batch)
            loss.backward()
            limit = trial.spec.clip_value(values)
            if limit is not None:
                torch.nn.utils.clip_grad_norm_(trial.model.parameters(), limit)
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
    """Packs models, so that one call trains all of them by one step.

    Args:
        models: plain modules of one structure, each with its own weights, on one device. (Of several structures: they are
            trained in turn.)
        loss: ``loss(model, batch)``, a scalar, as you would write it for one model.
        optimizer: ``thrifty.SGD(lr="lr", momentum=0.9)`` and the like; a string names an entry of ``values``.
        values: hyper-parameters of each model.
        seeds: of what each model draws at random, such as dropout; by default its position.

    Each model ends up where it would alone, up to rounding. Liu et al., DEEM 2021, call this primitive pack.

    >>> import thrifty as th
    >>> models = [torch.nn.Linear(4, 2) for _ in range(8)]
    >>> packed = th.pack(models, loss=lambda model, batch: model(batch).square().mean(),
    ...                  optimizer=th.SGD(lr="lr"), values=[{"lr": 0.1 * k} for k in range(8)])
    >>> for _ in range(3):
    ...     losses = packed.step(torch.ones(16, 4))
    >>> losses.shape, packed.fused
    (torch.Size([8]), True)

    Raises:
        UsageError: no models, or not one entry of ``values`` or ``seeds`` for each.
    """
    return Pack(models, loss=loss, optimizer=optimizer, values=values, seeds=seeds)


class _LossTask(Task):
    """A loss function as a task."""

    def __init__(self, loss: Loss, optimizer: Optimizer) -> None:
        self._loss = loss
        self.optimizer = optimizer

    def data(self, hp: HyperParameters) -> Any:
        raise NotImplementedError  # batches are given step by step

    def model(self, hp: HyperParameters) -> torch.nn.Module:
        raise NotImplementedError  # models are given

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return self._loss(model, batch)

    def metrics(self, model: torch.nn.Module, batch: Any) -> Mapping[str, Any]:
        return {"loss": self._loss(model, batch)}


class _GivenTrial(FusedTrial):
    """A trial whose model and batches come from outside."""

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
        self.spec = task.optimizer
        self.optimizer = self.spec.build(model.parameters(), values)
        self._options = [(self.spec.resolve(values), self.spec.clip_value(values))]

    def ready(
        self, feed: IteratorFeed, *, values: Mapping[str, Any], step: int, tick: int
    ) -> None:
        """Gets ready for one step."""
        self.feed = feed
        self.rates = dropout_rates(self.model)
        self.step_index, self.steps_left, self.first_tick = 0, 1, tick
        self._own_seed = _seed(self.seed, step)
        self._draw_key = (self._own_seed, *self.rates.items())
        self._options = [(self.spec.resolve(values), self.spec.clip_value(values))]

    def seed_step(self) -> None:
        """As the plain loop seeds torch's stream."""
        self.generator.manual_seed(self._own_seed)


def _seed(seed: int, step: int) -> int:
    return step_seed(derive_seed(seed, "pack"), step)


def _device_of(model: torch.nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))
