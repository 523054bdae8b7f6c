from __future__ import annotations

import gc
import os


# Set before NumPy and torch are imported. Threads of OpenMP and OpenBLAS spin while they wait for
# each other: on busy cores, a test with two of them takes four times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Ray starts its workers with a niceness of 15: beside other work, they hardly run at all.
os.environ.setdefault("RAY_worker_niceness", "0")

import pytest
import torch
from hypothesis import HealthCheck, settings


# The time of an example says more about the machine than about the code.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("few", settings.get_profile("busy"), max_examples=20)
settings.load_profile("busy")


def pytest_collection_finish() -> None:
    """Freeze what is imported, to save the garbage collector 0.3 s at each collection."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        import torch._dynamo  # noqa: F401, PLC0415 (a first optimizer imports it in any case)
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """Remove THRIFTY_ variables, so that no test depends on the caller's shell."""
    for name in list(os.environ):
        if name.startswith("THRIFTY_"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def one_thread():
    """Run torch with one thread, because bits may depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
