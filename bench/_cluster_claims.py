"""Claims of stages on PostgreSQL: many drivers take chains of one plan at once."""

from __future__ import annotations

import argparse
import multiprocessing
from statistics import median
from typing import Any

import numpy as np

from bench._cluster_claimer import claimer
from bench._harness import Goal, at_least, equal, table
from bench.postgresql_helpers import PrivatePostgreSQL
from thrifty.store import NodeRecord, Record, Store


def claims(args: argparse.Namespace) -> tuple[dict[str, Any], list[Goal]]:
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
