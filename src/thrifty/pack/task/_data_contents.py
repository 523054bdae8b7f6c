"""What data contains: arrays in memory, and memory-mapped files of tokens; with digests.

Files of tokens are those that nanoGPT and its relatives write.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from thrifty.core import TaskError, derive_seed, step_seed
from thrifty.pack._frozen import digest_of


class Samples:
    """The rows of arrays of equal length, one row of each array for each sample.

    Attributes:
        arrays: The arrays.
        has_changed: Whether a call of ``look`` has found other values than there were at first.
    """

    def __init__(self, arrays: Sequence[torch.Tensor]) -> None:
        self.arrays = tuple(arrays)
        self.has_changed = False
        self._digests: dict[int, str] = {}
        self._sums: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __len__(self) -> int:
        return len(self.arrays[0])

    def digest(self, place: int) -> str:
        """Return the digest of one of the arrays, and watch it from the first call on."""
        if place not in self._digests:
            self._sums[place] = _sums(self.arrays[place])
            self._digests[place] = digest_of(self.arrays[place])
        return self._digests[place]

    def look(self) -> bool:
        """Return whether an array whose digest was asked for has changed since.

        Sums of rows and columns are compared, which takes about as long as reading the arrays
        once.

        >>> rows = torch.arange(6.0).view(3, 2)
        >>> samples = Samples([rows])
        >>> digest = samples.digest(0)
        >>> samples.look()
        False
        >>> rows.numpy()[1] += 1
        >>> samples.look()
        True
        """
        self.has_changed = self.has_changed or not all(
            torch.equal(now, before)
            for place, sums in self._sums.items()
            for now, before in zip(_sums(self.arrays[place]), sums, strict=True)
        )
        return self.has_changed


def _sums(array: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums of an array's bits, read as whole numbers, by row and by column."""
    rows = array.detach()
    rows = (torch.view_as_real(rows) if rows.is_complex() else rows).reshape(len(rows), -1)
    num_bytes = rows.shape[1] * rows.element_size()
    like = next(
        dtype
        for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8)
        if num_bytes % dtype.itemsize == 0
    )
    flat = rows.contiguous().view(-1)
    if flat.storage_offset() * flat.element_size() % like.itemsize:
        flat = flat.clone()
    bits = flat.view(torch.uint8).view(like).view(len(rows), -1)
    return bits.sum(1, dtype=torch.int64), bits.sum(0, dtype=torch.int64)


WHOLE_BYTES = 2**28
"""Up to this size in bytes, the digest of a file covers all of it."""
NUM_CHUNKS = 1024
CHUNK_BYTES = 2**16
"""Of a larger file, the digest covers ``NUM_CHUNKS`` pieces of this size, spread evenly."""

_IDENTIFIED: set[tuple[str, str]] = set()
"""Path and digest of the files that the identity of a task has covered in this process."""


class TokenFile:
    """A file of tokens, one integer after the other, that is memory-mapped and never loaded whole.

    Training batches are ``(x, y)`` of shape ``(batch_size, block_size)``, int64, where ``y`` is
    ``x`` shifted by one token. Where a block begins is drawn anew for each step, as a function of
    the seed and the number of the step. Validation reads blocks that do not overlap, in order.

    Make it an attribute of the task, on the class or in ``__init__``: its content is then part of
    the task's identity, so that a changed file is never taken for the old one.

    Args:
        path: The file. There is no header.
        block_size: The number of tokens of a sample.
        dtype: The NumPy type of a token in the file.
        num_valid: How many blocks validation reads, spread evenly over the file (default: all).

    Raises:
        TaskError: There is no such file, it holds no whole number of tokens or too few of them, or
            an option is invalid.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "train.bin"
    >>> np.arange(100, dtype=np.uint16).tofile(path)
    >>> tokens = TokenFile(path, block_size=4)
    >>> x, y = tokens.batch(seed=0, step=0, batch_size=2)
    >>> bool((y == x + 1).all()), tuple(x.shape), tokens.num_tokens
    (True, (2, 4), 100)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        block_size: int,
        dtype: str = "uint16",
        num_valid: int | None = None,
    ) -> None:
        self.path = Path(path)
        self.block_size = _positive("block_size", block_size)
        self.dtype = _token_dtype(dtype)
        if not self.path.is_file():
            raise TaskError(
                f"TokenFile({str(path)!r}): there is no such file (the process runs in "
                f"{Path.cwd()}); write tokens with NumPy's array.astype(dtype).tofile(path)"
            )
        num_bytes, width = self.path.stat().st_size, self.dtype.itemsize
        if num_bytes % width:
            raise TaskError(
                f"TokenFile({str(path)!r}, dtype={self.dtype.name!r}): its {num_bytes} bytes are "
                f"no whole number of tokens of {width} bytes; give the dtype that it was written "
                "with"
            )
        self.num_tokens = num_bytes // width
        if self.num_tokens < self.block_size + 1:
            raise TaskError(
                f"TokenFile({str(path)!r}, block_size={block_size}): it has {self.num_tokens} "
                f"tokens, and a sample needs {self.block_size + 1} (the targets are one further); "
                "give a smaller block_size"
            )
        most = (self.num_tokens - 1) // self.block_size
        self.num_valid = most if num_valid is None else _positive("num_valid", num_valid)
        if self.num_valid > most:
            raise TaskError(
                f"TokenFile({str(path)!r}, num_valid={num_valid}): it has {most} blocks of "
                f"{block_size} tokens; give at most {most}"
            )
        self._digest = _digest_of(self.path)
        self._mapped: np.ndarray | None = None

    @property
    def tokens_per_sample(self) -> int:
        """The number of tokens of a sample."""
        return self.block_size

    @property
    def digest(self) -> str:
        """The digest of the file's content when this object was made.

        It covers the whole file up to 256 MiB, and of a larger one its size and 64 MiB, spread
        evenly.
        """
        return self._digest

    @property
    def is_identified(self) -> bool:
        """Whether the identity of a task has covered the file in this process."""
        return (str(self.path), self._digest) in _IDENTIFIED

    def batch(self, *, seed: int, step: int, batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the training batch of a step of a run: inputs and targets, on the CPU."""
        generator = torch.Generator().manual_seed(step_seed(derive_seed(seed, "tokens"), step))
        starts = torch.randint(
            self.num_tokens - self.block_size, (batch_size,), generator=generator
        )
        return self._blocks(starts.numpy())

    def valid_batches(self, batch_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the validation blocks, ``batch_size`` at a time."""
        most = (self.num_tokens - 1) // self.block_size
        starts = np.arange(self.num_valid) * most // self.num_valid * self.block_size
        for start in range(0, self.num_valid, batch_size):
            yield self._blocks(starts[start : start + batch_size])

    def check_unchanged(self) -> None:
        """Check that the file is still what it was when this object was made.

        Raises:
            TaskError: It has changed.
        """
        if _digest_of(self.path) != self._digest:
            raise TaskError(
                f"the token file {self.path} has changed since the task was made; make the task "
                "anew, so that it is another task"
            )

    def __thrifty_identity__(self) -> Mapping[str, Any]:
        """Return what the blocks depend on, with the content of the file."""
        self.check_unchanged()
        _IDENTIFIED.add((str(self.path), self._digest))
        return {
            "tokens": self._digest,
            "block_size": self.block_size,
            "dtype": self.dtype.name,
            "num_valid": self.num_valid,
        }

    def __copy__(self) -> TokenFile:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenFile:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_mapped": None}

    def __repr__(self) -> str:
        return f"TokenFile({str(self.path)!r}, block_size={self.block_size})"

    def _blocks(self, starts: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        if self._mapped is None:
            self._mapped = np.memmap(self.path, dtype=self.dtype, mode="r")
        places = starts[:, None] + np.arange(self.block_size + 1)
        both = torch.from_numpy(self._mapped[places].astype(np.int64))
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()


def _positive(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise TaskError(f"TokenFile({name}={value!r}): {name} must be a whole number, 1 or more")
    return int(value)


def _token_dtype(dtype: Any) -> np.dtype[Any]:
    found: np.dtype[Any]
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = np.dtype(object)
    if found.kind not in "ui":
        raise TaskError(
            f"TokenFile(dtype={dtype!r}): tokens are integers; give 'uint16', 'uint32' or another "
            "integer type of NumPy"
        )
    return found


def _digest_of(path: Path) -> str:
    stat = path.stat()
    return _digest(str(path.resolve()), stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=256)
def _digest(path: str, num_bytes: int, changed_ns: int) -> str:  # noqa: ARG001 (in the key)
    """Return the digest of a file; a file of another size or time of change is read again."""
    digest = hashlib.blake2b(str(num_bytes).encode(), digest_size=16)
    with Path(path).open("rb") as file:
        if num_bytes <= WHOLE_BYTES:
            while piece := file.read(2**20):
                digest.update(piece)
        else:
            for number in range(NUM_CHUNKS):
                file.seek((num_bytes - CHUNK_BYTES) * number // (NUM_CHUNKS - 1))
                digest.update(file.read(CHUNK_BYTES))
    return digest.hexdigest()
