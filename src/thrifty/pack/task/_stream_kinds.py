"""Kinds of streams, what a stream must be able to do, and what is known of its batches."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset

from thrifty.core import TaskError

from ._data import Batch
from ._token_file import TokenFile


MAX_ELEMENTS = 256
"""How many elements of each tensor are compared when validation data are read again."""


def is_function(stream: Any) -> bool:
    return callable(stream) and not isinstance(stream, Iterable | TokenFile)


def is_map(stream: Any) -> bool:
    """Return whether a stream is a data set or a list, whose samples have numbers."""
    kind = type(stream)
    if isinstance(stream, IterableDataset):  # it inherits an item access that only raises
        return False
    return hasattr(kind, "__len__") and hasattr(kind, "__getitem__")


def is_stateful(stream: Any) -> bool:
    return all(callable(getattr(stream, n, None)) for n in ("state_dict", "load_state_dict"))


def yields_samples(stream: Any) -> bool:
    """Return whether a stream yields samples; others yield batches."""
    is_hugging_face = type(stream).__module__.partition(".")[0] == "datasets"
    return isinstance(stream, IterableDataset) or is_hugging_face


def check_train(train: Any) -> None:
    if isinstance(train, TokenFile) or is_map(train):
        return
    if is_function(train):
        if num_required(train) != 2:
            raise TaskError(
                f"StreamData(train={name_of(train)}): it takes {num_required(train)} arguments; it "
                "is called with seed and epoch: def train(seed, epoch)"
            )
        return
    if isinstance(train, Iterator):
        raise TaskError(
            f"StreamData(train=...): {type(train).__name__} objects can be read only once, so a "
            "trial could not be resumed; give the function that makes it, with the arguments "
            "(seed, epoch)"
        )
    if not isinstance(train, Iterable) or not is_stateful(train):
        hint = (
            " Return thrifty.DatasetPair(train=..., valid=...) for a data set with items, or give "
            "torchdata's StatefulDataLoader."
            if isinstance(train, DataLoader)
            else ""
        )
        raise TaskError(
            f"StreamData(train=...): {type(train).__name__} objects cannot be resumed, because "
            "they have no state_dict and load_state_dict; add them, or give a function of "
            f"(seed, epoch) that returns an iterable of batches.{hint}"
        )


def check_valid(valid: Any) -> None:
    if is_function(valid):
        if num_required(valid) not in (0, 2):
            raise TaskError(
                f"StreamData(valid={name_of(valid)}): it takes {num_required(valid)} arguments; it "
                "takes none, or seed and epoch"
            )
        return
    if isinstance(valid, Iterator) or not isinstance(valid, Iterable | TokenFile):
        if is_map(valid):
            return
        raise TaskError(
            f"StreamData(valid=...): {type(valid).__name__} objects cannot be read after each "
            "epoch; give a function that returns an iterable of batches, a list of samples, or a "
            "data set"
        )


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def num_required(function: Callable[..., Any]) -> int:
    """Return how many arguments a function needs, besides ``batch_size``."""
    return sum(
        each.default is inspect.Parameter.empty
        and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
        and name != "batch_size"
        for name, each in parameters_of(function).items()
    )


def copy_of(stream: Any) -> Any:
    """Return a copy of a stream that has a state; data sets without a state are shared.

    Raises:
        TaskError: It cannot be copied.
    """
    inside = getattr(stream, "dataset", None)
    shared = inside is not None and is_map(inside) and not is_stateful(inside)
    try:
        return deepcopy(stream, {id(inside): inside} if shared else {})
    except Exception as error:
        raise TaskError(
            f"StreamData: the {type(stream).__name__} cannot be copied ({type(error).__name__}: "
            f"{error}), and each trial reads a copy of its own; make it anew in data(hp), unread "
            "and without open files, or give a function of (seed, epoch)"
        ) from error


def len_of(stream: Any) -> int | None:
    try:
        return len(stream)
    except TypeError:
        return None


def name_of(stream: Any) -> str:
    return str(getattr(stream, "__qualname__", type(stream).__name__))


def num_rows(batch: Batch) -> int:
    """Return the number of samples of a batch.

    Raises:
        TaskError: It holds nothing that has a length.
    """
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim:
            return len(leaf)
    num = len_of(batch)
    if num is None:
        raise TaskError(
            f"the validation stream gives batches of type {type(batch).__name__}, which have no "
            "rows; metrics are weighted by the rows of a batch, so give tensors whose first "
            "dimension is the samples"
        )
    return num


def digest_of(batch: Batch) -> int:
    """Return a digest of a part of a batch, cheap enough to compute each time."""
    found = 0
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            flat = leaf.detach().reshape(-1)
            some = flat[:: max(1, len(flat) // MAX_ELEMENTS)].cpu()
            text = some.contiguous().view(torch.uint8).numpy().tobytes() if len(some) else b""
            found = zlib.crc32(repr(tuple(leaf.shape)).encode() + text, found)
        elif isinstance(leaf, np.ndarray | str | bytes | int | float):
            found = zlib.crc32(repr(leaf).encode(), found)
    return found


def pinned(batch: Batch) -> Batch:
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.pin_memory(), batch)
