"""Files of a plan beside its checkpoints: frozen bases, and artifacts of trials.

A base is what checkpoints leave out: the frozen base of a model, once for all its trials. It is a
safetensors file in the plan's folder, named by its content. It is written and read one tensor at a
time, because it may be as large as the memory. The digest of each tensor that is read is compared
with the one in the checkpoint.

Equal artifacts of a plan are one file, ``artifact-DIGEST``, which is verified when it is read. It
is written to a temporary name, synced and renamed, before the record that names it. A run that is
killed in between leaves an orphan, which is removed like those of checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

from thrifty.core import Artifact, CheckpointError, TaskError, plain_logger

from ._checkpoints import ARTIFACT_NAME, BASE_NAME, MAX_HEADER_BYTES, CheckpointFolder


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


logger = plain_logger(__name__)

_CHUNK = 4 * 2**20
_SPOOLED = 16 * 2**20
"""Bytes of an artifact that are held in memory when it is read; larger ones go to a file."""
_DIGEST = re.compile("[0-9a-f]{32}", re.ASCII)


class ArtifactFiles:
    """The artifacts of a plan, as files of its folder.

    Args:
        checkpoints: The checkpoint folder.
        folder: The plan's folder within it.
    """

    def __init__(self, checkpoints: CheckpointFolder, *, folder: str) -> None:
        self._checkpoints = checkpoints
        self._folder = folder

    def put(self, path: Path, *, name: str) -> Artifact:
        """Store a copy of a file, unless one of equal content is stored already, undamaged.

        If it cannot be written, as on a full disk, the artifact says so: a trial does not fail for
        a file on which nothing depends.

        Raises:
            OSError: The file cannot be read.
            TaskError: It changes while it is read.
        """
        digest, num_bytes = _digest_and_size(path)
        found = Artifact(name=name, digest=digest, num_bytes=num_bytes)
        place = self._checkpoints.path_of(self._folder, artifact_file(digest))
        try:
            if self._checkpoints.num_bytes(place) != num_bytes or not self._is_whole(found):
                self._write(path, found)
        except OSError as error:
            refused = self._checkpoints.refused(error, place, num_bytes, what="artifact")
            logger.warning("%s. The trial goes on without the file", refused)
            said = error.strerror or type(error).__name__
            return Artifact(name=name, digest=digest, num_bytes=num_bytes, error=said)
        return found

    def _is_whole(self, artifact: Artifact) -> bool:
        try:
            self.open(artifact).close()
        except CheckpointError:
            return False
        return True

    def _write(self, path: Path, artifact: Artifact) -> None:
        seen = hashlib.blake2b(digest_size=16)

        def chunks() -> Iterator[bytes]:
            for chunk in _chunks(path):
                seen.update(chunk)
                yield chunk
            if seen.hexdigest() != artifact.digest:
                raise TaskError(
                    f"trial.log_artifact({str(path)!r}): the file changes while it is copied; "
                    "close it before you log it"
                )

        place = self._checkpoints.path_of(self._folder, artifact_file(artifact.digest))
        self._checkpoints.write_file(place, chunks())

    def open(self, artifact: Artifact) -> IO[bytes]:
        """Return the content of an artifact as a file that is open for reading.

        Raises:
            CheckpointError: The file was not stored, or is missing or damaged.
        """
        if not artifact.is_stored:
            raise CheckpointError(
                f"artifact {artifact.name!r} was not stored when it was logged ({artifact.error}); "
                "train a study of another name or seed to get it"
            )
        if not _DIGEST.fullmatch(artifact.digest):
            raise CheckpointError(
                f"artifact {artifact.name!r} has the digest {artifact.digest!r} in the database, "
                "which thrifty does not write; restore the database from a backup"
            )
        path = self._checkpoints.path_of(self._folder, artifact_file(artifact.digest))
        where = self._checkpoints.shown(path)
        seen = hashlib.blake2b(digest_size=16)
        out = tempfile.SpooledTemporaryFile(max_size=_SPOOLED)  # noqa: SIM115 (it is returned)
        try:
            for start in range(0, artifact.num_bytes, _CHUNK):
                stop = min(start + _CHUNK, artifact.num_bytes)
                chunk = self._checkpoints.read_part(path, start, stop)
                seen.update(chunk)
                out.write(chunk)
            if not artifact.num_bytes:
                self._checkpoints.read_part(path, 0, 0)
        except OSError as error:
            out.close()
            said = error.strerror or type(error).__name__
            raise CheckpointError(
                f"artifact {artifact.name!r} cannot be read from {where} ({said}); see that "
                "Storage(checkpoints=...) is the folder that the study was trained with"
            ) from None
        if seen.hexdigest() != artifact.digest:
            out.close()
            raise CheckpointError(
                f"artifact {artifact.name!r} is damaged: {where} is not the file that was logged"
            )
        out.seek(0)
        return out


def artifact_file(digest: str) -> str:
    """Return the name of the file of an artifact."""
    name = f"artifact-{digest}"
    assert ARTIFACT_NAME.fullmatch(name), digest
    return name


def _digest_and_size(path: Path) -> tuple[str, int]:
    seen, num_bytes = hashlib.blake2b(digest_size=16), 0
    for chunk in _chunks(path):
        seen.update(chunk)
        num_bytes += len(chunk)
    return seen.hexdigest(), num_bytes


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk
