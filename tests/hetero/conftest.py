"""A torchft lighthouse for the tests, where torchft is installed.

On a busy machine a live worker may be silent for seconds and join a quorum late. A worker therefore
counts as dead only after torchft's own default of silence, and a quorum waits for all live workers.
"""

from __future__ import annotations

import pytest


@pytest.fixture
def lighthouse(request):
    coordination = pytest.importorskip("torchft.coordination", reason="torchft is not installed")
    server = coordination.LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=getattr(request, "param", 1),
        join_timeout_ms=600_000,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=5000,
    )
    yield f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    server.shutdown()
