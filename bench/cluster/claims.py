"""Claims of stages on PostgreSQL: many drivers take chains of one plan at once."""

from __future__ import annotations

import argparse
import multiprocessing
import time
from multiprocessing.synchronize import Barrier
from statistics import median
from typing import Any

import numpy as np

from bench.common.harness import Part, at_least, equal, table
from bench.common.postgresql import PrivatePostgreSQL
from thrifty.plan import Stage
from thrifty.store import EpochRecord, NodeRecord, Record, Store


BATCH = 10
"""Number of chains whose ends a driver writes together, as it does ten times a second."""


def claims(args: argparse.Namespace) -> Part:
    """Measure 32 claimers; the median of some repeats counts."""
    rows = [
        claims_per_s(claimers=8 if args.quick else 32, claims=20 if args.quick else 200)
        for _ in range(1 if args.quick else args.repeats)
    ]
    table(rows)
    goals = [
        at_least("claims a second, 32 claimers", median(r["claims_per_s"] for r in rows), 500),
        equal("nodes claimed twice", sum(r["claimed twice"] for r in rows), 0),
    ]
    return {"rows": rows}, goals


def claims_per_s(*, claimers: int, claims: int) -> dict[str, Any]:
    """Return the claims a second of ``claimers`` processes, each with a study of its own.

    All take nodes of one plan, each in an order of its own. A claim that is lost to another claimer
    is not counted. A claimed node is released with an epoch's record, as after training. The clock
    starts when all processes have made a first batch, because processes last as long as a study.
    """
    spawn = multiprocessing.get_context("spawn")
    num_nodes = 4 * claimers * claims
    with PrivatePostgreSQL(durable=True, settings={"max_connections": "200"}) as server:
        _prepare(server.url, num_nodes=num_nodes, claimers=claimers)
        barrier, results = spawn.Barrier(claimers), spawn.Queue()
        children = [
            spawn.Process(
                target=claimer,
                args=(server.url, place),
                kwargs={
                    "num_nodes": num_nodes,
                    "claims": claims,
                    "barrier": barrier,
                    "results": results,
                },
            )
            for place in range(claimers)
        ]
        for child in children:
            child.start()
        found = [results.get(timeout=600) for _ in children]
        for child in children:
            child.join()
        with Store.open(server.url) as store:
            plan = store.plans.open("claims", task="bench").id
            written = [(e.node, e.epoch) for e in store.plans.load(plan).epochs]
    began, ended = min(f["began"] for f in found), max(f["ended"] for f in found)
    held = [node for f in found for node in f["held"]]
    waits = np.concatenate([f["claim_s"] for f in found])
    return {
        "claimers": claimers,
        "claims": len(held),
        "lost to another": sum(f["lost"] for f in found),
        "claimed twice": len(held) - len(set(held)),
        "written": len(written),
        "claims_per_s": claimers * claims / (ended - began),
        "claim_ms_median": float(np.median(waits)) * 1e3,
        "claim_ms_p99": float(np.quantile(waits, 0.99)) * 1e3,
    }


def _prepare(url: str, *, num_nodes: int, claimers: int) -> None:
    with Store.open(url) as store:
        plan = store.plans.open("claims", task="bench").id
        for place in range(claimers):
            store.studies.create(f"s{place}", plan=plan, spec={"mode": "max", "metric": "m"})
        nodes: list[Record] = [
            NodeRecord(plan=plan, node=n, parent=None, start=0, config={"lr": n}, epochs=1)
            for n in range(num_nodes)
        ]
        store.record(nodes)


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
            driver.changes(num_nodes=num_nodes, force=True)
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
        plan=plan, node=node, epoch=1, metrics={"m": 0.5}, seconds=0.1, worker="w", study=study
    )
