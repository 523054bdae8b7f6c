from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True)
def frozen_objects():
    """Each collection looks at the objects of this test alone, although tests thaw the heap."""
    gc.freeze()
