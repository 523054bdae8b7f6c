"""Attention over the edges of a row: softmax, weighted sums, and their gradients.

Heads are side by side.
Elements are read by two unsigned indices, as in ``_aggregate``.
"""

from __future__ import annotations

import math

import numpy as np

from ._compile import kernel


@kernel
def edge_softmax(
    indptr: np.ndarray,
    indices: np.ndarray,
    source: np.ndarray,
    destination: np.ndarray,
    slope: float,
    alpha: np.ndarray,
    begin: int,
    end: int,
) -> None:
    """Write each row's softmax over its edges to ``alpha[e, h]``.

    The scores are ``leaky_relu(source[j, h] + destination[i, h])``.
    """
    for i in range(begin, end):
        low, high = indptr[i], indptr[i + 1]
        for h in range(alpha.shape[1]):
            largest = -np.inf
            for e in range(low, high):
                score = source[indices[e], h] + destination[i, h]
                if score < 0:
                    score *= slope
                alpha[e, h] = score
                # A NaN score is never the largest, but makes the whole row NaN through the sum.
                largest = max(largest, score)
            total = 0.0
            for e in range(low, high):
                power = math.exp(alpha[e, h] - largest)
                alpha[e, h] = power
                total += power
            for e in range(low, high):
                alpha[e, h] /= total


@kernel
def edge_softmax_back(
    indptr: np.ndarray,
    indices: np.ndarray,
    source: np.ndarray,
    destination: np.ndarray,
    slope: float,
    alpha: np.ndarray,
    grad: np.ndarray,
    grad_scores: np.ndarray,
    grad_destination: np.ndarray,
    begin: int,
    end: int,
) -> None:
    """Write the gradients of all edges' scores and of ``destination``, given that of ``alpha``."""
    for i in range(begin, end):
        low, high = indptr[i], indptr[i + 1]
        for h in range(alpha.shape[1]):
            inner = 0.0
            for e in range(low, high):
                inner += alpha[e, h] * grad[e, h]
            total = 0.0
            for e in range(low, high):
                score = alpha[e, h] * (grad[e, h] - inner)
                # At 0, PyTorch uses the slope as well.
                if source[indices[e], h] + destination[i, h] <= 0:
                    score *= slope
                grad_scores[e, h] = score
                total += score
            grad_destination[i, h] = total


@kernel
def weighted_sum(
    indptr: np.ndarray,
    indices: np.ndarray,
    edges: np.ndarray,
    weights: np.ndarray,
    x: np.ndarray,
    out: np.ndarray,
    begin: int,
    end: int,
) -> None:
    """Write ``out[i] = sum over its edges e of weights[edges[e], head] * x[indices[e]]``.

    If ``edges`` is empty, the weights are ``weights[e, head]``.
    """
    heads = weights.shape[1]
    width = x.shape[1] // heads
    for i in range(begin, end):
        for f in range(x.shape[1]):
            out[i, f] = 0
        for e in range(np.int64(indptr[i]), np.int64(indptr[i + 1])):
            source = np.uint64(indices[np.uint64(e)])
            edge = np.uint64(edges[np.uint64(e)] if len(edges) > 0 else e)
            for h in range(heads):
                weight = weights[edge, h]
                for f in range(h * width, (h + 1) * width):
                    out[i, f] += weight * x[source, f]


@kernel
def edge_products(
    indptr: np.ndarray,
    indices: np.ndarray,
    rows: np.ndarray,
    x: np.ndarray,
    out: np.ndarray,
    begin: int,
    end: int,
) -> None:
    """Write inner products of the destination's part of ``rows`` and the source's part of ``x``.

    The product of edge ``e`` and a head goes to ``out[e, head]``.
    """
    heads = out.shape[1]
    width = x.shape[1] // heads
    for i in range(begin, end):
        for e in range(np.int64(indptr[i]), np.int64(indptr[i + 1])):
            source = np.uint64(indices[np.uint64(e)])
            for h in range(heads):
                total = x.dtype.type(0)
                for f in range(h * width, (h + 1) * width):
                    total += rows[i, f] * x[source, f]
                out[e, h] = total
