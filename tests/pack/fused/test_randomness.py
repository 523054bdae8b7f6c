from __future__ import annotations

import copy
import pickle

import pytest

from thrifty.pack.fused._randomness import TrialValue


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))]
)
def test_a_value_of_a_trial_can_be_copied(copied):
    out = copied(TrialValue(0.3, "body.dropout"))
    assert type(out) is TrialValue
    assert (out, out.path) == (0.3, "body.dropout")
