"""Times of the three products of a layer on a GPU: dense, gathered, and by each size of tiles.

    python -m bench.gyro.kernels [--limit 40]

The rows fit ``perf.SlicingKernelCosts`` and choose tiles. Kernels are compiled by several processes
first. Each time is the GPU's alone: launches are queued before the clock starts.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from bench.common.harness import table
from thrifty.nn import BlockGyroDropout, GyroSchedule, KeptGroups, _block_kernels, _sliced
from thrifty.nn._block_kernels import Tiles


PROCESSES = 8
CALLS = 20


class Case(NamedTuple):
    """A layer, the rows of its batch, and which of its sides are dropped."""

    name: str
    inputs: int
    outputs: int
    batch: int
    tau: int
    slices_inputs: bool
    slices_outputs: bool


CASES = (
    Case("MLP hidden", 4096, 4096, 256, 16, True, True),
    Case("MLP hidden", 4096, 4096, 256, 1, True, True),
    Case("MLP hidden", 4096, 4096, 256, 8, True, True),
    Case("MLP hidden", 4096, 4096, 256, 4, True, True),
    Case("Transformer up", 1024, 4096, 2048, 16, False, True),
    Case("Transformer down", 4096, 1024, 2048, 16, True, False),
    Case("Transformer up", 1024, 4096, 2048, 1, False, True),
    Case("MLP first", 784, 4096, 256, 16, False, True),
    Case("MLP last", 4096, 10, 256, 16, True, False),
)
TILES = {
    "in place": Tiles(precision="ieee"),
    "in place, depth 64": Tiles(depth=64, precision="ieee"),
    "in place, 32 rows, depth 16": Tiles(rows=32, depth=16, precision="ieee"),
    "in place, tf32x3": Tiles(precision="tf32x3"),
    "in place, tf32x3, depth 64": Tiles(depth=64, stages=2, precision="tf32x3"),
}

Products = dict[str, Callable[[], Any]]
"""The forward product and the gradients of input and weight."""


def ways(case: Case) -> Iterator[tuple[str, Callable[[], Products]]]:
    """Yield the ways to compute a case, each as a function that makes its products."""
    yield "dense", partial(dense, case)
    yield "gathered", partial(gathered, case)
    for name, tiles in TILES.items():
        yield name, partial(in_place, case, tiles)


def dense(case: Case) -> Products:
    x, grad, weight = (
        torch.randn(*shape, device="cuda")
        for shape in (
            (case.batch, case.inputs), (case.batch, case.outputs), (case.outputs, case.inputs),
        )
    )  # fmt: skip
    return {"y": lambda: x @ weight.t(), "dx": lambda: grad @ weight, "dw": lambda: grad.t() @ x}


def tensors(
    case: Case,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, KeptGroups | None, KeptGroups | None]:
    """Return input, gradient of the output, weight and kept groups."""
    torch.manual_seed(0)
    schedule = GyroSchedule(subnetworks=256, concurrent=case.tau, total_steps=100)
    inputs, outputs = (
        BlockGyroDropout(num_features=size, group_size=64, schedule=schedule)
        .cuda()
        .kept_of(schedule.active().cuda())
        if sliced
        else None
        for sliced, size in (
            (case.slices_inputs, case.inputs), (case.slices_outputs, case.outputs),
        )
    )  # fmt: skip
    rows = case.batch // case.tau
    num_in = case.inputs if inputs is None else inputs.num_units
    num_out = case.outputs if outputs is None else outputs.num_units
    x, grad = (torch.randn(case.tau, rows, size, device="cuda") for size in (num_in, num_out))
    return x, grad, torch.randn(case.outputs, case.inputs, device="cuda"), inputs, outputs


def gathered(case: Case) -> Products:
    x, grad, weight, inputs, outputs = tensors(case)
    places = _sliced._places(weight, num_parts=case.tau, inputs=inputs, outputs=outputs)
    blocks = weight.reshape(-1, weight.shape[1] // (1 if inputs is None else inputs.num_groups))
    take = partial(_sliced._gathered, x, weight, inputs=inputs, outputs=outputs)
    chosen = take()

    def of_weight() -> torch.Tensor:
        back = torch.bmm(grad.transpose(1, 2), x).reshape(-1, blocks.shape[1])
        return torch.zeros_like(blocks).index_add_(0, places.flatten(), back)

    return {
        "y": lambda: torch.bmm(x, take().transpose(1, 2)),
        "dx": lambda: torch.bmm(grad, chosen),
        "dw": of_weight,
    }


def in_place(case: Case, tiles: Tiles) -> Products:
    x, grad, weight, inputs, outputs = tensors(case)
    product, sides = _block_kernels.product, {"inputs": inputs, "outputs": outputs}
    return {
        "y": partial(
            product, x, weight, weight[:, 0].contiguous(), contracted=inputs, kept=outputs,
            size=grad.shape[-1], transposed=False, tiles=tiles,
        ),
        "dx": partial(
            product, grad, weight, None, contracted=outputs, kept=inputs,
            size=x.shape[-1], transposed=True, tiles=tiles,
        ),
        "dw": partial(_block_kernels.weight_gradient, grad, x, weight, **sides, tiles=tiles),
    }  # fmt: skip


def milliseconds(call: Callable[[], Any]) -> float:
    """Return the GPU's time for one call, the shortest of three means."""
    call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(3):
        torch.cuda._sleep(4_000_000)  # launches must not be waited for
        start.record()
        for _ in range(CALLS):
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / CALLS)
    return min(times)


def compile_share(number: int) -> None:
    """Run every ``PROCESSES``-th product once, which puts its kernel into Triton's cache."""
    found = [make for case in CASES for name, make in ways(case) if name in TILES]
    for make in found[number::PROCESSES]:
        for call in make().values():
            call()
    torch.cuda.synchronize()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--limit", type=float, default=40, help="seconds; later rows are left out")
    options.add_argument("--compile", type=int, help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.compile is not None:
        compile_share(args.compile)
    else:
        measure(limit_s=args.limit)


def measure(*, limit_s: float) -> None:
    """Compile all kernels, then print a table of times."""
    began = time.monotonic()
    command = [sys.executable, "-m", "bench.gyro.kernels", "--compile"]
    helpers = [subprocess.Popen([*command, str(number)]) for number in range(PROCESSES)]
    for helper in helpers:
        helper.wait()
    print(f"{torch.cuda.get_device_name()}, compiled after {time.monotonic() - began:.0f} s\n")
    rows: list[dict[str, Any]] = []
    left_out = []
    for case in CASES:
        whole: dict[str, float] = {}
        for name, make in ways(case):
            if time.monotonic() - began > limit_s:
                left_out.append(f"{case.name}, tau {case.tau}: {name}")
                continue
            found = {key: milliseconds(call) for key, call in make().items()}
            whole = whole or found
            rows.append({
                "layer": case.name,
                "tau": case.tau,
                "way": name,
                **{f"{key} ms": value for key, value in found.items()},
                "sum ms": sum(found.values()),
                "dense / sum": sum(whole.values()) / sum(found.values()),
            })
    table(rows)
    if left_out:
        print(f"\nleft out after {limit_s:.0f} s: {'; '.join(left_out)}")


if __name__ == "__main__":
    main()
