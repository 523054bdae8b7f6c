"""A lighthouse, where torchft is installed."""

from __future__ import annotations

import pytest


@pytest.fixture
def lighthouse():
    coordination = pytest.importorskip(
        "torchft.coordination", reason="torchft is not installed"
    )
    server = coordination.LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1,
        join_timeout_ms=1000,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=1000,
    )
    yield f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    server.shutdown()
