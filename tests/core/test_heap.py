"""Memory that was freed goes back to the system."""

from __future__ import annotations

import subprocess
import sys

import pytest

from thrifty.core import _heap, trim_heap


SCRIPT = """
import psutil
from thrifty.core import trim_heap

def resident():
    return psutil.Process().memory_info().rss / 2**20

held = [bytearray(60_000) for _ in range(3000)]
last = bytearray(60_000)  # it keeps the heap from shrinking by itself
full = resident()
held.clear()
before = resident()
trim_heap()
print(full - before, full - resident())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_freed_memory_is_given_back():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    kept, given = map(float, done.stdout.split())
    assert given > 100
    assert given > kept


@pytest.mark.parametrize("missing", [OSError("no such library"), TypeError("no name")])
def test_a_system_without_it(monkeypatch, missing):
    def refuse(name):
        raise missing

    _heap._trim.cache_clear()
    monkeypatch.setattr(_heap.ctypes, "CDLL", refuse)
    trim_heap()
    _heap._trim.cache_clear()
