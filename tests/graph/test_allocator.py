from __future__ import annotations

import subprocess
import sys

import pytest

from thrifty.graph import _batch


pytestmark = pytest.mark.slow


def test_large_memory_is_not_given_back():
    if not sys.platform.startswith("linux"):
        pytest.skip("glibc alone has mallopt")
    # Use a separate process, since the setting cannot be undone.
    code = """
import ctypes
from thrifty.graph._batch import tune_allocator
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
if not (hasattr(libc, "gnu_get_libc_version") and tune_allocator()):
    raise SystemExit(3)
block = libc.malloc(2**26)
ctypes.memset(block, 7, 2**26)
libc.free(block)
# a mapping of its own would be gone
again = libc.malloc(2**26)
assert again == block and ctypes.string_at(again + 2**25, 1) == b"\\x07"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode == 3:
        pytest.skip("not glibc")
    assert not done.returncode, done.stderr


def test_where_there_is_no_mallopt(monkeypatch):
    monkeypatch.setattr(_batch.sys, "platform", "darwin")
    assert not _batch.tune_allocator()
