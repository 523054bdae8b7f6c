"""Checkpoint files: safetensors with JSON in the header, written atomically, verified when read.

A checkpoint contains no pickle, and so nothing executable.

Killed runs leave two kinds of files, which are found and deleted here. A *temporary* file is one
that a writer did not finish. An *orphan* is a complete checkpoint without a row in the database:
its run died before it wrote the row. A *base* (see ``_plan_files``) that no checkpoint names is
deleted, too, and an *artifact* that no epoch names.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import fsspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save
from sqlalchemy import Connection, Engine, select

from thrifty.core import CheckpointError, CheckpointRef, StoreWriteError, UsageError, plain_logger

from . import _schema as schema
from ._address import redact, redact_root
from ._coordination import is_tag_of_dead, process_tag
from ._engine import fetch, user_errors
from ._records import artifacts_of


logger = plain_logger(__name__)

Arrays = Mapping[str, np.ndarray[Any, Any]]

MAX_HEADER_BYTES = 100_000_000
"""The limit of safetensors for a header."""

TEMPORARY = ".tmp"
"""Suffix of the name of a file that is still being written."""

BASE_NAME = re.compile(r"base-[0-9a-f]{32}\.safetensors", re.ASCII)
"""Pattern of the names of the files that hold what checkpoints leave out."""

ARTIFACT_NAME = re.compile(r"artifact-[0-9a-f]{32}", re.ASCII)
"""Pattern of the names of the files of artifacts."""

_PATH = re.compile(r"[A-Za-z0-9_-]+/[0-9]+-[0-9]+\.safetensors", re.ASCII)
"""Pattern of the paths that ``write`` makes; no other path in a database row is trusted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFile:
    """A file in a plan's folder.

    ``changed_at`` is in seconds since the Unix epoch, or None if the file system does not tell.
    """

    name: str
    num_bytes: int
    changed_at: float | None


class CheckpointFolder:
    """A folder, or any fsspec address, that holds checkpoints; each worker opens its own."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._shown = redact_root(root)
        try:
            self._fs, self._path = fsspec.core.url_to_fs(root)
        except (ValueError, ImportError, OSError) as error:
            # Do not chain the cause: it may quote the address with its password.
            raise UsageError(
                f"checkpoints cannot be kept at {self._shown}: {self._said(error)}; give "
                "Storage(checkpoints=...) "
                "a folder, or an address that fsspec knows"
            ) from None
        self._local = Path(self._path) if "file" in _protocols(self._fs) else None

    def write(
        self, folder: str, *, node: int, epoch: int, tensors: Arrays, meta: Mapping[str, Any]
    ) -> CheckpointRef:
        """Write one state atomically, and return a reference to its file.

        Raises:
            StoreWriteError: The disk is full, or the place is read-only.
        """
        path = f"{_safe(folder)}/{node}-{epoch}.safetensors"
        contiguous = {
            key: np.ascontiguousarray(value).reshape(value.shape) for key, value in tensors.items()
        }
        data = save(contiguous, metadata={"thrifty": json.dumps(meta)})
        with ThreadPoolExecutor(max_workers=1) as beside:  # the disk leaves a processor idle
            digest = beside.submit(_digest, data)
            try:
                if self._local is not None:
                    self.write_file(path, [data])
                else:
                    # An object store makes a file visible only when it is complete.
                    self._fs.pipe_file(f"{self._path}/{path}", data)
            except OSError as error:
                shown = f"{self._shown}/{path}"
                raise _refused(error, shown, len(data), said=self._said(error)) from self._cause(
                    error
                )
        return CheckpointRef(
            node=node, epoch=epoch, path=path, num_bytes=len(data), digest=digest.result()
        )

    def read(self, ref: CheckpointRef) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, Any]]:
        """Return the arrays and the JSON data of a state; the arrays are writeable.

        Raises:
            CheckpointError: The file is missing or altered, or lies outside this folder.
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

    def write_file(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Write a file atomically.

        Args:
            path: Its place in this folder, ``PLAN/NAME``.
            chunks: Its content, in parts.

        Raises:
            OSError: The disk is full, or the place is read-only.
        """
        if self._local is not None:
            self._check_links(path)
            self._write_local(self._local / path, chunks)
            return
        folder, _, _ = f"{self._path}/{path}".rpartition("/")
        self._fs.makedirs(folder, exist_ok=True)
        with self._fs.open(f"{self._path}/{path}", "wb") as out:
            for chunk in chunks:
                out.write(chunk)

    def read_part(self, path: str, start: int, stop: int) -> bytes:
        """Return some bytes of a file.

        Raises:
            OSError: The file is missing, or a symbolic link.
        """
        self._check_links(path)
        return bytes(self._fs.cat_file(f"{self._path}/{path}", start=start, end=stop))

    def num_bytes(self, path: str) -> int | None:
        """Return the size of a file; None if there is none.

        Raises:
            OSError: It is a symbolic link, or the place does not answer.
        """
        self._check_links(path)
        self._fs.invalidate_cache()  # other processes write to this folder, too
        try:
            return int(self._fs.size(f"{self._path}/{path}"))
        except FileNotFoundError:
            return None

    def base_named_in(self, path: str) -> str:
        """Return the name of the file that has what a checkpoint leaves out; "" if there is none.

        Reads the header of the checkpoint only.

        Raises:
            OSError: The file cannot be read.
            ValueError: It is no checkpoint; or KeyError or TypeError.
        """
        length = int.from_bytes(self.read_part(path, 0, 8), "little")
        header = json.loads(self.read_part(path, 8, 8 + min(length, MAX_HEADER_BYTES)))
        base = json.loads(header["__metadata__"]["thrifty"]).get("base")
        return f"base-{base}.safetensors" if base else ""

    def path_of(self, folder: str, name: str) -> str:
        """Return the path of a file of a plan's folder."""
        return f"{_safe(folder)}/{name}"

    def shown(self, path: str) -> str:
        """Return the full path of a file as messages show it."""
        return f"{self._shown}/{path}"

    def refused(
        self, error: OSError, path: str, num_bytes: int, *, what: str = "checkpoint"
    ) -> StoreWriteError:
        """Return the error for a file that could not be written; raise it from None."""
        return _refused(error, self.shown(path), num_bytes, said=self._said(error), what=what)

    def delete(self, ref: CheckpointRef) -> None:
        """Delete a state's file; ignore one that is gone already or lies outside this folder."""
        try:
            self._fs.rm_file(self._inside(ref.path))
        except FileNotFoundError:
            return
        except CheckpointError as error:
            # The row is deleted already, and one bad row must not end the study.
            logger.warning("nothing was deleted: %s", error)

    def files(self, folder: str) -> list[FoundFile]:
        """Return the files of one plan's folder; none if there is no such folder."""
        self._fs.invalidate_cache()  # other processes write to this folder, too
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
        """Create an empty file in one plan's folder."""
        path = f"{self._path}/{_safe(folder)}"
        self._fs.makedirs(path, exist_ok=True)
        self._fs.pipe_file(f"{path}/{name}", b"")

    def remove(self, folder: str, name: str) -> None:
        """Delete a file that ``files`` has listed."""
        assert "/" not in name
        self._fs.rm_file(f"{self._path}/{_safe(folder)}/{name}")

    def _said(self, error: BaseException) -> str:
        """Return the file system's message of an error, with the address's password hidden."""
        said = getattr(error, "strerror", None) or str(error)
        return redact(str(said), url=self.root) if "://" in self.root else str(said)

    def _cause(self, error: BaseException) -> BaseException | None:
        """Return the error to chain, or None if its traceback would show a password."""
        return (
            error
            if "://" not in self.root or redact(str(error), url=self.root) == str(error)
            else None
        )

    def _inside(self, path: str) -> str:
        """Return the full path of a checkpoint of this folder.

        Raises:
            CheckpointError: ``write`` makes no such path, or it contains a symbolic link.
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
        """Reject symbolic links below the root: they may lead anywhere. The root may be one.

        Raises:
            OSError: The file or its folder is a symbolic link.
        """
        if self._local is None:
            return
        file = self._local / path
        for part in (file.parent, file):
            if part.is_symlink():
                raise OSError(
                    errno.ELOOP, f"{part} is a symbolic link, which may lead out of {self._shown}"
                )

    def _write_local(self, path: Path, chunks: Iterable[bytes | memoryview]) -> None:
        # The name contains the writing process, so that files left by killed processes can be
        # found. It contains the thread, too, because two writers of one state must not share a
        # temporary file.
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
                for chunk in chunks:
                    out.write(chunk)
                out.flush()
                os.fsync(out.fileno())
            temporary.replace(path)
        except BaseException:
            if temporary.exists():
                temporary.unlink()
            raise


def _protocols(fs: Any) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def _safe(folder: str) -> str:
    """Return a folder name that cannot lead out of the root."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", folder) or "_"


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _header(data: bytes) -> Any:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length])


def _refused(
    error: OSError, path: str, num_bytes: int, *, said: str, what: str = "checkpoint"
) -> StoreWriteError:
    mend = (
        "free some disk space, or set Storage(disk_budget_bytes=...) or Storage(max_base_bytes=...)"
        if error.errno in (errno.ENOSPC, errno.EDQUOT)
        else "choose a writable place with Storage(checkpoints=...)"
    )
    return StoreWriteError(
        f"cannot write the {what} {path} ({num_bytes:,} bytes): {said}; {mend}, then run "
        "the study again: "
        "it goes on where it is"
    )


ABANDONED_AFTER_S = 86_400.0
"""A temporary file that has not changed for this long counts as abandoned.

This applies to files of other machines and of earlier versions, whose names do not tell whether
the writer is alive.
"""

_OWNER = ".owner-"
"""Prefix of the name of an empty file that marks which database keeps checkpoints in a folder."""
_UNKNOWN = "unknown"
_CHECKPOINT = re.compile(r"[0-9]+-[0-9]+\.safetensors", re.ASCII)
_WRITER = re.compile(
    rf"\.(?:{_CHECKPOINT.pattern}|{BASE_NAME.pattern}|{ARTIFACT_NAME.pattern})"
    rf"\.(?P<tag>.+)-[0-9]+{re.escape(TEMPORARY)}",
    re.ASCII,
)

Kind = Literal["checkpoint", "orphan", "temporary", "base", "artifact", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftovers:
    """Leftovers that were removed, and those that were not safe to remove and still use space."""

    num_removed: int = 0
    removed_bytes: int = 0
    num_left: int = 0
    left_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Files of all plans: checkpoints with a row in the database, bases, and leftovers."""

    num_kept: int = 0
    kept_bytes: int = 0
    num_bases: int = 0
    base_bytes: int = 0
    num_left: int = 0
    left_bytes: int = 0


def survey(engine: Engine, checkpoints: CheckpointFolder) -> Survey:
    """Count the files in the folders of all plans, without changing anything."""
    with engine.connect() as connection:
        paths = set(connection.execute(select(schema.checkpoints.c.path)).scalars())
        plans = connection.execute(select(schema.plans.c.id, schema.plans.c.identity)).all()
        known = {identity: artifact_names(connection, plan) for plan, identity in plans}
    for path in paths:
        folder, _, name = path.partition("/")
        known.setdefault(folder, set()).add(name)
    sizes: dict[str, list[int]] = {"checkpoint": [], "base": [], "left": []}
    for folder, names in known.items():
        for file in checkpoints.files(folder):
            kind = kind_of(file, known=names)
            if kind not in ("artifact", "other"):
                sizes[kind if kind in sizes else "left"].append(file.num_bytes)
    return Survey(
        num_kept=len(sizes["checkpoint"]),
        kept_bytes=sum(sizes["checkpoint"]),
        num_bases=len(sizes["base"]),
        base_bytes=sum(sizes["base"]),
        num_left=len(sizes["left"]),
        left_bytes=sum(sizes["left"]),
    )


def remove_leftovers(
    engine: Engine,
    checkpoints: CheckpointFolder,
    *,
    plan: int,
    is_alone: Callable[[], bool],
    folder: str,
    now: float,
) -> Leftovers:
    """Delete leftovers of killed runs from one plan's folder.

    A temporary file is deleted if the process that wrote it is gone. An orphan, or a base that no
    checkpoint names, is deleted if no other process runs a study of this plan, and no other
    database keeps checkpoints in this folder.
    """
    try:
        found = checkpoints.files(folder)
        ours = _claim_folder(engine, checkpoints, folder, plan=plan, found=found)
    except OSError as error:
        logger.debug("leftovers are not looked for: %s", error)
        return Leftovers()
    # Ask for other processes first: one that ends after that has recorded its checkpoints.
    may_go = ours and is_alone()
    known = known_paths(engine, folder)
    with user_errors(engine), engine.connect() as connection:
        known |= artifact_names(connection, plan)
    removed: list[FoundFile] = []
    left: list[FoundFile] = []
    unnamed = _unnamed_bases(checkpoints, folder, found, known=known) if may_go else set()
    for file in found:
        kind = kind_of(file, known=known)
        if kind in ("checkpoint", "artifact", "other") or (
            kind == "base" and file.name not in unnamed
        ):
            continue
        dead = _is_abandoned(file, now=now) if kind == "temporary" else may_go
        gone = dead and _remove(checkpoints, folder, file)
        (removed if gone else left).append(file)
    result = Leftovers(
        num_removed=len(removed),
        removed_bytes=sum(file.num_bytes for file in removed),
        num_left=len(left),
        left_bytes=sum(file.num_bytes for file in left),
    )
    if removed:
        logger.info(
            "removed %d files (%d bytes) that killed runs had left in %s/%s",
            result.num_removed,
            result.removed_bytes,
            checkpoints.root,
            folder,
        )
    return result


def known_paths(engine: Engine, folder: str) -> set[str]:
    """Return the names of the files in a folder that have a row, of any plan."""
    table = schema.checkpoints
    query = select(table.c.path).where(table.c.path.startswith(f"{folder}/", autoescape=True))
    return {row.path.rpartition("/")[2] for row in fetch(engine, query)}


def artifact_names(connection: Connection, plan: int) -> set[str]:
    """Return the names of the files of artifacts that epochs of a plan name."""
    e = schema.epochs
    query = select(e.c.artifacts).where(e.c.plan == plan, e.c.artifacts.is_not(None))
    return {
        f"artifact-{each.digest}"
        for stored in connection.execute(query).scalars()
        for each in artifacts_of(stored)
    }


def kind_of(file: FoundFile, *, known: Collection[str]) -> Kind:
    """Return the kind of a file in a plan's folder."""
    if ARTIFACT_NAME.fullmatch(file.name):
        return "artifact" if file.name in known else "orphan"
    if _CHECKPOINT.fullmatch(file.name):
        return "checkpoint" if file.name in known else "orphan"
    if BASE_NAME.fullmatch(file.name):
        return "base"
    ours = file.name.startswith(".") and file.name.endswith(TEMPORARY)
    return "temporary" if ours else "other"


def _unnamed_bases(
    checkpoints: CheckpointFolder,
    folder: str,
    found: Collection[FoundFile],
    *,
    known: Collection[str],
) -> set[str]:
    """Return the names of the bases in a folder that no checkpoint names."""
    unnamed = {file.name for file in found if kind_of(file, known=known) == "base"}
    for name in filter(_CHECKPOINT.fullmatch, known):
        if not unnamed:
            break
        try:
            unnamed.discard(checkpoints.base_named_in(f"{_safe(folder)}/{name}"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError):
            return set()  # what it names is not known
    return unnamed


def _is_abandoned(file: FoundFile, *, now: float) -> bool:
    writer = _WRITER.fullmatch(file.name)
    if writer is not None and is_tag_of_dead(writer["tag"]):
        return True
    return file.changed_at is not None and now - file.changed_at > ABANDONED_AFTER_S


def _remove(checkpoints: CheckpointFolder, folder: str, file: FoundFile) -> bool:
    try:
        checkpoints.remove(folder, file.name)
    except OSError as error:
        logger.debug("a leftover stays: %s", error)
        return False
    return True


def is_own_folder(engine: Engine, plan: int, found: Collection[FoundFile]) -> bool:
    """Return whether no other database is known to use the folder of a plan; mark nothing."""
    owners = {each.name.removeprefix(_OWNER) for each in found if each.name.startswith(_OWNER)}
    if not owners:
        return not any(_CHECKPOINT.fullmatch(each.name) for each in found)
    return owners == {_owner_of(engine, plan)}


def _claim_folder(
    engine: Engine,
    checkpoints: CheckpointFolder,
    folder: str,
    *,
    plan: int,
    found: Collection[FoundFile],
) -> bool:
    """Mark a folder as used by this database; return whether no other database uses it."""
    mine = _owner_of(engine, plan)
    owners = {each.name.removeprefix(_OWNER) for each in found if each.name.startswith(_OWNER)}
    fresh = {mine} - owners
    if not owners and any(_CHECKPOINT.fullmatch(each.name) for each in found):
        # An earlier version wrote these checkpoints, for this database or for others.
        fresh.add(_UNKNOWN)
    for owner in fresh:
        checkpoints.put(folder, f"{_OWNER}{owner}")
    return owners | fresh == {mine}


def _owner_of(engine: Engine, plan: int) -> str:
    """Return a name for the database; the time at which it made the plan makes it unique."""
    query = select(schema.plans.c.identity, schema.plans.c.created_at)
    ((identity, made),) = fetch(engine, query.where(schema.plans.c.id == plan))
    return hashlib.blake2b(f"{identity} {made!r}".encode(), digest_size=8).hexdigest()
