"""The fine-tuning bench: trials of a pack equal peft's own, and other records are found."""

from __future__ import annotations

import argparse
from copy import deepcopy

import pytest

from bench.finetune.runs import equality
from bench.finetune.setting import Setting, configurations
from bench.finetune.studies import same


@pytest.mark.slow
def test_trials_of_a_pack_equal_those_of_peft():
    tiny = Setting(hidden=64, layers=1, vocabulary=16, length=4, steps=2, double=True)
    found = equality(tiny, argparse.Namespace(trials=5, at_once=8, moved=1))
    assert max(found["greatest"]) <= 1e-10
    assert all(moved > 0 for (moved,) in found["moved"])


def test_configurations_have_each_rank_and_rate_once_and_both_sets_of_layers():
    for name in ("rank", "lr"):
        pairs = {(each[name], each["targets"]) for each in configurations()}
        assert len(pairs) == 8, name


RECORDS = {
    "state": "done",
    "trials": 2,
    "stages": [[0, -1, 0], [1, 0, 2]],
    "epochs": [[0, 0, {"loss": 1.0}], [1, 2, {"loss": 0.5}]],
}


def test_rounding_is_no_other_record():
    other = deepcopy(RECORDS)
    other["epochs"][1][2]["loss"] += 1e-6
    assert same(other, RECORDS)


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r["epochs"].pop(),
        lambda r: r["epochs"][0][2].update(loss=1.01),
        lambda r: r["epochs"][0][2].update(accuracy=1.0),
        lambda r: r["stages"].append([2, 0, 2]),
        lambda r: r.update(trials=3),
    ],
)
def test_other_records_are_found(change):
    other = deepcopy(RECORDS)
    change(other)
    assert not same(other, RECORDS)
