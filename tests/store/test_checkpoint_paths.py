"""Paths in database rows are untrusted: they cannot leave the folder of checkpoints."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from thrifty.core import CheckpointError, StoreWriteError
from thrifty.store import CheckpointFolder


HOSTILE = [
    "../victim/0-1.safetensors",
    "plan/../../victim/0-1.safetensors",
    "{folder}/victim/0-1.safetensors",
    "file://{folder}/victim/0-1.safetensors",
    "simplecache::file://{folder}/victim/0-1.safetensors",
    "plan/0-1.safetensors\0",
    "plan\0/0-1.safetensors",
    "plan/0-1.safetensors\n",
    "~/0-1.safetensors",
    "plan//0-1.safetensors",
    "plan/./0-1.safetensors",
    "plan/deeper/0-1.safetensors",
    "plan/*.safetensors",
    "plan/²-1.safetensors",
    "..\\victim\\0-1.safetensors",
    "plan",
    "",
]


@pytest.fixture
def scene(tmp_path):
    """Return a folder of checkpoints, a checkpoint's reference, and an outside file to keep."""
    folder = CheckpointFolder(str(tmp_path / "root"))
    ref = folder.write("plan", node=0, epoch=1, tensors={"x": np.ones(3)}, meta={})
    victim = tmp_path / "victim" / "0-1.safetensors"
    victim.parent.mkdir()
    victim.write_bytes((tmp_path / "root" / ref.path).read_bytes())
    return folder, ref, victim


@pytest.mark.parametrize("path", HOSTILE)
def test_a_path_that_leaves_the_folder_is_not_read(scene, tmp_path, path):
    folder, ref, _ = scene
    with pytest.raises(CheckpointError, match="is not one of the folder"):
        folder.read(replace(ref, path=path.format(folder=tmp_path)))


@pytest.mark.parametrize("path", HOSTILE)
def test_a_path_that_leaves_the_folder_is_not_deleted(scene, tmp_path, caplog, path):
    folder, ref, victim = scene
    folder.delete(replace(ref, path=path.format(folder=tmp_path)))
    assert victim.exists()
    assert folder.read(ref)[0]["x"].sum() == 3
    assert "nothing was deleted" in caplog.text


def test_the_same_on_any_file_system():
    folder = CheckpointFolder("memory://paths/root")
    ref = folder.write("plan", node=0, epoch=1, tensors={"x": np.ones(3)}, meta={})
    folder._fs.pipe_file("/paths/victim/0-1.safetensors", b"mine")
    with pytest.raises(CheckpointError, match="is not one of the folder"):
        folder.read(replace(ref, path="../victim/0-1.safetensors"))
    folder.delete(replace(ref, path="../victim/0-1.safetensors"))
    assert folder._fs.cat_file("/paths/victim/0-1.safetensors") == b"mine"


@pytest.mark.parametrize("link", ["plan", "plan/0-1.safetensors"])
def test_links_are_not_followed(scene, tmp_path, link):
    folder, ref, victim = scene
    (tmp_path / "root" / ref.path).unlink()
    if link == "plan":
        (tmp_path / "root" / "plan").rmdir()
    target = victim.parent if link == "plan" else victim
    (tmp_path / "root" / link).symlink_to(target)
    with pytest.raises(CheckpointError, match="symbolic link"):
        folder.read(ref)
    folder.delete(ref)
    assert victim.exists()
    with pytest.raises(StoreWriteError, match="symbolic link"):
        folder.write("plan", node=0, epoch=1, tensors={"x": np.zeros(3)}, meta={})
    assert victim.exists()


def test_the_root_itself_may_be_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "disk")
    folder = CheckpointFolder(str(tmp_path / "root"))
    ref = folder.write("plan", node=0, epoch=1, tensors={"x": np.ones(3)}, meta={})
    assert folder.read(ref)[0]["x"].sum() == 3


def test_a_header_that_nests_too_deeply_is_no_checkpoint(scene, tmp_path, monkeypatch):
    folder, ref, _ = scene
    monkeypatch.setattr("thrifty.store._checkpoints._digest", lambda data: ref.digest)
    header = b"[" * 100_000
    (tmp_path / "root" / ref.path).write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        folder.read(ref)
