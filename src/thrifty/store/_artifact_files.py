"""Files of artefacts: content-addressed copies in the folder of a plan, verified when read.

Equal content of a plan is one file, ``artifact-DIGEST``. A file is written to a temporary name,
synced and renamed, before the record that names it. A run that is killed in between leaves an
orphan, which is removed like those of checkpoints.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from thrifty.core import Artifact, CheckpointError, TaskError, plain_logger

from ._checkpoints import ARTIFACT_NAME, CheckpointFolder


logger = plain_logger(__name__)

_CHUNK = 4 * 2**20
_SPOOLED = 16 * 2**20
"""Bytes of an artefact that are held in memory when it is read; larger ones go to a file."""
_DIGEST = re.compile("[0-9a-f]{32}", re.ASCII)


class ArtifactFiles:
    """The artefacts of a plan, as files of its folder.

    Args:
        checkpoints: The checkpoint folder.
        folder: The plan's folder within it.
    """

    def __init__(self, checkpoints: CheckpointFolder, *, folder: str) -> None:
        self._checkpoints = checkpoints
        self._folder = folder

    def put(self, path: Path, *, name: str) -> Artifact:
        """Store a copy of a file, unless one of equal content is stored already, undamaged.

        If it cannot be written, as on a full disk, the artefact says so: a trial does not fail for
        a file on which nothing depends.

        Raises:
            OSError: The file cannot be read.
            TaskError: It changes while it is read.
        """
        digest, num_bytes = _content(path)
        found = Artifact(name=name, digest=digest, num_bytes=num_bytes)
        place = self._checkpoints.path_of(self._folder, artifact_file(digest))
        try:
            if self._checkpoints.num_bytes(place) != num_bytes or not self._is_whole(found):
                self._write(path, found)
        except OSError as error:
            refused = self._checkpoints.refused(error, place, num_bytes, what="artefact")
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
        """Return the content of an artefact as a file that is open for reading.

        Raises:
            CheckpointError: The file was not stored, or is missing or damaged.
        """
        if not artifact.is_stored:
            raise CheckpointError(
                f"artefact {artifact.name!r} was not stored when it was logged ({artifact.error}); "
                "train a study of another name or seed to get it"
            )
        if not _DIGEST.fullmatch(artifact.digest):
            raise CheckpointError(
                f"artefact {artifact.name!r} has the digest {artifact.digest!r} in the database, "
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
                f"artefact {artifact.name!r} cannot be read from {where} ({said}); see that "
                "Storage(checkpoints=...) is the folder that the study was trained with"
            ) from None
        if seen.hexdigest() != artifact.digest:
            out.close()
            raise CheckpointError(
                f"artefact {artifact.name!r} is damaged: {where} is not the file that was logged"
            )
        out.seek(0)
        return out


def artifact_file(digest: str) -> str:
    """Return the name of the file of an artefact."""
    name = f"artifact-{digest}"
    assert ARTIFACT_NAME.fullmatch(name), digest
    return name


def _content(path: Path) -> tuple[str, int]:
    seen, num_bytes = hashlib.blake2b(digest_size=16), 0
    for chunk in _chunks(path):
        seen.update(chunk)
        num_bytes += len(chunk)
    return seen.hexdigest(), num_bytes


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk
