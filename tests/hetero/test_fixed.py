"""A real group of two processes, as torchrun starts it."""

from __future__ import annotations

from itertools import count

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.study.processes import start_server
from thrifty.core import TooFewWorkersError
from thrifty.hetero import FixedMembership
from thrifty.hetero.workers import _membership

from .gloo import net_of, work
from .jobs import data, distance, plain


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Return the results of both processes. If one of them fails, the other one is killed."""
    folder = tmp_path_factory.mktemp("gloo")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    start_server()
    group = mp.start_processes(
        work, args=(store.port, str(folder)), nprocs=2, join=False, start_method="forkserver"
    )
    try:
        while not group.join():
            pass  # wait until both processes have ended
    finally:
        for process in group.processes:
            process.kill()
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["plain", "buckets", "norm"])
def test_two_processes_are_one(done, kind):
    net, _ = plain(2, net=net_of(kind), dataset=data(torch.float32))
    for each in done:
        mine = net_of(kind)
        mine.load_state_dict(each[kind]["state"])
        assert distance(mine, net) < 1e-6
        assert each[kind]["names"] == ("0", "1")
        assert each[kind]["sizes"] == done[0][kind]["sizes"]
    # With layers that sum over the batch, each worker needs at least one sample; here both have
    # more anyway.
    assert done[0][kind]["sizes"][:4] == [(12, 4), (12, 4), (12, 4), (9, 3)]


def test_draws_are_the_same_each_time(done):
    for each in done:
        for name, value in each["dropout"]["state"].items():
            assert torch.equal(value, each["again"]["state"][name])
            assert torch.equal(value, done[0]["dropout"]["state"][name])
    plain_state = done[0]["plain"]["state"]
    assert not torch.equal(done[0]["dropout"]["state"]["0.weight"], plain_state["0.weight"])


def test_who_is_left_is_told_and_cannot_go_on(done):
    said = done[0]["errors"]
    assert [each.partition(":")[0] for each in said] == [
        "PeerLostError",
        "PeerLostError",
        "TooFewWorkersError",
    ]
    assert "a sum over all workers failed" in said[0]
    assert "a broadcast to all workers failed" in said[1]


def test_the_group_that_was_made_is_left(done):
    assert [each["left"] for each in done] == [True, True]


@pytest.mark.parametrize(
    ("own", "other", "backend"),
    [("cuda", "cuda", "nccl"), ("cuda:1", "cpu", "gloo"), ("cpu", "cuda", "gloo")],
)
def test_sums_use_what_all_devices_can(monkeypatch, own, other, backend):
    store, made = dist.HashStore(), []
    store.set("thrifty/2/0/kind/1", other)
    store.set("thrifty/1/0/kind/1", "what it was before torchrun restarted it")
    monkeypatch.setattr(_membership, "_GROUPS", count())
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(_membership, "rendezvous", lambda *_, **__: iter([(store, 0, 2)]))
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **more: made.append((args, more)))
    FixedMembership(device=own)
    (((name,), options),) = made
    assert name == backend
    assert (options["rank"], options["world_size"]) == (0, 2)


def test_one_worker_alone_needs_no_group(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    members = FixedMembership()
    view = members.agree(step=4)
    assert (view.rank, view.names, view.steps) == (0, ("0",), (4,))
    value = torch.ones(2)
    members.all_reduce(value)
    members.broadcast(value, source=0)
    assert value.tolist() == [1.0, 1.0]
    members.close()
    members.close()
    assert not dist.is_initialized()


def test_a_group_of_someone_else_is_used_and_not_closed(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        members = FixedMembership()
        assert members.agree(step=0).names == ("0",)
        members.close()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_a_broken_group_cannot_go_on():
    with pytest.raises(TooFewWorkersError, match=r"cannot go on without it.*ElasticMembership"):
        FixedMembership().agree(step=0, broken=True)
