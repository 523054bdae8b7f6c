"""Experiments that compare models packed (recorded and replayed from a tape) and each alone."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from thrifty.pack.task._data import WholeBatch

from ._fusable import UnfusableError, dropout_rates
from ._packed import corner
from ._randomness import Randomness, fill
from ._step import Step, check_same, close, evaluate_alone, train_alone
from ._structure import Recorded, Structure, Variant, in_order
from ._tape import bind


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """Models that fit into a structure, with a batch for each.

    Attributes:
        structure: The structure that runs the models packed.
        models: The models.
        batches: The batch of each model, as a list of its tensors (pytree leaves).
        tolerance: Relative difference that is allowed; see ``close``.
        shared: Whether all batches are the same, so that the packed models get only one.
        num_rows: Number of real rows of each batch where these differ, the other rows being
            padding; None where all rows are real.
    """

    structure: Structure
    models: Sequence[torch.nn.Module]
    batches: Sequence[Sequence[torch.Tensor]]
    tolerance: float
    shared: bool = False
    num_rows: Sequence[int] | None = None

    def trains_alike(self) -> bool:
        """Return whether each model's step is the same packed and alone."""
        alone = self._alone()
        try:
            self.check(self.record(), alone)
        except UnfusableError:
            return False
        return True

    def evaluates_alike(self) -> bool:
        """Return whether each model's metrics are the same packed and alone."""
        try:
            recorded = self.record(training=False)
        except UnfusableError:
            return False
        found = self._replay(recorded, self._state())
        for k, (model, batch) in enumerate(zip(self.models, self.batches, strict=True)):
            wanted = evaluate_alone(self.structure.task, model, self._whole(batch))
            if list(wanted) != list(recorded.names):
                return False
            for value, name in zip(found, recorded.names, strict=True):
                if value is None or not close(
                    value[k].double(), torch.as_tensor(wanted[name]).double(), self.tolerance
                ):
                    return False
        return True

    def check(self, recorded: Recorded, alone: Sequence[Step]) -> None:
        """Compare a recorded training step with the step of each model alone.

        Raises:
            UnfusableError: They differ.
        """
        for packed, one in zip(self.packed(recorded), alone, strict=True):
            check_same(packed, one, tolerance=self.tolerance)

    def record(self, *, training: bool = True, seed: int = 0) -> Recorded:
        """Record one step of all models at once.

        Raises:
            UnfusableError: The step cannot be recorded for all models at once.
        """
        variant = Variant(
            size=len(self.models),
            training=training,
            shared=self.shared,
            padded=self.num_rows is not None,
            batch=(),
        )
        return self.structure.record(
            variant, batch=self._batch(), rows=self._rows(), state=self._state(), seed=seed
        )

    def packed_metrics(self) -> list[dict[str, float]]:
        """Return the metrics of each model, computed packed.

        Raises:
            UnfusableError: They cannot be computed for all models at once.
        """
        recorded = self.record(training=False)
        found = self._replay(recorded, self._state())
        values = {n: v for n, v in zip(recorded.names, found, strict=True) if v is not None}
        return [
            {name: float(value[k]) for name, value in values.items()}
            for k in range(len(self.models))
        ]

    def packed(self, recorded: Recorded) -> list[Step]:
        """Replay a recorded step and return each model's result."""
        state = self._state()
        losses, *gradients = self._replay(recorded, state)
        assert losses is not None
        named = dict(zip(self.structure.trained, gradients, strict=True))
        after = dict(zip(self.structure.state_names, state, strict=True))
        return [
            Step(
                loss=losses[k],
                gradients={name: None if g is None else g[k] for name, g in named.items()},
                buffers={name: after[name][k] for name in self.structure.buffers},
            )
            for k in range(len(self.models))
        ]

    def _replay(
        self, recorded: Recorded, state: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor | None]:
        """Replay a recording with other random numbers; this may change ``state``."""
        batch, rows = self._batch(), self._rows()
        generators = [
            torch.Generator(device=batch[0].device).manual_seed(k)
            for k in range(len(self.models))
        ]
        rates = [dropout_rates(model) for model in self.models]
        for draw in recorded.draws:
            fill(draw, generators=generators, rates=rates, num_rows=self.num_rows)
        inputs = in_order(batch, rows, state)
        tape = bind(recorded.program, inputs, draws=[d.noise for d in recorded.draws])
        with torch.no_grad():
            tape()
        return tape.outputs

    def _alone(self) -> list[Step]:
        steps = []
        for k, (model, batch) in enumerate(zip(self.models, self.batches, strict=True)):
            num = None if self.num_rows is None else self.num_rows[k]
            real = self._whole([leaf[:num] for leaf in batch])
            steps.append(train_alone(self.structure.task, deepcopy(model), real, seed=k))
        return steps

    def _whole(self, leaves: Sequence[torch.Tensor]) -> Any:
        return pytree.tree_unflatten(list(leaves), self.structure.batch_spec)

    def _batch(self) -> list[torch.Tensor]:
        if self.shared:
            return list(self.batches[0])
        return [torch.stack(leaves) for leaves in zip(*self.batches, strict=True)]

    def _rows(self) -> torch.Tensor | None:
        """Return the weights of the rows in the form of ``Group.rows``."""
        if self.num_rows is None:
            return None
        weights = torch.zeros(
            len(self.num_rows),
            max(self.num_rows),
            dtype=self.structure.layout.dtype,
            device=self.batches[0][0].device,
        )
        for k, num in enumerate(self.num_rows):
            weights[k, :num] = 1 / num
        return weights

    def _state(self) -> list[torch.Tensor]:
        """Return a stacked copy of the state of all models, in the structure's order and shapes."""
        full = self._state_of(self.structure.model)
        states = [self._state_of(model) for model in self.models]
        return [
            torch.stack([_padded(t, like.shape) for t in own])
            for like, *own in zip(full, *states, strict=True)
        ]

    def _state_of(self, model: torch.nn.Module) -> list[torch.Tensor]:
        own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return [own[name].detach() for name in self.structure.state_names]


def run_packed(
    structure: Structure, models: Sequence[torch.nn.Module], batch: WholeBatch
) -> list[Step]:
    """Run a packed step on a whole batch and return each model's result.

    Raises:
        UnfusableError: The step draws random numbers that are not each trial's own.
    """
    state = stacked(structure, models)
    generators = [
        torch.Generator(device=state[0].device).manual_seed(k) for k in range(len(models))
    ]
    before = torch.get_rng_state()
    losses, *gradients = structure.run(batch, state=state, randomness=Randomness(generators))
    if not torch.equal(before, torch.get_rng_state()):
        raise UnfusableError("it draws random numbers that are not each trial's own")
    assert losses is not None
    after = dict(zip(structure.state_names, state, strict=True))
    return [
        Step(
            loss=losses[k],
            gradients={
                name: None if g is None else g[k]
                for name, g in zip(structure.trained, gradients, strict=True)
            },
            buffers={name: after[name][k] for name in structure.buffers},
        )
        for k in range(len(models))
    ]


def stacked(structure: Structure, models: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
    """Return a stacked copy of the state of models, in the structure's order."""
    own = [{**dict(m.named_parameters()), **dict(m.named_buffers())} for m in models]
    return [
        torch.stack([each[name].detach() for each in own]) for name in structure.state_names
    ]


def _padded(tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    if tensor.shape == shape:
        return tensor
    out = tensor.new_zeros(shape)
    corner(out, tensor.shape).copy_(tensor)
    return out
