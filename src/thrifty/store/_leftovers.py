"""Files that killed runs leave in the checkpoint folder: finding them, and deleting them safely.

There are two kinds. A *temporary* file is one that a writer did not finish. An *orphan* is a
complete checkpoint without a row in the database: its run died before it wrote the row.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import Engine, select

from thrifty.core import plain_logger

from . import _schema as schema
from ._checkpoints import TEMPORARY, CheckpointFolder, FoundFile
from ._engine import user_errors
from .coordination._leases import Lease, is_tag_of_dead


logger = plain_logger(__name__)

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
    rf"\.{_CHECKPOINT.pattern}\.(?P<tag>.+)-[0-9]+{re.escape(TEMPORARY)}", re.ASCII
)

Kind = Literal["checkpoint", "orphan", "temporary", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftovers:
    """Leftovers that were removed, and those that were not safe to remove and still use space."""

    num_removed: int = 0
    removed_bytes: int = 0
    num_left: int = 0
    left_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Files in the folders of all plans: checkpoints with a row in the database, and leftovers."""

    num_kept: int = 0
    kept_bytes: int = 0
    num_left: int = 0
    left_bytes: int = 0


def survey(engine: Engine, checkpoints: CheckpointFolder) -> Survey:
    """Count the files in the folders of all plans, without changing anything."""
    with engine.connect() as connection:
        paths = set(connection.execute(select(schema.checkpoints.c.path)).scalars())
        plans = set(connection.execute(select(schema.plans.c.identity)).scalars())
    known: dict[str, set[str]] = {plan: set() for plan in plans}
    for path in paths:
        folder, _, name = path.partition("/")
        known.setdefault(folder, set()).add(name)
    sizes: dict[str, list[int]] = {"kept": [], "left": []}
    for folder, names in known.items():
        for file in checkpoints.files(folder):
            kind = kind_of(file, known=names)
            if kind != "other":
                sizes["kept" if kind == "checkpoint" else "left"].append(file.num_bytes)
    return Survey(
        num_kept=len(sizes["kept"]),
        kept_bytes=sum(sizes["kept"]),
        num_left=len(sizes["left"]),
        left_bytes=sum(sizes["left"]),
    )


def remove_leftovers(
    engine: Engine,
    checkpoints: CheckpointFolder,
    lease: Lease,
    *,
    folder: str,
    now: float,
) -> Leftovers:
    """Delete leftovers of killed runs from one plan's folder.

    A temporary file is deleted if the process that wrote it is gone. An orphan is deleted if no
    other process runs a study of this plan, and no other database keeps checkpoints in this
    folder.
    """
    try:
        found = checkpoints.files(folder)
        ours = _claim_folder(engine, checkpoints, folder, plan=lease.study.plan, found=found)
    except OSError as error:
        logger.debug("leftovers are not looked for: %s", error)
        return Leftovers()
    # Ask for other processes first: one that ends after that has recorded its checkpoints.
    may_go = ours and lease.is_alone()
    known = known_paths(engine, folder)
    removed: list[FoundFile] = []
    left: list[FoundFile] = []
    for file in found:
        kind = kind_of(file, known=known)
        if kind not in ("orphan", "temporary"):
            continue
        dead = may_go if kind == "orphan" else _is_abandoned(file, now=now)
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
    with user_errors(engine), engine.connect() as connection:
        return {path.rpartition("/")[2] for path in connection.execute(query).scalars()}


def kind_of(file: FoundFile, *, known: Collection[str]) -> Kind:
    """Return the kind of a file in a plan's folder."""
    if _CHECKPOINT.fullmatch(file.name):
        return "checkpoint" if file.name in known else "orphan"
    ours = file.name.startswith(".") and file.name.endswith(TEMPORARY)
    return "temporary" if ours else "other"


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
    with user_errors(engine), engine.connect() as connection:
        identity, made = connection.execute(query.where(schema.plans.c.id == plan)).one()
    return hashlib.blake2b(f"{identity} {made!r}".encode(), digest_size=8).hexdigest()
