from __future__ import annotations

import pytest
import torch

from tests.pack._drive import Trial
from tests.pack._toys import Dropping, Images
from thrifty.pack import FusedBackend
from thrifty.pack.backends import _fusion_policy as calibrating
from thrifty.pack.backends._fusion_policy import calibrate


pytestmark = pytest.mark.slow


def measured(task=None, **options):
    return calibrate(
        task or Dropping(),
        Trial(config={"lr": 0.05}, seed=1).member,
        device=torch.device("cpu"),
        structures={},
        channels_last=options.pop("channels_last", False),
        **options,
    )


@pytest.fixture
def timed(monkeypatch):
    """Replace measurements with given seconds by pack size, and record the sizes measured."""

    def patch(seconds):
        sizes = []

        def measure(task, member, size, **options):
            sizes.append(size)
            if isinstance(seconds[size], Exception):
                raise seconds[size]
            return seconds[size], 100.0 * size

        monkeypatch.setattr(calibrating, "_measure_fused", measure)
        return sizes

    return patch


def test_curves_of_a_trial_alone_and_of_packs():
    solo, fused = measured()
    assert (solo.backend, list(solo.step_s)) == ("solo", [1])
    assert (fused.backend, fused.variant) == ("fused", "")
    assert set(fused.step_s) <= {1, 4, 16, 32}
    assert 1 in fused.step_s
    assert set(fused.step_s) <= set(fused.memory_bytes)
    memory = [fused.memory_bytes[k] for k in sorted(fused.memory_bytes)]
    assert memory == sorted(set(memory))


def test_both_orders_of_images(monkeypatch):
    monkeypatch.setattr(calibrating, "SIZES", {"cpu": (1,)})
    curves = measured(Images(), channels_last=True)
    assert [(c.backend, c.variant, list(c.step_s)) for c in curves] == [
        ("solo", "", [1]),
        ("fused", "", [1]),
        ("fused", "channels last", [1]),
    ]


def test_sizes_beyond_the_best_are_left_out(timed):
    sizes = timed({1: 1e-3, 4: 2e-3, 16: 16e-3})
    _, fused = measured()
    assert sizes == [1, 4, 16]
    assert fused.step_s == {1: 1e-3, 4: 2e-3}
    assert fused.time(8) == pytest.approx(4e-3)


def test_no_larger_pack_is_tried_past_saturation(timed):
    sizes = timed({1: 1e-3, 4: 5e-3})
    _, fused = measured()
    assert sizes == [1, 4]
    assert fused.step_s == {1: 1e-3}


def test_a_pack_that_gains_almost_nothing_is_not_worth_it(timed):
    timed({1: 1e-3, 4: 3.95e-3, 16: 15.7e-3, 32: 31.3e-3})
    _, fused = measured()
    assert fused.step_s == {1: 1e-3}


@pytest.mark.parametrize(("seconds", "sizes"), [(4.1e-3, [1, 4]), (4.2e-3, [1])])
def test_a_pack_that_shares_its_checks_may_lose_almost_nothing(timed, seconds, sizes):
    timed({1: 1e-3, 4: seconds})
    _, fused = measured(shares_checks=True)
    assert list(fused.step_s) == sizes


@pytest.mark.parametrize(
    ("seconds", "wanted"),
    [
        ({1: 1.0, 4: 3.07, 16: 11.35}, [1, 4, 16]),  # 0.31 + 0.69 k: 0.69 < 0.9 * 3.07 / 4
        ({1: 1.0, 4: 3.10}, [1, 4]),  # 0.3 + 0.7 k: better still, but by too little
        ({1: 1.0, 4: 1.0, 16: 13.0}, [1, 4, 16]),  # 1 for each trial beyond 4
        ({1: 1.0, 4: 3.0, 16: 4.2, 32: 5.8}, [1, 4, 16, 32]),
    ],
)  # fmt: skip
def test_a_larger_pack_is_tried_if_the_line_through_the_two_largest_gives_hope(
    timed, seconds, wanted
):
    sizes = timed({k: 1e-3 * s for k, s in seconds.items()})
    measured()
    assert sizes == wanted


@pytest.mark.parametrize(
    ("factor", "wanted"), [(1.0, [4]), (0.98, [4]), (0.9, [4, 1, 16, 32])], ids=str
)
def test_the_other_order_of_images_is_tried_at_one_size_first(monkeypatch, factor, wanted):
    asked = []

    def measure(task, member, size, *, channels_last, **options):
        asked.append((channels_last, size))
        seconds = 1e-3 + 1e-5 * size  # a larger pack is always faster per trial
        return (factor if channels_last else 1.0) * seconds, 100.0 * size

    monkeypatch.setattr(calibrating, "_measure_fused", measure)
    monkeypatch.setattr(calibrating, "SIZES", {"cpu": (1, 4, 16, 32)})
    *_, last = measured(Images(), channels_last=True)
    assert [size for other, size in asked if not other] == [1, 4, 16, 32]
    assert [size for other, size in asked if other] == wanted
    assert last.variant == "channels last"


def test_no_larger_pack_is_tried_when_steps_are_long(timed):
    sizes = timed({1: 1.0, 4: 2.5})
    measured()
    assert sizes == [1, 4]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("no memory left"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=["cuda", "python", "cpu"],
)
def test_running_out_of_memory_ends_a_curve(timed, error):
    sizes = timed({1: 1e-3, 4: 2e-3, 16: error})
    _, fused = measured()
    assert sizes == [1, 4, 16]
    assert fused.step_s == {1: 1e-3, 4: 2e-3}


def test_without_memory_for_any_pack_there_is_no_curve(timed):
    timed({1: torch.OutOfMemoryError("no memory left")})
    assert [curve.backend for curve in measured()] == ["solo"]


def test_running_out_of_memory_in_a_step(monkeypatch):
    step = FusedBackend.one_step

    def crowded(self):
        if len(self._trials) > 4:
            raise torch.OutOfMemoryError("no memory left")
        step(self)

    monkeypatch.setattr(FusedBackend, "one_step", crowded)
    _, fused = measured()
    assert max(fused.step_s) <= 4


def test_other_errors_come_through(timed):
    timed({1: OSError("something else")})
    with pytest.raises(OSError, match="something else"):
        measured()


class Clock:
    """A clock that advances only while a step runs."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def steps(self, *seconds):
        for each in seconds:
            self.now += each
            yield


@pytest.mark.parametrize(
    ("steps", "wanted", "left"),
    [
        (
            (0.09, 0.05, 0.02, 0.01, 0.03, 0.5),
            0.01,
            1,
        ),  # short steps: two warm-up steps, three that count
        ((0.05, 0.2, 0.3, 0.2, 0.4, 0.5), 0.2, 1),
        ((0.5, 0.4, 0.3, 0.1), 0.3, 1),  # long steps: one warm-up step, two that count
    ],
)
def test_long_steps_are_measured_less_often(monkeypatch, steps, wanted, left):
    clock = Clock()
    monkeypatch.setattr(calibrating, "time", clock)
    rest = clock.steps(*steps)
    found = calibrating._seconds(rest, torch.device("cpu"))
    assert found == pytest.approx(wanted)
    assert len(list(rest)) == left


@pytest.mark.parametrize("keeps", [False, True])
def test_steps_that_keep_activations_are_not_timed(keeps):
    class Backend:
        """Knows whether it keeps activations once it has taken a step."""

        def __init__(self):
            self.steps = []
            self.keeps_activations = False

        def start(self, plans):
            (plan,) = {each.epoch for each in plans.values()}
            self._next = (plan, 0)
            return 4

        def one_step(self):
            self.steps.append(self._next)
            self._next = (self._next[0], self._next[1] + 1)
            self.keeps_activations = keeps

    backend = Backend()
    steps = calibrating._fused_steps(backend, 2, {"lr": 0.05})
    timed = []
    for _ in range(6):
        next(steps)
        timed.append(backend.steps[-1])
    again = [(0, 0), (0, 1)]
    assert timed == (3 * again if keeps else [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)])
    assert backend.steps == (again + timed if keeps else timed)
