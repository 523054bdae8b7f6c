"""Readers of a dashboard: many pages that are open at once.

    python -m bench.dashboard.readers ADDRESS NUMBER

Each reader waits for a study, then polls as a page does: it asks for the revision as often as the
server says, and for the views of the overview when the revision has changed. The readers report
what they saw. A line "off" pauses them, a line "on" resumes them, and any other line stops them.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median

import httpx

from bench.common.processes import say_result


POLL_S = 2.0
VIEWS = ("", "/history", "/importance")


@dataclass(kw_only=True)
class Tally:
    waits: list[float] = field(default_factory=list)
    failed: int = 0


@dataclass(kw_only=True)
class Page:
    """One reader: what it has, and of which revision."""

    client: httpx.AsyncClient
    tally: Tally
    tags: dict[str, str] = field(default_factory=dict)
    seen: dict[str, str] = field(default_factory=dict)
    pause_s: float = POLL_S

    async def get(self, path: str) -> str:
        """Request a path, with the ETag as a browser does; return the revision of the answer."""
        began = time.perf_counter()
        headers = {"If-None-Match": self.tags[path]} if path in self.tags else {}
        try:
            answer = await self.client.get(f"/api/studies/1{path}", headers=headers)
        except httpx.TransportError:
            self.tally.failed += 1
            return self.seen.get(path, "")
        self.tally.waits.append(time.perf_counter() - began)
        self.tally.failed += answer.status_code not in (200, 304)
        self.tags[path] = answer.headers.get("etag", "")
        self.pause_s = float(answer.headers.get("x-ask-again", self.pause_s))
        return answer.headers.get("x-revision", "")

    async def live(self, stop: asyncio.Event, awake: asyncio.Event) -> None:
        while not stop.is_set():
            await awake.wait()
            now = await self.get("/revision")
            for view in VIEWS:
                if self.seen.get(view) != now:
                    self.seen[view] = await self.get(view)
            await _first(stop.wait(), self.pause_s)


async def _first(end: Awaitable[object], pause_s: float) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(end, pause_s)


async def watch(address: str, *, number: int) -> Tally:
    tally, stop, awake = Tally(), asyncio.Event(), asyncio.Event()
    awake.set()
    limits = httpx.Limits(max_connections=number, max_keepalive_connections=number)
    async with httpx.AsyncClient(base_url=address, timeout=60, limits=limits) as client:
        while (await client.get("/api/studies/1/revision")).status_code != 200:
            await asyncio.sleep(0.1)
        pages = []
        for _ in range(number):
            pages.append(asyncio.create_task(Page(client=client, tally=tally).live(stop, awake)))
            await asyncio.sleep(POLL_S / number)  # spread the readers over a poll
        while (line := await asyncio.to_thread(sys.stdin.readline)) in {"on\n", "off\n"}:
            awake.set() if line == "on\n" else awake.clear()
        stop.set()
        awake.set()
        await asyncio.gather(*pages)
    return tally


def main() -> None:
    if hasattr(os, "SCHED_IDLE"):
        # Real readers run on other machines, so here they only get idle CPU time.
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    tally = asyncio.run(watch(sys.argv[1], number=int(sys.argv[2])))
    waits = sorted(tally.waits)
    say_result({
        "requests": len(waits),
        "failed": tally.failed,
        "median_ms": 1e3 * median(waits),
        "p99_ms": 1e3 * waits[int(0.99 * (len(waits) - 1))],
    })


if __name__ == "__main__":
    main()
