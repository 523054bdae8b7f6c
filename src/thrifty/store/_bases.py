"""Files with what checkpoints leave out: the frozen base of a model, once for all its trials.

A base is a safetensors file in the plan's folder, named by its content. It is written and read one
tensor at a time, because it may be as large as the memory. The digest of each tensor that is read
is compared with the one in the checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from thrifty.core import CheckpointError

from ._checkpoints import BASE_NAME, MAX_HEADER_BYTES, CheckpointFolder


MAX_BASE_BYTES = 2 * 2**30
"""The default of ``Storage.max_base_bytes``: a billion parameters in half precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseTensor:
    """One tensor of a base.

    Attributes:
        dtype: Its type as safetensors calls it, such as ``"BF16"``.
        shape: Its shape.
        num_bytes: Its size.
        read: Returns its bytes, in parts.
    """

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    read: Callable[[], Iterable[bytes | memoryview]]


class BaseFile:
    """The file of one base.

    Args:
        checkpoints: The checkpoint folder.
        folder: The plan's folder within it.
        digest: The digest of the base.
    """

    def __init__(self, checkpoints: CheckpointFolder, *, folder: str, digest: str) -> None:
        self._checkpoints = checkpoints
        self._folder = folder
        self.name = f"base-{digest}.safetensors"
        assert BASE_NAME.fullmatch(self.name), digest
        self._path = checkpoints.path_of(folder, self.name)

    def write(self, tensors: Mapping[str, BaseTensor], *, also: Mapping[str, str]) -> None:
        """Write the file atomically.

        Args:
            tensors: The tensors by name.
            also: The name of each tensor, by each of the names that it has.

        Raises:
            StoreWriteError: The disk is full, or the place is read-only.
        """
        try:
            self._checkpoints.write_file(self._path, _content(tensors, also=also))
        except OSError as error:
            num_bytes = size_of(tensors, also=also)
            raise self._checkpoints.refused(error, self._path, num_bytes) from None

    def num_bytes(self) -> tuple[int | None, int]:
        """Return its size (None if there is no file), and that of the plan's other bases."""
        sizes = {
            file.name: file.num_bytes
            for file in self._checkpoints.files(self._folder)
            if BASE_NAME.fullmatch(file.name)
        }
        own = sizes.pop(self.name, None)
        return own, sum(sizes.values())

    def read(self, name: str) -> tuple[str, tuple[int, ...], bytes]:
        """Return type, shape and bytes of a tensor; the caller checks their digest.

        Raises:
            CheckpointError: The file is missing or damaged, or has no such tensor.
        """
        where = self._checkpoints.shown(self._path)
        try:
            length = int.from_bytes(self._checkpoints.read_part(self._path, 0, 8), "little")
            data = 8 + min(length, MAX_HEADER_BYTES)
            header = json.loads(self._checkpoints.read_part(self._path, 8, data))
            entry = header[json.loads(header["__metadata__"]["thrifty"])[name]]
            begin, end = (data + int(offset) for offset in entry["data_offsets"])
            found = self._checkpoints.read_part(self._path, begin, end)
            return str(entry["dtype"]), tuple(int(n) for n in entry["shape"]), found
        except OSError as error:
            said = error.strerror or type(error).__name__
            raise CheckpointError(f"the stored base {where} cannot be read ({said})") from None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(
                f"the stored base {where} is damaged ({type(error).__name__}: {error})"
            ) from error


def base_bytes(checkpoints: CheckpointFolder, folder: str) -> int:
    """Return the bytes of all bases of a plan."""
    found = checkpoints.files(folder)
    return sum(file.num_bytes for file in found if BASE_NAME.fullmatch(file.name))


def size_of(tensors: Mapping[str, BaseTensor], *, also: Mapping[str, str]) -> int:
    """Return the size of the file that ``BaseFile.write`` writes."""
    data = sum(each.num_bytes for each in tensors.values())
    return len(_header(tensors, also=also)) + data


def _content(
    tensors: Mapping[str, BaseTensor], *, also: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    yield _header(tensors, also=also)
    for each in tensors.values():
        yield from each.read()


def _header(tensors: Mapping[str, BaseTensor], *, also: Mapping[str, str]) -> bytes:
    ends = list(accumulate(each.num_bytes for each in tensors.values()))
    entries: dict[str, Any] = {
        name: {
            "dtype": each.dtype,
            "shape": list(each.shape),
            "data_offsets": [end - each.num_bytes, end],
        }
        for (name, each), end in zip(tensors.items(), ends, strict=True)
    }
    entries["__metadata__"] = {"thrifty": json.dumps(also)}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # the data are aligned
    return len(text).to_bytes(8, "little") + text
