from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.devices import here
from tests.pack.fused.twin import check, group_of, normal, refused
from tests.pairs import pairwise


pytestmark = pytest.mark.usefixtures("device")


KINDS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


@pairwise(
    shape=[(4, 3), (4, 3, 5), (4, 3, 4, 3), (2, 3, 2, 3, 2)],
    training=[False, True],
    options=[{}, {"affine": False}, {"track_running_stats": False}],
    where=[0, 1, "shared"],
)
def test_batch_norm(shape, training, options, where):
    place = {"shared": True} if where == "shared" else {"axis": where}
    check(
        lambda m, x: m(x),
        lambda s: [normal(*shape, seed=s, **place)],
        make=lambda: KINDS[len(shape)](3, **options),
        training=training,
    )


def test_twice_in_one_pass():
    check(
        lambda m, x: m(m(x) * 2),
        lambda s: [normal(4, 3, 5, seed=s)],
        make=lambda: nn.BatchNorm1d(3),
    )


def test_evaluation_of_batches_that_differ_in_size():
    check(
        lambda m, x: m(x).pow(2).mean(),
        lambda s: [normal(5, 3, seed=s)],
        make=lambda: nn.BatchNorm1d(3),
        training=False,
        num_rows=(5, 2, 4),
    )


def test_batches_that_differ_in_size_are_refused():
    refused(
        "batch normalisation over batches that differ in size",
        lambda m, x: m(x),
        normal(4, 3),
        make=lambda: nn.BatchNorm1d(3),
        num_rows=(4, 2, 3),
        batch=4,
    )


def test_a_cumulative_average_is_refused():
    refused(
        "reads the value of a tensor",
        lambda m, x: m(x),
        normal(4, 3),
        make=lambda: nn.BatchNorm1d(3, momentum=None),
    )


def test_statistics_that_all_share_are_refused():
    mean, var = torch.zeros(3).double().to(here()), torch.ones(3).double().to(here())
    refused(
        "statistics that all trials share",
        lambda m, x: F.batch_norm(x, mean, var, training=True),
        normal(4, 3),
    )
    assert mean.eq(0).all()
    group = group_of()
    out = F.batch_norm(group.pack(normal(4, 3).value), mean, var)
    assert out.shape == (4, 3)
