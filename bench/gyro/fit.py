"""Products that ``perf.SlicingCosts`` is fitted to, sliced and whole.

Their sizes differ from those reported.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from bench.common.harness import interleaved
from bench.common.processes import say_result
from thrifty.nn import BlockGyroDropout, GyroSchedule, gyro_linear
from thrifty.perf import SlicedProduct, SlicingCosts


SHAPES = ((768, 3072), (1536, 1536), (3072, 3072), (768, 768))
BATCHES = (96, 384, 1536)
CONCURRENTS = (2, 6, 12)


class Measured(NamedTuple):
    """A product, and its sliced time as a share of its whole time."""

    product: SlicedProduct
    share: float


def measured(rounds: int) -> Iterator[Measured]:
    """Yield forward and backward of each product."""
    for (num_in, num_out), batch, tau in itertools.product(SHAPES, BATCHES, CONCURRENTS):
        schedule = GyroSchedule(subnetworks=24, concurrent=tau, total_steps=100)
        active = schedule.active()
        kept_in, kept_out = (
            BlockGyroDropout(0.5, num_features=num, group_size=48, schedule=schedule).kept_of(
                active
            )
            for num in (num_in, num_out)
        )
        weight = torch.randn(num_out, num_in, requires_grad=True)
        whole = torch.randn(batch, num_in, requires_grad=True)
        some = torch.randn(tau, batch // tau, num_in // 2, requires_grad=True)
        every = torch.randn(tau, batch // tau, num_in, requires_grad=True)
        calls: dict[str, Callable[..., torch.Tensor]] = {
            "whole": lambda x=whole, w=weight: F.linear(x, w),
            "both": lambda x=some, w=weight, i=kept_in, o=kept_out: gyro_linear(
                x, w, inputs=i, outputs=o
            ),
            "outputs": lambda x=every, w=weight, o=kept_out: gyro_linear(x, w, outputs=o),
            "inputs": lambda x=some, w=weight, i=kept_in: gyro_linear(x, w, inputs=i),
        }
        leaves = (weight, whole, some, every)
        took = interleaved(
            {name: timed(call, leaves) for name, call in calls.items()}, rounds=rounds
        )
        for name, left_in, left_out in (
            ("both", num_in // 2, num_out // 2),
            ("outputs", num_in, num_out // 2),
            ("inputs", num_in // 2, num_out),
        ):
            share = took[name] / took["whole"]
            product = SlicedProduct(
                parts=tau,
                rows=batch // tau,
                inputs=num_in,
                outputs=num_out,
                inputs_kept=left_in,
                outputs_kept=left_out,
            )
            yield Measured(product, share)


def timed(call: Callable[[], torch.Tensor], leaves: Sequence[torch.Tensor]) -> Callable[[], float]:
    """Return a function that runs a product forward and backward and returns its seconds."""

    def run() -> float:
        for leaf in leaves:
            leaf.grad = None
        began = time.perf_counter()
        out = call()
        out.backward(torch.ones_like(out))
        return time.perf_counter() - began

    return run


def judged(products: list[Measured]) -> dict[str, Any]:
    """Return how well the costs in use predict the products, and the best possible fit."""

    def error(costs: SlicingCosts) -> float:
        logs = [math.log(costs.share(each.product) / each.share) for each in products]
        return math.sqrt(sum(x * x for x in logs) / len(logs))

    grid = [
        SlicingCosts(flops_per_byte=float(f), half_rows=float(h))
        for f in (5, 10, 15, 20, 25, 30, 40)
        for h in (0, 4, 8, 12, 16, 24, 32)
    ]
    best = min(grid, key=error)
    return {
        "products": len(products),
        "rms, in use": error(SlicingCosts()),
        "rms, best": error(best),
        "flops_per_byte, best": best.flops_per_byte,
        "half_rows, best": best.half_rows,
    }


def main() -> None:
    options = json.loads(sys.argv[1])
    torch.set_num_threads(options.pop("threads", 2))
    say_result(judged(list(measured(**options))))


if __name__ == "__main__":
    main()
