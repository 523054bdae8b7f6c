from __future__ import annotations

import pytest

from tests.pack._measuring import Measuring


@pytest.fixture
def measure(monkeypatch):
    def patch(fused):
        measuring = Measuring(fused)
        monkeypatch.setattr("thrifty.pack._judge.calibrate", measuring)
        return measuring

    return patch
