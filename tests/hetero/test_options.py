"""Invalid options are refused at once."""

from __future__ import annotations

import pytest

from thrifty.core import HeteroError
from thrifty.hetero import HeteroOptions, Power


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_norm": "sync"}, "must be 'global' or 'local', got 'sync'"),
        ({"objective": "speed"}, "must be 'throughput' or 'energy', got 'speed'"),
        ({"objective": "energy"}, r"objective='energy' needs power=Power\("),
        ({"clip_norm": 0.0}, "`clip_norm` must be positive, got 0.0"),
        ({"clip_norm": -1.0}, "`clip_norm` must be positive, got -1.0"),
        ({"micro_batch": 0}, "`micro_batch` must be at least 1, got 0"),
        ({"bucket_cap_mb": 0.0}, "`bucket_cap_mb` must be positive, got 0.0"),
        ({"admit_every": 0}, "`admit_every` must be at least 1, got 0"),
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
