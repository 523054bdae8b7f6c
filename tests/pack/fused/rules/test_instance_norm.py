from __future__ import annotations

import pytest
from torch import nn

from tests.pack.fused.twin import check, normal, refused
from tests.pairs import pairwise


pytestmark = pytest.mark.usefixtures("device")


@pairwise(
    shape=[(4, 3, 5), (2, 3, 4, 3)],
    training=[False, True],
    affine=[False, True],
    track=[False, True],
    where=[0, 1, "shared"],
)
def test_instance_norm(shape, training, affine, track, where):
    place = {"shared": True} if where == "shared" else {"axis": where}
    kind = nn.InstanceNorm1d if len(shape) == 3 else nn.InstanceNorm2d
    check(
        lambda m, x: m(x),
        lambda s: [normal(*shape, seed=s, **place)],
        make=lambda: kind(3, affine=affine, track_running_stats=track),
        training=training,
    )


def test_without_a_batch():
    check(lambda m, x: m(x), lambda s: [normal(3, 5, seed=s)], make=lambda: nn.InstanceNorm1d(3))


def test_batches_that_differ_in_size():
    check(
        lambda m, x: m(x).pow(2).mean(),
        lambda s: [normal(5, 3, 4, seed=s)],
        make=lambda: nn.InstanceNorm1d(3, affine=True),
        num_rows=(5, 2, 4),
    )
    refused(
        "running statistics of batches that differ in size",
        lambda m, x: m(x),
        normal(4, 3, 5),
        make=lambda: nn.InstanceNorm1d(3, track_running_stats=True),
        num_rows=(4, 2, 3),
        batch=4,
    )
