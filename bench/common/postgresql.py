"""A private PostgreSQL server, for benchmarks and tests."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from thrifty.core import StoreError


class PrivatePostgreSQL:
    """A private PostgreSQL server, which a context manager starts and stops.

    You can pass it to other processes by value.

    Args:
        durable: whether commits survive a power cut, as they should anywhere but in tests.
        settings: further settings of the server, by name.

    Attributes:
        folder: folder of its data and its socket.

    Raises:
        StoreError: PostgreSQL is not installed, or does not start.
    """

    def __init__(self, *, durable: bool = False, settings: Mapping[str, str] | None = None) -> None:
        programs = postgresql_programs()
        if programs is None:
            raise StoreError(
                "PostgreSQL's server is not installed; install it, with Debian: apt-get "
                "install postgresql"
            )
        self._programs = programs
        self.folder = Path(tempfile.mkdtemp(prefix="thrifty-postgresql-"))
        fast = {} if durable else {"fsync": "off", "full_page_writes": "off"}
        self._settings = {"listen_addresses": "", **fast, **(settings or {})}
        # PostgreSQL refuses to run as root.
        self._user = _other_user() if os.geteuid() == 0 else None

    def __enter__(self) -> Self:
        if self._user is not None:
            shutil.chown(self.folder, self._user)
        try:
            self._run("initdb", "--username=thrifty", "--auth=trust", "--encoding=UTF8")
            self.start()
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self.stop(mode="immediate")
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def url(self) -> str:
        """Address of the server, as ``Storage`` takes it."""
        return self._url("postgres")

    @property
    def socket(self) -> Path:
        """Socket that the server listens on."""
        return self.folder / ".s.PGSQL.5432"

    def start(self) -> None:
        """Start the server and wait until it answers."""
        settings = " ".join(f"-c {name}={value}" for name, value in self._settings.items())
        options = f"-k {self.folder} {settings}"
        self._run("pg_ctl", "-w", "-l", str(self.folder / "log"), "-o", options, "start")

    def stop(self, *, mode: Literal["fast", "immediate"] = "fast") -> None:
        """Stop the server and end all connections; "immediate" amounts to a crash."""
        self._run("pg_ctl", "-w", "-m", mode, "stop")

    def new_database(self, name: str) -> str:
        """Make an empty database and return its address."""
        self._run("createdb", "-h", str(self.folder), "-U", "thrifty", name)
        return self._url(name)

    def _url(self, database: str) -> str:
        return f"postgresql+psycopg://thrifty@/{database}?host={self.folder}"

    def _run(self, program: str, *arguments: str) -> None:
        with tempfile.TemporaryFile() as said:
            # A file, not a pipe, because the server keeps the handle that it is given.
            done = subprocess.run(
                [str(self._programs / program), *arguments],
                check=False,
                stdout=said,
                stderr=said,
                cwd=self.folder,
                env={**os.environ, "PGDATA": str(self.folder / "data")},
                **self._as_user(),
            )
            said.seek(0)
            if done.returncode != 0:
                text = said.read().decode(errors="replace").strip()
                raise StoreError(f"{program} failed: {text or done.returncode}")

    def _as_user(self) -> dict[str, Any]:
        if self._user is None:
            return {}
        return {"user": self._user, "group": pwd.getpwnam(self._user).pw_gid, "extra_groups": []}


def postgresql_programs() -> Path | None:
    """Return the folder of the newest PostgreSQL server programs, or None if not installed."""
    found = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/initdb"),
        key=lambda path: int(path.parts[-3].split(".")[0]),
    )
    if found:
        return found[-1].parent
    on_path = shutil.which("initdb")
    return None if on_path is None else Path(on_path).resolve().parent


def _other_user() -> str:
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name).pw_name
        except KeyError:
            continue
    raise StoreError(
        "PostgreSQL does not run as root, and the users postgres and 'nobody' do not exist"
    )
