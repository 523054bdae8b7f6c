from __future__ import annotations

import pytest
import torch
from torch import nn

from thrifty.pack.fused import UnfusableError
from thrifty.pack.fused._fusable import check_memory, signature


def test_hooks_of_loading_and_saving_do_not_count():
    plain, hooked = nn.Linear(2, 3), nn.Linear(2, 3)
    hooked.register_load_state_dict_pre_hook(lambda *_: None)
    hooked.register_state_dict_post_hook(lambda *_: None)
    assert signature(plain, attributes={}) == signature(hooked, attributes={})


def test_sparse_tensors_cannot_become_rows():
    model = nn.Linear(2, 3)
    model.register_buffer("matrix", torch.eye(2).to_sparse())
    with pytest.raises(UnfusableError, match="one of its parameters or buffers is sparse"):
        check_memory([model])
