"""Programs of packed steps: how recorded ones are found again, prepared, run and checked."""

from __future__ import annotations

import math
from collections.abc import Hashable
from contextlib import AbstractContextManager

import torch

from ._activations import ActivationStore, ActivationUser, KeptTrunk
from ._binding import Bound, RowBinder, Shapes
from ._fusable import UnfusableError
from ._lanes import Lane
from ._row_state import RowState
from ._step import BlockOptions
from ._structure import Structure, Variant
from ._tape import BufferPool, Tape


class Programs(ActivationUser):
    """The programs of one block, each recorded and bound when first needed.

    There are few of them, since steps differ little.
    """

    def __init__(
        self,
        structure: Structure,
        state: RowState,
        *,
        options: BlockOptions,
        device: torch.device,
        buffer_pool: BufferPool,
        activations: ActivationStore | None = None,
    ) -> None:
        self._structure = structure
        self._device = device
        self._buffer_pool = buffer_pool
        self._bound: dict[Hashable, Bound] = {}
        self._binder = RowBinder(
            structure,
            state,
            options=options,
            device=device,
            buffer_pool=buffer_pool,
            activations=activations,
        )

    def training(
        self, size: int, *, shared: bool, padded: bool, num_rows: int, row_shapes: Shapes
    ) -> Bound:
        """Return the training step of the first ``size`` rows; prepare it when its inputs are in.

        Args:
            size: Number of trials.
            shared: Whether all of them see the same batch.
            padded: Whether their batches differ in size.
            num_rows: Number of rows of a batch.
            row_shapes: Shape and dtype of one such row, for each tensor of the batch.
        """
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
            found = self._bound[key] = self._place(variant)
        return found

    def evaluation(self, size: int, batch: Shapes) -> Bound:
        """Return the program for the metrics of the first ``size`` rows on one shared batch.

        Prepare it when the batch is in.
        """
        found = self._bound.get((size, batch))
        if found is None:
            variant = Variant(size=size, training=False, shared=True, padded=False, batch=batch)
            found = self._bound[size, batch] = self._place(variant)
        return found

    def prepare(self, bound: Bound) -> Tape:
        """Return the tape of a program; the first call records it on the present inputs.

        Raises:
            UnfusableError: The model does something that cannot be done for all trials at once.
        """
        self._buffer_pool.refill()
        if bound.tape is None:
            try:
                # a recording needs as much memory as a step by autograd
                with self._buffer_pool.emptied():
                    bound.recorded = self._structure.recorded(
                        bound.variant, **self._binder.inputs(bound)
                    )
            except UnfusableError:
                raise
            except Exception as error:
                # Recording ran on copies, so nothing has changed.
                # An error of the user's own occurs again when the trial runs alone.
                reason = f"recording it failed with {type(error).__name__}: {error}"
                raise UnfusableError(reason) from error
            bound.tape = self._binder.tape(bound, bound.recorded, user=self)
            samples = None if bound.samples is None else bound.samples()
            if bound.trunk is not None and samples is not None:
                bound.trunk.begin(samples, bound.index, verify=False)
        return bound.tape

    def without_buffers(self) -> AbstractContextManager[None]:
        """Free the memory of large buffers while trials compute alone.

        A step alone needs about as much memory as a step of a pack of one trial. No program may run
        within the context. Outputs of programs are lost unless they are copied before.
        """
        return self._buffer_pool.emptied()

    def is_current(self, bound: Bound) -> bool:
        """Return whether recording a program again on its present inputs gives the same calls."""
        assert bound.recorded is not None
        size = bound.variant.size
        whole = Lane(rows=slice(0, size), thread=0, variant=bound.variant, recorded=bound.recorded)
        parts = {lane.variant: lane for lane in bound.lanes or [whole]}
        return all(
            self._structure.record(
                variant, **self._binder.inputs(bound, part.rows)
            ).program.same_calls(part.recorded.program)
            for variant, part in parts.items()
        )

    def evaluations_are_current(self) -> bool:
        """Return whether recording each program for metrics again gives the same calls."""
        return all(
            self.is_current(bound)
            for bound in self._bound.values()
            if bound.recorded is not None and not bound.variant.training
        )

    def look_at_samples(self) -> None:
        """Find out whether samples have changed that kept activations belong to."""
        for samples in {trunk.samples() for trunk in self._trunks() if trunk.was_used}:
            if samples is not None and samples.look():
                for trunk in self._trunks():
                    if trunk.samples() is samples:
                        trunk.activations.fail("the data have changed in place")

    def take_doubt(self) -> str:
        """Return why results must not count because of kept activations; "" if they may.

        The reason is returned once, to be noted for all trials that are in training.
        """
        doubtful = [trunk for trunk in self._trunks() if trunk.is_doubtful]
        for trunk in doubtful:
            trunk.was_used = False
        return doubtful[0].activations.failure if doubtful else ""

    @property
    def keeps_activations(self) -> bool:
        """Whether the results of a trunk are kept."""
        return any(not trunk.activations.is_dropped for trunk in self._trunks())

    def head_elements(self, size: int, num_rows: int) -> float:
        """Return how many elements the largest value of a head has; infinite if none is kept.

        Args:
            size: Number of trials.
            num_rows: Number of samples in a batch.
        """
        return max(
            (
                bound.trunk.head_elements * size / bound.trials_of_a_tape * num_rows
                for bound in self._bound.values()
                if bound.trunk is not None and not bound.trunk.activations.is_dropped
            ),
            default=math.inf,
        )

    def _trunks(self) -> list[KeptTrunk]:
        return [bound.trunk for bound in self._bound.values() if bound.trunk is not None]

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors held for batches and random numbers."""
        return [
            tensor
            for bound in self._bound.values()
            for tensor in (*bound.batch, *[draw.noise for draw in bound.draws])
        ]

    def _place(self, variant: Variant) -> Bound:
        batch = self._batch(variant)
        return Bound(
            variant=variant,
            batch=batch,
            gathered=batch if variant.shared else tuple(t.flatten(0, 1) for t in batch),
            rows=self._rows(variant),
        )

    def _batch(self, variant: Variant) -> tuple[torch.Tensor, ...]:
        lead = () if variant.shared else (variant.size,)
        return tuple(
            self._laid_out(torch.zeros((*lead, *shape), dtype=dtype, device=self._device))
            for shape, dtype in variant.batch
        )

    def _rows(self, variant: Variant) -> torch.Tensor | None:
        """Return memory for the weights of rows, in the form of ``Group.rows``."""
        if not variant.padded:
            return None
        num_rows = variant.batch[0][0][0]
        dtype = self._structure.layout.dtype
        return torch.ones(variant.size, num_rows, dtype=dtype, device=self._device)

    def _laid_out(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._structure.channels_last and tensor.dim() == 4:
            return tensor.contiguous(memory_format=torch.channels_last)
        return tensor
