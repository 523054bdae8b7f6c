"""No process listens beyond this machine unless asked to."""

from __future__ import annotations

import ipaddress
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist

from thrifty.hetero import ElasticMembership, HeteroTask
from thrifty.hetero.workers._elastic import LOOPBACK, gloo_group, keep_gloo_here, open_store
from thrifty.pack import HyperParameters
from thrifty.run import Local
from thrifty.testing import LineTask


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("device")]


SOON = timedelta(seconds=30)


def listening(*pids: int) -> list[str]:
    """Return the addresses on which processes listen."""
    return [
        connection.laddr.ip
        for pid in pids or (os.getpid(),)
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]


def all_here(addresses) -> bool:
    return all(ipaddress.ip_address(address).is_loopback for address in addresses)


def test_a_store_listens_on_the_address_it_is_given():
    before = listening()
    store = open_store(LOOPBACK, timeout=SOON)
    client = dist.TCPStore(LOOPBACK, store.port, is_master=False, timeout=SOON)
    client.set("key", "value")
    assert store.get("key") == b"value"
    added = sorted(set(listening()) - set(before)) or listening()
    assert all_here(added)
    assert listening()


def test_a_name_that_only_others_know_is_listened_for_everywhere(monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    made = []

    def store(host, port, *, master_listen_fd, **_):
        with socket.socket(fileno=master_listen_fd) as held:
            made.append((host, held.getsockname()))

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr(dist, "TCPStore", store)
    open_store("worker-3.example", timeout=SOON)
    ((host, (address, _)),) = made
    assert (host, address) == ("worker-3.example", "0.0.0.0")
    with pytest.raises(OSError, match="not known"):
        open_store(LOOPBACK, timeout=SOON)


def test_a_group_listens_here():
    store = dist.HashStore()
    group = gloo_group(store, 0, 1, host=LOOPBACK, timeout=SOON)
    assert all_here(listening())
    assert group.size() == 1
    assert gloo_group(dist.HashStore(), 0, 1, host="10.9.8.7", timeout=SOON).size() == 1


def test_gloo_is_told_the_interface(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    keep_gloo_here()
    assert os.environ["GLOO_SOCKET_IFNAME"] in {name for _, name in socket.if_nameindex()}
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "odd0")])
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    keep_gloo_here()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


def test_the_processes_of_a_trial_listen_here():
    task = HeteroTask(LineTask(), workers=2)
    task.setup(HyperParameters({"lr": 0.1}), seed=0, device=torch.device("cpu"))
    try:
        task.train(0, HyperParameters({"lr": 0.1}))
        pids = [child.pid for child in task._crew._children]
        addresses = listening(*pids)
        assert addresses
        assert all_here(addresses)
    finally:
        task._crew.end()


def test_elastic_workers_listen_here(lighthouse):
    members = [
        ElasticMembership(lighthouse, name=name, timeout_s=20, quorum_s=20)
        for name in ("one", "two")
    ]
    try:
        with ThreadPoolExecutor(2) as pool:
            views = list(pool.map(lambda member: member.agree(step=0), members))
        assert [len(view.names) for view in views] == [2, 2]
        assert all_here(listening())
    finally:
        for member in members:
            member.close()


def test_worker_processes_do_not_listen_at_all(tmp_path):
    executor = Local(workers=2, threads=1).open(
        LineTask(), checkpoints=str(tmp_path), folder="plan"
    )
    before = listening()
    try:
        executor._workers[0]._start(executor._task)
        assert listening() == before
        assert not listening(executor._workers[0].child.pid)
    finally:
        executor.close()
