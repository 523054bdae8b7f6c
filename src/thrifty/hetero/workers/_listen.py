"""Listening addresses of workers: the loopback interface unless another address is given.

By default ``torch.distributed`` listens on all interfaces, and its protocols have no
authentication."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist


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

    >>> [
    ...     is_loopback(host)
    ...     for host in ("127.0.0.1", "localhost", "::1", "10.0.0.1", "worker-3")
    ... ]
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
