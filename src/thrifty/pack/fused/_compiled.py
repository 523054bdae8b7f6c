"""Recorded programs through ``torch.compile``.

Compiling takes seconds to minutes once and gives fewer and larger kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ._record import Program, Ref
from ._tape import Tape


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
