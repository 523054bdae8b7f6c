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
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from thrifty.core import CheckpointError, CheckpointRef, StoreWriteError


Arrays = Mapping[str, np.ndarray[Any, Any]]


class CheckpointFolder:
    """Keeps states under a folder or any fsspec address; workers make their own from its address.

    ``fsync=False`` trusts the machine not to lose power (a lost file is found out and trained again).
    """

    def __init__(self, root: str, *, fsync: bool = True) -> None:
        self.root = root
        self._fsync = fsync
        self._fs, self._path = fsspec.core.url_to_fs(root)
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
                self._write_local(self._local / path, data)
            else:
                # object stores make a file visible when it is complete
                self._fs.pipe_file(f"{self._path}/{path}", data)
        except OSError as error:
            raise _refused(error, f"{self.root}/{path}", len(data)) from error
        return CheckpointRef(
            node=node, epoch=epoch, path=path, num_bytes=len(data), digest=_digest(data)
        )

    def read(
        self, ref: CheckpointRef
    ) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, Any]]:
        """The arrays and the JSON of a state; the arrays may be written to.

        Raises:
            CheckpointError: it is missing or not what was written.
        """
        where = f"{self.root}/{ref.path}"
        try:
            data = self._fs.cat_file(f"{self._path}/{ref.path}")
        except OSError as error:
            raise CheckpointError(f"checkpoint {where} cannot be read ({error})") from error
        if _digest(data) != ref.digest:
            raise CheckpointError(
                f"checkpoint {where} is damaged: it is not the file that was written"
            )
        try:
            meta = json.loads(_header(data)["__metadata__"]["thrifty"])
            return load(data), meta
        except (SafetensorError, KeyError, ValueError) as error:
            raise CheckpointError(f"checkpoint {where} is no checkpoint ({error})") from error

    def delete(self, ref: CheckpointRef) -> None:
        """Removes a state; no matter if it is gone already."""
        try:
            self._fs.rm_file(f"{self._path}/{ref.path}")
        except FileNotFoundError:
            return

    def _write_local(self, path: Path, data: bytes) -> None:
        # the thread in the name: two writers of one state must not share a temporary file
        temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
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


def _refused(error: OSError, path: str, num_bytes: int) -> StoreWriteError:
    why = error.strerror or str(error)
    mend = (
        "free some disk space, or set Storage(disk_budget_bytes=...)"
        if error.errno in (errno.ENOSPC, errno.EDQUOT)
        else "choose a writable place with Storage(checkpoints=...)"
    )
    return StoreWriteError(
        f"cannot write the checkpoint {path} ({num_bytes:,} bytes): {why}; {mend}, then run the study again: "
        "it goes on where it is"
    )
