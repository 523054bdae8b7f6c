"""Workers that are Slurm jobs. Only this file imports submitit, and only when it is used."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Client,
    Connection,
    Listener,
    answer_challenge,
    deliver_challenge,
)
from pathlib import Path
from typing import Any

import cloudpickle

from thrifty.core import UsageError, WorkerLostError, plain_logger, require
from thrifty.core._child import pickled
from thrifty.pack import Prefer, Task, Trainable
from thrifty.store._plan_files import MAX_BASE_BYTES

from ._cluster import ClusterExecutor, RemoteWorker, WorkerEvictedError, user_paths
from ._executor import Assignment, Executor, ExecutorConfig, Order, check_options
from ._worker import WorkerSpec


logger = plain_logger(__name__)

ASK_S = 30.0
"""Seconds between questions to Slurm about jobs that have not begun."""
LEAVE_S = 10.0
"""Seconds in which a process of this machine has to end by itself."""
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d{1,2}))?(?::(\d{1,2}))?")
_EVICTED = {"PREEMPTED", "NODE_FAIL", "TIMEOUT", "REQUEUED", "CANCELLED", "BOOT_FAIL"}
"""States of jobs that the trials which they have trained are not to blame for."""
_NOT_YET = {"RUNNING", "COMPLETING"}
KNOWN_S = 5.0
"""Seconds in which Slurm has to know that a job has ended."""
_LEAVING = "leaving"
"""What a job says instead of a result; the traceback of a task is another text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slurm(ExecutorConfig):
    """An executor configuration that trains on a Slurm cluster, each worker a job.

    The program that runs the study may run on a login node, or in a job of its own. It submits
    ``workers`` jobs by submitit, which connect to it over TCP. Jobs that end are replaced while
    there is work. ``signal_s`` seconds before its time limit, or when it is preempted, a job is
    told so: it ends its epoch, keeps the states of its trials, and hands them back.

    Only the program that runs the study writes to the database. Jobs write states at the checkpoint
    address of the study, which must be a folder that all machines see, or an address such as
    ``s3://bucket/folder``.

    Attributes:
        workers: How many jobs train at a time.
        partition: The partition (default: that of the cluster).
        time: The time limit of a job: ``"4:00:00"``, ``"2-00:00:00"``, or minutes.
        gpus_per_node: GPUs of each job; it trains on the first.
        cpus_per_task: CPUs of each job, and its threads unless ``threads`` says otherwise.
        mem_gb: Memory of each job (default: that of the cluster).
        options: Other options of ``sbatch``, such as ``{"account": "lab", "qos": "long"}``.
        folder: Where submitit keeps the files of jobs, with their output; all machines see it.
        host: The name or address under which jobs reach this machine (default: its host name).
        signal_s: Seconds before the time limit at which a job is told; longer than an epoch.
        cluster: ``"slurm"``, or ``"local"`` for jobs that are processes of this machine.
        threads: As in ``Local``, like the following ones.
        pack: How several trials are trained jointly.
        pack_size: How many are.
        memory_margin: Fraction of a device's memory that a pack may use.
        epoch_timeout: Seconds that an epoch may take.

    Raises:
        UsageError: An option is invalid.

    >>> Slurm(workers=8, partition="gpu", gpus_per_node=1, time="4:00:00").minutes
    240
    """

    workers: int = 1
    partition: str | None = None
    time: str | int = 60
    gpus_per_node: int = 0
    cpus_per_task: int = 1
    mem_gb: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    folder: str = "slurm"
    host: str | None = None
    signal_s: int = 120
    cluster: str = "slurm"
    threads: int | None = None
    pack: Prefer = "auto"
    pack_size: int | None = None
    memory_margin: float = 0.9
    epoch_timeout: float | None = None

    def __post_init__(self) -> None:
        check_options(self)
        for name, least in (("gpus_per_node", 0), ("cpus_per_task", 1), ("signal_s", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UsageError(f"Slurm({name}={value!r}): a whole number, {least} or more")
        if self.cluster not in {"slurm", "local"}:
            raise UsageError(f'Slurm(cluster={self.cluster!r}): it is "slurm" or "local"')
        if self.minutes * 60 <= self.signal_s:
            raise UsageError(
                f"Slurm(time={self.time!r}, signal_s={self.signal_s}): a job would be told to end "
                "when it begins; give it more time"
            )

    @property
    def minutes(self) -> int:
        """The time limit in minutes, rounded up.

        Raises:
            UsageError: It is no time.
        """
        if isinstance(self.time, int) and not isinstance(self.time, bool) and self.time > 0:
            return self.time
        found = _TIME.fullmatch(self.time) if isinstance(self.time, str) else None
        if found is None:
            raise UsageError(
                f'Slurm(time={self.time!r}): give minutes, or a text such as "4:00:00" (hours, '
                'minutes, seconds) or "2-00:00:00" (with days)'
            )
        days, *parts = (None if part is None else int(part) for part in found.groups())
        numbers = [part for part in parts if part is not None]
        if days is not None:  # days-hours[:minutes[:seconds]]
            hours, minutes, seconds = (*numbers, 0, 0)[:3]
        elif len(numbers) == 3:  # hours:minutes:seconds
            hours, minutes, seconds = numbers
        else:  # minutes[:seconds]
            hours, minutes, seconds = 0, *(*numbers, 0)[:2]
        total = (((days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
        return -(-total // 60)

    def open(
        self,
        task: Task | Trainable,
        *,
        checkpoints: str,
        folder: str,
        curves: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
        refused: Mapping[str, str] | None = None,
        max_base_bytes: float = MAX_BASE_BYTES,
    ) -> Executor:
        """Listen for jobs, and return the executor for a task.

        Raises:
            MissingExtraError: submitit is not installed.
            UsageError: There is no Slurm here.
        """
        cluster = SlurmCluster(self, pickled(task))
        specs = [
            WorkerSpec(
                name=f"{self.cluster}-{i}",
                device="cuda:0" if self.gpus_per_node else "cpu",
                threads=self.threads or self.default_threads,
                checkpoints=_absolute(checkpoints),
                folder=folder,
                pack=self.pack,
                curves=curves or {},
                refused=refused or {},
                max_base_bytes=max_base_bytes,
                epoch_timeout=self.epoch_timeout,
            )
            for i in range(self.workers)
        ]
        return ClusterExecutor(
            cluster,
            specs,
            expected=self.workers,
            needs=f"partition {self.partition or 'of the cluster'}, {self.time} of time",
            epoch_timeout_s=self.epoch_timeout,
        )

    @property
    def default_threads(self) -> int:
        """CPU threads of each worker if ``threads`` is None: one for each of its CPUs."""
        return self.cpus_per_task

    def with_threads(self, threads: int) -> Slurm:
        """Return a copy with ``threads`` CPU threads for each worker."""
        return replace(self, threads=threads)

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return self.workers


@dataclass(eq=False)
class _Call:
    """A call of a job's method, which ends with a result or an error."""

    message: tuple[Any, ...]
    is_done: bool = False
    result: Any = None
    error: WorkerLostError | None = None


@dataclass(eq=False)
class _Job:
    """A job, and its connection once it has one."""

    name: str
    job: Any = None
    connection: Connection | None = None
    call: _Call | None = None
    waiting: list[tuple[Any, ...]] = field(default_factory=list)
    is_gone: str = ""
    """Why it takes no more calls; empty if it does."""
    has_left: bool = False
    """Whether it has said that it ends."""
    has_ended: bool = False
    """Whether it has closed its connection, as it does at its end."""


class SlurmCluster:
    """Jobs, and the socket at which they report; each job has at most one call at a time."""

    def __init__(self, config: Slurm, task: bytes) -> None:
        self._config = config
        self._task = task
        self._submitter = _submitter(config)
        self._key = secrets.token_bytes(32)
        self._host = _host(config)
        self._listener = Listener((_place(config, self._host), 0), backlog=128)
        self._changed = threading.Condition()
        self._jobs: dict[str, _Job] = {}
        self._unsubmitted: list[_Job] = []
        self._submitted: list[Any] = []
        self._asked_at = time.monotonic()
        self._is_closed = False
        threading.Thread(target=self._accept, name="thrifty-slurm", daemon=True).start()

    # -- what an executor needs ------------------------------------------------------------

    def start_worker(self) -> Any:
        """Request a job; those that are requested together are submitted as one array."""
        one = _Job(name=secrets.token_hex(8))
        self._unsubmitted.append(one)
        return one

    def prepare(self, worker: Any, spec: WorkerSpec) -> Any:
        """Call ``prepare`` on a job, with the task, once it has connected."""
        return self._called(worker, ("prepare", spec, user_paths(), self._task))

    def advance(
        self, worker: Any, assignments: Sequence[Assignment], *, orders: Sequence[Order], stop: bool
    ) -> Any:
        """Call ``advance`` on a job."""
        return self._called(worker, ("advance", list(assignments), list(orders), stop))

    def wait(self, calls: Sequence[Any], timeout_s: float) -> Sequence[Any]:
        """Return the calls that have ended; wait up to ``timeout_s`` if there are none."""
        self._submit()
        self._ask_slurm()
        with self._changed:
            self._changed.wait_for(lambda: any(call.is_done for call in calls), timeout_s)
            return [call for call in calls if call.is_done]

    def result(self, call: Any) -> Any:
        """Return the result of a call.

        Raises:
            WorkerEvictedError: The job was ended by Slurm, or has handed back its work.
            WorkerLostError: It has ended for another reason.
        """
        if call.error is not None:
            raise call.error
        return call.result

    def stop_worker(self, worker: Any) -> None:
        """End a job now, or cancel it if it has not begun."""
        with self._changed:
            # One that waits for a call ends when its connection does.
            ends_itself = worker.has_ended or (worker.connection and worker.call is None)
            self._end(worker, "it was stopped", evicted=True)
        if worker in self._unsubmitted:
            self._unsubmitted.remove(worker)
        elif not ends_itself:
            self._cancel(worker.job)

    def check(self) -> None:
        """Check nothing: a cluster that cannot be asked starts no jobs, and the log says so."""

    def close(self) -> None:
        """End all jobs, and listen no longer."""
        self._is_closed = True
        for one in list(self._jobs.values()):
            self.stop_worker(one)
        self._listener.close()
        if self._config.cluster == "local":
            _wait_for(self._submitted)

    # -- connections -----------------------------------------------------------------------

    def _called(self, one: _Job, message: tuple[Any, ...]) -> _Call:
        call = _Call(message)
        with self._changed:
            if one.is_gone:
                call.is_done, call.error = True, WorkerEvictedError(one.is_gone)
                return call
            one.call = call
            if one.connection is None:
                one.waiting.append(message)
            else:
                self._send(one, message)
        return call

    def _send(self, one: _Job, message: tuple[Any, ...]) -> None:
        assert one.connection is not None
        try:
            one.connection.send_bytes(pickled(message))
        except OSError as error:
            self._end(one, f"its connection is broken ({error})", evicted=False)

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection = self._listener.accept()
            except OSError:
                return  # it is closed
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        """Receive what one job sends, until it ends."""
        try:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            one = self._jobs.get(connection.recv())
        except (AuthenticationError, EOFError, OSError):
            connection.close()
            return
        if one is None:
            connection.close()
            return
        with self._changed:
            one.connection = connection
            for message in one.waiting:
                self._send(one, message)
            one.waiting.clear()
        while True:
            try:
                found = connection.recv()
            except (EOFError, OSError):
                break
            with self._changed:
                if found == _LEAVING:
                    one.has_left = True
                elif one.call is not None:
                    one.call.result, one.call.is_done, one.call = found, True, None
                    self._changed.notify_all()
        state = "" if one.has_left or one.is_gone else self._state_at_end(one)
        with self._changed:
            one.has_ended = True
            connection.close()
            why = (
                "it was told to end" if one.has_left else f"its job has ended, {state or 'killed'}"
            )
            self._end(one, why, evicted=one.has_left or state in _EVICTED)

    def _end(self, one: _Job, why: str, *, evicted: bool) -> None:
        """Note that a job takes no more calls; its present call has failed."""
        one.is_gone = one.is_gone or why
        if one.connection is not None and not one.has_ended:
            _hang_up(one.connection)
        if one.call is not None:
            kind = WorkerEvictedError if evicted else WorkerLostError
            one.call.error, one.call.is_done, one.call = kind(why), True, None
        self._jobs.pop(one.name, None)
        self._changed.notify_all()

    # -- Slurm -----------------------------------------------------------------------------

    def _cancel(self, job: Any) -> None:
        if self._config.cluster == "local":
            job._process.terminate()  # submitit would interrupt it, and show where it was
        else:
            job.cancel(check=False)

    def _submit(self) -> None:
        jobs, self._unsubmitted = self._unsubmitted, []
        if not jobs:
            return
        with self._changed:
            self._jobs.update((one.name, one) for one in jobs)
        address = (self._host, self._listener.address[1])
        refused = require("submitit.core.utils", extra="slurm").FailedJobError
        try:
            with self._submitter.batch():
                for one in jobs:
                    one.job = self._submitter.submit(serve, address, self._key, one.name)
        except refused as error:
            with self._changed:
                for one in jobs:
                    # it has no number, so it cannot be cancelled
                    one.job, one.has_ended = None, True
                    self._jobs.pop(one.name, None)
            raise UsageError(
                f"Slurm does not take the workers' jobs: {str(error).strip()}; see sinfo for "
                "partitions and what their nodes have"
            ) from error
        self._submitted += [one.job for one in jobs]

    def _ask_slurm(self) -> None:
        """Find out about jobs that have ended before they have connected."""
        pending = [one for one in list(self._jobs.values()) if one.connection is None]
        failed = [one for one in pending if one.job is not None and _has_result(one.job)]
        if time.monotonic() - self._asked_at >= ASK_S:
            self._asked_at = time.monotonic()
            failed += [one for one in pending if self._state(one) in {*_EVICTED, "FAILED"}]
        for one in failed:
            was_told = _has_result(one.job) and _was_told_to_end(one.job)
            with self._changed:
                self._end(
                    one,
                    f"job {one.job.job_id} has ended before it has reached {self._host}: see "
                    f"{one.job.paths.stderr}",
                    evicted=was_told,
                )

    def _state_at_end(self, one: _Job) -> str:
        """Return the state of a job that has lost its connection, once Slurm knows it."""
        until = time.monotonic() + KNOWN_S
        while (state := self._state(one)) in _NOT_YET and time.monotonic() < until:
            time.sleep(0.5)
        return state

    def _state(self, one: _Job) -> str:
        """Return the state of a job, in Slurm's words; empty if it is unknown."""
        if self._config.cluster == "local":
            return ""
        found = subprocess.run(
            ["scontrol", "show", "job", str(one.job.job_id), "-o"],
            capture_output=True,
            text=True,
            check=False,
        )
        match = re.search(r"\bJobState=(\w+)", found.stdout)
        return match.group(1) if match else ""


def _hang_up(connection: Connection) -> None:
    """End a connection of which another thread receives, and which that thread then closes."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as found:
        found.shutdown(socket.SHUT_RDWR)


# -- in a job ------------------------------------------------------------------------------


def serve(address: tuple[str, int], key: bytes, name: str) -> None:
    """Be a worker, until the study or Slurm ends it.

    Args:
        address: Where the program listens that runs the study.
        key: What both know.
        name: The name of this job there.
    """
    worker = RemoteWorker()

    def leave(*_: object) -> None:
        worker.is_leaving = True

    # submitit's own handler would end the job at once; Slurm sends both when it preempts a job.
    for number in (signal.SIGUSR2, signal.SIGTERM):
        signal.signal(number, leave)
    with Client(address, authkey=key) as connection:
        connection.send(name)
        while _has_message(connection, worker):
            try:
                method, *arguments = cloudpickle.loads(connection.recv_bytes())
            except EOFError:
                return
            if method == "prepare":
                connection.send(worker.prepare(*arguments))
            else:
                assignments, orders, stop = arguments
                connection.send(worker.advance(assignments, orders=orders, stop=stop))
        connection.send(_LEAVING)


def _has_message(connection: Connection, worker: RemoteWorker) -> bool:
    """Wait for the next call; return False if the worker leaves instead."""
    while not (worker.is_leaving and not worker.num_active):
        if connection.poll(0.2):
            return True
    return False


# -- options -------------------------------------------------------------------------------


def _submitter(config: Slurm) -> Any:
    submitit = require("submitit", extra="slurm")
    if config.cluster == "slurm" and shutil.which("sbatch") is None:
        raise UsageError(
            "there is no Slurm on this machine (no sbatch); run the study on a login node, or try "
            'it with thrifty.Slurm(cluster="local")'
        )
    try:
        executor = submitit.AutoExecutor(folder=config.folder, cluster=config.cluster)
        Path(config.folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"Slurm(folder={config.folder!r}): cannot write the files of jobs there ({error})"
        ) from error
    slurm = {"partition": config.partition, "signal_delay_s": config.signal_s, **config.options}
    executor.update_parameters(
        name="thrifty",
        timeout_min=config.minutes,
        gpus_per_node=config.gpus_per_node or None,
        cpus_per_task=config.cpus_per_task,
        mem_gb=config.mem_gb,
        **{f"slurm_{name}": value for name, value in slurm.items() if value is not None},
    )
    if config.cluster == "local":
        executor._executor.parameters["signal_delay_s"] = config.signal_s
    return executor


def _host(config: Slurm) -> str:
    return "127.0.0.1" if config.cluster == "local" else config.host or socket.gethostname()


def _place(config: Slurm, host: str) -> str:
    """Return the address to listen at.

    Raises:
        UsageError: The host has no address here.
    """
    if config.cluster == "local":
        return host
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise UsageError(
            f"jobs cannot reach this machine by its name {host!r} ({error}); give another one, "
            "Slurm(host=...)"
        ) from error


def _wait_for(jobs: Sequence[Any]) -> None:
    """Wait for processes of this machine; one that does not end is cancelled."""
    until = time.monotonic() + LEAVE_S
    while any(not job.done() for job in jobs) and time.monotonic() < until:
        time.sleep(0.02)
    for job in jobs:
        if not job.done():
            job._process.kill()
            job._process.wait()


def _has_result(job: Any) -> bool:
    """Return whether a job has ended, by its file: to ask Slurm takes longer."""
    return bool(job.paths.result_pickle.exists())


def _was_told_to_end(job: Any) -> bool:
    """Return whether a job was told to end while it was still importing what it needs."""
    return "UncompletedJobError" in str(job.exception())


def _absolute(checkpoints: str) -> str:
    return checkpoints if "://" in checkpoints else str(Path(checkpoints).absolute())
