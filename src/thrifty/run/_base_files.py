"""The frozen bases of a study's models, kept once beside its checkpoints."""

from __future__ import annotations

import math

import torch

from thrifty.core import CheckpointError, plain_logger
from thrifty.pack._frozen import Base, FrozenTensor, LoadedBase, bytes_of, digest_of
from thrifty.store import CheckpointFolder
from thrifty.store._bases import BaseFile, BaseTensor, size_of


logger = plain_logger(__name__)

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names that safetensors has for types of numbers."""
_TYPES = {name: dtype for dtype, name in _NAMES.items()}


class StoredBase(Base):
    """A base in a file, of which tensors are read when they are asked for.

    Args:
        checkpoints: The checkpoint folder.
        folder: The plan's folder within it.
        digest: The digest of the base.
    """

    def __init__(self, checkpoints: CheckpointFolder, *, folder: str, digest: str) -> None:
        self._file = BaseFile(checkpoints, folder=folder, digest=digest)
        self._digest = digest

    @property
    def digest(self) -> str:
        """The digest of names and contents."""
        return self._digest

    def tensor(self, name: str, *, digest: str) -> torch.Tensor:
        """Return a parameter.

        Raises:
            CheckpointError: The file is missing or damaged, or the parameter is not in it.
        """
        dtype, shape, data = self._file.read(name)
        try:
            held = torch.frombuffer(bytearray(data), dtype=_TYPES[dtype]).reshape(shape)
        except (KeyError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"the stored base {self._file.name} is damaged: {name!r} cannot be read ({error})"
            ) from error
        if digest_of(held) != digest:
            raise CheckpointError(
                f"the stored base {self._file.name} is damaged: {name!r} is not what was written"
            )
        return held


class BaseFiles:
    """The bases that a worker writes, each once.

    Args:
        checkpoints: The checkpoint folder.
        folder: The plan's folder within it.
        max_bytes: How many bytes all bases of the plan may take.
    """

    def __init__(self, checkpoints: CheckpointFolder, *, folder: str, max_bytes: float) -> None:
        self._checkpoints = checkpoints
        self._folder = folder
        self._max_bytes = max_bytes
        self._done: set[str] = set()

    def stored(self, base: Base) -> StoredBase:
        """Return a base as one that is read from its file."""
        return StoredBase(self._checkpoints, folder=self._folder, digest=base.digest)

    def keep(self, base: Base | None) -> None:
        """Write a base to a file. Do nothing if an intact file exists, or if the base is too large.

        Raises:
            StoreWriteError: The disk is full, or the place is read-only.
        """
        if not isinstance(base, LoadedBase) or base.digest in self._done:
            return
        self._done.add(base.digest)
        if any(each.tensor.dtype not in _NAMES for each in base.tensors.values()):
            logger.info("a base is not stored: safetensors has no name for one of its types")
            return
        first = {each.digest: name for name, each in reversed(base.tensors.items())}
        tensors = {name: _part(base.tensors[name]) for name in sorted(first.values())}
        also = {name: first[each.digest] for name, each in base.tensors.items()}
        file = BaseFile(self._checkpoints, folder=self._folder, digest=base.digest)
        num_bytes, (found, others) = size_of(tensors, also=also), file.num_bytes()
        if found == num_bytes and self._is_intact(base):
            return
        if num_bytes + others > self._max_bytes:
            besides = f", besides {others:,} bytes of others," if others else ""
            logger.info(
                "a base of %s bytes%s is over Storage(max_base_bytes=%s) and is not stored; the "
                "task has to make it again for each trial that goes on",
                f"{num_bytes:,}",
                besides,
                f"{self._max_bytes:,.0f}" if math.isfinite(self._max_bytes) else "inf",
            )
            return
        file.write(tensors, also=also)

    def _is_intact(self, base: LoadedBase) -> bool:
        """Return whether a file has all tensors of a base; reads it once."""
        stored = self.stored(base)
        try:
            for name, each in base.tensors.items():
                stored.tensor(name, digest=each.digest)
        except CheckpointError as error:
            logger.warning("%s; it is written again", error)
            return False
        return True


def _part(frozen: FrozenTensor) -> BaseTensor:
    tensor = frozen.tensor
    return BaseTensor(
        dtype=_NAMES[tensor.dtype],
        shape=tuple(tensor.shape),
        num_bytes=tensor.nbytes,
        read=lambda: bytes_of(tensor),
    )
