"""Saved graphs read back unchanged, are complete or absent, and are never read when damaged."""

from __future__ import annotations

import errno
import json
import os
import shutil

import numpy as np
import pytest
import torch

from thrifty.core import GraphError, StoreWriteError
from thrifty.graph import Graph, NeighborSampler, _saved, load_graph, save_graph


pytestmark = pytest.mark.slow


FILES = ("indptr.npy", "indices.npy", "x.npy", "y.npy", "header.json")


@pytest.fixture
def graph():
    x = torch.arange(6.0).reshape(3, 2)
    return Graph([0, 2, 3, 4], [1, 2, 0, 0], x=x.bfloat16(), y=torch.tensor([0, 1, 0]))


@pytest.fixture
def place(graph, tmp_path):
    save_graph(graph, tmp_path / "saved")
    return tmp_path / "saved"


def same(a, b):
    edges = (a.indptr == b.indptr).all() and (a.indices == b.indices).all()
    return edges and all(
        (v is None and w is None) or (v.dtype == w.dtype and torch.equal(v, w))
        for v, w in ((a.x, b.x), (a.y, b.y))
    )


def changed_header(place, **changes):
    path = place / "header.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_read_as_written(graph, tmp_path, mmap, dtype):
    graph = graph.replace(x=graph.x.to(dtype))
    save_graph(graph, tmp_path / "saved")
    assert same(load_graph(tmp_path / "saved", mmap=mmap), graph)


@pytest.mark.parametrize(
    "y", [torch.ones(3, dtype=torch.bool), torch.ones(3, 2, dtype=torch.bfloat16), None]
)
def test_labels_of_other_dtypes(graph, tmp_path, y):
    graph = Graph(graph.indptr, graph.indices, y=y)
    save_graph(graph, tmp_path / "saved")
    assert same(load_graph(tmp_path / "saved"), graph)


@pytest.mark.parametrize("mmap", [False, True])
def test_an_empty_graph(tmp_path, mmap):
    graph = Graph([0], [], x=torch.empty(0, 4))
    save_graph(graph, tmp_path / "saved")
    assert same(load_graph(tmp_path / "saved", mmap=mmap), graph)


def mapped_file(array):
    while array is not None and not isinstance(array, np.memmap):
        array = array.base
    return array


def test_arrays_stay_on_disk(place):
    found = load_graph(place)
    assert mapped_file(found.indices) is not None
    # A change to the file is visible, since no array was copied.
    with (place / "x.npy").open("r+b") as out:
        out.seek(-2, os.SEEK_END)
        out.write(torch.tensor([9.0]).bfloat16().view(torch.uint8).numpy().tobytes())
    assert found.x[2, 1] == 9


def test_writing_to_a_loaded_graph_does_not_change_the_file(place, graph):
    load_graph(place).x.zero_()
    assert same(load_graph(place), graph)


def test_files_that_can_only_be_mapped_for_reading(place, graph, monkeypatch):
    load = np.load

    def refusing(path, *, mmap_mode, allow_pickle):
        if mmap_mode == "c":
            raise OSError(errno.ENOMEM, "cannot allocate memory")
        return load(path, mmap_mode=mmap_mode, allow_pickle=allow_pickle)

    monkeypatch.setattr(np, "load", refusing)
    found = load_graph(place)
    assert not found.indices.flags.writeable
    assert same(found, graph)
    a, b = (NeighborSampler(g, [2]).sample([0, 1]) for g in (found, graph))
    assert torch.equal(a.nodes, b.nodes)


def test_other_trouble_when_mapping_is_not_hidden(place, monkeypatch):
    def failing(path, **options):
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(np, "load", failing)
    with pytest.raises(OSError, match="input/output error"):
        load_graph(place)


def test_parents_are_made(graph, tmp_path):
    save_graph(graph, tmp_path / "a" / "b" / "saved")
    assert same(load_graph(tmp_path / "a" / "b" / "saved"), graph)


def test_a_folder_that_is_there_is_not_touched(place, graph):
    with pytest.raises(GraphError, match="exists; choose another name"):
        save_graph(graph.replace(y=torch.ones(3)), place)
    assert same(load_graph(place), graph)


def test_overwriting_leaves_a_loaded_graph_as_it_was(place, graph, tmp_path):
    old = load_graph(place)
    save_graph(graph.replace(y=torch.ones(3)), place, overwrite=True)
    assert load_graph(place).y.tolist() == [1, 1, 1]
    assert same(old, graph)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_a_mapped_graph_may_replace_itself(place, graph):
    save_graph(load_graph(place), place, overwrite=True)
    assert same(load_graph(place), graph)


def test_a_link_is_followed(place, graph, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(place)
    save_graph(graph.replace(y=torch.ones(3)), link, overwrite=True)
    assert link.is_symlink()
    assert load_graph(place).y.tolist() == [1, 1, 1]


@pytest.mark.parametrize("is_folder", [True, False])
def test_nothing_but_a_graph_is_overwritten(graph, tmp_path, is_folder):
    precious = tmp_path / "precious"
    if is_folder:
        precious.mkdir()
        precious = precious / "thesis.tex"
    precious.write_text("years of work")
    with pytest.raises(GraphError, match="something else than a graph"):
        save_graph(graph, tmp_path / "precious", overwrite=True)
    assert precious.read_text() == "years of work"


def test_labels_that_numpy_does_not_know(graph, tmp_path):
    odd = graph.replace(y=torch.zeros(3).to(torch.float8_e4m3fn))
    with pytest.raises(GraphError, match=r"y is torch\.float8_e4m3fn, which cannot be saved"):
        save_graph(odd, tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


class Killed(BaseException):
    """Stands for the death of the process."""


def killed_at(monkeypatch, count):
    """Simulate a kill at the ``count``-th write to disk, after which no cleanup runs."""
    calls = iter(range(count))
    fsync = os.fsync

    def failing(handle):
        if next(calls, None) is None:
            raise Killed
        fsync(handle)

    monkeypatch.setattr(os, "fsync", failing)
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **options: None)


@pytest.mark.parametrize("count", range(7))
def test_killed_between_files(graph, tmp_path, monkeypatch, count):
    killed_at(monkeypatch, count)
    with pytest.raises(Killed):
        save_graph(graph, tmp_path / "saved")
    # Four arrays, the header and their folder are on disk before the final name exists.
    assert (tmp_path / "saved").exists() == (count == 6)
    if count == 6:
        assert same(load_graph(tmp_path / "saved"), graph)


@pytest.mark.parametrize("count", range(7))
def test_killed_while_overwriting(place, graph, monkeypatch, count):
    other = graph.replace(y=torch.ones(3))
    killed_at(monkeypatch, count)
    with pytest.raises(Killed):
        save_graph(other, place, overwrite=True)
    assert same(load_graph(place), other if count == 6 else graph)


def full_disk(*args, **options):
    raise OSError(errno.ENOSPC, "no space left on device")


def test_a_full_disk_leaves_nothing(graph, tmp_path, monkeypatch):
    monkeypatch.setattr(np.lib.format, "write_array", full_disk)
    with pytest.raises(StoreWriteError, match=r"saved in .*: .*no space left.*make room"):
        save_graph(graph, tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_the_old_graph(place, graph, monkeypatch):
    monkeypatch.setattr(_saved, "_write_header", full_disk)
    with pytest.raises(StoreWriteError):
        save_graph(graph.replace(y=torch.ones(3)), place, overwrite=True)
    assert same(load_graph(place), graph)


def test_the_old_graph_comes_back_when_the_new_one_cannot_be_renamed(place, graph, monkeypatch):
    rename = type(place).rename

    def failing(self, target):
        if self.suffix == ".new":
            raise OSError(errno.EACCES, "permission denied")
        return rename(self, target)

    monkeypatch.setattr(type(place), "rename", failing)
    with pytest.raises(StoreWriteError, match="permission denied"):
        save_graph(graph, place, overwrite=True)
    assert same(load_graph(place), graph)
    assert [path.name for path in place.parent.iterdir()] == ["saved"]


def test_a_parent_that_is_a_file(graph, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreWriteError, match="could not be saved"):
        save_graph(graph, tmp_path / "file" / "saved")


def test_no_graph_there(tmp_path):
    with pytest.raises(GraphError, match=r"there is no graph in .*: header.json is missing"):
        load_graph(tmp_path / "nowhere")


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file(place, name):
    (place / name).unlink()
    with pytest.raises(GraphError, match=f"{name} is missing"):
        load_graph(place)


@pytest.mark.parametrize("name", FILES[:-1])
@pytest.mark.parametrize("mmap", [False, True])
def test_a_truncated_file(place, name, mmap):
    data = (place / name).read_bytes()
    (place / name).write_bytes(data[:-1])
    with pytest.raises(GraphError, match=f"{name} has .* bytes where {len(data)} were written"):
        load_graph(place, mmap=mmap, verify=False)


@pytest.mark.parametrize("name", FILES[:-1])
@pytest.mark.parametrize("mmap", [False, True])
def test_an_altered_byte(place, name, mmap):
    data = bytearray((place / name).read_bytes())
    data[-1] ^= 1
    (place / name).write_bytes(data)
    with pytest.raises(GraphError, match=f"{name} was altered"):
        load_graph(place, mmap=mmap)


def test_a_file_without_its_beginning(place):
    path = place / "indices.npy"
    path.write_bytes(bytes(len(path.read_bytes())))
    with pytest.raises(GraphError, match=r"indices.npy is damaged"):
        load_graph(place)


def test_a_file_of_another_graph(place):
    array = np.load(place / "indices.npy")
    np.save(place / "indices.npy", array.view(np.float32))
    with pytest.raises(GraphError, match=r"float32 of shape .*not what was written"):
        load_graph(place)


def test_pickled_objects_are_not_read(place):
    path = place / "y.npy"
    np.save(path, np.array([{}], dtype=object), allow_pickle=True)
    header = json.loads((place / "header.json").read_text())
    header["arrays"]["y"]["bytes"] = path.stat().st_size
    changed_header(place, **header)
    with pytest.raises(GraphError, match=r"y.npy is damaged"):
        load_graph(place, mmap=False)


def test_arrays_that_do_not_fit_each_other(place, graph):
    odd = Graph(graph.indptr, graph.indices[:3], check=False)
    save_graph(odd, place, overwrite=True)
    with pytest.raises(GraphError, match=r"is damaged: indptr goes from 0 to 4"):
        load_graph(place)


@pytest.mark.parametrize("text", ["", "{", "\x00"])
def test_a_header_that_is_no_json(place, text):
    (place / "header.json").write_text(text)
    with pytest.raises(GraphError, match=r"header.json is damaged"):
        load_graph(place)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "thrifty chart"}, "no header of a graph"),
        ({"version": 2}, "a newer thrifty wrote .*version 2; this one reads 1.*upgrade"),
        ({"version": "1"}, "is damaged"),
        ({"arrays": {}}, "is damaged"),
        ({"arrays": None}, "is damaged"),
        ({"arrays": {"indptr": {}, "indices": {}}}, "is damaged"),
        ({"arrays": {"indptr": {}, "indices": {}, "../x": {}}}, "is damaged"),
    ],
)
def test_a_wrong_header(place, changes, message):
    changed_header(place, **changes)
    with pytest.raises(GraphError, match=message):
        load_graph(place)


def test_a_header_that_is_a_list(place):
    (place / "header.json").write_text("[]")
    with pytest.raises(GraphError, match="no header of a graph"):
        load_graph(place)
