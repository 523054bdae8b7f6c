"""Memory that was freed goes back to the system."""

from __future__ import annotations

import subprocess
import sys

import pytest

from thrifty.core import _heap, freed_at_once, trim_heap


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


PIECES = """
import contextlib, sys
import psutil
import torch
from thrifty.core import freed_at_once

def resident():
    return psutil.Process().memory_info().rss / 2**20

torch.ones(2**23)  # from now on, the C library keeps what is freed
before = resident()
small = []
with freed_at_once(int(sys.argv[1])), contextlib.ExitStack() as held:
    for size in range(300):
        each = torch.ones(2**18 + 16 * size)
        small.append(torch.ones(1))
        del each
    pieces = [torch.ones(2**18) for _ in range(200)]
    between = [torch.ones(1) for _ in range(200)]
    del pieces[::2], pieces[:-1]
    print(resident() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_large_pieces_are_given_back_as_soon_as_they_are_freed():
    left = []
    for num_bytes in (0, 2**30):
        done = subprocess.run(
            [sys.executable, "-c", PIECES, str(num_bytes)],
            capture_output=True,
            text=True,
            check=True,
        )
        left.append(float(done.stdout))
    assert left[0] > 100
    assert left[1] < 50


def test_contexts_may_be_open_within_others_and_the_last_one_ends_it(monkeypatch):
    sizes = []
    monkeypatch.setattr(_heap, "_set_threshold", sizes.append)

    def fail():
        with freed_at_once(2**30):
            with freed_at_once(2**30), freed_at_once(0):
                assert sizes == [_heap._SMALL]
            assert sizes == [_heap._SMALL]
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail()
    assert sizes == [_heap._SMALL, _heap._LARGEST]


@pytest.mark.parametrize("missing", [OSError("no such library"), TypeError("no name")])
def test_a_system_without_it(monkeypatch, missing):
    def refuse(name):
        raise missing

    _heap._function.cache_clear()
    monkeypatch.setattr(_heap.ctypes, "CDLL", refuse)
    trim_heap()
    with freed_at_once(2**30):
        pass
    _heap._function.cache_clear()
