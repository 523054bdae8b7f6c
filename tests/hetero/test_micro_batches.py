"""Gradient accumulation: shares in micro-batches, against one process on the whole batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.hetero.memberships import ThreadCluster
from thrifty.core import HeteroError
from thrifty.hetero import HeteroOptions, HeteroTask, HeteroTrainer
from thrifty.hetero._samples import Share
from thrifty.perf import StepCurve
from thrifty.testing import LineTask

from .jobs import Worker, data, distance, loss, model, plain, sgd


MANY_SUMS = 1e-6
"""Bucket size in MiB, small enough that each parameter gets its own bucket."""


class Counted(Worker):
    """A worker that records the samples of each pass."""

    def __init__(self, seconds, **options):
        self.passes = []
        super().__init__(seconds, **options)

    def _loss(self, net, batch):
        self.passes.append(len(batch[0]))
        return super()._loss(net, batch)


def uneven(micro_batch, *, speeds=(1.0, 3.0), **options):
    team = {
        f"w{i}": Counted(
            lambda size, step, speed=speed: 0.5 + speed * size,
            curve=StepCurve(fixed_s=0.5, sample_s=speed),
            micro_batch=micro_batch,
            **options,
        )
        for i, speed in enumerate(speeds)
    }
    return ThreadCluster().run({name: worker.job(3) for name, worker in team.items()})


@pytest.mark.parametrize("cap", [None, 25.0, MANY_SUMS])
@pytest.mark.parametrize("micro_batch", [1, 5])
def test_micro_batches_equal_one_process(micro_batch, cap):
    done = uneven(micro_batch, bucket_cap_mb=cap, verify=False)
    net, losses = plain(3)
    for worker in done.values():
        assert distance(worker.net, net) < 1e-12
        assert [r.loss for r in worker.reports] == pytest.approx(losses, rel=1e-6)
        assert max(worker.passes) <= micro_batch
    assert max(done["w0"].reports[0].sizes) > 5


def test_each_worker_may_have_its_own():
    team = {
        f"w{i}": Counted(lambda size, step: 1.0, micro_batch=most, verify=False)
        for i, most in enumerate([None, 3])
    }
    done = ThreadCluster().run({name: worker.job(2) for name, worker in team.items()})
    net, _ = plain(2)
    assert distance(done["w1"].net, net) < 1e-12
    assert max(done["w0"].passes) > 3 >= max(done["w1"].passes)


def alone(net, dataset, *, loss, epochs=2, weight=None, **options):
    """Train on one worker, and return the losses of all steps."""
    trainer = HeteroTrainer(
        net,
        sgd(net),
        dataset,
        loss=loss,
        weight=weight,
        global_batch=16,
        options=HeteroOptions(**{"curve": StepCurve(sample_s=1.0), **options}),
    )
    return [report.loss for report in trainer.run(epochs=epochs)]


def test_weighted_means_are_those_of_the_whole_batch():
    x, y = data().tensors
    dataset = TensorDataset(x, y, torch.linspace(0.0, 2.0, len(x), dtype=torch.float64))

    def weighted(net, batch):
        values = nn.functional.cross_entropy(net(batch[0]), batch[1], reduction="none")
        return (values * batch[2]).sum() / batch[2].sum()

    nets = [model(), model()]
    losses = [
        alone(net, dataset, loss=weighted, weight=lambda batch: batch[2].sum(), micro_batch=most)
        for net, most in zip(nets, (None, 3), strict=True)
    ]
    assert distance(*nets) < 1e-12
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


class Gated(nn.Module):
    """A second layer that only samples above a limit reach."""

    def __init__(self):
        super().__init__()
        torch.default_generator.manual_seed(1)
        self.all, self.some = (nn.Linear(1, 1, dtype=torch.float64) for _ in range(2))

    def forward(self, x):
        return self.all(x) + (self.some(x) * (x > 57) if (x > 57).any() else 0.0)


def test_a_parameter_may_have_a_gradient_in_some_parts_only():
    x = torch.arange(60, dtype=torch.float64)[:, None]
    dataset = TensorDataset(x, x / 60)

    def squared(net, batch):
        return (net(batch[0] / 1.0) - batch[1]).square().mean() / 1000

    nets = [Gated(), Gated()]
    for net, most in zip(nets, (None, 2), strict=True):
        alone(net, dataset, loss=squared, micro_batch=most, bucket_cap_mb=MANY_SUMS, verify=False)
    assert distance(*nets) < 1e-10


def test_the_speed_is_measured_in_micro_batches():
    passes = []

    def counted(net, batch):
        passes.append(len(batch[0]))
        return loss(net, batch)

    alone(model(), data(), loss=counted, micro_batch=4, curve=None, epochs=1)
    assert max(passes) == 4


def test_batch_normalisation_sees_a_micro_batch_or_is_refused():
    with pytest.raises(HeteroError, match=r"needs all samples in one pass, and micro_batch=4; use"):
        alone(model(norm=True), data(), loss=loss, micro_batch=4)
    losses = alone(model(norm=True), data(), loss=loss, micro_batch=4, batch_norm="local")
    assert losses != alone(model(norm=True), data(), loss=loss, batch_norm="local")


def test_only_local_statistics_make_another_task():
    def identity(**options):
        task = HeteroTask(LineTask(), workers=2, options=HeteroOptions(**options))
        return task._content().training

    assert identity() == identity(micro_batch=4)
    assert identity(batch_norm="local") != identity(batch_norm="local", micro_batch=4)


@pytest.mark.parametrize(("num", "most"), [(7, 3), (6, 3), (2, 5), (0, 2), (9, 1)])
def test_parts_are_equal_and_complete(num, most):
    share = Share(public=tuple(range(num)), private=tuple(range(100, 104)) if num % 2 else ())
    parts = share.parts(most)
    sizes = [len(part) for part in parts]
    assert max(sizes) <= most
    assert max(sizes) - min(sizes) <= 1
    assert tuple(i for part in parts for i in part.public) == share.public
    assert tuple(i for part in parts for i in part.private) == share.private
