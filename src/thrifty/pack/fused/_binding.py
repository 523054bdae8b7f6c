"""Recorded programs bound to the rows of a block: compiled, captured, in lanes, without a trunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch.utils import _pytree as pytree

from thrifty.pack._frozen import FrozenTensor, cheap_copy, digest_of, is_lent
from thrifty.pack.task._data_contents import Samples

from ._activations import ActivationStore, ActivationUser, KeptTrunk
from ._lanes import Division, Lane, Lanes, division
from ._narrowing import optimized
from ._randomness import DropoutMask
from ._record import Program, Ref
from ._row_state import RowState
from ._step import BlockOptions
from ._structure import Recorded, Structure, Variant, in_order
from ._tape import BufferPool, Tape, bind, captured
from ._trunk import Cut, cuts_of


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


class RowBinder:
    """What binds the recorded programs of a block to its rows, so that they run in place.

    Args:
        structure: The structure of the trials.
        state: The rows.
        options: Options of the block.
        device: Where the rows are.
        buffer_pool: Memory of the intermediate results.
        activations: Where results of frozen trunks are kept; None if they are not.
    """

    def __init__(
        self,
        structure: Structure,
        state: RowState,
        *,
        options: BlockOptions,
        device: torch.device,
        buffer_pool: BufferPool,
        activations: ActivationStore | None,
    ) -> None:
        self._structure = structure
        self._state = state
        self._store = activations
        self._options = options
        self._device = device
        self._buffer_pool = buffer_pool
        self.num_uncaptured = 0
        """Count of programs that cannot be captured as a CUDA graph and run call by call."""

    def inputs(self, bound: Bound, rows: slice | None = None) -> dict[str, Any]:
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

    def tape(self, bound: Bound, recorded: Recorded, *, user: ActivationUser) -> Tape:
        """Bind a recorded program to the first rows.

        Args:
            bound: What it is bound to.
            recorded: The program.
            user: Who uses kept results of its trunk.
        """
        variant, rows = bound.variant, slice(0, bound.variant.size)
        bound.names = recorded.names
        bound.draws = tuple(replace(d, noise=torch.zeros_like(d.noise)) for d in recorded.draws)
        inputs = in_order(*self._places(bound, rows))
        program = self._without_trunk(bound, recorded.program, inputs, user=user)
        bound.lanes = self._lanes(bound, recorded, program)
        if bound.lanes:
            return self._in_lanes(bound, recorded.program, user=user)
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

    def _destinations(self, variant: Variant, rows: slice) -> dict[int, torch.Tensor]:
        """Return where a program leaves the gradients of some trials, by position of the output."""
        return dict(enumerate(self._state.gradients(rows), start=1)) if variant.training else {}

    # -- lanes ---------------------------------------------------------------------------

    def _lanes(self, bound: Bound, recorded: Recorded, program: Program) -> tuple[Lane, ...]:
        """Return the lanes in which a program runs; none if it runs once for all trials.

        Args:
            bound: What it is bound to.
            recorded: The program for all trials.
            program: The same without its trunk if that is kept.
        """
        size = bound.variant.size
        if self._device.type != "cpu" or self._options.compile:
            return ()
        found = division(
            program, size=size, common=self._in_common(bound), threads=torch.get_num_threads()
        )
        if found.lanes < 2 or (bound.trunk is not None and size % found.lanes):
            return ()
        if any(n is not None and program.meta[n][0][:1] != (size,) for n in program.outputs):
            return ()
        lanes = self._recorded_lanes(bound, found)
        are_alike = all(
            [d.path for d in lane.recorded.draws] == [d.path for d in recorded.draws]
            and lane.recorded.names == recorded.names
            and [n is None for n in lane.recorded.program.outputs]
            == [n is None for n in recorded.program.outputs]
            for lane in lanes
        )
        return lanes if are_alike else ()

    def _recorded_lanes(self, bound: Bound, divided: Division) -> tuple[Lane, ...]:
        """Return lanes with the programs recorded for them; none if that is not possible.

        Args:
            bound: What they are bound to.
            divided: How the trials are divided.
        """
        lanes = []
        try:
            with self._buffer_pool.emptied():
                for number, rows in enumerate(divided.rows(bound.variant.size)):
                    part = replace(bound.variant, size=rows.stop - rows.start)
                    lanes.append(
                        Lane(
                            rows=rows,
                            thread=divided.thread(number),
                            variant=part,
                            recorded=self._structure.recorded(part, **self.inputs(bound, rows)),
                        )
                    )
        except Exception:  # noqa: BLE001 -- the program for all trials has been recorded, and runs
            return ()
        return tuple(lanes)

    def _in_common(self, bound: Bound) -> list[int]:
        """Return the inputs that all trials of a program have in common."""
        names = self._structure.state_names
        first = len(bound.batch) + (bound.rows is not None)
        batch = range(len(bound.batch)) if bound.variant.shared else ()
        held = (n for n, name in enumerate(names, start=first) if name in self._structure.held)
        return [*batch, *held]

    def _in_lanes(self, bound: Bound, program: Program, *, user: ActivationUser) -> Tape:
        """Bind the program of each lane to its rows.

        Args:
            bound: What they are bound to.
            program: The program for all trials, which says what comes out.
            user: Who uses kept results of their trunk.
        """
        outputs = self._outputs(bound.variant, program)
        heads: dict[Variant, Program] = {}
        tapes: list[list[Tape]] = [[] for _ in range(bound.lanes[-1].thread + 1)]
        for lane in bound.lanes:
            inputs = in_order(*self._places(bound, lane.rows))
            if lane.variant not in heads:
                head = lane.recorded.program
                if bound.trunk is not None:
                    bound.trunk = None
                    head = self._without_trunk(bound, head, inputs, user=user)
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

    def _outputs(self, variant: Variant, program: Program) -> list[torch.Tensor | None]:
        """Return memory for the outputs of a program for all trials; gradients have theirs."""
        wanted = self._destinations(variant, slice(0, variant.size))
        outputs = [
            None if n is None else wanted.get(place) for place, n in enumerate(program.outputs)
        ]
        for place, number in enumerate(program.outputs):
            if number is not None and place not in wanted:
                shape, _, dtype = program.meta[number]  # one number for all trials has no strides
                outputs[place] = torch.empty(shape, dtype=dtype, device=self._device)
        return outputs

    # -- graphs and trunks ---------------------------------------------------------------

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
        self,
        bound: Bound,
        program: Program,
        inputs: Sequence[torch.Tensor],
        *,
        user: ActivationUser,
    ) -> Program:
        """Return the part of a program that runs at each step.

        The rest becomes the trunk of ``bound`` if its results may be kept.

        Args:
            bound: What the program is bound to.
            program: The program.
            inputs: Its inputs.
            user: Who uses kept results.
        """
        store, samples = self._store, self._samples_to_keep(bound)
        if store is None or samples is None:
            return program
        batch = range(len(bound.batch))
        held = {
            n: self._state.lent[name]
            for n, name in enumerate(self._structure.state_names, start=len(batch))
            if name in self._structure.held
        }
        for cut in cuts_of(program, batch=batch, shared=held, num_rows=len(bound.batch[0])):
            key = (
                *_content_key(cut, program, samples=samples, held=held),
                f"{self._device} {torch.__version__}",
            )
            kept = store.open(
                key, cut, variant=bound.variant, num=len(samples), device=self._device, user=user
            )
            if kept is not None:
                values = {v.number: _empty(program, v.number, self._device) for v in cut.values}
                bound.trunk = KeptTrunk(
                    cut,
                    self._trunk_tape(cut, inputs, values=tuple(values.values())),
                    tuple(values.values()),
                    activations=kept,
                    samples=samples,
                    once=not bound.variant.training,
                )
                return replace(cut.head, constants={**cut.head.constants, **values})
        return program

    def _samples_to_keep(self, bound: Bound) -> Samples | None:
        """Return the samples of a program whose trunk's results may be kept; None if they may not.

        All trials have to see the same batch, and some of their state has to be frozen.
        """
        is_on = self._store is not None and self._store.is_on
        if not is_on or not bound.variant.shared or bound.rows is not None:
            return None
        samples = None if bound.samples is None else bound.samples()
        if samples is None or not self._structure.held or samples.has_changed:
            return None
        return samples

    def _trunk_tape(
        self, cut: Cut, inputs: Sequence[torch.Tensor], *, values: Sequence[torch.Tensor]
    ) -> Tape:
        """Bind the trunk of a program; its results go into ``values``."""
        return bind(
            optimized(cut.trunk, device=self._device),
            inputs,
            destinations=dict(enumerate(values)),
            buffer_pool=self._buffer_pool,
        )


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
