"""A folder of activations of frozen trunks, which later processes find again."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from thrifty.core import plain_logger
from thrifty.pack._frozen import digest_of


logger = plain_logger(__name__)

TEMPORARY = ".tmp"
STALE_S = 3600.0
"""The age in seconds from which a file that is still being written counts as abandoned."""

_NUMBERS = itertools.count()


class ActivationFolder:
    """A folder of safetensors files, one for each content of trunk and data.

    Nothing that goes wrong here is an error: what cannot be read is computed again, and what cannot
    be written is not kept.

    Args:
        path: The folder, which is made when something is first written.
        limit_bytes: The most bytes that its files may take; the oldest are removed first.
    """

    def __init__(self, path: Path, *, limit_bytes: int) -> None:
        self._path = path
        self._limit_bytes = limit_bytes
        self._has_failed = False

    def read(self, key: Sequence[str]) -> list[torch.Tensor] | None:
        """Return the rows that were written under a key; None if there are none or not intact."""
        path = self._file(key)
        try:
            with safe_open(path, framework="pt") as file:
                meta = json.loads(file.metadata()["thrifty"])
                rows = [file.get_tensor(str(n)) for n in range(len(meta["digests"]))]
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError, LookupError, TypeError, ValueError) as error:
            logger.warning("%s is computed again, because it cannot be read: %s", path, error)
            return None
        if meta["key"] != list(key) or meta["digests"] != [digest_of(each) for each in rows]:
            logger.warning("%s is computed again, because it is damaged", path)
            return None
        with suppress(OSError):
            os.utime(path)  # it was used last
        return rows

    def write(self, key: Sequence[str], rows: Sequence[torch.Tensor]) -> None:
        """Write rows atomically, and remove old files beyond the limit."""
        path = self._file(key)
        if self._has_failed or not self._make_room(sum(r.numel() * r.itemsize for r in rows)):
            return
        temporary = path.with_name(f".{path.stem}-{os.getpid()}-{next(_NUMBERS)}{TEMPORARY}")
        tensors = {str(n): each.detach().cpu().contiguous() for n, each in enumerate(rows)}
        meta = {"key": list(key), "digests": [digest_of(each) for each in tensors.values()]}
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            save_file(tensors, temporary, metadata={"thrifty": json.dumps(meta)})
            temporary.replace(path)
        except (OSError, SafetensorError) as error:
            self._has_failed = True
            logger.warning("activations are kept in memory only: %s", error)
            with suppress(OSError):
                temporary.unlink()

    def _file(self, key: Sequence[str]) -> Path:
        digest = hashlib.blake2b(json.dumps(list(key)).encode(), digest_size=16)
        return self._path / f"{digest.hexdigest()}.safetensors"

    def _make_room(self, num_bytes: int) -> bool:
        """Remove the oldest files until a new one fits; return whether it can fit."""
        if num_bytes > self._limit_bytes:
            return False
        found: list[tuple[float, int, Path]] = []
        with suppress(OSError):
            for path in self._path.iterdir():
                stat = path.stat()
                if path.suffix == TEMPORARY and stat.st_mtime < time.time() - STALE_S:
                    path.unlink()
                elif path.suffix == ".safetensors":
                    found.append((stat.st_mtime, stat.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total + num_bytes <= self._limit_bytes:
                break
            with suppress(OSError):
                path.unlink()
            total -= size
        return True
