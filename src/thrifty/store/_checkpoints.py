"""Checkpoint files: safetensors with JSON in the header, written atomically, verified when read.

Nothing in a checkpoint is executable: no pickle.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from thrifty.core import (
    CheckpointError,
    CheckpointRef,
    StoreWriteError,
    UsageError,
    plain_logger,
)

from ._address import redact, redact_root
from ._holder import process_tag


logger = plain_logger(__name__)

Arrays = Mapping[str, np.ndarray[Any, Any]]

TEMPORARY = ".tmp"
"""How the name of a file ends that is still being written."""

_PATH = re.compile(r"[A-Za-z0-9_-]+/[0-9]+-[0-9]+\.safetensors", re.ASCII)
"""What ``write`` makes, and nothing else: a path in a database row may come from anybody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFile:
    """A file in a plan's folder; ``changed_at`` is in seconds since the epoch, where the file system says it."""

    name: str
    num_bytes: int
    changed_at: float | None


class CheckpointFolder:
    """Keeps states under a folder or any fsspec address; workers make their own from its address.

    ``fsync=False`` trusts the machine not to lose power (a lost file is found out and trained again).
    """

    def __init__(self, root: str, *, fsync: bool = True) -> None:
        self.root = root
        self._fsync = fsync
        self._shown = redact_root(root)
        try:
            self._fs, self._path = fsspec.core.url_to_fs(root)
        except (ValueError, ImportError, OSError) as error:
            # The cause is not chained: it may quote the address with its password.
            raise UsageError(
                f"checkpoints cannot be kept at {self._shown}: {self._said(error)}; give Storage(checkpoints=...) "
                "a folder, or an address that fsspec knows"
            ) from None
        self._local = Path(self._path) if "file" in _protocols(self._fs) else None

    def write(
        self, folder: str, *, node: int, epoch: int, tensors: Arrays, meta: Mapping[str, Any]
    ) -> CheckpointRef:
        """Writes one state so that it is there whole or not at all.

        Raises:
            StoreWriteError: full disk, read-only place.
        """
        path = f"{_safe(folder)}/{node}-{epoch}.safetensors"
        contiguous = {
            key: np.ascontiguousarray(value).reshape(value.shape)
            for key, value in tensors.items()
        }
        data = save(contiguous, metadata={"thrifty": json.dumps(meta)})
        try:
            if self._local is not None:
                self._check_links(path)
                self._write_local(self._local / path, data)
            else:
                # object stores make a file visible when it is complete
                self._fs.pipe_file(f"{self._path}/{path}", data)
        except OSError as error:
            path = f"{self._shown}/{path}"
            raise _refused(error, path, len(data), said=self._said(error)) from self._cause(
                error
            )
        return CheckpointRef(
            node=node, epoch=epoch, path=path, num_bytes=len(data), digest=_digest(data)
        )

    def read(
        self, ref: CheckpointRef
    ) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, Any]]:
        """Read the arrays and the JSON of a state; the arrays may be written to.

        Raises:
            CheckpointError: The file is missing, is not what was written, or lies outside this folder.
        """
        where = f"{self._shown}/{ref.path}"
        try:
            data = self._fs.cat_file(self._inside(ref.path))
        except OSError as error:
            raise CheckpointError(
                f"checkpoint {where} cannot be read ({self._said(error)})"
            ) from self._cause(error)
        if _digest(data) != ref.digest:
            raise CheckpointError(
                f"checkpoint {where} is damaged: it is not the file that was written"
            )
        try:
            meta = json.loads(_header(data)["__metadata__"]["thrifty"])
            return load(data), meta
        except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"checkpoint {where} is no checkpoint ({error})") from error

    def delete(self, ref: CheckpointRef) -> None:
        """Remove a state. A file that is gone already is no error; one outside this folder stays."""
        try:
            self._fs.rm_file(self._inside(ref.path))
        except FileNotFoundError:
            return
        except CheckpointError as error:
            # The row is gone; one bad row must not end the study.
            logger.warning("nothing was deleted: %s", error)

    def files(self, folder: str) -> list[FoundFile]:
        """List the files of one plan's folder; none if there is no such folder."""
        self._fs.invalidate_cache()  # other processes write here, too
        try:
            found = self._fs.ls(f"{self._path}/{_safe(folder)}", detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [
            FoundFile(
                name=str(each["name"]).rpartition("/")[2],
                num_bytes=int(each.get("size") or 0),
                changed_at=each.get("mtime"),
            )
            for each in found
            if each["type"] == "file"
        ]

    def put(self, folder: str, name: str) -> None:
        """Make an empty file in one plan's folder."""
        path = f"{self._path}/{_safe(folder)}"
        self._fs.makedirs(path, exist_ok=True)
        self._fs.pipe_file(f"{path}/{name}", b"")

    def remove(self, folder: str, name: str) -> None:
        """Remove a file that ``files`` has found."""
        assert "/" not in name
        self._fs.rm_file(f"{self._path}/{_safe(folder)}/{name}")

    def _said(self, error: BaseException) -> str:
        """An error in the words of the file system, without the password of its address."""
        said = getattr(error, "strerror", None) or str(error)
        return redact(str(said), url=self.root) if "://" in self.root else str(said)

    def _cause(self, error: BaseException) -> BaseException | None:
        """The error, unless a traceback would show a password."""
        return (
            error
            if "://" not in self.root or redact(str(error), url=self.root) == str(error)
            else None
        )

    def _inside(self, path: str) -> str:
        """Return the full path of a checkpoint of this folder.

        Raises:
            CheckpointError: The path is not one that ``write`` makes, or a link leads out of the folder.
        """
        if not _PATH.fullmatch(path):
            raise CheckpointError(
                f"checkpoint path {path!r} in the database is not one of the folder {self._shown}; "
                "checkpoints lie at PLAN/NODE-EPOCH.safetensors in it"
            )
        try:
            self._check_links(path)
        except OSError as error:
            raise CheckpointError(str(error)) from error
        return f"{self._path}/{path}"

    def _check_links(self, path: str) -> None:
        """Refuse symbolic links below the root: they may lead anywhere. The root itself may be one."""
        if self._local is None:
            return
        file = self._local / path
        for part in (file.parent, file):
            if part.is_symlink():
                raise OSError(
                    errno.ELOOP,
                    f"{part} is a symbolic link, which may lead out of {self._shown}",
                )

    def _write_local(self, path: Path, data: bytes) -> None:
        # The name says which process writes, so that what a killed one leaves behind can be found. The
        # thread is part of it because two writers of one state must not share a temporary file.
        temporary = path.with_name(
            f".{path.name}.{process_tag()}-{threading.get_ident()}{TEMPORARY}"
        )
        try:
            try:
                out = temporary.open("wb")
            except FileNotFoundError:
                path.parent.mkdir(parents=True, exist_ok=True)
                out = temporary.open("wb")
            with out:
                out.write(data)
                if self._fsync:
                    out.flush()
                    os.fsync(out.fileno())
            temporary.replace(path)
        except OSError:
            if temporary.exists():
                temporary.unlink()
            raise


def _protocols(fs: Any) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def _safe(folder: str) -> str:
    """A folder name that cannot leave the root."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", folder) or "_"


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _header(data: bytes) -> Any:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length])


def _refused(error: OSError, path: str, num_bytes: int, *, said: str) -> StoreWriteError:
    mend = (
        "free some disk space, or set Storage(disk_budget_bytes=...)"
        if error.errno in (errno.ENOSPC, errno.EDQUOT)
        else "choose a writable place with Storage(checkpoints=...)"
    )
    return StoreWriteError(
        f"cannot write the checkpoint {path} ({num_bytes:,} bytes): {said}; {mend}, then run the study again: "
        "it goes on where it is"
    )
