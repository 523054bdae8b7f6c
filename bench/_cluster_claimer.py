"""A process that claims stages of a plan.

It loads no more than the store, so that 32 of them start quickly.
"""

from __future__ import annotations

import time
from multiprocessing.synchronize import Barrier
from typing import Any

import numpy as np

from thrifty.plan import Stage
from thrifty.store import EpochRecord, Store


BATCH = 10
"""Number of chains whose ends a driver writes together, as it does ten times a second."""


def claimer(
    url: str, place: int, *, num_nodes: int, claims: int, barrier: Barrier, results: Any
) -> None:
    nodes = iter(np.random.default_rng(place).permutation(num_nodes).tolist())
    held: list[int] = []
    claim_s: list[float] = []
    lost = 0
    with Store.open(url) as store:
        info = store.studies.get(f"s{place}")
        with store.lease(info, shared=True) as lease:
            driver = store.drive(lease)
            driver.changes(num_nodes=num_nodes, anyway=True)
            # A later look would show nodes that were trained, which does not matter here.
            barrier.wait()
            began = 0.0
            while len(held) < BATCH + claims:
                if len(held) == BATCH and not began:
                    barrier.wait()
                    began, claim_s, lost = time.time(), [], 0
                node = next(nodes)
                stage = Stage(node=node, start=0, stop=1)
                asked = time.perf_counter()
                taken = driver.claim([stage])
                claim_s.append(time.perf_counter() - asked)
                if not taken:
                    lost += 1
                    continue
                held.append(node)
                driver.done([stage])
                if len(held) % BATCH == 0:
                    driver.record([_epoch(info.plan, n, info.id) for n in held[-BATCH:]])
            ended = time.time()
    results.put({
        "began": began,
        "ended": ended,
        "held": held,
        "claim_s": np.array(claim_s),
        "lost": lost,
    })


def _epoch(plan: int, node: int, study: int) -> EpochRecord:
    return EpochRecord(
        plan=plan,
        node=node,
        epoch=1,
        metrics={"m": 0.5},
        seconds=0.1,
        worker="w",
        study=study,
    )
