"""Whether fusing pays, by measuring a trial or a similar one, and again when trials leave."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.devices import here
from tests.pack._drive import Trial, alone, assert_same, together
from tests.pack._toys import Dropping, Toy
from tests.pack.test_auto import blocks, fused_slots, is_fused
from thrifty.pack import SGD, AutoBackend, _backend
from thrifty.pack.backends._fusion_policy import max_padding
from thrifty.perf import PackCurve


pytestmark = [
    pytest.mark.usefixtures("free_checks"),
    pytest.mark.slow,
    pytest.mark.usefixtures("device"),
]


class Kin(Toy):
    """Trials of about the same cost, with other activations, kinds of optimizer and batch sizes."""

    optimizer = SGD(lr="lr", momentum="momentum")
    batch_size = "size"  # type: ignore[assignment]

    def network(self, hp):
        activation = nn.ReLU if hp.get("relu", False) else nn.Tanh
        width = hp.get("width", 8)
        return nn.Sequential(nn.Linear(6, width), activation(), nn.Linear(width, 1))


def kin(**changes):
    return Trial(config={"lr": 0.05, "momentum": 0.9, "size": 8, **changes})


RELATIVES = {"activation": {"relu": True}, "optimizer": {"momentum": 0.0}, "batch": {"size": 9}}
STRANGERS = {"width": {"width": 64}, "batch": {"size": 16}}

by_relative = pytest.mark.parametrize("changes", RELATIVES.values(), ids=RELATIVES)


# -- similar trials ------------------------------------------------------------------------


@by_relative
@pytest.mark.parametrize(("fused_s", "fuses"), [(0.5, True), (0.86, True), (1.15, False)])
def test_a_clear_measurement_is_believed_of_relatives(measure, changes, fused_s, fuses):
    measuring = measure({1: fused_s})
    backend = AutoBackend(Kin(), device=here())
    assert fused_slots(backend, [kin(), kin(**changes)]) == ([0, 1] if fuses else [])
    assert len(measuring.calls) == 1


@pytest.mark.parametrize("changes", [{"relu": True}, {"momentum": 0.0}])
@pytest.mark.parametrize("fused_s", [0.88, 0.99, 1.01, 1.14])
def test_a_close_measurement_is_made_again_for_relatives(measure, changes, fused_s):
    measuring = measure({1: fused_s})
    fused_slots(AutoBackend(Kin(), device=here()), [kin(), kin(**changes)])
    assert [call[0].values for call in measuring.calls] == [
        kin().member.values,
        kin(**changes).member.values,
    ]


@pytest.mark.parametrize("changes", STRANGERS.values(), ids=STRANGERS)
def test_a_measurement_is_not_believed_of_strangers(measure, changes):
    measuring = measure({1: 0.1})
    fused_slots(AutoBackend(Kin(), device=here()), [kin(), kin(**changes)])
    assert len(measuring.calls) == 2


def test_relatives_are_fused_as_was_best_for_the_one_that_was_measured(measure):
    measure({1: 0.5, 2: 0.6})
    backend = AutoBackend(Kin(), device=here())
    fused_slots(backend, [kin(), *[kin(relu=True)] * 3])
    assert sorted(blocks(backend)) == [1, 1, 2]


@by_relative
def test_relatives_are_what_they_are_alone(measure, changes):
    measure({1: 0.5, 4: 1.0})
    trials = [kin(), kin(**changes), kin()]
    found = together(AutoBackend(Kin(), device=here()), trials)
    assert_same(found, alone(Kin(), trials), tolerance=1e-5)


# -- trials that leave ---------------------------------------------------------------------


class Watched(AutoBackend):
    """An automatic back-end that records which slots are fused at each step."""

    def __init__(self, task):
        super().__init__(task, device=here())
        self.seen = []

    def step(self, plans):
        outcomes = super().step(plans)
        self.seen.append([slot for slot in sorted(self._where) if is_fused(self, slot)])
        return outcomes


LEAVING = [Trial(config={"lr": 0.05}, seed=k, epochs=e) for k, e in enumerate([2, 2, 6])]


@pytest.mark.parametrize(("alone_s", "stays"), [(1.02, True), (1.04, False), (1.5, False)], ids=str)
def test_a_trial_without_company_goes_back_if_that_is_clearly_quicker(measure, alone_s, stays):
    measure({1: alone_s, 4: 1.6})
    backend = Watched(Dropping())
    found = together(backend, LEAVING)
    assert backend.seen[:2] == [[0, 1, 2]] * 2
    assert backend.seen[2:] == [[2] if stays else []] * 4
    assert_same(found, alone(Dropping(), LEAVING), tolerance=1e-5)


def test_a_trial_goes_back_when_nobody_comes_for_those_who_left(measure):
    measure({1: 1.5, 4: 1.6})
    backend = Watched(Dropping())
    trials = [*LEAVING, *LEAVING[:1]]
    found = together(backend, trials, at_once=3)
    assert [len(slots) for slots in backend.seen] == [3, 3, 2, 2, 0, 0]
    assert_same(found, alone(Dropping(), trials), tolerance=1e-5)


# -- padding -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step_s", "wanted"),
    [
        ({1: 1.0}, 1.0),  # fusing more trials gains nothing
        ({1: 1.0, 4: 4.0}, 1.0),
        ({1: 1.0, 4: 5.0}, 1.0),
        ({1: 5.0, 4: 17.0}, 8 / 7),  # 1 + 4 k: zeros of 1/8 cost 0.5, half of the saved 1
        ({1: 2.0, 4: 5.0}, 1.5),  # 1 + k: zeros of 1/2 would pay, but 1/3 is the limit
        ({1: 5.0, 4: 5.0}, 1.5),
        ({1: 5.0, 4: 4.0}, 1.5),
    ],
)  # fmt: skip
def test_how_much_may_be_padded(step_s, wanted):
    found = max_padding(PackCurve(backend="fused", step_s=step_s))
    assert found == pytest.approx(wanted)


@pytest.mark.parametrize(("size", "held"), [(9, [2]), (10, [1, 1])])
def test_blocks_pad_as_much_as_was_found_to_pay(measure, size, held):
    measure({1: 0.5, 4: 1.7})
    backend = AutoBackend(Kin(), device=here())
    assert fused_slots(backend, [kin(), kin(size=size)]) == [0, 1]
    assert blocks(backend) == held


def test_the_name_of_a_processor_is_its_model(monkeypatch):
    """Measurements of one processor are not those of another one."""
    _backend._processor_name.cache_clear()
    text = "processor\t: 0\nmodel name\t: Fast One 9000\nflags\t: a b\nmodel name\t: other\n"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: text)
    assert _backend.device_name(torch.device("cpu")) == "Fast One 9000"
    _backend._processor_name.cache_clear()
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: missing())
    monkeypatch.setattr(_backend.platform, "processor", lambda: "")
    monkeypatch.setattr(_backend.platform, "machine", lambda: "arm64")
    assert _backend.device_name(torch.device("cpu")) == "arm64"
    _backend._processor_name.cache_clear()


def missing():
    raise FileNotFoundError("/proc/cpuinfo")
