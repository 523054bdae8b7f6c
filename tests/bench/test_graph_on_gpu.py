from __future__ import annotations

import sys

import numpy as np
import pytest

from bench.graph.datasets import rmat
from bench.graph.on_gpu import on_gpu


pytestmark = pytest.mark.slow


@pytest.mark.skipif(sys.platform != "linux", reason="processes need Linux")
def test_the_benchmark_beside_a_gpu_runs_on_a_cpu():
    figures, goals = on_gpu(
        quick=False, rounds=1, device="cpu", scale=10, num_edges=10_000, batch_size=64
    )
    ways = {(row["batches"], row["by"]) for row in figures["steps"]}
    assert len(ways) == 9
    assert all(row["ms"] > 0 for row in figures["steps"])
    assert len(goals) == 1


def test_a_random_graph_has_hubs_and_does_not_depend_on_threads(monkeypatch):
    monkeypatch.setattr("bench.graph.datasets._CHUNK", 1000)
    graph = rmat(10, 20_000, num_features=3)
    assert graph.num_edges == 20_000
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    again = rmat(10, 20_000, num_features=3)
    assert np.array_equal(graph.indices, again.indices)
    assert np.array_equal(graph.x, again.x)
    degrees = np.sort(graph.degrees())[::-1]
    # Each of ten levels gives one half of the nodes 0.57 + 0.19 of the edges.
    assert 0.8 < degrees[:256].sum() / 20_000 < 0.9
    assert graph.x.mean().abs() < 0.1
    assert 0.9 < graph.x.std() < 1.1
