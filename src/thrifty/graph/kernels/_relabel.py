"""Third pass of a hop: number the neighbours, new nodes in the order of their appearance."""

from __future__ import annotations

import numpy as np

from ._compile import inlined, kernel, prefetch


AHEAD = 24
"""Edges between prefetch and use."""
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_32 = np.uint64(32)


@kernel
def relabel_dense(
    found: np.ndarray,
    table: np.ndarray,
    stamp: int,
    bits: int,
    nodes: np.ndarray,
    num_nodes: int,
    out: np.ndarray,
) -> int:
    """Write local numbers, using a table with an entry for each node of the graph.

    An entry is ``stamp << bits | local number``; entries with another stamp are from earlier
    batches.

    Returns:
        The number of nodes in the batch afterwards.
    """
    num = len(found)
    mark = np.uint32(stamp << bits)
    mask = np.uint32((1 << bits) - 1)
    for e in range(num):
        if e + AHEAD < num:
            prefetch(table, found[np.uint64(e + AHEAD)])
        node = np.uint32(found[e])
        entry = table[node]
        if entry & ~mask == mark:
            out[e] = entry & mask
        else:
            table[node] = mark | np.uint32(num_nodes)
            nodes[np.uint64(num_nodes)] = node
            out[e] = num_nodes
            num_nodes += 1
    return num_nodes


@kernel
def relabel_hashed(
    found: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    slots: np.ndarray,
    nodes: np.ndarray,
    num_nodes: int,
    out: np.ndarray,
) -> int:
    """Write local numbers, using a hash table with open addressing.

    ``keys`` (-1: free) and ``values`` have a power of two of slots, more than there are nodes.
    ``slots`` records the slot of each node of the batch, so that it can be freed again.

    Returns:
        The number of nodes in the batch afterwards.
    """
    num = len(found)
    last = len(keys) - 1
    for e in range(num):
        if e + AHEAD < num:
            prefetch(keys, _home(found[e + AHEAD], last))
        node = found[e]
        slot = _home(node, last)
        while keys[slot] != node and keys[slot] != -1:
            slot = (slot + 1) & last
        if keys[slot] == -1:
            keys[slot] = node
            values[slot] = num_nodes
            slots[num_nodes] = slot
            nodes[num_nodes] = node
            num_nodes += 1
        out[e] = values[slot]
    return num_nodes


@kernel
def free_slots(keys: np.ndarray, slots: np.ndarray) -> None:
    """Free the slots of a batch."""
    for i in range(len(slots)):
        keys[slots[i]] = -1


@inlined
def _home(node: int, last: int) -> int:
    """Return the first slot to look at."""
    return np.int64((np.uint64(node) * _MULTIPLIER) >> _32) & last
