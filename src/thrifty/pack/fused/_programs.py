"""The programs of a structure, bound to the rows of a block."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from ._compiled import compiled
from ._options import BlockOptions
from ._randomness import Draw
from ._row_state import RowState
from ._structure import Structure, Variant, in_order
from ._tape import Arena, Tape, bind, captured


Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""Shape and dtype of each tensor of a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A program bound to a block, and where its inputs have to be put. ``gathered`` is the batch with all trials' rows in one."""

    tape: Tape
    batch: tuple[torch.Tensor, ...]
    gathered: tuple[torch.Tensor, ...]
    rows: torch.Tensor | None
    draws: tuple[Draw, ...]
    names: tuple[str, ...]

    def gather(self, arrays: Sequence[torch.Tensor], index: torch.Tensor) -> None:
        """Puts the batches of all trials, their rows one after the other in ``index``."""
        num = len(index)
        for array, target in zip(arrays, self.gathered, strict=True):
            torch.index_select(array, 0, index, out=target[:num])

    def weigh(self, num_rows: Sequence[int]) -> None:
        """Gives the real rows of each trial's batch their weights, if it has any."""
        if self.rows is not None:
            self.rows.zero_()
            for k, num in enumerate(num_rows):
                self.rows[k, :num] = 1.0 / num


class Programs:
    """Programs are recorded and bound when they are first needed: there are few, for steps differ little."""

    def __init__(
        self,
        structure: Structure,
        state: RowState,
        *,
        options: BlockOptions,
        device: torch.device,
        arena: Arena,
    ) -> None:
        self._structure = structure
        self._state = state
        self._options = options
        self._device = device
        self._arena = arena
        self._bound: dict[Hashable, Bound] = {}

    def training(
        self, size: int, *, shared: bool, padded: bool, num_rows: int, row_shapes: Shapes
    ) -> Bound:
        """A step of the first ``size`` rows; ``num_rows`` are those of a batch, ``row_shapes`` is what one of them consists of."""
        key = (size, shared, padded, num_rows, row_shapes)
        found = self._bound.get(key)
        if found is None:
            variant = Variant(
                size=size,
                training=True,
                shared=shared,
                padded=padded,
                batch=tuple(((num_rows, *shape), dtype) for shape, dtype in row_shapes),
            )
            found = self._bound[key] = self._make(variant)
        return found

    def evaluation(self, size: int, batch: Shapes) -> Bound:
        """The metrics of the first ``size`` rows on one batch for all."""
        found = self._bound.get((size, batch))
        if found is None:
            variant = Variant(size=size, training=False, shared=True, padded=False, batch=batch)
            found = self._bound[size, batch] = self._make(variant)
        return found

    def tensors(self) -> list[torch.Tensor]:
        """What is held for batches and random numbers."""
        return [
            tensor
            for bound in self._bound.values()
            for tensor in (*bound.batch, *[draw.noise for draw in bound.draws])
        ]

    def _make(self, variant: Variant) -> Bound:
        """Records the program of a variant if need be, and binds it to the first rows."""
        batch, rows = self._batch(variant), self._rows(variant)
        trained = self._state.trained(variant.size)
        untrained = self._state.untrained(variant.size)
        # recording runs the model once: not on the live running statistics
        recorded = self._structure.recorded(
            variant, batch=batch, rows=rows, state=[*trained, *[t.clone() for t in untrained]]
        )
        draws = tuple(
            Draw(noise=torch.zeros_like(d.noise), path=d.path, p=d.p) for d in recorded.draws
        )
        gradients = self._state.gradients(variant.size) if variant.training else []
        inputs = in_order(batch, rows, [*trained, *untrained])
        noises = [d.noise for d in draws]
        wanted = dict(enumerate(gradients, start=1))
        if self._options.compile and variant.training:
            tape = compiled(recorded.program, inputs, draws=noises, destinations=wanted)
        else:
            tape = bind(
                recorded.program, inputs, draws=noises, destinations=wanted, arena=self._arena
            )
        if self._options.cuda_graphs and variant.training:
            tape = _captured(tape, untrained)
        return Bound(
            tape=tape,
            batch=batch,
            gathered=batch if variant.shared else tuple(t.flatten(0, 1) for t in batch),
            rows=rows,
            draws=draws,
            names=recorded.names,
        )

    def _batch(self, variant: Variant) -> tuple[torch.Tensor, ...]:
        lead = () if variant.shared else (variant.size,)
        return tuple(
            self._laid_out(torch.zeros((*lead, *shape), dtype=dtype, device=self._device))
            for shape, dtype in variant.batch
        )

    def _rows(self, variant: Variant) -> torch.Tensor | None:
        """The weights of rows, as ``Group`` has them."""
        if not variant.padded:
            return None
        num_rows = variant.batch[0][0][0]
        dtype = self._structure.layout.dtype
        return torch.ones(variant.size, num_rows, dtype=dtype, device=self._device)

    def _laid_out(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._structure.channels_last and tensor.dim() == 4:
            return tensor.contiguous(memory_format=torch.channels_last)
        return tensor


def _captured(tape: Tape, untrained: Sequence[torch.Tensor]) -> Tape:
    """As a CUDA graph; the run that warms up must not count in the running statistics."""
    before = [tensor.clone() for tensor in untrained]
    tape()
    out = captured(tape)
    for tensor, value in zip(untrained, before, strict=True):
        tensor.copy_(value)
    return out
