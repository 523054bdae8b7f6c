"""Specifications of optimizers: values, parameter groups and errors."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn

import thrifty as th
from thrifty.core import TaskError
from thrifty.pack import SGD, AdamW, Optimizer, times


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
        self.head = nn.Linear(4, 2)


NAMES = [
    "backbone.0.weight",
    "backbone.0.bias",
    "backbone.1.weight",
    "backbone.1.bias",
    "head.weight",
    "head.bias",
]
GROUPS = {"*.bias": {"weight_decay": 0.0}, "backbone.*": {"lr": times("lr", 0.1)}}
SPEC = AdamW(lr="lr", weight_decay="wd", groups=GROUPS)
VALUES = {"lr": 0.5, "wd": 0.25}


def is_vector(parameter):
    return parameter.ndim < 2


def built(spec, values=VALUES):
    net = Net()
    name_of = {id(p): name for name, p in net.named_parameters()}
    groups = spec.build(net.named_parameters(), values).param_groups
    return [([name_of[id(p)] for p in group["params"]], group) for group in groups]


# -- times -----------------------------------------------------------------------------------


def test_times_is_a_frozen_value():
    assert times("lr", 0.1) == times("lr", 0.1) != times("lr", 0.2)
    assert len({times("lr", 0.1), times("lr", 0.1)}) == 1
    assert repr(times("lr", 0.1)) == "times('lr', 0.1)"
    assert vars(times("lr", 0.1)) == {"value": "lr", "factor": 0.1}
    assert th.times is times


def test_times_stands_anywhere_in_an_option():
    spec = Optimizer(
        torch.optim.Adam,
        lr=times("lr", "scale"),
        betas=(times("beta", 0.5), 0.999),
        eps=times(2, 4),
        clip_norm=times("lr", 10),
    )
    values = {"lr": 0.5, "scale": 0.25, "beta": 0.5}
    assert spec.names() == {"lr", "scale", "beta"}
    assert spec.resolve(values) == {"lr": 0.125, "betas": (0.25, 0.999), "eps": 8}
    assert spec.clipping(values).norm == 5.0


@pytest.mark.parametrize("bad", [None, True, [1.0], ("lr",)])
def test_times_takes_numbers_and_names(bad):
    with pytest.raises(TaskError, match="must be a number or the name of a hyper-parameter"):
        times("lr", bad)


@pytest.mark.parametrize("option", ["lr", "weight_decay"])
def test_a_text_is_no_rate(option):
    said = rf"hyper-parameter 'x' \({option}='x'\), whose value is the text '0.1'; give it numbers"
    with pytest.raises(TaskError, match=said):
        Optimizer(torch.optim.SGD, **{"lr": 0.1, option: "x"}).resolve({"x": "0.1"})


def test_a_product_of_something_that_is_no_number():
    with pytest.raises(TaskError, match="'kind' is 'sgd'; only numbers can be multiplied"):
        SGD(lr=times("kind", 2)).resolve({"kind": "sgd"})


# -- parameter groups ------------------------------------------------------------------------


def test_a_parameter_gets_the_options_of_all_groups_that_match():
    found = [(names, g["lr"], g["weight_decay"]) for names, g in built(SPEC)]
    assert found == [
        (["backbone.0.weight", "backbone.1.weight"], 0.05, 0.25),
        (["backbone.0.bias", "backbone.1.bias"], 0.05, 0.0),
        (["head.weight"], 0.5, 0.25),
        (["head.bias"], 0.5, 0.0),
    ]


def test_a_later_group_wins_for_each_option():
    groups = {"*": {"lr": 1.0, "weight_decay": 1.0}, "head.*": {"lr": 2.0}}
    found = [(g["lr"], g["weight_decay"]) for _, g in built(AdamW(lr="lr", groups=groups))]
    assert found == [(1.0, 1.0), (2.0, 1.0)]


def test_parameters_with_equal_options_are_one_group():
    groups = {"*.bias": {"lr": 1.0}, "*.1.weight": {"lr": 1.0}, "head.weight": {"lr": "lr"}}
    found = [names for names, _ in built(SGD(lr="lr", groups=groups))]
    assert found == [["backbone.0.weight", "head.weight"], [*NAMES[1:4], "head.bias"]]


def test_a_key_may_be_a_function_of_the_parameter():
    spec = AdamW(lr="lr", weight_decay="wd", groups={is_vector: {"weight_decay": 0.0}})
    vectors = [*NAMES[1:4], "head.bias"]
    assert [n for n, g in built(spec) if not g["weight_decay"]] == [vectors]


def test_a_function_may_match_nothing():
    spec = SGD(lr="lr", groups={lambda p: p.ndim > 7: {"lr": 0.0}})
    assert [names for names, _ in built(spec)] == [NAMES]


def test_a_pattern_that_matches_nothing():
    spec = SGD(lr="lr", groups={"backbnoe.*": {"lr": 0.0}})
    with pytest.raises(TaskError, match=r"'backbnoe\.\*'.*backbone\.0\.weight, backbone\.0\.bias"):
        built(spec)


def test_groups_need_names():
    with pytest.raises(TaskError, match=r"model\.named_parameters"):
        SPEC.build(Net().parameters(), VALUES)


def test_without_groups_names_may_be_left_out():
    net = Net()
    for parameters in (net.parameters(), net.named_parameters()):
        (group,) = SGD(lr="lr").build(parameters, VALUES).param_groups
        assert group["params"] == list(net.parameters())


def test_names_of_all_groups_are_followed():
    groups = {"*.bias": {"weight_decay": "bias_wd"}, "head.*": {"lr": times("head", 0.1)}}
    spec = AdamW(lr="lr", clip_norm="clip", groups=groups)
    assert spec.names() == {"lr", "clip", "bias_wd", "head"}


def test_a_group_with_an_unknown_hyper_parameter():
    with pytest.raises(TaskError, match="follows hyper-parameter 'bias_wd'"):
        built(AdamW(lr="lr", groups={"*.bias": {"weight_decay": "bias_wd"}}))


def test_a_factory_may_take_groups():
    def make(parameters, *, lr, decay):
        return torch.optim.SGD(parameters, lr=lr, weight_decay=decay)

    spec = Optimizer(make, lr="lr", decay=0.5, groups={"*.bias": {"weight_decay": 0.0}})
    assert [(g["lr"], g["weight_decay"]) for _, g in built(spec)] == [(0.5, 0.5), (0.5, 0.0)]


# -- refused specifications ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weigth_decay": 0.1}, "AdamW has no option 'weigth_decay'.*weight_decay"),
        ({"groups": {"*": {"weigth_decay": 0.1}}}, "AdamW has no option 'weigth_decay'"),
        ({"groups": {"*": {"params": []}}}, "the key of the group says which"),
        ({"groups": {"*": {"clip_norm": 1.0}}}, "for all parameters together"),
        ({"groups": {3: {"lr": 0.1}}}, "a key must be a pattern"),
        ({"groups": {lambda name, p: True: {"lr": 0.1}}}, "a function of one parameter"),
    ],
)
def test_what_is_refused_at_once(options, message):
    with pytest.raises(TaskError, match=message):
        AdamW(lr="lr", **options)


def test_an_unknown_option_of_a_partial_class():
    with pytest.raises(TaskError, match="no option 'lrr'"):
        Optimizer(partial(torch.optim.SGD, nesterov=False), lrr="lr")


def test_an_unknown_option_of_a_group_of_a_factory():
    def make(parameters, *, lr):
        return torch.optim.SGD(parameters, lr=lr)

    with pytest.raises(TaskError, match="make has no option 'weigth_decay'"):
        built(Optimizer(make, lr="lr", groups={"*.bias": {"weigth_decay": 0.0}}))


class Loose(torch.optim.SGD):
    def __init__(self, params, **options):
        super().__init__(params, **options)


def test_a_class_that_takes_anything_tells_when_it_is_built():
    spec = Optimizer(Loose, lr="lr", groups={"*.bias": {"anything": 0.0}})
    with pytest.raises(TaskError, match="Loose has no option 'anything'"):
        built(spec)


# -- as data ---------------------------------------------------------------------------------


def test_a_specification_cannot_be_changed():
    with pytest.raises(AttributeError, match=r"cannot be changed.*clip_norm=1\.0"):
        SPEC.clip_norm = 1.0
    with pytest.raises(AttributeError, match="cannot be changed"):
        del SPEC.options


def test_a_specification_shows_all_that_it_is():
    spec = SGD(lr="lr", clip_norm=1.0, groups={"*.bias": {"lr": 0}, is_vector: {"lr": 1}})
    assert repr(spec) == (
        "Optimizer(SGD, lr='lr', momentum=0.0, clip_norm=1.0, "
        "groups={'*.bias': {'lr': 0}, is_vector: {'lr': 1}})"
    )
    # This is part of a task's identity: an address would change it in each process.
    assert "0x" not in repr(Optimizer(partial(is_vector, p=3), groups={lambda p: True: {"lr": 1}}))


def test_a_specification_is_plain_data():
    assert vars(SGD(lr="lr", groups=GROUPS)) == {
        "factory": torch.optim.SGD,
        "clip_norm": None,
        "options": {"lr": "lr", "momentum": 0.0},
        "groups": tuple(GROUPS.items()),
    }


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))]
)
def test_a_specification_can_be_copied(copied):
    assert vars(copied(SPEC)) == vars(SPEC)
