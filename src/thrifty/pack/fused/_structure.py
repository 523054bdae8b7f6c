"""A structure: what the trials of a fused pack have in common, and the programs recorded for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from thrifty.pack._counters import step_counters
from thrifty.pack._task import Task

from . import rules as rules
from ._layout import Layout
from ._packed import Group, Packed
from ._randomness import Draw, Randomness, TrialValue, plain
from ._record import Program, record
from ._registry import UnfusableError
from ._signature import dropouts, follows_rate_itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Which program: for how many trials, on what batches.

    ``shared``: all see the same batch; ``padded``: batches differ in size and have row weights;
    ``batch``: shapes and dtypes of its tensors, for one trial.
    """

    size: int
    training: bool
    shared: bool
    padded: bool
    batch: tuple[tuple[tuple[int, ...], torch.dtype], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A program, the random draws it needs, and the names of what it returns before any gradients."""

    program: Program
    draws: tuple[Draw, ...]
    names: tuple[str, ...]


def in_order(
    batch: Sequence[torch.Tensor],
    rows: torch.Tensor | None,
    state: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """The inputs of a program, in the order in which it takes them."""
    return [*batch, *([] if rows is None else [rows]), *state]


class Structure:
    """A skeleton model whose tensors are packed while a program is recorded.

    Attributes:
        layout: of the trained parameters.
        frozen: names of parameters that are not trained.
        buffers: names of buffers.
        counters: names of those that count optimiser steps.
    """

    def __init__(
        self,
        task: Task,
        model: torch.nn.Module,
        *,
        batch_spec: Any,
        trained: Sequence[str],
        channels_last: bool = False,
    ) -> None:
        self.task = task
        self.model = model
        self.batch_spec = batch_spec
        self.channels_last = channels_last
        parameters = dict(model.named_parameters())
        self.layout = Layout.of([(name, parameters[name]) for name in trained])
        self.frozen = tuple(name for name in parameters if name not in trained)
        self.buffers = tuple(name for name, _ in model.named_buffers())
        self.counters = frozenset(step_counters(model))
        self._places = _places(model)
        self.built_in: set[str] = set()
        """Paths of dropout rates that the model computes with: programs hold for these rates alone."""
        for path, (layer, name) in dropouts(model).items():
            own = self.built_in if follows_rate_itself(layer) else None
            setattr(layer, name, TrialValue(plain(getattr(layer, name)), path, own))
        self._recorded: dict[Variant, Recorded] = {}
        self.in_double: dict[int, tuple[Structure, Recorded]] = {}
        """The same in double precision, by the number of rows: what second opinions run."""
        self.whole = False
        """Whether batches are objects that all trials of a group see at once, of another shape at each step."""
        self.sharing = True
        """Whether one batch for all trials may be given as one."""
        self.padding = True
        """Whether batches of different sizes may be padded."""
        self.draws_nothing = False
        """Whether its training steps need no random numbers."""
        self.fused_metrics = True
        """Whether metrics can be worked out for all trials at once."""

    @property
    def trained(self) -> tuple[str, ...]:
        """Names of the trained parameters."""
        return tuple(segment.name for segment in self.layout.segments)

    @property
    def untrained(self) -> tuple[str, ...]:
        """Names of frozen parameters and buffers."""
        return (*self.frozen, *self.buffers)

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of all tensors, in the order in which a program takes them."""
        return (*self.trained, *self.untrained)

    @property
    def has_images(self) -> bool:
        """Whether it has convolutions of images, which may be faster with channels last."""
        return any(len(segment.shape) == 4 for segment in self.layout.segments)

    def arranged(
        self, groups: Sequence[Sequence[str]], *, channels_last: bool = False
    ) -> Structure:
        """The same structure, its trained parameters in the order of their param groups.

        Args:
            groups: The names of the parameters of each.
            channels_last: Whether images lie in memory with their channels last.
        """
        trained = set(self.trained)
        out = Structure(
            self.task,
            self.model,
            batch_spec=self.batch_spec,
            trained=[name for names in groups for name in names if name in trained],
            channels_last=channels_last,
        )
        out.built_in |= self.built_in
        out.whole, out.sharing, out.padding = self.whole, self.sharing, self.padding
        out.draws_nothing, out.fused_metrics = self.draws_nothing, self.fused_metrics
        return out

    def recorded(
        self,
        variant: Variant,
        *,
        batch: Sequence[torch.Tensor],
        rows: torch.Tensor | None,
        state: Sequence[torch.Tensor],
    ) -> Recorded:
        """The program of a variant, recorded when first needed on the tensors given."""
        if variant not in self._recorded:
            self._recorded[variant] = self.record(variant, batch=batch, rows=rows, state=state)
        return self._recorded[variant]

    def record(
        self,
        variant: Variant,
        *,
        batch: Sequence[torch.Tensor],
        rows: torch.Tensor | None,
        state: Sequence[torch.Tensor],
        seed: int = 0,
    ) -> Recorded:
        """Records loss and gradients (training) or metrics (otherwise) of ``variant.size`` trials.

        ``state`` has the tensors of ``state_names``, each ``[K, ...]``; ``seed`` is for the random numbers that are drawn meanwhile.

        Raises:
            UnfusableError: the model does something that cannot be done for all trials at once.
        """
        generators = [
            torch.Generator(device=state[0].device).manual_seed(seed + k)
            for k in range(variant.size)
        ]
        group = Group(
            variant.size,
            randomness=Randomness(generators),
            rows=rows,
            channels_last=self.channels_last,
        )
        num_trained = len(self.layout.segments)
        trained = [t.detach().requires_grad_(variant.training) for t in state[:num_trained]]
        state = [*trained, *[t.detach() for t in state[num_trained:]]]
        leaves = list(batch) if variant.shared else [group.pack(t) for t in batch]
        whole = pytree.tree_unflatten(leaves, self.batch_spec)
        names: list[str] = []

        def train() -> list[torch.Tensor | None]:
            names.append("loss")
            return self._train(group, whole, trained)

        def evaluate() -> list[torch.Tensor | None]:
            metrics = self._evaluate(group, whole)
            names.extend(metrics)
            return list(metrics.values())

        inputs = in_order(batch, rows, state)
        with self._holding(group, state), torch.set_grad_enabled(variant.training):
            self.model.train(variant.training)
            draws = group.randomness.draws
            program, _ = record(
                train if variant.training else evaluate,
                inputs,
                draws=lambda: [draw.noise for draw in draws],
            )
        return Recorded(program=program, draws=tuple(draws), names=tuple(names))

    def run(
        self, batch: Any, *, state: Sequence[torch.Tensor], randomness: Randomness
    ) -> list[torch.Tensor | None]:
        """Losses, ``[K]``, and gradients by the order of ``trained`` on a batch as the user's code takes it, without a recording.

        ``state`` as for ``record``.

        Raises:
            UnfusableError: the model does something that cannot be done for all trials at once.
        """
        group = Group(len(randomness.generators), randomness=randomness)
        num_trained = len(self.layout.segments)
        trained = [t.detach().requires_grad_() for t in state[:num_trained]]
        with self._holding(group, [*trained, *state[num_trained:]]), torch.enable_grad():
            self.model.train()
            return self._train(group, batch, trained)

    def metrics(
        self, batch: Any, *, state: Sequence[torch.Tensor], size: int
    ) -> dict[str, torch.Tensor]:
        """Metrics, each ``[K]``, on a batch as the user's code takes it. Raises as ``run`` does."""
        group = Group(size, randomness=Randomness([]))
        with self._holding(group, state), torch.no_grad():
            self.model.eval()
            return self._evaluate(group, batch)

    def _train(
        self, group: Group, batch: Any, trained: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        losses = _scalar(group, self.task.loss(self.model, batch), "the loss")
        gradients = torch.autograd.grad(losses.sum(), trained, allow_unused=True)
        return [losses.detach(), *gradients]

    def _evaluate(self, group: Group, batch: Any) -> dict[str, torch.Tensor]:
        metrics = self.task.metrics(self.model, batch)
        return {
            name: _scalar(group, value, f"metric {name!r}") for name, value in metrics.items()
        }

    @contextmanager
    def _holding(self, group: Group, state: Sequence[torch.Tensor]) -> Iterator[None]:
        """The skeleton's tensors are the packed ones for a while."""
        before = []
        for name, tensor in zip(self.state_names, state, strict=True):
            packed = group.pack(tensor)
            for home, key in self._places[name]:
                before.append((home, key, home[key]))
                home[key] = packed
        try:
            yield
        finally:
            for home, key, value in before:
                home[key] = value


def _places(model: torch.nn.Module) -> dict[str, list[tuple[dict[str, Any], str]]]:
    """Where each parameter and buffer stands in a model; a tied one stands in several places."""
    first: dict[int, str] = {}
    places: dict[str, list[tuple[dict[str, Any], str]]] = {}
    for path, module in model.named_modules():
        for home in (module._parameters, module._buffers):
            for key, tensor in home.items():
                if tensor is None:
                    continue
                name = first.setdefault(id(tensor), f"{path}.{key}" if path else key)
                places.setdefault(name, []).append((home, key))  # type: ignore[arg-type]
    return places


def _scalar(group: Group, value: Any, what: str) -> torch.Tensor:
    """A number for each trial, ``[K]``."""
    if type(value) is Packed:
        if value.numel() != 1:
            raise UnfusableError(
                f"{what} has shape {tuple(value.shape)}; it must be one number"
            )
        return group.first(value).reshape(group.size)
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.reshape(1).expand(group.size)
    raise UnfusableError(f"{what} is a {type(value).__name__}, not worked out by torch")
