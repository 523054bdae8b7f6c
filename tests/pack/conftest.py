from __future__ import annotations

import pytest

from tests.pack._measuring import Measuring


@pytest.fixture
def free_checks(monkeypatch):
    """Make checks cost nothing: most tests have few steps and test something else."""
    monkeypatch.setattr("thrifty.pack.backends._fusion_policy._price", lambda *_, **__: 0.0)


@pytest.fixture
def measure(monkeypatch):
    def patch(fused):
        measuring = Measuring(fused)
        monkeypatch.setattr("thrifty.pack.backends._fusion_policy.calibrate", measuring)
        return measuring

    return patch
