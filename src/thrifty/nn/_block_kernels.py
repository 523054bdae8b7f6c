"""Triton kernels for products with the kept groups of a weight, which they read in place.

Gathering the kept groups moves a copy of them through memory for each part of the batch. These
kernels look up which groups a part keeps, and address the blocks in the weight itself.

- ``product`` is the forward product, and with the weight transposed the gradient of the input.
- ``weight_gradient`` goes through the blocks of the weight. Each block sums over the parts that
  keep its rows and its columns, and is written once. So there are no atomics, and results are
  deterministic.

The sizes of tiles depend on shapes alone. Nothing waits for the GPU, so steps can be captured.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from thrifty.core import plain_logger

from ._masks import KeptGroups


try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:  # PyTorch for CPUs comes without it
    triton = tl = None

logger = plain_logger(__name__)

_FAILURES: tuple[type[Exception], ...] = (
    RuntimeError,
    OSError,
    ImportError,
    subprocess.SubprocessError,
    *([] if triton is None else [triton.TritonError]),
)
"""What is raised where Triton cannot compile."""
INTERPRETED: Final = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton interprets kernels, which then also run on CPU tensors; for tests."""
LARGEST_PARTS: Final = 256
"""Parts of a batch that ``weight_gradient`` can hold in registers."""
_SMALLEST_TILE: Final = 16
"""Rows, columns and depth that a product on tensor cores has at least."""
_ENOUGH_PROGRAMS: Final = 264
"""Tiles below which some processors of a large GPU are idle: two for each of an H100's 132."""
_LARGEST_OFFSET: Final = 2**31
"""Offsets are 32-bit numbers."""
GATHERED_ROWS = 128
"""Rows of a part from which the gradient of its input, in float32, is faster by cuBLAS.

Then gathering the blocks is a small part of the time. Measured on an H200 with
`python -m bench.gyro.kernels`.
"""


def kernel(function: Callable[..., None]) -> Any:
    """Compile a function with Triton when it is first launched."""
    if triton is None:
        return function
    # Each of these would otherwise be compiled anew for 1, for multiples of 16 and for the rest.
    any_number = ["num_parts", "num_rows", "tiles_m", "num_kept_r", "num_kept_c"]
    return triton.jit(function, do_not_specialize=any_number)


class Tiles(NamedTuple):
    """Sizes of the tiles of a kernel.

    Attributes:
        rows: Rows of the result that a program computes at most.
        columns: Columns of the result that a program computes at most.
        depth: Numbers of each sum that are multiplied at a time, at most.
        warps: Groups of 32 threads of a program; None chooses by the size of the tile.
        stages: Steps of the loop whose loads are under way at the same time.
        precision: How float32 is multiplied: ``"ieee"``, ``"tf32"`` or ``"tf32x3"``. None follows
            ``torch.backends.cuda.matmul.allow_tf32``.
    """

    rows: int = 64
    columns: int = 64
    depth: int = 32
    warps: int | None = None
    stages: int = 3
    precision: str | None = None


DEFAULT_TILES: Final = Tiles()
FLOAT32_TILES: Final = Tiles(depth=64, stages=2, precision="tf32x3")
"""Tiles of ``product`` for float32 where TF32 is not allowed.

Three products of TF32 on tensor cores add up to about the precision of float32, as in PyTorch's
memory-efficient attention. They are three to five times as fast as products without tensor cores;
for the gradient of the weight they are slower (H200, `python -m bench.gyro.kernels`).
"""


# -- the kernels -----------------------------------------------------------------------------


@kernel
def _product(
    a, weight, bias, out,
    kept_k, kept_n, stride_kept_k, stride_kept_n,
    num_parts, num_rows, size_k, size_n, stride_k, stride_n, tiles_m,
    GROUP_K: tl.constexpr, GROUP_N: tl.constexpr, MASK_K: tl.constexpr, MASK_N: tl.constexpr,
    HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    # A group size of 0 means all units. Neighbouring programs compute the same columns for all
    # parts, so blocks of the weight that several parts keep are still in the cache.
    program = tl.program_id(0)
    m = program % tiles_m
    part = (program // tiles_m) % num_parts
    n = program // tiles_m // num_parts
    rows = m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = n * BLOCK_N + tl.arange(0, BLOCK_N)
    if GROUP_N == 0:
        units = columns
    else:
        PER_N: tl.constexpr = GROUP_N // BLOCK_N
        group_n = tl.load(kept_n + part * stride_kept_n + n // PER_N).to(tl.int32)
        units = group_n * GROUP_N + (n % PER_N) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    left_at = a + (part * num_rows + rows)[:, None] * size_k + depth[None, :]
    right_at = weight + depth[:, None] * stride_k + units[None, :] * stride_n
    in_rows = rows[:, None] < num_rows
    in_columns = columns[None, :] < size_n
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(tl.cdiv(size_k, BLOCK_K)):
        if GROUP_K == 0:
            start = k * BLOCK_K
        else:
            PER_K: tl.constexpr = GROUP_K // BLOCK_K
            group_k = tl.load(kept_k + part * stride_kept_k + k // PER_K).to(tl.int32)
            start = group_k * GROUP_K + (k % PER_K) * BLOCK_K
        if MASK_K:
            within = k * BLOCK_K + depth < size_k
            left = tl.load(left_at + k * BLOCK_K, mask=in_rows & within[None, :], other=0.0)
            right = tl.load(
                right_at + start * stride_k, mask=within[:, None] & in_columns, other=0.0
            )
        else:
            left = tl.load(left_at + k * BLOCK_K, mask=in_rows, other=0.0)
            if MASK_N:
                right = tl.load(right_at + start * stride_k, mask=in_columns, other=0.0)
            else:
                right = tl.load(right_at + start * stride_k)
        total = tl.dot(left, right, total, input_precision=PRECISION)
    if HAS_BIAS:
        shift = tl.load(bias + units, mask=columns < size_n, other=0.0)
        total += shift.to(tl.float32)[None, :]
    out_at = out + (part * num_rows + rows)[:, None] * size_n + columns[None, :]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=in_rows & in_columns)


@kernel
def _places(
    kept, stride, num_kept, num_parts, group,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
) -> Any:  # fmt: skip
    """Return the place of a group among those that each part keeps, or -1."""
    parts = tl.arange(0, PARTS)
    found = tl.full((PARTS,), -1, dtype=tl.int32)
    for first in range(0, num_kept, BLOCK):
        places = first + tl.arange(0, BLOCK)
        groups = tl.load(
            kept + parts[:, None] * stride + places[None, :],
            mask=(parts < num_parts)[:, None] & (places < num_kept)[None, :],
            other=-1,
        )
        here = tl.where(groups.to(tl.int32) == group, places[None, :], -1)
        found = tl.maximum(found, tl.max(here, axis=1))
    return found


@kernel
def _weight_gradient(
    grad, a, of_weight, of_bias,
    kept_r, kept_c, stride_kept_r, stride_kept_c, num_kept_r, num_kept_c,
    num_parts, num_rows, size_r, size_c, all_r, all_c,
    GROUP_R: tl.constexpr, GROUP_C: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
    PARTS: tl.constexpr, KEPT: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr,
) -> None:  # fmt: skip
    r = tl.program_id(1)
    c = tl.program_id(0)
    parts = tl.arange(0, PARTS)
    at_r = tl.arange(0, BLOCK_R)
    at_c = tl.arange(0, BLOCK_C)
    units_r = r * BLOCK_R + at_r
    units_c = c * BLOCK_C + at_c
    depth = tl.arange(0, BLOCK_M)
    if GROUP_R == 0:
        place_r = tl.zeros((PARTS,), dtype=tl.int32)
        within_r = r * BLOCK_R
    else:
        PER_R: tl.constexpr = GROUP_R // BLOCK_R
        place_r = _places(kept_r, stride_kept_r, num_kept_r, num_parts, r // PER_R, PARTS, KEPT)
        within_r = (r % PER_R) * BLOCK_R
    if GROUP_C == 0:
        place_c = tl.zeros((PARTS,), dtype=tl.int32)
        within_c = c * BLOCK_C
    else:
        PER_C: tl.constexpr = GROUP_C // BLOCK_C
        place_c = _places(kept_c, stride_kept_c, num_kept_c, num_parts, c // PER_C, PARTS, KEPT)
        within_c = (c % PER_C) * BLOCK_C
    in_r = units_r < all_r
    in_c = units_c < all_c
    if HAS_WEIGHT:
        keep = (place_r >= 0) & (place_c >= 0) & (parts < num_parts)
        num = tl.sum(keep.to(tl.int32))
        part = -1
        total = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
        # Most parts keep only one of the two groups, or none: go from one that keeps both to the
        # next.
        for _ in range(num):
            part = tl.min(tl.where(keep & (parts > part), parts, PARTS))
            first_r = tl.sum(tl.where(parts == part, place_r, 0)) * GROUP_R + within_r
            first_c = tl.sum(tl.where(parts == part, place_c, 0)) * GROUP_C + within_c
            for m in range(0, num_rows, BLOCK_M):
                rows = m + depth
                in_rows = rows < num_rows
                left = tl.load(
                    grad + (part * num_rows + rows)[None, :] * size_r + (first_r + at_r)[:, None],
                    mask=in_rows[None, :] & in_r[:, None],
                    other=0.0,
                )
                right = tl.load(
                    a + (part * num_rows + rows)[:, None] * size_c + (first_c + at_c)[None, :],
                    mask=in_rows[:, None] & in_c[None, :],
                    other=0.0,
                )
                total = tl.dot(left, right, total, input_precision=PRECISION)
        tl.store(
            of_weight + units_r[:, None] * all_c + units_c[None, :],
            total.to(of_weight.dtype.element_ty),
            mask=in_r[:, None] & in_c[None, :],
        )
    if HAS_BIAS:
        if c == 0:  # known when it runs, HAS_BIAS when it is compiled
            keep_r = (place_r >= 0) & (parts < num_parts)
            num_r = tl.sum(keep_r.to(tl.int32))
            own = -1
            shift = tl.zeros((BLOCK_R,), dtype=tl.float32)
            for _ in range(num_r):
                own = tl.min(tl.where(keep_r & (parts > own), parts, PARTS))
                start = tl.sum(tl.where(parts == own, place_r, 0)) * GROUP_R + within_r
                for m in range(0, num_rows, BLOCK_M):
                    rows = m + depth
                    some = tl.load(
                        grad + (own * num_rows + rows)[:, None] * size_r + (start + at_r)[None, :],
                        mask=(rows < num_rows)[:, None] & in_r[None, :],
                        other=0.0,
                    )
                    shift += tl.sum(some.to(tl.float32), axis=0)
            tl.store(of_bias + units_r, shift.to(of_bias.dtype.element_ty), mask=in_r)


# -- how they are launched -------------------------------------------------------------------


def fits(
    x: Tensor,
    weight: Tensor,
    *,
    dtype: torch.dtype,
    inputs: KeptGroups | None,
    outputs: KeptGroups | None,
) -> bool:
    """Return whether the kernels can compute a product.

    Args:
        x: Shape as for ``gyro_linear``.
        weight: The whole weight.
        dtype: What both are multiplied in.
        inputs: The groups that ``x`` has; None for all.
        outputs: The groups to compute; None for all.
    """
    if triton is None or not (x.is_cuda or INTERPRETED):
        return False
    return (
        dtype in {torch.float32, torch.float16, torch.bfloat16}
        and x.device == weight.device
        and x.dim() > 1
        and len(x) <= LARGEST_PARTS
        and 0 < x.numel() < _LARGEST_OFFSET
        and 0 < weight.numel() < _LARGEST_OFFSET
        and x.numel() // x.shape[-1] * weight.shape[0] < _LARGEST_OFFSET
        and all(k is None or _block(k.group_size) >= _SMALLEST_TILE for k in (inputs, outputs))
        and works(x.device)
    )


def works(device: torch.device) -> bool:
    """Return whether kernels can be compiled for a device, and run there."""
    if triton is None:
        return False
    if device.type != "cuda":
        return INTERPRETED
    index = torch.cuda.current_device() if device.index is None else device.index
    if torch.cuda.is_current_stream_capturing() and index not in _tried:
        return False  # the trial launch would become a part of the graph
    _tried.add(index)
    return _works(index)


_tried: set[int] = set()


@cache
def _works(index: int) -> bool:
    device = torch.device("cuda", index)
    if torch.version.cuda is None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    x = torch.ones(1, 16, 16, device=device)
    try:
        product(x, x[0], None, contracted=None, kept=None, size=16, transposed=False)
    except _FAILURES as error:
        # Triton compiles its launcher with a C compiler, which some machines do not have.
        logger.warning(
            "Triton kernels do not work here, so kept groups are gathered, which is slower: %s",
            error,
        )
        return False
    return True


def product(
    a: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    contracted: KeptGroups | None,
    kept: KeptGroups | None,
    size: int,
    transposed: bool,
    tiles: Tiles | None = None,
) -> Tensor:
    """Multiply each part by the blocks of the weight that it keeps.

    Args:
        a: Shape ``(parts, rows, contracted units)``, contiguous.
        weight: The whole weight, shape ``(out_features, in_features)``, contiguous.
        bias: The whole bias, or None.
        contracted: The groups that ``a`` has; None for all units.
        kept: The groups to compute; None for all units.
        size: Number of units to compute for each part.
        transposed: Whether to multiply by the weight rather than its transpose, as the gradient of
            the input does.
        tiles: Sizes of the tiles; None chooses them.

    Returns:
        Shape ``(parts, rows, size)``.
    """
    parts, rows, depth = a.shape
    if tiles is None:
        exact = a.dtype == torch.float32 and precision() == "ieee"
        tiles = FLOAT32_TILES if exact else DEFAULT_TILES
    out = a.new_empty(parts, rows, size)
    block_n = _block(kept.group_size, tiles.columns) if kept else _covering(size, tiles.columns)
    block_k = _depth(contracted, depth, tiles.depth)
    tiles_n = -(-size // block_n)
    block_m = _covering(rows, tiles.rows)
    while block_m > _SMALLEST_TILE and tiles_n * parts * -(-rows // block_m) < _ENOUGH_PROGRAMS:
        block_m //= 2
    tiles_m = -(-rows // block_m)
    in_features = weight.shape[1]
    with _launched_on(a):
        _product[(tiles_m * parts * tiles_n,)](
            a, weight, bias, out,
            None if contracted is None else contracted.groups,
            None if kept is None else kept.groups,
            0 if contracted is None else contracted.groups.stride(0),
            0 if kept is None else kept.groups.stride(0),
            parts, rows, depth, size,
            in_features if transposed else 1, 1 if transposed else in_features, tiles_m,
            GROUP_K=contracted.group_size if contracted else 0,
            GROUP_N=kept.group_size if kept else 0,
            MASK_K=depth % block_k != 0,
            MASK_N=size % block_n != 0,
            HAS_BIAS=bias is not None,
            PRECISION=tiles.precision or precision(),
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
            num_warps=tiles.warps or _num_warps(block_m * block_n),
            num_stages=tiles.stages,
        )  # fmt: skip
    return out


def weight_gradient(
    grad: Tensor,
    a: Tensor,
    weight: Tensor,
    *,
    inputs: KeptGroups | None,
    outputs: KeptGroups | None,
    with_weight: bool = True,
    with_bias: bool = True,
    tiles: Tiles = DEFAULT_TILES,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of the weight and the bias.

    Args:
        grad: Gradient of the output, shape ``(parts, rows, outputs kept)``, contiguous.
        a: Shape ``(parts, rows, inputs kept)``, contiguous.
        weight: The whole weight.
        inputs: The groups that ``a`` has; None for all units.
        outputs: The groups that ``grad`` has; None for all units.
        with_weight: Whether the gradient of the weight is needed.
        with_bias: Whether the gradient of the bias is needed.
        tiles: Sizes of the tiles; ``depth`` counts rows of ``a``.
    """
    num_out, num_in = weight.shape
    parts, rows, size_c = a.shape
    of_weight = torch.empty_like(weight) if with_weight else None
    of_bias = weight.new_empty(num_out) if with_bias else None
    block_r = _block(outputs.group_size, tiles.rows) if outputs else _covering(num_out, tiles.rows)
    block_c = (
        _block(inputs.group_size, tiles.columns) if inputs else _covering(num_in, tiles.columns)
    )
    most_kept = max([1, *(k.groups.shape[1] for k in (inputs, outputs) if k)])
    # At least 16 parts, so that fewer variants are compiled.
    held_parts = _power_from(max(parts, 16))
    held = min(_power_from(most_kept), max(1, 4096 // held_parts))
    grid = (-(-num_in // block_c) if with_weight else 1, -(-num_out // block_r))
    with _launched_on(a):
        _weight_gradient[grid](
            grad, a, of_weight, of_bias,
            None if outputs is None else outputs.groups,
            None if inputs is None else inputs.groups,
            0 if outputs is None else outputs.groups.stride(0),
            0 if inputs is None else inputs.groups.stride(0),
            0 if outputs is None else outputs.groups.shape[1],
            0 if inputs is None else inputs.groups.shape[1],
            parts, rows, grad.shape[-1], size_c, num_out, num_in,
            GROUP_R=outputs.group_size if outputs else 0,
            GROUP_C=inputs.group_size if inputs else 0,
            HAS_WEIGHT=with_weight,
            HAS_BIAS=with_bias,
            PRECISION=tiles.precision or precision(),
            PARTS=held_parts, KEPT=held,
            BLOCK_R=block_r, BLOCK_C=block_c, BLOCK_M=_covering(rows, tiles.depth),
            num_warps=tiles.warps or _num_warps(block_r * block_c),
            num_stages=tiles.stages,
        )  # fmt: skip
    return of_weight, of_bias


def precision() -> str:
    """Return how float32 is multiplied, as PyTorch is told to multiply matrices."""
    matmul = torch.backends.cuda.matmul
    # The newer of PyTorch's two settings raises an error if the older one is read after it.
    set_to = getattr(matmul, "fp32_precision", None)
    allowed = matmul.allow_tf32 if set_to is None else set_to == "tf32"
    return "tf32" if allowed else "ieee"


def gathers(x: Tensor) -> bool:
    """Return whether to gather the kept groups for the gradient of an input ``x``."""
    return x.dtype == torch.float32 and x.shape[1] >= GATHERED_ROWS and precision() == "ieee"


def _launched_on(x: Tensor) -> AbstractContextManager[Any]:
    """Make the device of a tensor the current one, where Triton launches kernels."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _block(group_size: int, most: int = 64) -> int:
    """Return the largest power of two that divides a group, up to ``most``."""
    return min(group_size & -group_size, most)


def _depth(kept: KeptGroups | None, size: int, most: int) -> int:
    return _covering(size, most) if kept is None else _block(kept.group_size, most)


def _covering(size: int, most: int) -> int:
    """Return the smallest tile that covers ``size``, up to ``most``."""
    return max(_SMALLEST_TILE, min(_power_from(size), most))


def _power_from(number: int) -> int:
    """Return the smallest power of two that is no less than a number."""
    return 1 << max(number - 1, 0).bit_length()


def _num_warps(size: int) -> int:
    """Return the warps for a tile: each thread computes 16 numbers, or 32 of the largest tile."""
    return max(1, min(size // 512, 4))
