from __future__ import annotations

import numpy as np
import pytest
import torch

from thrifty.core import CheckpointError
from thrifty.pack import State
from thrifty.run import state_from_arrays, state_to_arrays
from thrifty.run._running_chain import StateFiles
from thrifty.store import CheckpointFolder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool])
def test_what_is_taken_apart_is_put_together(dtype):
    state = State(tensors={"w": torch.ones(3).to(dtype)}, tree={"tensor": "w"})
    again = state_from_arrays(*state_to_arrays(state))
    assert again.tree == state.tree
    assert again.tensors["w"].dtype == dtype
    assert torch.equal(again.tensors["w"].float(), torch.ones(3))


@pytest.mark.parametrize(
    "meta",
    [
        {},
        [],
        {"dtypes": []},
        {"dtypes": {}},
        {"tree": 1, "dtypes": {"w": "load"}},
        {"tree": 1, "dtypes": {"w": "nothing"}},
        {"tree": 1, "dtypes": {"w": 5}},
        {"tree": 1, "dtypes": {"w": "complex128"}},
    ],
)
def test_what_is_no_state_is_a_lost_checkpoint(meta):
    with pytest.raises(CheckpointError, match="not the state of a trial"):
        state_from_arrays({"w": np.ones(3, np.uint8)}, meta)


def test_a_file_that_holds_no_state_is_named(tmp_path):
    files = StateFiles(str(tmp_path), folder="plan", name="worker")
    ref = CheckpointFolder(str(tmp_path)).write(
        "plan", node=0, epoch=1, tensors={"w": np.ones(3, np.uint8)}, meta={"dtypes": {}}
    )
    with pytest.raises(CheckpointError, match=f"{ref.path}: this is not the state of a trial"):
        files.read(ref)
    files.close()
