"""The states of a worker's trials: as arrays, in a cache, and in files."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from thrifty.core import CheckpointError, CheckpointRef
from thrifty.pack import State
from thrifty.store import CheckpointFolder


CACHE_BYTES = 256 * 2**20
"""Size of the cache of recent states, so that a branch need not read what was just written."""


class StateFiles:
    """The states that a worker reads, and writes in a thread of its own.

    Args:
        checkpoints: The checkpoint folder of the study.
        folder: The folder of the plan within it.
        name: The name of the worker.
    """

    def __init__(self, checkpoints: str, *, folder: str, name: str) -> None:
        self._checkpoints = CheckpointFolder(checkpoints)
        self._folder = folder
        self._writer = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-writer")
        self._recent = RecentStates(CACHE_BYTES)

    def write(self, node: int, epoch: int, state: State) -> Future[CheckpointRef]:
        """Start to write the state after an epoch of a node."""
        self._recent.add((node, epoch), state)
        return self._writer.submit(self._write, node, epoch, state)

    def read(self, ref: CheckpointRef) -> State:
        """Return a state, from the cache if it is there.

        Raises:
            CheckpointError: The file is missing, damaged or not that of a state.
        """
        known = self._recent.get((ref.node, ref.epoch))
        if known is not None:
            return known
        arrays, meta = self._checkpoints.read(ref)
        try:
            state = state_from_arrays(arrays, meta)
        except CheckpointError as error:
            raise CheckpointError(f"{ref.path}: {error}") from error
        self._recent.add((ref.node, ref.epoch), state)
        return state

    def close(self) -> None:
        """Wait for states that are still being written."""
        self._writer.shutdown()

    def _write(self, node: int, epoch: int, state: State) -> CheckpointRef:
        arrays, meta = state_to_arrays(state)
        return self._checkpoints.write(
            self._folder, node=node, epoch=epoch, tensors=arrays, meta=meta
        )


def state_to_arrays(state: State) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return a state as NumPy arrays and JSON data.

    NumPy has no bfloat16 and no float8, so those are stored as integers of the same width.
    """
    arrays: dict[str, np.ndarray] = {}
    dtypes: dict[str, str] = {}
    for key, tensor in state.tensors.items():
        held = tensor.cpu().contiguous()
        try:
            arrays[key] = held.numpy()
        except TypeError:
            width = {1: torch.uint8, 2: torch.int16}[held.element_size()]
            arrays[key] = held.view(width).numpy()
            dtypes[key] = str(held.dtype).removeprefix("torch.")
    return arrays, {"tree": state.tree, "dtypes": dtypes}


def state_from_arrays(arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> State:
    """Return the state from which ``state_to_arrays`` made arrays and JSON data.

    Raises:
        CheckpointError: The arrays or the JSON data are not the output of ``state_to_arrays``.
    """
    tensors: dict[str, torch.Tensor] = {}
    try:
        for key, array in arrays.items():
            tensor = torch.from_numpy(array.copy() if not array.flags.writeable else array)
            dtype = meta["dtypes"].get(key)
            tensors[key] = tensor if dtype is None else tensor.view(_dtype(dtype))
        return State(tensors=tensors, tree=meta["tree"])
    except (KeyError, AttributeError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"this is not the state of a trial ({error})") from error


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name!r} is no type of numbers")
    return found


class RecentStates:
    """The most recently used states, up to a number of bytes; at least one state is kept."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held_bytes = 0
        self._states: OrderedDict[tuple[int, int], State] = OrderedDict()

    def get(self, key: tuple[int, int]) -> State | None:
        if key in self._states:
            self._states.move_to_end(key)
        return self._states.get(key)

    def add(self, key: tuple[int, int], state: State) -> None:
        replaced = self._states.pop(key, None)
        self._held_bytes += _num_bytes(state) - (_num_bytes(replaced) if replaced else 0)
        self._states[key] = state
        while self._held_bytes > self._max_bytes and len(self._states) > 1:
            _, dropped = self._states.popitem(last=False)
            self._held_bytes -= _num_bytes(dropped)


def _num_bytes(state: State) -> int:
    return sum(t.numel() * t.element_size() for t in state.tensors.values())
