from __future__ import annotations

from torch import nn

from thrifty.pack.fused._signature import signature


def test_hooks_of_loading_and_saving_do_not_count():
    plain, hooked = nn.Linear(2, 3), nn.Linear(2, 3)
    hooked.register_load_state_dict_pre_hook(lambda *_: None)
    hooked.register_state_dict_post_hook(lambda *_: None)
    assert signature(plain, attributes={}) == signature(hooked, attributes={})
