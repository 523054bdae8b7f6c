"""``thrifty doctor``: check what is installed and what works."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, Literal

import click
import numpy as np
from rich.console import Console
from rich.table import Table
from sqlalchemy import URL, Engine, create_engine, text
from sqlalchemy.exc import DBAPIError

from thrifty import __version__
from thrifty.agents import SCHEMA_VERSION
from thrifty.core import StoreError, installing, size_text
from thrifty.store import VERSION, CheckpointFolder, redact_url
from thrifty.store._address import read_address, redact
from thrifty.store._checkpoints import survey
from thrifty.store._engine import ReadOnlyFile, can_write
from thrifty.store._store import default_checkpoints

from ._options import cell, json_option, print_document


State = Literal["ok", "absent", "warning", "broken"]

_FOR_DEVELOPERS = ("test", "check", "bench", "docs")
_LITTLE_BYTES = 2**30
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of a check; ``needed`` means that every study or a given option needs it."""

    section: str
    name: str
    state: State
    detail: str
    needed: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the finding as plain data."""
        return asdict(self)


Check = Callable[[], tuple[State, str]]


def findings(
    *, storage: str | None, extras: Sequence[str], device: str | None
) -> Iterator[Finding]:
    """Run all checks, in order.

    Args:
        storage: Address of the database to check; None: no database.
        extras: Extras that must be installed.
        device: Device for the training steps (default: a GPU, or the CPU).
    """
    yield _look("versions", "thrifty", lambda: ("ok", _versions()), needed=True)
    yield _look("versions", "torch", _torch_version, needed=True)
    yield from _extras(extras)
    yield _look("devices", "cpu", _cpu)
    yield from _accelerators()
    for name in ("solo", "concatenated", "fused"):
        check = partial(_step, name, device)
        yield _look("back-ends", name, check, needed=name == "solo" or device is not None)
    yield _look("kernels", "numba", _kernels, needed="graph" in extras)
    yield from _drivers(storage, extras)
    if storage is not None:
        check = partial(_storage, storage)
        yield _look("storage", redact_url(storage), check, needed=True, url=storage)
        yield _look("storage", "disk", partial(_disk, storage), url=storage)
        yield _look("storage", "checkpoints", partial(_checkpoints, storage), url=storage)


def _look(section: str, name: str, check: Check, *, needed: bool = False, url: str = "") -> Finding:
    """Run a check. Its text is shown without the passwords of ``url``."""
    try:
        state, detail = check()
    except Exception as error:  # noqa: BLE001 (any error is the check's result)
        said = str(error).strip().split("\n")[0]
        state, detail = "broken", f"{type(error).__name__}: {said}"
    detail = redact(detail, url=url)
    return Finding(section=section, name=name, state=state, detail=detail, needed=needed)


# -- what is installed ---------------------------------------------------------------------


def _versions() -> str:
    return f"{__version__}, Python {platform.python_version()}, {platform.platform(terse=True)}"


def _torch_version() -> tuple[State, str]:
    torch = import_module("torch")
    return "ok", f"{torch.__version__}, {torch.get_num_threads()} threads"


def _extras(asked: Sequence[str]) -> Iterator[Finding]:
    try:
        known = extras_of(metadata.requires("thrifty") or [])
    except Exception as error:  # noqa: BLE001 (an installation may be broken in any way)
        detail = f"what they are is not known: {type(error).__name__}: {error}"
        yield Finding(section="extras", name="", state="broken", detail=detail, needed=bool(asked))
        return
    for name in sorted({*known, *asked}):
        check = partial(_extra, name, known)
        if name in asked or name not in _FOR_DEVELOPERS:
            yield _look("extras", name, check, needed=name in asked)


def extras_of(requirements: Sequence[str]) -> dict[str, list[tuple[str, str]]]:
    """Return packages and their minimum versions by extra, from a distribution's requirements.

    >>> extras_of([
    ...     "torch>=2.6",
    ...     "numba>=0.60; extra == 'graph'",
    ...     'thrifty[graph]; extra == "test"',
    ... ])
    {'graph': [('numba', '0.60')], 'test': [('thrifty', '')]}
    """
    out: dict[str, list[tuple[str, str]]] = {}
    for requirement in requirements:
        extra = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", requirement)
        package = re.match(r"[\w.-]+", requirement)
        if extra is None or package is None:
            continue
        least = re.search(r">=\s*([\w.]+)", requirement.partition(";")[0])
        out.setdefault(extra[1], []).append((package[0], least[1] if least else ""))
    return out


def _extra(name: str, known: Mapping[str, Sequence[tuple[str, str]]]) -> tuple[State, str]:
    if name not in known:
        return "broken", f"there is no such extra; there are {', '.join(known) or 'none'}"
    said: list[str] = []
    worst: State = "ok"
    for package, least in known[name]:
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            said.append(f"{package} is not installed")
            worst = "absent"
            continue
        old = bool(least) and _numbers(version) < _numbers(least)
        said.append(f"{package} {version}" + (f" (needs {least})" if old else ""))
        worst = "warning" if old and worst == "ok" else worst
    if worst == "ok":
        return worst, ", ".join(said)
    return worst, f"{', '.join(said)}; in the checkout: {installing(name)}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def _drivers(storage: str | None, extras: Sequence[str]) -> Iterator[Finding]:
    asked = bool(storage and storage.startswith("postgresql")) or "postgresql" in extras
    yield _look("drivers", "psycopg", _psycopg, needed=asked)
    yield _look("drivers", "ray", _ray, needed="ray" in extras)


def _psycopg() -> tuple[State, str]:
    try:
        psycopg = import_module("psycopg")
    except ModuleNotFoundError:
        return "absent", f"needed for PostgreSQL; in the checkout: {installing('postgresql')}"
    return "ok", f"{psycopg.__version__}, libpq {psycopg.pq.version()}"


def _ray() -> tuple[State, str]:
    try:
        # Do not import it: that alone takes seconds.
        return "ok", metadata.version("ray")
    except metadata.PackageNotFoundError:
        return "absent", f"needed for clusters; in the checkout: {installing('ray')}"


# -- devices -------------------------------------------------------------------------------


def _cpu() -> tuple[State, str]:
    cores = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    names = ("SC_PAGE_SIZE", "SC_PHYS_PAGES")
    memory = ""
    if set(names) <= set(getattr(os, "sysconf_names", ())):
        page, pages = (os.sysconf(name) for name in names)
        memory = f", {size_text(page * pages)} of memory"
    return "ok", f"{usable} of {cores} cores usable{memory}"


def _accelerators() -> Iterator[Finding]:
    try:
        torch = import_module("torch")
        num = torch.cuda.device_count() if torch.cuda.is_available() else 0
        mps = torch.backends.mps.is_available()
    except Exception as error:  # noqa: BLE001 (a mismatched driver may raise anything)
        yield Finding(section="devices", name="gpu", state="broken", detail=str(error))
        return
    for index in range(num):
        yield _look("devices", f"cuda:{index}", partial(_cuda, torch, index))
    if mps:
        yield _look("devices", "mps", lambda: ("ok", platform.machine()))
    if not num and not mps:
        yield Finding(
            section="devices", name="gpu", state="absent", detail="none that torch can use"
        )


def _cuda(torch: Any, index: int) -> tuple[State, str]:
    free, total = torch.cuda.mem_get_info(index)
    name = torch.cuda.get_device_name(index)
    major, minor = torch.cuda.get_device_capability(index)
    memory = f"{size_text(free)} of {size_text(total)} free"
    return "ok", f"{name}, compute capability {major}.{minor}, {memory}"


# -- what works ----------------------------------------------------------------------------


def _step(name: str, device: str | None) -> tuple[State, str]:
    found: tuple[State, str] = import_module("thrifty.cli._demo").tiny_step(name, device=device)
    return found


def _kernels() -> tuple[State, str]:
    try:
        numba = import_module("numba")
    except ModuleNotFoundError:
        return "absent", f"needed for graphs; in the checkout: {installing('graph')}"
    kernels = import_module("thrifty.graph.kernels")
    if not kernels.COMPILED:
        return ("warning", f"numba {numba.__version__} does not compile (NUMBA_DISABLE_JIT is set)")
    # This is the first number of SplitMix64 from seed 0, as published by its authors.
    if int(kernels.mix(_GOLDEN)) != 0xE220A8397B1DCDAF:
        return "broken", f"numba {numba.__version__}: a compiled kernel gives a wrong answer"
    return "ok", f"numba {numba.__version__}, kernels compile"


# -- storage -------------------------------------------------------------------------------


def _storage(storage: str) -> tuple[State, str]:
    """Check a database without changing it: doctor must not upgrade it."""
    address = read_address(storage)
    if address.get_backend_name() != "sqlite":
        return _database(_server(address), can_write="SELECT NOT pg_is_in_recovery()")
    file = _file_of(address)
    if file is None:
        return "warning", "in memory: it is gone when the process ends"
    if not file.exists():
        return "broken", f"there is no file {file}; a study that is run makes it"
    engine = ReadOnlyFile(file, timeout_s=1.0).engine(address)
    return _database(engine, can_write=f"SELECT {int(can_write(file))}")


def _file_of(address: URL) -> Path | None:
    if address.database in (None, "", ":memory:"):
        return None
    return Path(str(address.database)).resolve()


def _server(address: URL) -> Engine:
    if address.drivername == "postgresql":
        address = address.set(drivername="postgresql+psycopg")
    return create_engine(address, connect_args={"connect_timeout": 3})


def _checkpoints(storage: str) -> tuple[State, str]:
    """Count the files in the default folder of checkpoints.

    A ``Storage`` with its own folder is not known here.
    """
    address = read_address(storage)
    file = _file_of(address) if address.get_backend_name() == "sqlite" else None
    if file is None and address.get_backend_name() == "sqlite":
        return "absent", "they go with the process"
    if file is not None and not file.exists():
        return "absent", "none yet"
    engine = _server(address) if file is None else ReadOnlyFile(file, timeout_s=1.0).engine(address)
    try:
        folder = CheckpointFolder(default_checkpoints(storage))
        found = survey(engine, folder)
    except (DBAPIError, StoreError):
        return "absent", "not known: the database cannot be read"
    finally:
        engine.dispose()
    said = f"{found.num_kept:,} files, {size_text(found.kept_bytes)} in {folder.root}"
    if found.num_bases:
        said += f", and {found.num_bases:,} bases, {size_text(found.base_bytes)}"
    if not found.num_left:
        return "ok", said
    said += (
        f"; {found.num_left:,} more files ({size_text(found.left_bytes)}) that no study "
        "knows, of a run that was "
        "killed or goes on: the next run of their task removes them where that is safe"
    )
    return "warning", said


def _database(engine: Engine, *, can_write: str) -> tuple[State, str]:
    try:
        with engine.connect() as connection:
            version = connection.execute(text("SELECT version_num FROM thrifty_version")).scalar()
            studies = connection.execute(text("SELECT count(*) FROM studies")).scalar()
            writable = bool(connection.execute(text(can_write)).scalar())
    except DBAPIError as error:
        said = str(error.orig).strip().split("\n")[0]
        return "broken", f"cannot be read as a database of thrifty: {said}"
    finally:
        engine.dispose()
    said = f"schema {version}, {studies} studies"
    if version is None or version > VERSION:
        return "broken", f"{said}; written by a newer thrifty, which knows more than {VERSION}"
    if not writable:
        return "broken", f"{said}; it can be read, but it cannot be written"
    if version < VERSION:
        return "warning", f"{said}; the next command brings it up to {VERSION}"
    return "ok", f"{said}, writable"


def _disk(storage: str) -> tuple[State, str]:
    """Check the disk for checkpoints: beside a SQLite file, or in the working directory."""
    address = read_address(storage)
    sqlite = address.get_backend_name() == "sqlite"
    folder = Path(str(address.database)).resolve().parent if sqlite else Path.cwd()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    said = f"{size_text(free)} free for checkpoints in {folder}"
    return ("ok" if free > _LITTLE_BYTES else "warning"), said


_COLOURS: dict[State, str] = {"ok": "green", "absent": "dim", "warning": "yellow", "broken": "red"}


@click.command("doctor")
@click.option(
    "--storage",
    envvar="THRIFTY_STORAGE",
    help="A database address to look at, without changing anything in it.",
)
@click.option(
    "--extra", "extras", multiple=True, help="Fail if this extra is not installed; repeat for more."
)
@click.option("--device", help="Device on which training steps are tried  [default: a GPU, or cpu]")
@json_option
@click.pass_context
def doctor_command(
    ctx: click.Context,
    *,
    storage: str | None,
    extras: tuple[str, ...],
    device: str | None,
    as_json: bool,
) -> None:
    """Check this installation: versions, extras, devices, back-ends, kernels, storage.

    The exit code is 1 if a check fails that an option requests or that every study needs.
    """
    found = list(findings(storage=storage, extras=extras, device=device))
    failed = any(each.needed and each.state in ("broken", "absent") for each in found)
    if as_json:
        checks = [each.to_json() for each in found]
        print_document({"schema_version": SCHEMA_VERSION, "ok": not failed, "checks": checks})
    else:
        console = Console()
        console.print(_table(found))
        console.print(_summary(found), highlight=False)
    ctx.exit(1 if failed else 0)


def _table(found: list[Finding]) -> Table:
    table = Table("", "", "", "", show_header=False, box=None, pad_edge=False)
    section = ""
    for each in found:
        colour = _COLOURS[each.state]
        table.add_row(
            cell(each.section if each.section != section else "", style="bold"),
            cell(each.name),
            cell(_said(each), style=colour),
            cell(each.detail),
        )
        section = each.section
    return table


def _said(finding: Finding) -> str:
    """Return a state in words: what is absent is optional unless it is needed."""
    if finding.state != "absent":
        return finding.state
    if finding.section not in ("extras", "drivers", "kernels"):
        return "none"
    return "not installed" if finding.needed else "not installed (optional)"


def _summary(found: list[Finding]) -> str:
    return ", ".join(_counted(found)) or "nothing was looked at"


def _counted(found: list[Finding]) -> Iterator[str]:
    counts = Counter((each.state, _said(each)) for each in found)
    for state, colour in _COLOURS.items():
        for (counted, said), num in counts.items():
            if counted == state:
                yield f"[{colour}]{num} {said}[/{colour}]"
