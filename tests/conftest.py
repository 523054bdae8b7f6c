from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings


# How long an example takes says more about the machine than about the code.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """No test depends on what the caller's shell has set."""
    for name in list(os.environ):
        if name.startswith("THRIFTY_"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def one_thread():
    """Bits may depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
