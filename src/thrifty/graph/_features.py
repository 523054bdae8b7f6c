"""Features of the nodes of a batch, in the dtype of the batch."""

from __future__ import annotations

import numpy as np
import torch

from thrifty.core import GraphError

from ._memory import Memory
from .kernels._rows import gather_bfloat16, gather_float16, gather_rows


def gather_features(
    x: torch.Tensor,
    nodes: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    memory: Memory | None = None,
) -> torch.Tensor:
    """Return ``x[nodes]`` or ``x[nodes].float()``, equal bit by bit.

    It takes one pass, in the calling thread alone.

    Args:
        x: features, float32, bfloat16 or float16, contiguous, shape
            ``(num_nodes, num_features)``; may be memory-mapped.
        nodes: existing node numbers; int64, shape ``(num,)``.
        dtype: dtype of the result: that of ``x`` or float32; None for that of ``x``.
        memory: pool to take the result's memory from; None for fresh memory.

    Returns:
        Shape ``(num, num_features)``.

    Raises:
        GraphError: the dtype of ``x`` cannot be converted to ``dtype``.

    >>> gather_features(torch.tensor([[1.0], [2.0]]), torch.tensor([1, 0, 1])).tolist()
    [[2.0], [1.0], [2.0]]
    """
    dtype = batch_dtype(x.dtype, dtype)
    shape = (len(nodes), x.shape[1])
    out = (
        torch.empty(shape, dtype=dtype, device="cpu")
        if memory is None
        else memory.array(shape, dtype)
    )
    rows = nodes.numpy()
    if x.dtype == torch.float32:
        gather_rows(x.numpy(), rows, out.numpy())
    elif dtype == x.dtype:
        gather_rows(_bits(x), rows, _bits(out))
    else:
        widen = gather_bfloat16 if x.dtype == torch.bfloat16 else gather_float16
        widen(_bits(x), rows, out.numpy().view(np.uint32))
    return out


def batch_dtype(stored: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return the dtype of a batch's features.

    Raises:
        GraphError: ``wanted`` is neither the stored dtype nor float32.
    """
    if wanted is None or wanted in {stored, torch.float32}:
        return stored if wanted is None else wanted
    raise GraphError(
        f"dtype={wanted}: batches of {stored} features can be {stored} or torch.float32; "
        f"for another, store them so: graph.replace(x=graph.x.to({wanted}))"
    )


def _bits(halves: torch.Tensor) -> np.ndarray:
    return halves.view(torch.int16).numpy().view(np.uint16)
