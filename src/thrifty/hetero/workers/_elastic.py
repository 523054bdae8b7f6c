"""Elastic membership, coordinated by torchft's lighthouse, and where workers listen."""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from thrifty.core import HeteroError, TooFewWorkersError, plain_logger, require

from ._membership import Wait, WorkerView, peer_losses


LOOPBACK = "127.0.0.1"
_INTERFACES = ("lo", "lo0", "Loopback Pseudo-Interface 1")


def open_store(host: str, *, timeout: timedelta) -> Any:
    """Open the rendezvous store of the workers on one address of this machine.

    Args:
        host: The address to listen on. If it does not belong to this machine (for example, a name
            that only other machines resolve), the store listens on all interfaces.
        timeout: Timeout of every exchange.
    """
    listening = _listen(host)
    port = listening.getsockname()[1]
    return dist.TCPStore(  # type: ignore[attr-defined]
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listening.detach(),
    )


def gloo_group(store: Any, rank: int, size: int, *, host: str, timeout: timedelta) -> Any:
    """Create a gloo process group. Its sockets use the loopback interface if ``host`` does."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    device = {"hostname": host} if is_loopback(host) else {}
    options._devices = [
        dist.ProcessGroupGloo.create_device(**device)
        if device
        else dist.ProcessGroupGloo.create_default_device()
    ]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, options)


def keep_gloo_here() -> None:
    """Make all gloo groups that this process creates listen on the loopback interface."""
    name = loopback_name(name for _, name in socket.if_nameindex())
    if name is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name


def loopback_name(names: Iterable[str]) -> str | None:
    """Return the name of the loopback interface among a machine's interface names.

    >>> loopback_name(["eth0", "lo"])
    'lo'
    """
    known = set(names)
    return next((name for name in _INTERFACES if name in known), None)


def is_loopback(host: str) -> bool:
    """Return whether an address or a name refers to this machine.

    >>> [is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "10.0.0.1", "worker-3")]
    [True, True, True, False, False]
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listen(host: str) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except OSError:
        if is_loopback(host):
            raise
        return socket.create_server(("", 0))


_log = plain_logger("thrifty.hetero")

_BEAT_S = 0.25
"""Seconds between heartbeats. By default torchft's lighthouse waits 5 s for one."""

_CONNECT_S = 5.0
"""Timeout in seconds for connecting to workers that have just reported themselves alive."""

_TRIES = 10
"""Attempts to connect. A worker may die during each of them."""

_RETRY_S = 0.2
"""Seconds between two polls for enough workers."""


class ElasticMembership:
    """Continues with the remaining workers when one is lost, and admits new ones.

    Start each worker separately (``torchrun --nproc-per-node=1 train.py``, on any machine, at any
    time) and give it the address of a lighthouse (the program ``torchft_lighthouse``), which tracks
    the live workers. This class uses only that part of torchft. It asks for the members at the
    start, after a failure and from time to time, not at every step. State travels from peer to peer
    as plain tensors, without pickle. Sums use gloo.

    Args:
        lighthouse: Address of the lighthouse, such as ``"http://host:29510"`` (default: the
            environment variable ``TORCHFT_LIGHTHOUSE``).
        name: Unique name of this worker (default: generated).
        min_workers: With fewer workers the job waits for more, then fails.
        starts: Whether this worker may begin a job. Otherwise it only joins a running job, and
            fails if there is none (it may be over).
        timeout_s: Timeout of every exchange.
        quorum_s: Seconds to wait for enough workers.
        host: The address under which the other workers reach this one, and the only one on which it
            listens (default: the loopback interface, for workers on one machine). Anyone who can
            connect to it can take part in the job: give an address of a network that you trust.

    Raises:
        HeteroError: No lighthouse is given, or it does not answer.
        MissingExtraError: torchft is not installed.
    """

    def __init__(
        self,
        lighthouse: str | None = None,
        *,
        name: str | None = None,
        min_workers: int = 1,
        starts: bool = True,
        timeout_s: float = 30.0,
        quorum_s: float = 60.0,
        host: str = "127.0.0.1",
    ) -> None:
        lighthouse = lighthouse or os.environ.get("TORCHFT_LIGHTHOUSE")
        if not lighthouse:
            raise HeteroError(
                "no lighthouse is known: start one with `torchft_lighthouse --min_replicas 1` and "
                "give its address, or set TORCHFT_LIGHTHOUSE"
            )
        self.name = name or f"{os.environ.get('RANK', '0')}-{uuid.uuid4().hex[:8]}"
        self._address = lighthouse
        self._min_workers = min_workers
        self._starts = starts
        self._timeout = timedelta(seconds=timeout_s)
        self._quorum_s = quorum_s
        self._client = _connect(lighthouse, self._timeout)
        self._host = host
        self._store = open_store(host, timeout=self._timeout)
        self._store_address = f"{host}:{self._store.port}"
        self._attempt = 0
        self._key: tuple[int, int] | None = None
        self._group: Any = None
        self._stores: Any = None
        self._closed = threading.Event()
        self._client.heartbeat(self.name)  # makes a current quorum wait for this worker
        self._beat = threading.Thread(target=self._live, name="thrifty-heartbeat", daemon=True)
        self._beat.start()

    def agree(self, *, step: int, broken: bool = False) -> WorkerView:
        """Ask the lighthouse for the members and connect to them."""
        if broken:
            self._leave()
            self._attempt += 1
        for _ in range(_TRIES):
            view, key, store = self._ask(step, time.monotonic() + self._quorum_s)
            if key == self._key:
                return view
            self._leave()
            try:
                self._join(view, key, store)
            except RuntimeError as error:
                # A member has died since the lighthouse named it. The lighthouse will notice.
                _log.warning("workers %s did not all meet: %s", list(view.names), error)
                self._attempt += 1
                continue
            return view
        raise TooFewWorkersError(
            f"the workers {', '.join(view.names)} could not be reached, in {_TRIES} tries: do "
            "their host= names resolve, and are ports open between them?"
        )

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum a tensor over the present workers."""
        self.begin_all_reduce(tensor)()

    def begin_all_reduce(self, tensor: Tensor) -> Wait:
        """Begin to sum a tensor over the present workers."""
        return self._begin("a sum over all workers", lambda group: group.allreduce([tensor]))

    def broadcast(self, tensor: Tensor, *, source: int) -> None:
        """Broadcast a tensor to the present workers."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        self._begin(
            "a broadcast to all workers", lambda group: group.broadcast([tensor], options)
        )()

    def close(self) -> None:
        """Stop the heartbeats and close the connections."""
        self._closed.set()
        self._beat.join()
        self._leave()

    def _ask(self, step: int, end: float) -> tuple[WorkerView, tuple[int, int], str]:
        """Return the view, the key that all members use for it, and their store's address."""
        while True:
            left = max(_RETRY_S, end - time.monotonic())
            try:
                quorum = self._client.quorum(
                    self.name,
                    timedelta(seconds=left),
                    address=self.name,
                    store_address=self._store_address,
                    step=step,
                    world_size=1,
                    data={"attempt": self._attempt, "starts": self._starts},
                )
            except (RuntimeError, TimeoutError) as error:
                raise TooFewWorkersError(
                    f"no agreement on who takes part within {self._quorum_s:g} s: is the "
                    f"lighthouse {self._address} alive, and are {self._min_workers} workers "
                    f"running? ({error})"
                ) from error
            members = sorted(quorum.participants, key=lambda member: member.replica_id)
            names = tuple(member.replica_id for member in members)
            told = [member.data or {} for member in members]
            self._attempt = max(int(each["attempt"]) for each in told)
            begun = any(
                each["starts"] or member.step for each, member in zip(told, members, strict=True)
            )
            if self.name in names and len(names) >= self._min_workers and begun:
                view = WorkerView(
                    generation=int(quorum.quorum_id) * 1000 + self._attempt,
                    rank=names.index(self.name),
                    names=names,
                    steps=tuple(member.step for member in members),
                )
                key = (int(quorum.quorum_id), self._attempt)
                return view, key, members[0].store_address
            self._wait(
                end,
                f"{len(names)} of at least {self._min_workers} workers are there"
                if begun
                else "there is no job to join; it may be over",
            )

    def _wait(self, end: float, why: str) -> None:
        if time.monotonic() > end:
            raise TooFewWorkersError(f"{why}; waited for {self._quorum_s:g} s")
        self._closed.wait(_RETRY_S)

    def _join(self, view: WorkerView, key: tuple[int, int], store: str) -> None:
        if len(view.names) > 1:
            host, _, port = store.rpartition(":")
            soon = min(self._timeout, timedelta(seconds=_CONNECT_S))
            self._stores = dist.TCPStore(  # type: ignore[attr-defined]
                host, int(port), is_master=False, wait_for_workers=False, timeout=soon
            )
            meeting = dist.PrefixStore(  # type: ignore[attr-defined]
                f"thrifty/{key[0]}/{key[1]}", self._stores
            )
            self._group = gloo_group(
                meeting, view.rank, len(view.names), host=self._host, timeout=soon
            )
            self._group._set_default_timeout(self._timeout)
        self._key = key

    def _leave(self) -> None:
        """Close the connections, so that workers that still wait for a sum get an error."""
        if self._group is not None:
            self._group.abort()
        self._group = self._stores = self._key = None

    def _begin(self, what: str, start: Callable[[Any], Any]) -> Wait:
        def wait() -> None:
            if work is not None:
                with peer_losses(what):
                    work.wait(self._timeout)

        work = None
        if self._group is not None:
            with peer_losses(what):
                work = start(self._group)
        return wait

    def _live(self) -> None:
        client = _connect(self._address, self._timeout)
        while not self._closed.wait(_BEAT_S):
            try:
                client.heartbeat(self.name)
            except (RuntimeError, TimeoutError):
                continue  # the lighthouse may come back; until then `agree` raises


def _connect(address: str, timeout: timedelta) -> Any:
    os.environ.setdefault("RUST_LOG", "warn")  # otherwise torchft logs every quorum
    LighthouseClient = require("torchft.coordination", extra="elastic").LighthouseClient
    try:
        return LighthouseClient(address, timeout)
    except (RuntimeError, TimeoutError) as error:
        raise HeteroError(
            f"the lighthouse {address} does not answer: start one with `torchft_lighthouse "
            f"--min_replicas 1`, and give its address ({error})"
        ) from error
