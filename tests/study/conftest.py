from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def as_on_a_quiet_machine(known_gains):
    """What is packed does not depend on what else this machine does."""
