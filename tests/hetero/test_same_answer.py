"""Uneven workers equal one process, for any split, and when workers die or join."""

from __future__ import annotations

import random
import threading

import pytest
import torch

from tests.hetero.memberships import ThreadCluster
from thrifty.perf import StepCurve

from .jobs import SAMPLES, Worker, data, distance, model, plain


pytestmark = pytest.mark.slow


SPEEDS = [1.0, 3.0, 1.5, 7.0]


def constant(speed):
    return lambda size, step: 0.5 + speed * size


MANY_SUMS = 1e-6
"""Bucket size in MiB, small enough that each parameter gets its own bucket."""


@pytest.mark.sample(8)
@pytest.mark.parametrize("cap", [None, 25.0, MANY_SUMS])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_uneven_is_one_process(workers, norm, cap):
    team = {
        f"w{i}": Worker(
            constant(SPEEDS[i]),
            net=model(norm),
            curve=StepCurve(fixed_s=0.5, sample_s=SPEEDS[i]),
            bucket_cap_mb=cap,
        )
        for i in range(workers)
    }
    done = ThreadCluster().run({name: worker.job(3) for name, worker in team.items()})
    net, losses = plain(3, net=model(norm))
    for worker in done.values():
        assert distance(worker.net, net) < 1e-12
        assert [r.loss for r in worker.reports] == pytest.approx(losses, rel=1e-6)
        assert worker.reports[0].sizes == done["w0"].reports[0].sizes
    if workers > 1:
        assert len(set(done["w0"].reports[0].sizes)) > 1


def test_float32_agrees_to_rounding():
    team = {
        f"w{i}": Worker(
            constant(SPEEDS[i]),
            net=model(dtype=torch.float32),
            dataset=data(torch.float32),
            curve=StepCurve(sample_s=SPEEDS[i]),
        )
        for i in range(3)
    }
    done = ThreadCluster().run({name: worker.job(3) for name, worker in team.items()})
    net, _ = plain(3, net=model(dtype=torch.float32), dataset=data(torch.float32))
    assert all(distance(worker.net, net) < 1e-6 for worker in done.values())


def test_the_split_follows_and_the_answer_stays():
    """A worker runs four times slower for a while."""
    team = {
        "a": Worker(constant(1.0), curve=StepCurve(fixed_s=0.5, sample_s=1.0)),
        "b": Worker(
            lambda size, step: 0.5 + (4.0 if 12 <= step < 40 else 1.0) * size,
            curve=StepCurve(fixed_s=0.5, sample_s=1.0),
        ),
    }
    done = ThreadCluster().run({name: worker.job(16) for name, worker in team.items()})
    changes = [e for r in done["a"].reports for e in r.events if hasattr(e, "reason")]
    assert [change.reason for change in changes] == ["slower", "faster"]
    net, _ = plain(16)
    assert distance(done["b"].net, net) < 1e-12
    sizes = [r.sizes for r in done["a"].reports]
    assert sizes[5] == (8, 8)
    assert sizes[20] == (13, 3)
    assert sizes[60] == (8, 8)


@pytest.mark.sample(8)
@pytest.mark.parametrize("cap", [25.0, MANY_SUMS])
@pytest.mark.parametrize("seed", range(12))
def test_kills_and_joins_at_random(seed, cap):
    """Every epoch has every sample once, and the result is that of one process."""
    rng = random.Random(seed)
    sums = 1 if cap > 1 else 4  # sums per step
    options = {"admit_every": 2, "bucket_cap_mb": cap}
    cluster = ThreadCluster()
    names = [f"w{i}" for i in range(rng.randint(2, 4))]
    team = {name: Worker(constant(rng.uniform(1, 5)), **options) for name in names}
    for name in names[1:]:
        if rng.random() < 0.7:
            cluster.kill(name, after=rng.randrange(3, 25 * sums), delivers=rng.random() < 0.5)
    late = Worker(constant(2.0), net=model(), **options)
    joins_at, threads = rng.randrange(1, 10), []
    results = {}

    def start(report):
        if report.step == joins_at and not threads:
            threads.append(threading.Thread(target=join))
            member.append(cluster.member("x"))
            threads[0].start()

    member = []

    def join():
        results["x"] = late.job(6)(member[0])

    jobs = {name: worker.job(6) for name, worker in team.items()}
    jobs["w0"] = team["w0"].job(6, on_step=start)
    done = cluster.run(jobs)
    threads[0].join()
    net, losses = plain(6)
    assert distance(done["w0"].net, net) < 1e-12
    assert distance(results["x"].net, net) < 1e-12
    assert [r.loss for r in done["w0"].reports] == pytest.approx(
        losses[-len(done["w0"].reports) :], rel=1e-6
    )
    assert done["w0"].reports[-1].step == len(losses)
    by_epoch = {}
    for report in done["w0"].reports:
        by_epoch[report.epoch] = by_epoch.get(report.epoch, 0) + sum(report.sizes)
    if len(done["w0"].reports) == len(losses):
        assert set(by_epoch.values()) == {SAMPLES}


@pytest.mark.sample(8)
@pytest.mark.parametrize("after", range(4, 30))
def test_a_step_that_is_trained_again_is_tracked_once(after):
    """Running statistics of a failed pass are discarded."""
    cluster = ThreadCluster()
    cluster.kill("b", after=after)
    team = {name: Worker(constant(1.0 + at), net=model(norm=True)) for at, name in enumerate("abc")}
    done = cluster.run({name: worker.job(2) for name, worker in team.items()})
    net, _ = plain(2, net=model(norm=True))
    assert all(distance(worker.net, net) < 1e-12 for worker in done.values())
