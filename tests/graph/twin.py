"""A slow, obvious sampler in plain Python; its batches equal those of ``NeighborSampler``."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from thrifty.core import derive_seed


GOLDEN = 0x9E3779B97F4A7C15
WORD = 2**64 - 1


def mix(z):
    """Return the output function of SplitMix64."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & WORD
    return z ^ (z >> 31)


def below(word, bound):
    """Map a word to a number below ``bound``."""
    if bound < 2**16:
        return (word >> 32) * bound >> 32
    return int((word >> 11) * 2.0**-53 * bound)


class Draws:
    """The random numbers of one row."""

    def __init__(self, key, row):
        self.state = mix((key + row * GOLDEN) & WORD)

    def below(self, bound):
        self.state = (self.state + GOLDEN) & WORD
        return below(mix(self.state), bound)


def floyd(num, degree, draws, *, biased=False):
    """Return Robert Floyd's sample of ``num`` of ``degree``.

    With ``biased``, draw below ``last`` where it must be below ``last + 1``.
    """
    picks = []
    for last in range(degree - num, degree):
        pick = draws.below(last if biased else last + 1)
        picks.append(last if pick in picks else pick)
    return picks


def choose(degree, fanout, replace, draws):
    """Return which edges of a row are taken."""
    if fanout < 0 or degree == 0:
        return list(range(degree))
    if replace:
        return [draws.below(degree) for _ in range(fanout)]
    if fanout >= degree:
        return list(range(degree))
    return floyd(fanout, degree, draws)


@dataclass
class TwinBatch:
    """The content of a ``Batch`` as lists.

    ``blocks`` are lists of rows of local numbers, each with the number of sources.
    """

    nodes: list[int]
    seed_rows: list[int]
    num_seeds: int
    blocks: list[tuple[list[list[int]], int]]
    hop_nodes: list[int]
    hop_edges: list[int]


def sample(graph, seeds, fanouts, *, mode, replace, seed, epoch, batch):
    """Sample one batch."""
    local: dict[int, int] = {}
    seed_rows = [local.setdefault(int(node), len(local)) for node in seeds]
    ends, rows_of_hops = [len(local)], []
    first = 0
    for hop, fanout in enumerate(fanouts):
        key = derive_seed(seed, "neighbors", epoch, batch, hop)
        expanded = list(local)[first:]
        rows = []
        for row, node in enumerate(expanded):
            neighbors = graph.neighbors(node).tolist()
            picks = choose(len(neighbors), fanout, replace, Draws(key, row))
            rows.append([local.setdefault(neighbors[p], len(local)) for p in picks])
        if mode == "frontier":
            first = ends[-1]
        rows_of_hops.append(rows)
        ends.append(len(local))
    return TwinBatch(
        nodes=list(local),
        seed_rows=seed_rows,
        num_seeds=ends[0],
        blocks=_blocks(rows_of_hops, ends[1:], mode),
        hop_nodes=[ends[0], *(b - a for a, b in pairwise(ends))],
        hop_edges=[sum(map(len, rows)) for rows in rows_of_hops],
    )


def _blocks(rows_of_hops, ends, mode):
    blocks = []
    for hop, end in enumerate(ends):
        hops = rows_of_hops[: hop + 1] if mode == "frontier" else [rows_of_hops[hop]]
        blocks.append(([row for rows in hops for row in rows], end))
    return blocks[::-1]
