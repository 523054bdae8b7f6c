"""One setup for training on several devices, and many of them as arrays."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from tests.perf._draw import drawn
from thrifty.core import UsageError
from thrifty.perf.steptime import Setup
from thrifty.perf.steptime._model import Columns

from . import _draw


@pytest.mark.parametrize("placement", [(), (0,), (4, 0), (2, -1)])
def test_a_machine_without_devices(placement):
    with pytest.raises(UsageError, match="each machine of a placement must have 1 device or more"):
        Setup(placement=placement, batch=8)


@pytest.mark.parametrize("batch", [0, -1, math.inf, math.nan])
def test_a_batch_that_is_none(batch):
    with pytest.raises(UsageError, match="a batch must be positive"):
        Setup(placement=(1,), batch=batch)


@drawn
@given(st.lists(_draw.setups, max_size=6))
def test_columns_are_what_setups_say(setups):
    columns = Columns.of(setups)
    rows = zip(
        columns.batch,
        columns.nodes,
        columns.devices,
        columns.most,
        columns.least,
        columns.apart,
        columns.together,
        strict=True,
    )
    for setup, row in zip(setups, rows, strict=True):
        ordered = sorted(setup.placement)
        num = sum(1 for each in ordered for _ in range(each))
        several = len(ordered) > 1
        assert row == (
            setup.batch,
            len(ordered),
            num,
            ordered[-1],
            ordered[0],
            several,
            not several and num > 1,
        )
        assert setup.num_devices == num
