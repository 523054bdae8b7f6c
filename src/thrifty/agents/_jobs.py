"""Training in the background, within a budget, and the studies that files define."""

from __future__ import annotations

import json
import linecache
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Literal

import thrifty
from thrifty.core import UsageError
from thrifty.store import Store
from thrifty.study import Study

from .documents import BudgetDocument


STORAGE_VARIABLE = "THRIFTY_JOB_STORAGE"
"""Variable with the address of a job's database; arguments would show its password to all users."""

_LOG_CHARS = 2_000
_PATIENCE_S = 20.0
"""Seconds that a job has to end after it was told to, until it is killed."""

_STOPPED = {-signal.SIGINT, -signal.SIGTERM, 128 + signal.SIGINT, 128 + signal.SIGTERM}
"""Exit codes of a process that a signal has ended, perhaps before it had trained anything."""

JobState = Literal["running", "done", "stopped", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A process that trains some configurations.

    Attributes:
        id: Its identifier.
        study: The study that has the configurations as trials.
        storage: Address of its database.
        folder: Where its output is.
        process: The process.
        lifeline: A pipe's end; when it is closed, also by the server's death, the job stops.
        began: When it started, by the monotonic clock.
    """

    id: str
    study: str
    storage: str
    folder: Path
    process: subprocess.Popen[bytes]
    lifeline: IO[bytes]
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Seconds since it started."""
        return time.monotonic() - self.began

    @property
    def is_running(self) -> bool:
        """Whether the process is alive."""
        return self.process.poll() is None

    def wait(self, seconds: float) -> None:
        """Wait until the process ends, for at most ``seconds``."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=seconds)

    def output(self) -> Mapping[str, Any] | None:
        """Return the JSON document that the process has printed; None before its end."""
        if self.is_running:
            return None
        with suppress(ValueError, OSError):
            found = json.loads((self.folder / "out").read_text(encoding="utf-8"))
            return found if isinstance(found, dict) else None
        return None

    def log(self) -> str:
        """Return the last lines that the process has logged."""
        with (self.folder / "log").open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _LOG_CHARS))
            return file.read().decode(errors="replace")

    @property
    def state(self) -> JobState:
        """The state of the job."""
        if self.is_running:
            return "running"
        if self.process.returncode in _STOPPED:
            return "stopped"
        found = self.output()
        if found is None or "error" in found:
            return "failed"
        return "done" if found["done"] else "stopped"

    def stop(self) -> None:
        """Let it stop at the end of an epoch; it keeps what it has trained."""
        # Not by a signal: a second one would stop it at once, and lose an epoch.
        self.lifeline.close()


class Jobs:
    """The jobs of a server, one at a time.

    Args:
        command: The words that start the program.
    """

    def __init__(self, *, command: Sequence[str]) -> None:
        self._command = tuple(command)
        self._jobs: dict[str, Job] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="thrifty-jobs-")

    def start(self, words: Sequence[str], *, given: str, study: str, storage: str) -> Job:
        """Start a job.

        Args:
            words: The arguments of the program.
            given: What it reads from standard input.
            study: The study that has its configurations as trials.
            storage: Address of its database.

        Raises:
            UsageError: Another job is running.
        """
        running = [job.id for job in self._jobs.values() if job.is_running]
        if running:
            raise UsageError(f"job {running[0]} is running; wait for it, or stop it")
        number = f"job-{len(self._jobs) + 1}"
        folder = Path(self._folder.name) / number
        folder.mkdir()
        (folder / "in").write_text(given, encoding="utf-8")
        with (
            (folder / "in").open("rb") as source,
            (folder / "out").open("wb") as out,
            (folder / "log").open("wb") as log,
        ):
            reading, writing = os.pipe()
            try:
                process = subprocess.Popen(
                    [*self._command, *words, "--lifeline", str(reading)],
                    stdin=source,
                    stdout=out,
                    stderr=log,
                    env={**os.environ, STORAGE_VARIABLE: storage},
                    pass_fds=(reading,),
                    start_new_session=True,  # Ctrl-C for the server is not one for the job
                )
            finally:
                os.close(reading)
        self._jobs[number] = Job(
            id=number,
            study=study,
            storage=storage,
            folder=folder,
            process=process,
            lifeline=os.fdopen(writing, "wb"),
        )
        return self._jobs[number]

    def get(self, job: str | int) -> Job:
        """Return a job.

        Args:
            job: Its identifier, such as ``"job-1"``, or its number, such as ``1`` or ``"1"``.

        Raises:
            UsageError: There is no such job.
        """
        name = f"job-{job}" if str(job).isdecimal() else str(job)
        if name not in self._jobs:
            known = ", ".join(self._jobs) or "none"
            raise UsageError(f"there is no job {job!r}; there are: {known}")
        return self._jobs[name]

    def close(self) -> None:
        """Stop all jobs, and wait for their end."""
        for job in self._jobs.values():
            job.stop()
        for job in self._jobs.values():
            try:
                job.process.wait(timeout=_PATIENCE_S)
            except subprocess.TimeoutExpired:
                job.process.kill()
                job.process.wait()
        self._folder.cleanup()


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What some studies have trained.

    Attributes:
        epochs: Epochs, each counted as often as it was trained.
        seconds: Seconds of training and evaluation.
    """

    epochs: int = 0
    seconds: float = 0.0


def usage_of(store: Store, names: Iterable[str]) -> Usage:
    """Return what studies have trained, by the records of their epochs.

    Args:
        store: The database.
        names: Names of the studies; those that do not exist have trained nothing.
    """
    epochs, seconds = 0, 0.0
    for name in names:
        info = store.studies.find(name)
        if info is None:
            continue
        for each in store.plans.load(info.plan).epochs:
            if each.study == info.id:
                epochs += (not each.evaluated) + each.again
                seconds += each.seconds + each.again_s
    return Usage(epochs=epochs, seconds=seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A limit on what an agent trains.

    What is used is counted in the database, so it holds across calls, servers and crashes.

    Attributes:
        is_allowed: Whether it may train at all.
        max_epochs: Epochs that all of its runs together may train; None for any number.
        max_seconds: Seconds that they may train; None for any number.
    """

    is_allowed: bool = False
    max_epochs: int | None = None
    max_seconds: float | None = None

    def check(self, used: Usage, *, epochs: float) -> None:
        """Check that some epochs may be trained.

        Raises:
            UsageError: Nothing may be trained, or not that much.
        """
        self.check_allowed("train")
        if self.max_seconds is not None and used.seconds >= self.max_seconds:
            raise UsageError(
                f"the budget of {self.max_seconds:,.0f} seconds is used up; ask the user for more"
            )
        if self.max_epochs is not None and used.epochs + epochs > self.max_epochs:
            left = max(0, self.max_epochs - used.epochs)
            raise UsageError(
                f"these configurations need {epochs:,.0f} epochs, and {left:,} are left of the "
                f"budget of {self.max_epochs:,}; give fewer or shorter ones, or ask the user for "
                "more"
            )

    def check_allowed(self, what: str) -> None:
        """Check that an agent may train and stop.

        Raises:
            UsageError: The server is read-only.
        """
        if not self.is_allowed:
            raise UsageError(
                f"this server is read-only; its user starts it with --allow-run to let you {what}"
            )

    def document(self, used: Usage) -> BudgetDocument:
        """Return the budget as a document."""
        return {
            "allowed": self.is_allowed,
            "max_epochs": self.max_epochs,
            "used_epochs": used.epochs,
            "max_seconds": self.max_seconds,
            "used_seconds": used.seconds,
        }


# -- studies that files define ---------------------------------------------------------------------


_NOT_THE_USERS = tuple(
    f"{Path(folder).resolve()}/"
    for folder in {
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *thrifty.__path__,
    }
)


_INSTALLED = {"site-packages", "dist-packages"}
"""Folders of installed packages, also of environments beside the user's files."""


class Studies:
    """The studies of some files. A file is run when one of its studies is first asked for.

    Args:
        files: The files, which the user has named.
        load: Returns the studies that a file defines.
        storage: Address of a database to use instead of that of the studies; None for theirs.
    """

    def __init__(
        self,
        files: Sequence[Path],
        *,
        load: Callable[[Path], Sequence[Study]],
        storage: str | None = None,
    ) -> None:
        self._files = tuple(files)
        self._load = load
        self._storage = storage
        self._studies: dict[str, tuple[Path, Study]] | None = None
        self._sources: Mapping[str, tuple[Path, object]] = {}

    @property
    def all(self) -> Mapping[str, tuple[Path, Study]]:
        """The studies by name, each with its file.

        Raises:
            UsageError: A file cannot be loaded, or two define studies of one name.
        """
        if self._studies is not None and any(
            _stamp(file) != stamp for file, stamp in self._sources.values()
        ):
            self._forget()
        if self._studies is None:
            before = dict(sys.modules)
            try:
                self._studies = self._loaded()
            finally:
                self._sources = self._modules(before)
                if self._studies is None:
                    self._forget()  # once it is mended, all of it is imported again
        return self._studies

    def _loaded(self) -> dict[str, tuple[Path, Study]]:
        found: dict[str, tuple[Path, Study]] = {}
        for file in self._files:
            for study in self._load(file):
                if study.name in found:
                    other, _ = found[study.name]
                    raise UsageError(
                        f"{other} and {file} both define study {study.name!r}; rename one"
                    )
                if self._storage is not None:
                    study.storage = replace(study.storage, url=self._storage)
                found[study.name] = (file, study)
        return found

    @staticmethod
    def _modules(before: Mapping[str, object]) -> Mapping[str, tuple[Path, object]]:
        """Return the user's modules that were imported since, by name.

        Each has its file, with a stamp that changes when the file does.
        """
        found = {}
        for name, module in list(sys.modules.items()):
            path = getattr(module, "__file__", None)
            if path is None:
                continue
            file = Path(path).resolve()
            is_installed = str(file).startswith(_NOT_THE_USERS) or _INSTALLED & set(file.parts)
            if before.get(name) is not module and not is_installed:
                found[name] = (file, _stamp(file))
        return found

    def _forget(self) -> None:
        """Forget the modules of the user, so that they are imported again."""
        for name in self._sources:
            sys.modules.pop(name, None)
        self._studies, self._sources = None, {}
        linecache.checkcache()

    def get(self, name: str) -> tuple[Path, Study]:
        """Return a study and its file.

        Raises:
            UsageError: No file defines such a study.
        """
        found = self.all.get(name)
        if found is None:
            known = ", ".join(self.all) or "none"
            raise UsageError(f"no file of this server defines study {name!r}; they define: {known}")
        return found

    def urls(self, default: str) -> list[str]:
        """Return the addresses of all databases.

        Args:
            default: The address to use without any file and any option.
        """
        if self._storage is not None:
            return [self._storage]
        found = dict.fromkeys(study.storage.url for _, study in self.all.values())
        return list(found) or [default]


def _stamp(file: Path) -> object:
    with suppress(OSError):
        found = file.stat()
        return found.st_mtime_ns, found.st_size
    return None
