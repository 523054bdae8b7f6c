"""The jobs of the processes of real groups, in a module that these processes can import."""

from __future__ import annotations

import os
import signal

import torch
from torch import nn

from thrifty.core import HeteroError, PeerLostError, TooFewWorkersError
from thrifty.hetero import FixedMembership, HeteroOptions, HeteroTrainer, StepCurve
from thrifty.testing import VirtualClock

from .jobs import Costly, data, loss, model, sgd


SPEEDS = (1.0, 3.0)


def net_of(kind):
    net = model(norm=kind == "norm", dtype=torch.float32)
    if kind == "dropout":
        net.insert(2, nn.Dropout(0.5))
    return net


def trained(kind, members, rank):
    net, clock = net_of(kind), VirtualClock()

    def timed(net, batch):
        clock.advance(SPEEDS[rank] * len(batch[0]))
        return loss(net, batch)

    trainer = HeteroTrainer(
        net,
        sgd(net),
        data(torch.float32),
        loss=timed,
        global_batch=16,
        seed=5,
        members=members,
        clock=clock,
        options=HeteroOptions(
            curve=StepCurve(sample_s=SPEEDS[rank]),
            bucket_cap_mb=1e-6 if kind == "buckets" else 25.0,
        ),
    )
    sizes = [report.sizes for report in trainer.run(epochs=2)]
    return {"state": net.state_dict(), "sizes": sizes, "names": trainer._workers.group.view.names}


def work(rank, port, folder):
    """Train some jobs; then the second process leaves, and the first one detects it."""
    torch.set_num_threads(1)
    # Use the environment that torchrun sets: its agent runs the store, at a free port.
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    # The kind of device only decides which backend carries the sums: with a CPU among the workers,
    # it is gloo, for the worker on a GPU, too.
    members = FixedMembership(device="cpu" if rank else "cuda", timeout_s=600)
    jobs = {
        "plain": "plain",
        "buckets": "buckets",
        "norm": "norm",
        "dropout": "dropout",
        "again": "dropout",
    }
    done = {name: trained(kind, members, rank) for name, kind in jobs.items()}
    done["errors"] = losing(members) if rank == 0 else []
    members.close()
    members.close()
    done["left"] = not torch.distributed.is_initialized()
    torch.save(done, f"{folder}/{rank}.pt")
    # Exit now that everything is written: gloo's threads of a broken group may abort the process
    # while the interpreter shuts down.
    os._exit(0)


def join_group(rank, size, port):
    """Join a group of CPU workers with the environment that torchrun sets."""
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    return FixedMembership(timeout_s=600)


def costly(members, rank, speeds, *, batch=16, on_step=None, epochs=6, sum_s=10.0):
    """Train with sums that take some seconds on the worker's own clock."""
    net, clock = net_of("plain"), VirtualClock()

    def timed(net, batch):
        clock.advance(speeds[rank] * len(batch[0]))
        return loss(net, batch)

    trainer = HeteroTrainer(
        net,
        sgd(net),
        data(torch.float32),
        loss=timed,
        global_batch=batch,
        seed=5,
        members=Costly(members, clock, sum_s),
        clock=clock,
        options=HeteroOptions(curve=StepCurve(sample_s=speeds[rank]), stand_by=True),
    )
    steps = []
    for report in trainer.run(epochs=epochs):
        steps.append((report.step, list(report.names)))
        if on_step is not None:
            on_step(report)
    return {"state": net.state_dict(), "steps": steps, "place": trainer.state()["epoch"]}


def stand_by(rank, port, folder):
    """Train jobs in which one or two of three workers stand by; then one of them is killed."""
    members = join_group(rank, 3, port)
    pids = torch.zeros(3, dtype=torch.int64)
    pids[rank] = os.getpid()
    members.agree(step=0)
    members.all_reduce(pids)
    done = {
        "alone": costly(members, rank, (1.0, 15.0, 15.0)),
        "pair": costly(members, rank, (1.0, 1.0, 60.0), batch=40, epochs=20, sum_s=30.0),
    }

    def kill(report):
        if report.step == 14:
            os.kill(int(pids[2]), signal.SIGKILL)

    torch.save(done, f"{folder}/{rank}.pt")
    try:
        costly(members, rank, (1.0, 15.0, 15.0), on_step=kill)
    except (HeteroError, TooFewWorkersError) as error:
        done["error"] = f"{type(error).__name__}: {error}"
    torch.save(done, f"{folder}/{rank}.pt")
    os._exit(0)


def abandon(rank, port, folder):
    """Let the worker that trains alone end without a word while the other one stands by."""
    members = join_group(rank, 2, port)

    def leave(report):
        if report.step == 14:
            os._exit(0)

    try:
        costly(members, rank, (1.0, 15.0), on_step=leave)
    except (HeteroError, TooFewWorkersError) as error:
        torch.save({"error": f"{type(error).__name__}: {error}"}, f"{folder}/{rank}.pt")
    os._exit(0)


def losing(members):
    said = []
    for what in (
        lambda: members.all_reduce(torch.ones(1)),
        lambda: members.broadcast(torch.ones(1), source=1),
        lambda: members.agree(step=0, broken=True),
    ):
        try:
            what()
        except (PeerLostError, TooFewWorkersError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said
