"""Blocks for tests, the dense matrices they represent, and PyG without its warnings."""

from __future__ import annotations

import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from thrifty.graph import Block


def block_of(rows, num_src, *, indptr_dtype=torch.int32):
    """Return a block from the neighbour lists of its destinations."""
    ends = np.cumsum([0, *map(len, rows)])
    indices = [source for row in rows for source in row]
    return Block(
        torch.tensor(ends, dtype=indptr_dtype),
        torch.tensor(indices, dtype=torch.int32),
        num_src=num_src,
    )


@st.composite
def blocks(draw):
    """Draw any block, including rows without edges, repeated edges and no rows at all."""
    num_src = draw(st.integers(1, 8))
    num_dst = draw(st.integers(0, num_src))
    row = st.lists(st.integers(0, num_src - 1), max_size=6)
    return block_of(draw(st.lists(row, min_size=num_dst, max_size=num_dst)), num_src)


def random_block(num_dst, num_src, *, most=5, seed=0):
    """Return a block whose destinations have 0 to ``most`` neighbours."""
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, num_src, rng.integers(0, most + 1)).tolist() for _ in range(num_dst)]
    return block_of(rows, num_src)


def shared(block):
    """Return the same block, marked as shared by several trials."""
    return Block(block.indptr, block.indices, num_src=block.num_src, shared=True)


def adjacency(block, dtype=torch.float64):
    """Return how often each source sends to each destination, shape ``(num_dst, num_src)``."""
    dense = torch.zeros(block.num_dst, block.num_src, dtype=dtype)
    for i, (low, high) in enumerate(pairwise(block.indptr.tolist())):
        for source in block.indices[low:high].tolist():
            dense[i, source] += 1
    return dense


def means(block, dtype=torch.float64):
    """Return the matrix that averages over neighbours."""
    dense = adjacency(block, dtype)
    return dense / dense.sum(1, keepdim=True).clamp(min=1)


def features(num, width, *, seed=0, dtype=torch.float64, requires_grad=False):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num, width, generator=generator, dtype=dtype)
    return x.requires_grad_(requires_grad)


def pyg():
    """Return ``torch_geometric`` with its layers, or skip the test."""
    with warnings.catch_warnings(action="ignore"):
        # PyG uses features that torch warns about.
        pytest.importorskip("torch_geometric.nn")
        return pytest.importorskip("torch_geometric")
