"""Workers on a Ray cluster. Only this file imports ray, and only when it is used."""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from thrifty.core import UsageError, WorkerLostError, plain_logger, require
from thrifty.core._child import pickled
from thrifty.pack import Prefer, Task, Trainable
from thrifty.store._address import redact_root
from thrifty.store._plan_files import MAX_BASE_BYTES

from ._cluster import ClusterExecutor, Pulse, RemoteWorker, WorkerEvictedError, user_paths
from ._executor import Assignment, Executor, ExecutorConfig, Order, check_options
from ._worker import WorkerSpec


logger = plain_logger(__name__)

UNITS = 10_000
"""Units per resource: Ray counts resources in ten-thousandths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ray(ExecutorConfig):
    """An executor configuration that trains on a Ray cluster, each worker a long-lived actor.

    ``address`` names the cluster. The default is the cluster that ``RAY_ADDRESS`` names or that
    runs on this machine; if there is none, one is started here for the duration of the run. A
    program that is already connected to Ray keeps its connection.

    ``workers`` defaults to the number that the cluster has room for when the run begins. Workers
    beyond that number are requested when they are needed, so that the cluster may grow. Each
    worker gets ``num_cpus``, ``num_gpus`` (a fraction of one GPU, or several) and ``resources``,
    and trains on ``cuda:0`` if it has a GPU. ``runtime_env`` is Ray's: what else a worker needs,
    such as ``{"working_dir": "."}`` for the user's code.

    ``threads`` is the number of CPU threads of each worker (default: the number fixed by the first
    run of the search plan, or ``num_cpus``). ``threads``, ``pack``, ``pack_size``,
    ``memory_margin`` and ``epoch_timeout`` are as in ``Local``. If ``num_gpus`` is a fraction, a
    pack uses at most 0.9 of that fraction of the GPU's memory.

    If no machine of the cluster is large enough for one worker, the run warns and waits, because a
    cluster that scales with demand may add such a machine.

    Workers' output is shown here, unless the environment has ``RAY_LOG_TO_DRIVER=0``.

    Workers save states at the checkpoint address of the study. Workers on several machines need an
    address that all of them see: a shared folder, or one such as ``s3://bucket/folder``.

    >>> Ray(address="auto", workers=4, num_gpus=0.5).memory_margin
    0.45

    Raises:
        UsageError: An option is invalid as in ``Local``; a resource is negative, not finite, or
            above 0 but below 1/10000; ``num_gpus`` is above 1 and not whole; ``resources`` names
            CPU or GPU; or ``workers`` is None and a worker needs no resources.
    """

    address: str | None = None
    workers: int | None = None
    num_cpus: float = 1
    num_gpus: float = 0
    resources: Mapping[str, float] = field(default_factory=dict, hash=False)
    runtime_env: Mapping[str, Any] | None = field(default=None, hash=False)
    threads: int | None = None
    pack: Prefer = "auto"
    pack_size: int | None = None
    memory_margin: float = 0.9
    epoch_timeout: float | None = None

    def __post_init__(self) -> None:
        check_options(self)
        self._check_resources()
        if 0 < self.num_gpus < 1:  # the other users of this GPU need memory, too
            margin = min(self.memory_margin, 0.9 * self.num_gpus)
            object.__setattr__(self, "memory_margin", margin)

    def _check_resources(self) -> None:
        for name in ("CPU", "GPU"):
            if name in self.resources:
                raise UsageError(
                    f"Ray(resources={dict(self.resources)!r}): "
                    f"say num_{name.lower()}s={self.resources[name]:g} instead"
                )
        for name, amount in _needs(self, all_of_them=True).items():
            if not (math.isfinite(amount) and amount >= 0 and (amount == 0 or amount * UNITS >= 1)):
                raise UsageError(f"Ray: {amount} of {name}: 0, or at least {1 / UNITS}")
        if self.num_gpus > 1 and self.num_gpus != int(self.num_gpus):
            raise UsageError(f"Ray(num_gpus={self.num_gpus}): a fraction of one GPU, or whole ones")
        if self.workers is None and not _needs(self):
            raise UsageError(
                "Ray(num_cpus=0): a worker that needs nothing fits any number of times; "
                "say how many with workers="
            )

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
        """Connect to the cluster and return the executor for a task.

        Raises:
            MissingExtraError: Ray is not installed.
            UsageError: There is no cluster at the address.
        """
        cluster = RayCluster(_import_ray(), self, pickled(task))
        nodes = cluster.nodes()
        room = _room(nodes, _needs(self))
        _warn_about(checkpoints, nodes)
        if room == 0:
            _warn_too_small(self, nodes)
        specs = [
            WorkerSpec(
                name=f"ray-{i}",
                device="cuda:0" if self.num_gpus else "cpu",
                threads=self.threads or self.default_threads,
                checkpoints=_absolute(checkpoints),
                folder=folder,
                pack=self.pack,
                curves=curves or {},
                refused=refused or {},
                max_base_bytes=max_base_bytes,
                epoch_timeout=self.epoch_timeout,
            )
            for i in range(self.workers or max(1, room))
        ]
        return ClusterExecutor(
            cluster,
            specs,
            expected=room,
            needs=_in_words(_needs(self)),
            epoch_timeout_s=self.epoch_timeout,
        )

    @property
    def default_threads(self) -> int:
        """CPU threads of each worker if ``threads`` is None: one for each of its CPUs."""
        return max(1, int(self.num_cpus))

    def with_threads(self, threads: int) -> Ray:
        """Return a copy with ``threads`` CPU threads for each worker."""
        return replace(self, threads=threads)

    @property
    def num_workers(self) -> int:
        """Number of workers; 1 if the cluster decides it and Ray is not connected yet."""
        ray = sys.modules.get("ray")
        if self.workers is not None or ray is None or not ray.is_initialized():
            return self.workers or 1
        return max(1, _room(ray.nodes(), _needs(self)))


class RayCluster:
    """A Ray cluster and the task that its actors train."""

    def __init__(self, ray: ModuleType, config: Ray, task: bytes) -> None:
        self._ray = ray
        self._connection = _Connection.join(ray, config)
        self._pulse = Pulse(ray.nodes)
        self._lost = False
        self._task = ray.put(task)
        own = dict(config.runtime_env or {})
        self._paths = [] if "working_dir" in own else user_paths()
        # The runtime environment of the connection applies to all its actors.
        inherited = self._connection.brought == config.runtime_env
        self._actor = ray.remote(RemoteWorker).options(
            num_cpus=config.num_cpus,
            num_gpus=config.num_gpus,
            resources=dict(config.resources),
            max_restarts=0,  # the study decides whether to replace a lost worker
            runtime_env=None if inherited else own or None,
        )

    def nodes(self) -> list[dict[str, Any]]:
        """Return the machines of the cluster that are alive."""
        return [node for node in self._ray.nodes() if node["Alive"]]

    def start_worker(self) -> Any:
        """Request an actor."""
        return self._actor.remote()

    def prepare(self, worker: Any, spec: WorkerSpec) -> Any:
        """Call ``prepare`` on an actor, with the task."""
        return worker.prepare.remote(spec, self._paths, self._task)

    def advance(
        self, worker: Any, assignments: Sequence[Assignment], *, orders: Sequence[Order], stop: bool
    ) -> Any:
        """Call ``advance`` on an actor."""
        return worker.advance.remote(assignments, orders=orders, stop=stop)

    def wait(self, calls: Sequence[Any], timeout_s: float) -> Sequence[Any]:
        """Return the calls that have ended; wait up to ``timeout_s`` if there are none."""
        wanted = list(calls)
        over: list[Any] = self._ray.wait(wanted, timeout=timeout_s)[0]
        if over:
            over = self._ray.wait(wanted, num_returns=len(wanted), timeout=0)[0]
        return over

    def result(self, call: Any) -> Any:
        """Return the result of a call.

        Raises:
            WorkerEvictedError: The call's actor is gone with its machine, or cannot be reached.
            WorkerLostError: The call's actor is gone for another reason.
        """
        try:
            return self._ray.get(call)
        except self._ray.exceptions.RayError as error:
            why = " ".join(str(error).split())
            if self._is_eviction(error):
                raise WorkerEvictedError(why) from error
            raise WorkerLostError(why) from error

    def _is_eviction(self, error: Exception) -> bool:
        """Return whether an actor is gone with its machine."""
        exceptions = self._ray.exceptions
        # A live machine reports at once that one of its processes has died. ActorUnavailableError
        # is all that Ray knows at first about a machine that has fallen silent.
        if isinstance(error, exceptions.ActorUnavailableError | exceptions.NodeDiedError):
            return True
        # Ray gives the reason only in the message.
        return isinstance(error, exceptions.ActorDiedError) and (
            error.preempted or "its node has died" in str(error)
        )

    def stop_worker(self, worker: Any) -> None:
        """Kill an actor now, or cancel the request for it."""
        if not self._lost:
            self._ray.kill(worker)

    def check(self) -> None:
        """Check that the cluster still answers.

        Raises:
            WorkerLostError: The cluster no longer answers.
        """
        trouble = self._pulse.check()
        if trouble:
            self._lost = True
            raise WorkerLostError(
                f"the Ray cluster is gone ({trouble}); start it again, and run the study again: "
                "it goes on where it is"
            )

    def close(self) -> None:
        """Disconnect from Ray, unless another executor in this process uses the connection."""
        self._task = self._actor = None
        self._connection.leave(self._ray)


class _Connection:
    """This process's connection to Ray, shared by all its users.

    A process has one connection. If thrifty opened it, thrifty closes it after the last user. A
    connection that the user's program opened stays open.
    """

    _lock = threading.Lock()
    _ours: _Connection | None = None

    def __init__(self, runtime_env: Mapping[str, Any] | None) -> None:
        self.brought = runtime_env
        self._num_users = 0

    @classmethod
    def join(cls, ray: ModuleType, config: Ray) -> _Connection:
        """Return the existing connection, or open one."""
        with cls._lock:
            if cls._ours is None or not ray.is_initialized():
                if ray.is_initialized():
                    return cls(None)  # the connection of the user's program
                _connect(ray, config)
                cls._ours = cls(config.runtime_env)
            cls._ours._num_users += 1
            return cls._ours

    def leave(self, ray: ModuleType) -> None:
        """Remove one user, and disconnect after the last one."""
        with self._lock:
            if self is not _Connection._ours:
                return
            self._num_users -= 1
            if self._num_users == 0:
                _Connection._ours = None
                ray.shutdown()


def _import_ray() -> ModuleType:
    ray: ModuleType = require("ray", extra="ray")
    return ray


def _connect(ray: ModuleType, config: Ray) -> None:
    try:
        with _keeping_sigterm():
            ray.init(
                address=config.address,
                runtime_env=None if config.runtime_env is None else dict(config.runtime_env),
                namespace="thrifty",
                include_dashboard=False,
                logging_level=logging.WARNING,
            )
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        where = "" if config.address is None else f"address={config.address!r}"
        raise UsageError(
            f"Ray({where}): cannot connect to a cluster ({' '.join(str(error).split())}); "
            "'ray start --head' starts one, "
            "and without address= one is started for the run"
        ) from error


@contextlib.contextmanager
def _keeping_sigterm() -> Iterator[None]:
    """Restore the SIGTERM handler, which asks a run to stop: Ray replaces it when it connects."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _needs(config: Ray, *, all_of_them: bool = False) -> dict[str, float]:
    """Return the resources that a worker needs, by Ray's names."""
    needs = {"CPU": config.num_cpus, "GPU": config.num_gpus, **config.resources}
    return {name: amount for name, amount in needs.items() if amount or all_of_them}


def _in_words(needs: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in needs.items())


def _room(nodes: Sequence[Mapping[str, Any]], needs: Mapping[str, float]) -> int:
    """Return how many workers fit on the machines of a cluster."""
    if not needs:
        return sys.maxsize
    return sum(
        min(_times(node["Resources"].get(name, 0), need, name) for name, need in needs.items())
        for node in nodes
        if node["Alive"]
    )


def _times(have: float, need: float, name: str) -> int:
    """Return how often ``need`` fits into a machine; a fraction of a GPU must lie on one GPU."""
    if name == "GPU" and need < 1:
        return int(have) * (UNITS // round(need * UNITS))
    return round(have * UNITS) // round(need * UNITS)


def _is_path(address: str) -> bool:
    return "://" not in address


def _absolute(checkpoints: str) -> str:
    """Return an absolute path, because a worker has another working directory."""
    return str(Path(checkpoints).absolute()) if _is_path(checkpoints) else checkpoints


def _warn_about(checkpoints: str, nodes: Sequence[Mapping[str, Any]]) -> None:
    machines = {node["NodeManagerAddress"] for node in nodes}
    if len(machines) > 1 and (_is_path(checkpoints) or checkpoints.startswith("file:")):
        logger.warning(
            "%d machines keep states under %s: if that is not one folder for all of them, set "
            "Storage(checkpoints=...) to an address that all of them see, such as "
            "s3://bucket/folder",
            len(machines),
            redact_root(checkpoints),
        )


def _warn_too_small(config: Ray, nodes: Sequence[Mapping[str, Any]]) -> None:
    """Warn that no machine of the cluster, even if idle, has what one worker needs."""
    needs = _needs(config)
    totals = {name: sum(node["Resources"].get(name, 0) for node in nodes) for name in needs}
    options = [f"num_{name.lower()}s" if name in ("CPU", "GPU") else "resources" for name in needs]
    logger.warning(
        "no machine of this Ray cluster can run a worker, even when it is idle: each needs %s, and "
        "the whole cluster has %s on %d machine(s). The run waits until a large enough machine "
        "joins, which happens on a cluster that scales with demand; on any other, stop the run and "
        "lower %s of th.Ray(...)",
        _in_words(needs),
        _in_words(totals),
        len(nodes),
        " or ".join(dict.fromkeys(options)),
    )
