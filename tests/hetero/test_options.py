"""Invalid options are refused at once."""

from __future__ import annotations

import pytest

from thrifty.core import HeteroError
from thrifty.hetero import HeteroOptions, Power


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_norm": "sync"}, "batch_norm is 'global' or 'local', not 'sync'"),
        ({"objective": "speed"}, "objective is 'throughput' or 'energy', not 'speed'"),
        ({"objective": "energy"}, r"objective='energy' needs power=Power\("),
        ({"clip_norm": 0.0}, "clip_norm is positive, not 0.0"),
        ({"clip_norm": -1.0}, "clip_norm is positive, not -1.0"),
        ({"micro_batch": 0}, "`micro_batch` must be at least 1, got 0"),
        ({"bucket_cap_mb": 0.0}, "bucket_cap_mb is positive, not 0.0"),
        ({"admit_every": 0}, "admit_every is at least 1, not 0"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(HeteroError, match=message):
        HeteroOptions(**options)


def test_options_at_their_bounds():
    HeteroOptions(
        batch_norm="local",
        objective="energy",
        power=Power(idle_w=1.0, busy_w=2.0),
        clip_norm=1e-9,
        admit_every=1,
    )
