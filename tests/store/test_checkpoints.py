from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from thrifty.core import CheckpointError, StoreWriteError
from thrifty.store import CheckpointFolder


DTYPES = ["bool", "uint8", "int16", "int64", "float16", "float32", "float64"]
shapes = st.lists(st.integers(0, 4), max_size=3)


def write(root, **tensors):
    folder = CheckpointFolder(str(root))
    return folder, folder.write("plan", node=1, epoch=2, tensors=tensors, meta={"a": [1, None]})


@given(st.sampled_from(DTYPES), shapes, st.integers(0, 100))
@settings(max_examples=40, deadline=None)
def test_what_is_read_is_what_was_written(tmp_path_factory, dtype, shape, seed):
    values = np.random.default_rng(seed).integers(0, 100, size=shape).astype(dtype)
    folder, ref = write(tmp_path_factory.mktemp("c"), x=values)
    arrays, meta = folder.read(ref)
    assert arrays["x"].dtype == values.dtype
    assert arrays["x"].shape == values.shape
    assert np.array_equal(arrays["x"], values)
    assert meta == {"a": [1, None]}


def test_a_view_with_gaps_is_written_whole(tmp_path):
    values = np.arange(12.0).reshape(3, 4).T[::2]
    folder, ref = write(tmp_path, x=values)
    assert np.array_equal(folder.read(ref)[0]["x"], values)


def test_a_folder_may_move(tmp_path):
    _, ref = write(tmp_path / "old", x=np.ones(3))
    (tmp_path / "old").rename(tmp_path / "new")
    assert CheckpointFolder(str(tmp_path / "new")).read(ref)[0]["x"].sum() == 3


def test_any_file_system_will_do(tmp_path):
    folder, ref = write("memory://checkpoints", x=np.ones(3))
    assert folder.read(ref)[0]["x"].sum() == 3
    folder.delete(ref)
    with pytest.raises(CheckpointError, match="cannot be read"):
        folder.read(ref)


@pytest.mark.parametrize("place", [0, 9, 60, -1])
def test_a_flipped_bit_is_found_out(tmp_path, place):
    folder, ref = write(tmp_path, x=np.ones(30))
    path = tmp_path / ref.path
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged"):
        folder.read(ref)


def test_a_truncated_file_is_found_out(tmp_path):
    folder, ref = write(tmp_path, x=np.ones(30))
    path = tmp_path / ref.path
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match="damaged"):
        folder.read(ref)


def test_a_file_without_our_header_is_no_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr("thrifty.store._checkpoints._digest", lambda data: "same")
    folder, ref = write(tmp_path, x=np.ones(3))
    (tmp_path / ref.path).write_bytes((10).to_bytes(8, "little") + b'{"a": {}}  ')
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        folder.read(ref)


def test_names_cannot_leave_the_folder(tmp_path):
    folder = CheckpointFolder(str(tmp_path / "root"))
    ref = folder.write("../../up", node=0, epoch=1, tensors={"x": np.ones(1)}, meta={})
    assert ".." not in ref.path
    assert (tmp_path / "root" / ref.path).exists()


def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreWriteError, match=r"No space left.*free some disk space"):
        write(tmp_path, x=np.ones(3))
    assert [p for p in Path(tmp_path).rglob("*") if p.is_file()] == []


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreWriteError, match="choose a writable place"):
        write(tmp_path / "file" / "below", x=np.ones(3))


def test_deleting_twice_is_no_error(tmp_path):
    folder, ref = write(tmp_path, x=np.ones(3))
    folder.delete(ref)
    folder.delete(ref)
