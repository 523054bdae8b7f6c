"""Rows of large models exist once they are used, and belong to one process."""

from __future__ import annotations

import os

import psutil
import pytest
import torch

from thrifty.pack.fused._row_state import _zeros


CPU = torch.device("cpu")
WIDTH = 2**23


@pytest.mark.parametrize("width", [3, WIDTH])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rows_are_zeros_that_can_be_written(width, dtype):
    rows = _zeros(2, width, dtype=dtype, device=CPU)
    assert rows.shape == (2, width)
    assert rows.dtype == dtype
    assert not rows[1].any()
    rows[0] = 1
    assert rows[0].all()
    assert not rows[1, -1]


def test_a_row_that_is_not_written_takes_no_memory():
    before = psutil.Process().memory_info().rss
    rows = _zeros(8, WIDTH, dtype=torch.float32, device=CPU)
    rows[0] = 1
    grown = psutil.Process().memory_info().rss - before
    assert grown < 3 * WIDTH * 4, "one of eight rows, and room for noise"


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("width", [3, WIDTH])
def test_a_process_that_user_code_forks_writes_to_rows_of_its_own(width):
    rows = _zeros(2, width, dtype=torch.float32, device=CPU)
    child = os.fork()
    if not child:
        rows[0, :3] = 1
        os._exit(0 if rows[0, 0] == 1 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert not rows[0, :3].any()
