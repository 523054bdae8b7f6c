"""The dropout masks of all trials of a block by one kernel, on a GPU.

Alone, PyTorch draws each mask by a call that reads the trial's place in its random stream. A pack
of 64 Transformers of two layers needs 512 masks for a step, and Python takes longer for these calls
than the GPU for the step. The kernel here computes the same numbers (Philox 4x32-10; Salmon et al.,
Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011), for each trial at its own place of its own
stream.

Which number of the stream decides about which element is PyTorch's affair and may change with its
version. So before the kernel draws a kind of mask for the first time, its masks and the places
behind them are compared with those of the calls. If any bit differs, calls draw this kind.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch

from thrifty.core import plain_logger


try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:  # PyTorch for CPUs comes without it
    triton = tl = None

logger = plain_logger(__name__)

AVAILABLE: Final = triton is not None
INTERPRETED: Final = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton interprets kernels, which then also run on CPU tensors; for tests."""
FAILURES: Final[tuple[type[Exception], ...]] = (
    RuntimeError,
    OSError,
    ImportError,
    subprocess.SubprocessError,
    *([] if triton is None else [triton.TritonError]),
)
"""What is raised where Triton cannot compile."""

PHILOX: Final = 4
"""Numbers that a GPU's generator makes at a time; its offset is a multiple of them."""
_THREADS: Final = 256
"""Threads of a block of PyTorch's kernel for dropout."""
_BLOCK: Final = 512
"""Groups of four numbers that a program of our kernel makes."""
MaskKind = Literal["dropout", "attention"]
"""Which numbers of a stream decide: PyTorch's kernel for dropout or the one for attention."""


class Place(NamedTuple):
    """A place in a GPU's random stream: all that the state of its generator holds."""

    seed: int
    offset: int


class Mask(NamedTuple):
    """The mask of one trial.

    Attributes:
        row: Row of the tensor that it is written to.
        place: Where the trial's stream is before the mask.
        rate: Probability that a number is dropped.
        numel: Numbers of the mask, from the beginning of the row.
    """

    row: int
    place: Place
    rate: float
    numel: int


def kernel(function: Callable[..., None]) -> Any:
    """Compile a function with Triton when it is first launched."""
    return function if triton is None else triton.jit(function)


@kernel
def _masks(
    out, numbers, factors, row_stride, ATTENTION: tl.constexpr, BLOCK: tl.constexpr
) -> None:  # fmt: skip
    # Columns of ``numbers``: seed, counter, row, groups of four, threads; then two floats.
    of_mask = numbers + tl.program_id(1) * 6
    seed = tl.load(of_mask)
    counter = tl.load(of_mask + 1)
    row = tl.load(of_mask + 2)
    num = tl.load(of_mask + 3)
    threshold = tl.load(factors + tl.program_id(1) * 12 + 10)
    scale = tl.load(factors + tl.program_id(1) * 12 + 11)
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if ATTENTION:  # one sequence, in the order of the elements
        place = counter + group
        sequence = tl.zeros_like(group)
    else:  # a sequence for each thread, which comes to every so many groups
        threads = tl.load(of_mask + 4)
        place = counter + group // threads
        sequence = group % threads
    a, b, c, d = tl.philox(
        seed,
        (place & 0xFFFFFFFF).to(tl.uint32), (place >> 32).to(tl.uint32),
        (sequence & 0xFFFFFFFF).to(tl.uint32), (sequence >> 32).to(tl.uint32),
    )  # fmt: skip
    random = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    uniform = random.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    kept = uniform > threshold if ATTENTION else uniform < threshold
    element = tl.program_id(0).to(tl.int64) * (4 * BLOCK) + tl.arange(0, 4 * BLOCK)
    value = tl.where(kept, scale, 0.0).to(out.dtype.element_ty)
    tl.store(out + row * row_stride + element, value, mask=element < 4 * num)


def fits(noise: torch.Tensor, kind: MaskKind, *, numel: Sequence[int] | None = None) -> bool:
    """Return whether the kernel can write masks into the rows of ``noise``, ``[K, ...]``.

    Args:
        noise: What is filled.
        kind: See ``MaskKind``.
        numel: Numbers of each trial's mask if these are not whole rows.
    """
    own = noise[0]
    return (
        AVAILABLE
        and (noise.is_cuda or INTERPRETED)
        and noise.dtype == torch.float32
        and 0 < own.numel() == noise.stride(0)
        and _is_dense(own)
        and (own.is_contiguous() or (kind == "dropout" and numel is None))
        and all(n > 0 and n % PHILOX == 0 for n in (numel or [own.numel()]))
    )


def _is_dense(x: torch.Tensor) -> bool:
    """Return whether a tensor fills its memory, in any order of the dimensions."""
    step = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride != step:
            return False
        step *= size
    return True


def write(noise: torch.Tensor, masks: Sequence[Mask], kind: MaskKind) -> None:
    """Write masks into the rows of ``noise``; rows of no mask keep what they hold."""
    numbers = np.empty((len(masks), 6), dtype=np.int64)
    threads = _threads_of(noise.device)
    numbers[:, :5] = [
        (
            mask.place.seed - 2**64 if mask.place.seed >= 2**63 else mask.place.seed,
            mask.place.offset // PHILOX,
            mask.row,
            mask.numel // PHILOX,
            threads(mask.numel),
        )
        for mask in masks
    ]
    factors = numbers.view(np.float32).reshape(len(masks), 12)
    factors[:, 10:] = [_threshold_and_scale(mask.rate, kind) for mask in masks]
    table = torch.from_numpy(numbers).to(noise.device, non_blocking=True)
    most = max(mask.numel for mask in masks)
    grid = (-(-most // (PHILOX * _BLOCK)), len(masks))
    with torch.cuda.device(noise.device) if noise.is_cuda else nullcontext():
        _masks[grid](
            noise, table, table.view(torch.float32), noise.stride(0),
            ATTENTION=kind == "attention", BLOCK=_BLOCK,
        )  # fmt: skip


def after(place: Place, mask: Mask, kind: MaskKind, *, device: torch.device) -> Place:
    """Return where a stream is behind a mask."""
    if mask.rate in {0.0, 1.0}:  # nothing is drawn
        return place
    if kind == "attention":
        drawn = mask.numel
    else:
        rounds = -(-mask.numel // (PHILOX * _threads_of(device)(mask.numel)))
        drawn = rounds * PHILOX
    return place._replace(offset=place.offset + -(-drawn // PHILOX) * PHILOX)


def _threads_of(device: torch.device) -> Callable[[int], int]:
    """Return a function from the size of a tensor to the threads that PyTorch's dropout starts."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        most = found.multi_processor_count * (found.max_threads_per_multi_processor // _THREADS)
    else:
        most = 4  # so that tests come to several rounds
    return lambda numel: _THREADS * min(most, -(-numel // _THREADS))


def _threshold_and_scale(rate: float, kind: MaskKind) -> tuple[np.float32, np.float32]:
    """Return what decides whether a number is kept, and what it then is, rounded as in PyTorch."""
    keep = np.float32(1.0 - rate)
    if kind == "attention":
        if rate in {0.0, 1.0}:
            return np.float32(-1.0 if rate == 0.0 else 2.0), np.float32(1.0)
        return np.float32(rate), np.float32(1.0) / keep
    if rate in {0.0, 1.0}:
        return np.float32(2.0 if rate == 0.0 else -1.0), np.float32(1.0)
    return keep, np.float32(1.0 / float(keep))
