"""A simulated executor for plans: it trains nothing but checks that each chain could start."""

from __future__ import annotations

from collections import Counter

import numpy as np

from thrifty.core import CheckpointRef, EpochDone, StageDone
from thrifty.plan import Answer, Chain, SearchPlan


def ref(node: int, epoch: int) -> CheckpointRef:
    return CheckpointRef(node=node, epoch=epoch, path="", num_bytes=1, digest="")


class Driver:
    """Driver that runs chains in random interleaving on some workers and counts what is trained."""

    def __init__(self, plan: SearchPlan, *, workers: int = 1, seed: int = 0) -> None:
        self.plan = plan
        self.workers = workers
        self.rng = np.random.default_rng(seed)
        self.trained: Counter[tuple[int, int]] = Counter()
        self.answers: list[Answer] = []
        self.chains: list[Chain] = []
        self._running: list[list] = []

    def fill(self) -> bool:
        while len(self._running) < self.workers:
            chain = self.plan.next_chain()
            if chain is None:
                break
            self._check_start(chain)
            self.chains.append(chain)
            self._running.append([(s.node, s.start, s.stop) for s in chain.stages])
        return bool(self._running)

    def step(self) -> None:
        stages = self._running[int(self.rng.integers(len(self._running)))]
        node, start, stop = stages.pop(0)
        for epoch in range(start + 1, stop + 1):
            self.trained[node, epoch] += 1
            event = EpochDone(
                node=node, epoch=epoch, metrics={"m": float(epoch)}, seconds=0.0, worker="w"
            )
            self.answers += self.plan.record(event)
        done = StageDone(node=node, start=start, stop=stop, worker="w", checkpoint=ref(node, stop))
        self.answers += self.plan.record(done)
        self._running = [s for s in self._running if s]

    def run(self) -> None:
        while self.fill():
            self.step()

    def _check_start(self, chain: Chain) -> None:
        first = chain.stages[0]
        if chain.resume is None:
            assert first.start == 0
        else:
            owner = self.plan.owner(first.node, first.start)
            assert (chain.resume.node, chain.resume.epoch) == (owner.id, first.start)
        for a, b in zip(chain.stages, chain.stages[1:], strict=False):
            assert a.stop == b.start
            assert a.node == b.node or self.plan.nodes[b.node].parent is self.plan.nodes[a.node]
