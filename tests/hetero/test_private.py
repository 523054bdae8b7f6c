"""Private samples are read by their worker alone, and count like all others."""

from __future__ import annotations

import threading
from itertools import islice

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset, default_collate

from tests.hetero.memberships import ThreadCluster
from thrifty.hetero import StepCurve

from .jobs import FEATURES, Worker, distance, loss, model, sgd


PUBLIC = 24
PRIVATE = {"a": 30, "b": 0, "c": 7}


def samples(num, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num, FEATURES, generator=generator, dtype=torch.double)
    return TensorDataset(x, torch.randint(0, 3, (num,), generator=generator))


class Recorded(Dataset):
    """A data set that records which samples are read, and in which threads."""

    def __init__(self, data):
        self.data = data
        self.read = []
        self.threads = set()

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        self.read.append(index)
        self.threads.add(threading.get_ident())
        return self.data[index]


class Team:
    """Workers a, b and c with private data, and a record of what each one reads in each step."""

    def __init__(self, private=PRIVATE, public=PUBLIC, epochs=3, cluster=None, **options):
        self.private = {
            name: Recorded(samples(num, seed)) for seed, (name, num) in enumerate(private.items())
        }
        self.batches = {name: [] for name in private}
        self.read = {name: {} for name in private}
        self.used = {name: [] for name in private}
        speeds = dict(zip(private, (1.0, 2.0, 4.0), strict=False))
        self.workers = {
            name: Worker(
                lambda size, step, speed=speed: speed * size,
                curve=StepCurve(sample_s=speed),
                dataset=samples(public, 99),
                private=self.private[name],
                collate=self.recording(name),
                # Each batch that is read counts as a step here, so checks must not read any.
                verify=False,
                **options,
            )
            for name, speed in speeds.items()
        }
        jobs = {
            name: worker.job(epochs, on_step=self.noting(name))
            for name, worker in self.workers.items()
        }
        self.done = (cluster or ThreadCluster()).run(jobs)

    def recording(self, name):
        def collate(taken):
            self.batches[name].append(default_collate(taken))
            return self.batches[name][-1]

        return collate

    def noting(self, name):
        def on_step(report):
            data = self.private[name]
            self.read[name].setdefault(report.epoch, []).extend(data.read)
            data.read.clear()
            self.used[name].append(self.workers[name].trainer.state()["private"])

        return on_step


def test_each_private_sample_is_trained_once_an_epoch_where_it_is():
    team = Team()
    for name, num in PRIVATE.items():
        for epoch in range(3):
            assert sorted(team.read[name].get(epoch, [])) == list(range(num))
    threads = [data.threads for data in team.private.values()]
    assert [len(each) for each in threads] == [1, 0, 1]
    assert not threads[0] & threads[2]
    for report in team.workers["b"].reports:
        assert sum(report.sizes) <= 16
    assert sum(sum(r.sizes) for r in team.workers["b"].reports) == 3 * (PUBLIC + 37)


def test_private_order_changes_with_the_epoch():
    team = Team()
    assert team.read["a"][0] != team.read["a"][1]


def test_a_step_is_that_of_one_process_with_all_of_its_samples():
    """A step equals a step of the plain loop on the workers' batches joined together."""
    team = Team()
    net = model()
    optimizer = sgd(net)
    batches = {name: iter(each) for name, each in team.batches.items()}
    for report in team.workers["a"].reports:
        parts = [
            next(batches[name])
            for name, size in zip(report.names, report.sizes, strict=True)
            if size
        ]
        x, y = (torch.cat(values) for values in zip(*parts, strict=True))
        optimizer.zero_grad()
        value = loss(net, (x, y))
        value.backward()
        optimizer.step()
        assert report.loss == pytest.approx(value.item())
    for worker in team.done.values():
        assert distance(worker.net, net) < 1e-12


def test_with_subsampling_an_epoch_ends_when_the_shares_do():
    """Subsampling ends an epoch early and draws other samples in the next one.

    Worker a has 11 of the 16 samples of a step: 83 of 120, fewer than its 100 samples.
    """
    team = Team({"a": 100, "b": 0}, public=20, epochs=2, subsample=True)
    assert team.workers["a"].reports[0].sizes == (11, 5)
    own = [team.read["a"][epoch] for epoch in range(2)]
    assert [len(each) for each in own] == [len(set(each)) for each in own] == [83, 83]
    assert set(own[0]) != set(own[1])


def test_who_is_lost_takes_its_samples_along():
    """Worker b dies while it alone has samples left; worker a continues with the next epoch."""
    cluster = ThreadCluster()
    # Three exchanges of the meeting and three steps: by then the public samples are used up.
    cluster.kill("b", after=6)
    team = Team({"a": 0, "b": 60}, public=16, epochs=3, cluster=cluster)
    reports = team.done["a"].reports
    assert [report.epoch for report in reports] == [0, 0, 0, 1, 2]
    assert [report.sizes for report in reports[3:]] == [(16,), (16,)]
    assert sorted(team.read["b"]) == [0]


def test_a_state_knows_how_far_each_worker_is():
    team = Team(epochs=1)
    assert team.used["a"][-1] == {"a": 30, "c": 7}
    assert team.used["a"] == team.used["b"] == team.used["c"]


def test_resuming_trains_what_was_left():
    """The steps before a state was saved and those resumed from it make up one epoch."""

    def job(trainer_of, state=None, steps=None):
        def run(members):
            trainer = trainer_of(members)
            if state is not None:
                trainer.load_state(state)
            shares = [report.share for report in islice(trainer.run(epochs=1), steps)]
            return trainer.state(), shares

        return run

    def both(**options):
        workers = {
            name: Worker(
                lambda size, step: float(size), dataset=samples(PUBLIC, 99), private=samples(num, 1)
            )
            for name, num in {"a": 30, "b": 10}.items()
        }
        return ThreadCluster().run({
            name: job(worker._make, **options) for name, worker in workers.items()
        })

    first = both(steps=2)
    rest = both(state=first["a"][0])
    for name, num in {"a": 30, "b": 10}.items():
        shares = first[name][1] + rest[name][1]
        assert sorted(index for share in shares for index in share.private) == list(range(num))


def test_there_may_be_private_samples_alone():
    team = Team({"a": 20, "b": 12}, public=0, epochs=2)
    for name, num in {"a": 20, "b": 12}.items():
        assert [sorted(team.read[name][epoch]) for epoch in range(2)] == [list(range(num))] * 2


def test_gradients_alone_leave_a_worker():
    """Sums have the size of the gradients and a few control numbers, never that of samples."""
    sizes = set()

    class Listening:
        def __init__(self, members):
            self.members = members

        def __getattr__(self, name):
            return getattr(self.members, name)

        def all_reduce(self, tensor):
            self.begin_all_reduce(tensor)()

        def begin_all_reduce(self, tensor):
            sizes.add(tensor.numel())
            return self.members.begin_all_reduce(tensor)

    worker = Worker(
        lambda size, step: float(size), dataset=samples(PUBLIC, 99), private=samples(9, 1)
    )
    job = worker.job(1)
    other = Worker(lambda size, step: float(size), dataset=samples(PUBLIC, 99))
    ThreadCluster().run({"a": lambda members: job(Listening(members)), "b": other.job(1)})
    parameters = [p.numel() for p in model().parameters()]
    rows = 2 * 10  # control rows of the meeting
    assert sizes == {rows, sum(parameters) + len(parameters) + 3 * 2 + 7}
    assert isinstance(worker.net, nn.Module)
