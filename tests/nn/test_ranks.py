"""Two data-parallel processes share one schedule, one set of masks and all samples' gradient."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thrifty.nn import GyroDropout


pytestmark = pytest.mark.slow


def train(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    steps(rank, folder)
    dist.barrier()
    # A wrapped model keeps its group, also after `destroy_process_group`. A thread of the group
    # that still holds tensors when the interpreter ends aborts the process
    # (pytorch/pytorch#179291), so the interpreter does not end.
    os._exit(0)


def steps(rank, folder):
    torch.set_num_threads(1)
    torch.manual_seed(7)  # all ranks build the same model
    drop = GyroDropout(0.5, num_features=6, subnetworks=8, concurrent=2, total_steps=12)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 6), drop, nn.Linear(6, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    drop.schedule.follow(optimizer)
    seen = []
    for step in range(9):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        seen.append(drop.rows(drop.schedule.active(), dtype=torch.float32))
        model(x[rank::2]).square().mean().backward()
        optimizer.step()
    torch.save({"seen": torch.stack(seen), **model.module.state_dict()}, f"{folder}/{rank}.pt")


def test_ranks_have_one_schedule(tmp_path):
    mp.spawn(train, args=(str(tmp_path),), nprocs=2)
    one, two = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert len(one["seen"].unique(dim=0)) > 1
    assert int(one["1.schedule.position"]) == 9
