"""The products of one step of the small network, alone.

No packing that computes them can be faster.

    python -m bench.pack.products [--quick]

They run on one thread with K = 16, in the shapes of ``mlp`` of the zoo. Beside them are torch's
other ways to compute the same, and the largest products, which show what the processor can do.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from bench.common.processes import say_result


K, ROWS = 16, 32
LAYERS = ((64, 128), (128, 128), (128, 10))
LARGE = 1024


def quickest_s(run: Callable[[], Any], *, repeats: int) -> float:
    """Return the quickest of some calls, because other load on the machine only adds to it."""
    for _ in range(repeats // 10 + 1):
        run()
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - began)
    return best


def products(*, repeats: int) -> dict[str, Any]:
    """Return the seconds of a step of all K as batched products.

    The middle layer's forward pass is also measured in other ways.
    """
    seconds, flops = 0.0, 0
    for number, (width_in, width_out) in enumerate(LAYERS):
        x, w = torch.randn(K, ROWS, width_in), torch.randn(K, width_out, width_in)
        g = torch.randn(K, ROWS, width_out)
        out, wide, back = torch.empty_like(g), torch.empty_like(w), torch.empty_like(x)
        calls: list[Callable[[], Any]] = [
            lambda x=x, w=w, out=out: torch.bmm(  # type: ignore[misc]
                x, w.transpose(1, 2), out=out
            ),
            lambda g=g, x=x, wide=wide: torch.bmm(  # type: ignore[misc]
                g.transpose(1, 2), x, out=wide
            ),
        ]
        if number:  # the gradient of the inputs is not needed
            calls.append(
                lambda g=g, w=w, back=back: torch.bmm(g, w, out=back)  # type: ignore[misc]
            )
        seconds += sum(quickest_s(call, repeats=repeats) for call in calls)
        flops += len(calls) * 2 * K * ROWS * width_in * width_out
    square = torch.randn(LARGE, LARGE)
    image = torch.randn(1, LARGE // 4, 64, 64).contiguous(memory_format=torch.channels_last)
    kernel = torch.randn(LARGE // 4, LARGE // 4, 3, 3)
    large = quickest_s(lambda: square @ square, repeats=10)
    convolution = quickest_s(lambda: F.conv2d(image, kernel, padding=1), repeats=10)
    return {
        "us of a trial-step": 1e6 * seconds / K,
        "GFLOP/s": 1e-9 * flops / seconds,
        "GFLOP/s of a large product": 2e-9 * LARGE**3 / large,
        "GFLOP/s of a large convolution": 18e-9 * 64**2 * (LARGE // 4) ** 2 / convolution,
        **_other_ways(repeats=repeats),
    }


def _other_ways(*, repeats: int) -> dict[str, float]:
    """Return the times of other ways to run the middle layer forward.

    They are relative to its batched product.
    """
    width = LAYERS[1][0]
    x, w = torch.randn(K, ROWS, width), torch.randn(K, width, width)
    out = torch.empty(K, ROWS, width)
    batched = quickest_s(lambda: torch.bmm(x, w.transpose(1, 2), out=out), repeats=repeats)
    rows = torch.randn(ROWS, K * width, 1, 1).contiguous(memory_format=torch.channels_last)
    kernels = w.view(K * width, width, 1, 1)
    linear = torch.ops.mkldnn._linear_pointwise
    ways: dict[str, Callable[[], Any]] = {
        "grouped convolution": lambda: F.conv2d(rows, kernels, groups=K),
        "inner products of oneDNN": lambda: [
            linear(x[k], w[k], None, "none", [], "") for k in range(K)
        ],
        "products one by one": lambda: [torch.mm(x[k], w[k].t(), out=out[k]) for k in range(K)],
    }
    return {
        f"{name}, times a batched product": quickest_s(way, repeats=repeats) / batched
        for name, way in ways.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with torch.no_grad():
        say_result(products(repeats=20 if args.quick else 2000))


if __name__ == "__main__":
    main()
