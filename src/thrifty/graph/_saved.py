"""Graphs on disk: one file for each array, and a header."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import zlib
from pathlib import Path
from typing import Any, Literal, TypeGuard

import numpy as np
import torch

from thrifty.core import GraphError, StoreWriteError

from ._graph import Graph, as_tensor


_FORMAT = "thrifty graph"
_VERSION = 1
_HEADER = "header.json"
_ARRAYS = ("indptr", "indices", "x", "y")
_PART_BYTES = 2**26


def save_graph(graph: Graph, folder: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write a graph to a folder of ``.npy`` files and a JSON header, without pickle.

    The files are written next to the folder and renamed when they are complete and on disk, so
    readers see the whole graph or none.

    Args:
        graph: Graph to save. bfloat16 is stored as its bits, uint16.
        folder: Target folder; its parents are created.
        overwrite: Whether to replace a graph that already exists. Processes that have mapped it
            keep the old one.

    Raises:
        GraphError: The target already exists, or labels have a dtype that NumPy does not know.
        StoreWriteError: The disk is full or not writable; what was there before is unchanged.

    >>> import tempfile
    >>> place = Path(tempfile.mkdtemp()) / "pair"
    >>> save_graph(Graph([0, 1, 2], [1, 0], x=torch.ones(2, 3)), place)
    >>> load_graph(place)
    Graph(num_nodes=2, num_edges=2, num_features=3)
    """
    place = Path(folder).resolve()
    _check_free(place, overwrite=overwrite)
    found = {name: getattr(graph, name) for name in _ARRAYS if getattr(graph, name) is not None}
    dtypes = {name: _dtype_name(values) for name, values in found.items()}
    arrays = {name: _bits(values, name=name) for name, values in found.items()}
    whole = place.with_name(f".{place.name}.{secrets.token_hex(6)}.new")
    try:
        whole.mkdir(parents=True)
        entries = {name: _write_array(whole, name, array) for name, array in arrays.items()}
        for name, dtype in dtypes.items():
            entries[name]["dtype"] = dtype
        _write_header(whole, entries)
        _put_in_place(whole, place)
    except OSError as error:
        raise StoreWriteError(
            f"the graph could not be saved in {place}: {error}; make room, or choose another place"
        ) from error
    finally:
        # Renamed already if all went well.
        shutil.rmtree(whole, ignore_errors=True)


def load_graph(folder: str | os.PathLike[str], *, mmap: bool = True, verify: bool = True) -> Graph:
    """Read a graph that `save_graph` wrote.

    Args:
        folder: Folder of the graph.
        mmap: Whether arrays stay on disk and are read on access; processes share that memory.
            Writes to the arrays are visible to this process only and not saved. Features larger
            than the memory are read-only, and writing to them ends the process.
        verify: Whether to compare all bytes with their checksums and to check ranges, which reads
            the files once. Otherwise only sizes are checked; an altered file then gives wrong
            batches, or ends the process.

    Raises:
        GraphError: There is no graph, a file is missing, truncated or altered, or a newer thrifty
            wrote it.
    """
    place = Path(folder)
    entries = _read_header(place)
    found = {
        name: _tensor_or_array(_read_array(place, name, entry, mmap=mmap, verify=verify), entry)
        for name, entry in entries.items()
    }
    try:
        return Graph(**found, check=verify)
    except GraphError as error:
        raise GraphError(f"the graph in {place} is damaged: {error}") from error


def _check_free(place: Path, *, overwrite: bool) -> None:
    if not place.exists():
        return
    if not overwrite:
        raise GraphError(f"{place} exists; choose another name, or give overwrite=True")
    if not place.is_dir() or not {path.name for path in place.iterdir()} <= _own_files():
        raise GraphError(f"{place} holds something else than a graph; choose another name")


def _own_files() -> set[str]:
    return {_HEADER, *(f"{name}.npy" for name in _ARRAYS)}


def _dtype_name(values: Any) -> str:
    return str(values.dtype).removeprefix("torch.")


def _bits(values: Any, *, name: str) -> np.ndarray:
    """Return the values as an array that NumPy can store."""
    if isinstance(values, np.ndarray):
        return values
    try:
        stored = values.view(torch.uint16) if values.dtype == torch.bfloat16 else values
        array: np.ndarray = stored.numpy()
    except (RuntimeError, TypeError) as error:
        raise GraphError(f"{name} is {values.dtype}, which cannot be saved: {error}") from error
    return array


def _write_array(folder: Path, name: str, array: np.ndarray) -> dict[str, Any]:
    with (folder / f"{name}.npy").open("wb") as out:
        np.lib.format.write_array(out, array, allow_pickle=False)
        _flush(out)
        num_bytes = out.tell()
    return {"shape": list(array.shape), "bytes": num_bytes, "crc32": _checksum(array)}


def _write_header(folder: Path, entries: dict[str, dict[str, Any]]) -> None:
    header = {"format": _FORMAT, "version": _VERSION, "arrays": entries}
    with (folder / _HEADER).open("w", encoding="utf-8") as out:
        json.dump(header, out, indent=1)
        _flush(out)


def _flush(out: Any) -> None:
    out.flush()
    os.fsync(out.fileno())


def _put_in_place(whole: Path, place: Path) -> None:
    _flush_folder(whole)
    old = whole.with_suffix(".old")
    if place.exists():
        place.rename(old)
    try:
        whole.rename(place)
    except OSError:
        if old.exists():
            old.rename(place)
        raise
    _flush_folder(place.parent)
    shutil.rmtree(old, ignore_errors=True)


def _flush_folder(folder: Path) -> None:
    # A new name is on disk once its folder is flushed. Where folders cannot be opened, the
    # operating system takes care of that.
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _read_header(place: Path) -> dict[str, dict[str, Any]]:
    path = place / _HEADER
    if not path.is_file():
        raise GraphError(f"there is no graph in {place}: {_HEADER} is missing")
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise GraphError(f"{path} is damaged ({error}); save the graph again") from error
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        raise GraphError(f"{path} is no header of a graph")
    version = header.get("version")
    if isinstance(version, int) and version > _VERSION:
        raise GraphError(
            f"a newer thrifty wrote the graph in {place} (version {version}; this one reads "
            f"{_VERSION}); upgrade thrifty"
        )
    entries = header.get("arrays")
    if version != _VERSION or not _are_entries(entries):
        raise GraphError(f"{path} is damaged; save the graph again")
    return entries


def _are_entries(entries: Any) -> TypeGuard[dict[str, dict[str, Any]]]:
    if not isinstance(entries, dict) or not {"indptr", "indices"} <= set(entries) <= set(_ARRAYS):
        return False
    kinds = {"shape": list, "bytes": int, "crc32": int, "dtype": str}
    return all(
        isinstance(entry, dict)
        and all(isinstance(entry.get(key), kind) for key, kind in kinds.items())
        for entry in entries.values()
    )


def _read_array(
    place: Path, name: str, entry: dict[str, Any], *, mmap: bool, verify: bool
) -> np.ndarray:
    path = place / f"{name}.npy"
    if not path.is_file():
        raise GraphError(f"{path} is missing; save the graph again")
    if path.stat().st_size != entry["bytes"]:
        raise GraphError(
            f"{path} has {path.stat().st_size} bytes where {entry['bytes']} were written; save "
            "the graph again"
        )
    try:
        array = _mapped(path) if mmap else _loaded(path, None)
    except (ValueError, EOFError) as error:
        raise GraphError(f"{path} is damaged ({error}); save the graph again") from error
    if list(array.shape) != entry["shape"] or array.dtype.name != _stored_dtype(entry["dtype"]):
        raise GraphError(
            f"{path} holds {array.dtype} of shape {array.shape}, not what was written; save "
            "the graph again"
        )
    if verify and _checksum(array) != entry["crc32"]:
        raise GraphError(f"{path} was altered after it was written; save the graph again")
    return array


def _mapped(path: Path) -> np.ndarray:
    try:
        # Map for writing, because torch requires it; a page is copied before it is written to.
        return _loaded(path, "c")
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        # The system counts such pages against its memory, but not pages for reading only.
        return _loaded(path, "r")


def _loaded(path: Path, mmap_mode: Literal["c", "r"] | None) -> np.ndarray:
    array: np.ndarray = np.load(path, mmap_mode=mmap_mode, allow_pickle=False)
    return array


def _stored_dtype(dtype: str) -> str:
    return "uint16" if dtype == "bfloat16" else dtype


def _checksum(array: np.ndarray) -> int:
    # Part by part, so that a mapped file is not copied as a whole.
    data = array.reshape(-1).view(np.uint8)
    found = 0
    for start in range(0, len(data), _PART_BYTES):
        found = zlib.crc32(data[start : start + _PART_BYTES].data, found)
    return found


def _tensor_or_array(array: np.ndarray, entry: dict[str, Any]) -> Any:
    if entry["dtype"] == "bfloat16":
        return as_tensor(array, name="x").view(torch.bfloat16)
    return array
