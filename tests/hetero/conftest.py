"""A lighthouse, where torchft is installed.

On a busy machine a live worker may be silent for seconds, and come late to a meeting. So a worker
counts as dead after as long a silence as torchft's own default, and a meeting waits for all that
live.
"""

from __future__ import annotations

import pytest


@pytest.fixture
def lighthouse(request):
    coordination = pytest.importorskip(
        "torchft.coordination", reason="torchft is not installed"
    )
    server = coordination.LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=getattr(request, "param", 1),
        join_timeout_ms=600_000,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=5000,
    )
    yield f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    server.shutdown()
