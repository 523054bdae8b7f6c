"""Where workers listen for each other: on the loopback interface alone, unless another address is asked for.

``torch.distributed`` listens on all interfaces, and its protocols ask nobody for a password.
"""

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
    """Open a store at which workers meet, on one address of this machine.

    Args:
        host: The address. If it is not one of this machine (a name that only others see, say), the store
            listens on all interfaces: it was asked for.
        timeout: Of every exchange.
    """
    listening = _listen(host)
    port = listening.getsockname()[1]
    return dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listening.detach(),
    )


def gloo_group(store: Any, rank: int, size: int, *, host: str, timeout: timedelta) -> Any:
    """Make a group of workers, whose sockets are on the loopback interface if ``host`` is."""
    options = dist.ProcessGroupGloo._Options()
    device = {"hostname": host} if is_loopback(host) else {}
    options._devices = [
        dist.ProcessGroupGloo.create_device(**device)
        if device
        else dist.ProcessGroupGloo.create_default_device()
    ]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, options)


def keep_gloo_here() -> None:
    """Have all groups that this process makes listen on the loopback interface."""
    name = loopback_name(name for _, name in socket.if_nameindex())
    if name is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name


def loopback_name(names: Iterable[str]) -> str | None:
    """The name of the loopback interface among those of a machine.

    >>> loopback_name(["eth0", "lo"])
    'lo'
    """
    known = set(names)
    return next((name for name in _INTERFACES if name in known), None)


def is_loopback(host: str) -> bool:
    """Say whether an address or a name is this machine's own.

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
