"""Programs of packed steps: how recorded ones are found again, run, compiled and checked."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch.utils import _pytree as pytree

from thrifty.pack._frozen import FrozenTensor, cheap_copy, digest_of, is_lent
from thrifty.pack.task._data_contents import Samples

from ._activations import ActivationStore, KeptTrunk, User
from ._fusable import UnfusableError
from ._lanes import Lane, Lanes, division
from ._narrowing import optimized
from ._randomness import DropoutMask
from ._record import Program, Ref
from ._row_state import RowState
from ._step import BlockOptions
from ._structure import Recorded, Structure, Variant, in_order
from ._tape import BufferPool, Tape, bind, captured
from ._trunk import Cut, cuts_of


def compiled(
    program: Program,
    inputs: Sequence[torch.Tensor],
    *,
    draws: Sequence[torch.Tensor] = (),
    destinations: Mapping[int, torch.Tensor] | None = None,
) -> Tape:
    """Bind a program like ``bind``, but run it as a compiled graph.

    Results are copied to their destinations, where a plain tape also leaves them.
    """
    wanted = dict(destinations or {})
    for position, value in enumerate(program.outputs):
        if value is not None and position not in wanted:
            shape, _, dtype = program.meta[value]
            wanted[position] = torch.empty(shape, dtype=dtype, device=inputs[0].device)
    constants = dict(program.constants)
    constants.update({
        number: tensor
        for number, tensor in zip(program.draws, draws, strict=False)
        if number is not None
    })
    numbers = [*range(program.num_inputs), *constants]
    tensors = [*inputs, *constants.values()]
    positions = [p for p, value in enumerate(program.outputs) if value is not None]
    step = torch.compile(_graph(program, numbers, positions), fullgraph=True, dynamic=False)
    targets = [wanted[p] for p in positions]

    def run() -> None:
        for target, found in zip(targets, step(*tensors), strict=True):
            target.copy_(found)

    outputs = [None if value is None else wanted[p] for p, value in enumerate(program.outputs)]
    return Tape(run, outputs)


def _graph(
    program: Program, numbers: Sequence[int], positions: Sequence[int]
) -> torch.fx.GraphModule:
    """Return a program as a graph of ATen calls.

    Args:
        program: The program.
        numbers: The values that are inputs of the graph.
        positions: The outputs of the program that the graph returns.
    """
    graph = torch.fx.Graph()
    nodes: dict[int, Any] = {n: graph.placeholder(f"v{n}") for n in numbers}
    for call in program.calls:
        args, kwargs = pytree.tree_map_only(
            Ref, lambda ref: nodes[ref.value], (call.args, call.kwargs)
        )
        node = graph.call_function(call.function, args, kwargs)
        returns = call.function._schema.returns
        if len(returns) == 1 and "List" not in str(returns[0].type):
            nodes[call.outputs[0]] = node
            continue
        for index, number in zip(call.places, call.outputs, strict=True):
            nodes[number] = graph.call_function(_item, (node, index))
    graph.output(tuple(nodes[program.outputs[p]] for p in positions))  # type: ignore[index]
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def _item(values: Sequence[Any], index: int) -> Any:
    return values[index]


Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""Shape and dtype of each tensor of a batch."""


@dataclass(slots=True, kw_only=True, eq=False)
class Bound:
    """A program bound to the rows of a block, with the memory that its inputs go into.

    The program is recorded on the first inputs (``Programs.prepare``), so that the recording shows
    what user code does with real labels.

    Attributes:
        variant: The variant of the program.
        batch: Memory for the tensors of the batch.
        gathered: The same memory, with the rows of all trials in one dimension.
        rows: Weights of the rows where batches differ in size; None where they do not.
        tape: The bound program; None until it is prepared.
        recorded: The recorded program; None until it is prepared.
        draws: The random numbers that the program needs.
        names: Names of the outputs that come before any gradients.
        is_checked: Whether one trial's step with it has been compared with the step alone.
        lanes: Parts of the trials that run at the same time; none where all trials run at once.
        trunk: The part of the program whose results are kept by sample; the tape is the rest then.
        samples: The samples that the present batch consists of; a program does not keep them.
        index: Which of them.
    """

    variant: Variant
    batch: tuple[torch.Tensor, ...]
    gathered: tuple[torch.Tensor, ...]
    rows: torch.Tensor | None
    tape: Tape | None = None
    recorded: Recorded | None = None
    draws: tuple[DropoutMask, ...] = ()
    names: tuple[str, ...] = ()
    is_checked: bool = False
    lanes: tuple[Lane, ...] = ()
    trunk: KeptTrunk | None = None
    samples: ReferenceType[Samples] | None = None
    index: torch.Tensor | None = None

    def gather(self, samples: Samples, index: torch.Tensor, *, verify: bool = False) -> None:
        """Copy the batches of all trials in; ``index`` lists their rows one after the other.

        What only the trunk reads is left out if its results are kept.

        Args:
            samples: The samples that the batches consist of.
            index: Which of them.
            verify: Whether to compare kept results of the trunk with new ones.
        """
        self.samples, self.index = ref(samples), index
        num = len(index)
        reads = None if self.trunk is None else self.trunk.begin(samples, index, verify=verify)
        for place, (array, target) in enumerate(zip(samples.arrays, self.gathered, strict=True)):
            if reads is None or place in reads:
                torch.index_select(array, 0, index, out=target[:num])

    def run(self) -> None:
        """Run the program on the inputs that are in."""
        assert self.tape is not None
        if self.trunk is not None:
            self.trunk.run()
        self.tape.run()

    @property
    def rows_apart(self) -> list[slice]:
        """The rows of the trials whose results come from one tape, for each tape."""
        return [lane.rows for lane in self.lanes] or [slice(0, self.variant.size)]

    @property
    def trials_of_a_tape(self) -> int:
        """Number of trials whose results come from one tape, the most of all tapes."""
        return max(len(range(self.variant.size)[rows]) for rows in self.rows_apart)

    def weigh(self, num_rows: Sequence[int]) -> None:
        """Set the weights of the real rows of each trial's batch, if rows have weights."""
        if self.rows is not None:
            self.rows.zero_()
            for k, num in enumerate(num_rows):
                self.rows[k, :num] = 1.0 / num


class Programs(User):
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
        self._state = state
        self._store = activations
        self._options = options
        self._device = device
        self._buffer_pool = buffer_pool
        self._bound: dict[Hashable, Bound] = {}
        self.num_uncaptured = 0
        """Count of programs that cannot be captured as a CUDA graph and run call by call."""

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
                    bound.recorded = self._structure.recorded(bound.variant, **self._inputs(bound))
            except UnfusableError:
                raise
            except Exception as error:
                # Recording ran on copies, so nothing has changed.
                # An error of the user's own occurs again when the trial runs alone.
                reason = f"recording it failed with {type(error).__name__}: {error}"
                raise UnfusableError(reason) from error
            bound.tape = self._bind(bound, bound.recorded)
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
            self._structure.record(variant, **self._inputs(bound, part.rows)).program.same_calls(
                part.recorded.program
            )
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

    def _inputs(self, bound: Bound, rows: slice | None = None) -> dict[str, Any]:
        """Return copies of the inputs for a recording, as the model may write into any of them.

        Args:
            bound: What the recording is for.
            rows: The rows of the trials (default: all).
        """
        batch, weights, state = self._places(bound, rows or slice(0, bound.variant.size))
        return {
            "batch": [t.clone() for t in batch],
            "rows": weights,
            "state": [_same_layout(t) for t in state],
        }

    def _places(
        self, bound: Bound, rows: slice
    ) -> tuple[Sequence[torch.Tensor], torch.Tensor | None, Sequence[torch.Tensor]]:
        """Return where some trials have their batches, the weights of their rows, and their state.

        Args:
            bound: A program, with memory for its inputs.
            rows: The rows of the trials.
        """
        batch = bound.batch if bound.variant.shared else [t[rows] for t in bound.batch]
        weights = None if bound.rows is None else bound.rows[rows]
        return batch, weights, [*self._state.trained(rows), *self._state.untrained(rows)]

    def _bind(self, bound: Bound, recorded: Recorded) -> Tape:
        """Bind a recorded program to the first rows."""
        variant, rows = bound.variant, slice(0, bound.variant.size)
        bound.names = recorded.names
        bound.draws = tuple(replace(d, noise=torch.zeros_like(d.noise)) for d in recorded.draws)
        inputs = in_order(*self._places(bound, rows))
        program = self._without_trunk(bound, recorded.program, inputs)
        bound.lanes = self._lanes(bound, recorded, program)
        if bound.lanes:
            return self._in_lanes(bound, recorded.program)
        program = optimized(program, device=self._device)
        noises = [d.noise for d in bound.draws]
        wanted = self._destinations(variant, rows)
        if self._options.compile and variant.training:
            tape = compiled(program, inputs, draws=noises, destinations=wanted)
        else:
            tape = bind(
                program, inputs, draws=noises, destinations=wanted, buffer_pool=self._buffer_pool
            )
        if self._options.cuda_graphs and self._device.type == "cuda" and recorded.program.calls:
            return self._captured(tape, self._state.untrained(rows))
        return tape

    def _destinations(self, variant: Variant, rows: slice) -> dict[int, torch.Tensor]:
        """Return where a program leaves the gradients of some trials, by position of the output."""
        return dict(enumerate(self._state.gradients(rows), start=1)) if variant.training else {}

    def _lanes(self, bound: Bound, recorded: Recorded, program: Program) -> tuple[Lane, ...]:
        """Return the lanes in which a program runs; none if it runs once for all trials.

        Args:
            bound: What it is bound to.
            recorded: The program for all trials.
            program: The same without its trunk if that is kept.
        """
        variant, size = bound.variant, bound.variant.size
        if self._device.type != "cpu" or self._options.compile:
            return ()
        found = division(
            program, size=size, common=self._in_common(bound), threads=torch.get_num_threads()
        )
        if found.lanes < 2 or (bound.trunk is not None and size % found.lanes):
            return ()
        if any(n is not None and program.meta[n][0][:1] != (size,) for n in program.outputs):
            return ()
        lanes = []
        try:
            with self._buffer_pool.emptied():
                for number, rows in enumerate(found.rows(size)):
                    part = replace(variant, size=rows.stop - rows.start)
                    lanes.append(
                        Lane(
                            rows=rows,
                            thread=found.thread(number),
                            variant=part,
                            recorded=self._structure.recorded(part, **self._inputs(bound, rows)),
                        )
                    )
        except Exception:  # noqa: BLE001 -- the program for all trials has been recorded, and runs
            return ()
        alike = all(
            [d.path for d in lane.recorded.draws] == [d.path for d in recorded.draws]
            and lane.recorded.names == recorded.names
            and [n is None for n in lane.recorded.program.outputs]
            == [n is None for n in recorded.program.outputs]
            for lane in lanes
        )
        return tuple(lanes) if alike else ()

    def _in_common(self, bound: Bound) -> list[int]:
        """Return the inputs that all trials of a program have in common."""
        names = self._structure.state_names
        first = len(bound.batch) + (bound.rows is not None)
        batch = range(len(bound.batch)) if bound.variant.shared else ()
        held = (n for n, name in enumerate(names, start=first) if name in self._structure.held)
        return [*batch, *held]

    def _in_lanes(self, bound: Bound, program: Program) -> Tape:
        """Bind the program of each lane to its rows.

        Args:
            bound: What they are bound to.
            program: The program for all trials, which says what comes out.
        """
        wanted = self._destinations(bound.variant, slice(0, bound.variant.size))
        outputs = [
            None if n is None else wanted.get(place) for place, n in enumerate(program.outputs)
        ]
        for place, number in enumerate(program.outputs):
            if number is not None and place not in wanted:
                shape, _, dtype = program.meta[number]  # one number for all trials has no strides
                outputs[place] = torch.empty(shape, dtype=dtype, device=self._device)
        heads: dict[Variant, Program] = {}
        tapes: list[list[Tape]] = [[] for _ in range(bound.lanes[-1].thread + 1)]
        for lane in bound.lanes:
            inputs = in_order(*self._places(bound, lane.rows))
            if lane.variant not in heads:
                head = lane.recorded.program
                if bound.trunk is not None:
                    bound.trunk = None
                    head = self._without_trunk(bound, head, inputs)
                heads[lane.variant] = optimized(head, device=self._device)
            own = self._destinations(bound.variant, lane.rows)
            own |= {
                place: output[lane.rows]
                for place, output in enumerate(outputs)
                if output is not None and place not in own
            }
            tapes[lane.thread].append(
                bind(
                    heads[lane.variant],
                    inputs,
                    draws=[d.noise[lane.rows] for d in bound.draws],
                    destinations=own,
                    buffer_pool=self._buffer_pool,
                    lane=lane.thread,
                )
            )
        return Tape(Lanes(tapes, cores=torch.get_num_threads()), outputs)

    def _captured(self, tape: Tape, untrained: Sequence[torch.Tensor]) -> Tape:
        """Capture a tape as a CUDA graph, or count it where that is not possible.

        The warm-up run changes running statistics (among ``untrained``), so they are put back.
        """
        shared = [tensor for tensor in untrained if is_lent(tensor)]
        own = [tensor for tensor in untrained if not is_lent(tensor)]
        before = [tensor.clone() for tensor in own]
        with torch.no_grad():
            tape()
            found = captured(tape, self._device, shared=shared)
            for tensor, value in zip(own, before, strict=True):
                tensor.copy_(value)
        self.num_uncaptured += found is None
        return tape if found is None else found

    def _without_trunk(
        self, bound: Bound, program: Program, inputs: Sequence[torch.Tensor]
    ) -> Program:
        """Return the part of a program that runs at each step.

        The rest becomes the trunk of ``bound`` if its results may be kept.
        """
        store, structure = self._store, self._structure
        samples = None if bound.samples is None else bound.samples()
        is_known = bound.variant.shared and bound.rows is None and samples is not None
        if store is None or not store.is_on or not is_known or not structure.held:
            return program
        assert samples is not None
        if samples.has_changed:
            return program
        batch = range(len(bound.batch))
        held = {
            n: self._state.lent[name]
            for n, name in enumerate(structure.state_names, start=len(batch))
            if name in structure.held
        }
        num_rows = len(bound.batch[0])
        for cut in cuts_of(program, batch=batch, shared=held, num_rows=num_rows):
            key = (
                *_content_key(cut, program, samples=samples, held=held),
                f"{self._device} {torch.__version__}",
            )
            kept = store.open(
                key, cut, variant=bound.variant, num=len(samples), device=self._device, user=self
            )
            if kept is None:
                continue
            values = {v.number: _empty(program, v.number, self._device) for v in cut.values}
            tape = bind(
                optimized(cut.trunk, device=self._device),
                inputs,
                destinations=dict(enumerate(values.values())),
                buffer_pool=self._buffer_pool,
            )
            bound.trunk = KeptTrunk(
                cut,
                tape,
                tuple(values.values()),
                activations=kept,
                samples=samples,
                once=not bound.variant.training,
            )
            return replace(cut.head, constants={**cut.head.constants, **values})
        return program

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


def _content_key(
    cut: Cut, program: Program, *, samples: Samples, held: Mapping[int, FrozenTensor]
) -> tuple[str, ...]:
    """Return the key of what a trunk computes of some samples."""
    names: dict[int, str] = {}
    data: list[str] = []
    for number in sorted(cut.trunk_reads):
        if number in held:
            names[number] = held[number].digest
        elif number in program.constants:
            names[number] = digest_of(program.constants[number])
        else:
            shape, _, dtype = program.meta[number]
            names[number] = f"batch {len(data)} {tuple(shape[1:])} {dtype}"
            data.append(samples.digest(number))
    return (cut.key(names), *data)


def _empty(program: Program, number: int, device: torch.device) -> torch.Tensor:
    shape, stride, dtype = program.meta[number]
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


def _same_layout(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with exactly the strides of a tensor, which a program's views depend on."""
    if is_lent(tensor):
        return cheap_copy(tensor)
    out = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return out.copy_(tensor)
