"""Energy in joules by a model, or by counters as Zeus reads them."""

from __future__ import annotations

import sys
import warnings
from types import ModuleType, SimpleNamespace

import pytest
import torch

from thrifty.core import HeteroError, MissingExtraError
from thrifty.hetero import Power, PowerMeter, ZeusMeter


class Monitor:
    """A stand-in for ``ZeusMonitor``, which has one open window for each name."""

    def __init__(self, *windows):
        self.windows = list(windows)
        self.open = set()

    def begin_window(self, key):
        assert key not in self.open
        self.open.add(key)

    def end_window(self, key):
        self.open.remove(key)
        return self.windows.pop(0)


def window(gpu=None, cpu=None, dram=None):
    return SimpleNamespace(gpu_energy=gpu or {}, cpu_energy=cpu, dram_energy=dram)


def test_a_model_counts_work_and_waiting():
    meter = PowerMeter(Power(idle_w=2.0, busy_w=5.0))
    assert meter.joules(busy_s=3.0, whole_s=7.0) == 3 * 5 + 4 * 2
    assert meter.joules(busy_s=1.0, whole_s=1.0) == 5.0
    assert meter.source == "modelled"


def test_counters_of_all_parts_are_added():
    monitor = Monitor(window({0: 10.0, 1: 20.0}, {0: 4.0}, {0: 1.5}))
    meter = ZeusMeter(gpus=[0, 1], cpus=[0], monitor=monitor)
    assert meter.joules(busy_s=1.0, whole_s=2.0) == 35.5


def test_counters_that_are_not_there_count_nothing():
    monitor = Monitor(window({0: 10.0}), window(), window(None, {0: 3.0, 1: 4.0}))
    meter = ZeusMeter(gpus=[0], monitor=monitor)
    joules = [meter.joules(busy_s=1.0, whole_s=1.0) for _ in range(3)]
    assert joules == [10.0, 0.0, 7.0]
    assert all(type(each) is float for each in joules)


def test_windows_follow_each_other():
    """Windows leave no gap: energy spent between two calls counts in the second one."""
    monitor = Monitor(window({0: 1.0}), window({0: 2.0}))
    meter = ZeusMeter(gpus=[0], monitor=monitor)
    assert len(monitor.open) == 1
    for joules in (1.0, 2.0):
        assert meter.joules(busy_s=1.0, whole_s=1.0) == joules
        assert len(monitor.open) == 1


@pytest.mark.parametrize(
    ("parts", "source"),
    [({"gpus": [0]}, "NVML"), ({"cpus": [0]}, "RAPL"), ({"gpus": [1], "cpus": [0]}, "NVML+RAPL")],
)
def test_counters_are_named(parts, source):
    assert ZeusMeter(monitor=Monitor(), **parts).source == source


@pytest.mark.parametrize("parts", [{}, {"gpus": []}, {"gpus": [], "cpus": []}])
def test_something_has_to_be_counted(parts):
    with pytest.raises(HeteroError, match="name the GPUs or the CPU packages"):
        ZeusMeter(monitor=Monitor(), **parts)


def zeus(monkeypatch, make):
    """Install a stand-in for the zeus package."""
    package, module = ModuleType("zeus"), ModuleType("zeus.monitor")
    module.ZeusMonitor = make
    monkeypatch.setitem(sys.modules, "zeus", package)
    monkeypatch.setitem(sys.modules, "zeus.monitor", module)


def test_a_monitor_of_the_named_parts_is_made(monkeypatch):
    made = []

    def make(**options):
        made.append(options)
        return Monitor(window({2: 6.0}))

    zeus(monkeypatch, make)
    assert ZeusMeter(gpus=[2]).joules(busy_s=1.0, whole_s=1.0) == 6.0
    assert made[0]["gpu_indices"] == [2]
    assert made[0]["cpu_indices"] == []


def test_counters_that_cannot_be_read_are_said(monkeypatch):
    def make(**options):
        raise PermissionError("/sys/class/powercap")

    zeus(monkeypatch, make)
    with pytest.raises(
        HeteroError, match=r"CPUs \[0\] cannot be read \(/sys/class/powercap\).*PowerMeter"
    ):
        ZeusMeter(cpus=[0])


def test_without_zeus_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "zeus", None)
    monkeypatch.delitem(sys.modules, "zeus.monitor", raising=False)
    with pytest.raises(MissingExtraError, match=r"zeus is not installed.*\.\[energy\]"):
        ZeusMeter(gpus=[0])


def test_a_counter_that_stands_still_is_not_estimated(monkeypatch):
    """A GPU's counter is updated every 20 to 100 ms; estimates between would count twice."""
    made = []

    def make(**options):
        made.append(options["approx_instant_energy"])
        return Monitor()

    zeus(monkeypatch, make)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: [(9, 0), (6, 1)][gpu])
    ZeusMeter(gpus=[0])
    ZeusMeter(gpus=[0, 1])  # a GPU without a counter: Zeus polls its watts
    assert made == [False, True]


def test_a_window_without_an_update_is_no_warning():
    class Still(Monitor):
        def end_window(self, key):
            warnings.warn("The energy consumption of one or more GPUs was zero", stacklevel=1)
            return super().end_window(key)

    meter = ZeusMeter(gpus=[0], monitor=Still(window({0: 0.0})))
    assert meter.joules(busy_s=0.01, whole_s=0.01) == 0.0


class WithoutRapl(Monitor):
    """Zeus 0.16 where RAPL cannot be read: the first window fails, not the constructor."""

    def __init__(self, *, cpu_indices, **options):
        super().__init__(window({0: 5.0}))
        self.cpus = cpu_indices

    def begin_window(self, key):
        if self.cpus:
            raise ValueError("No CPUs available.")
        super().begin_window(key)


def test_without_rapl_gpus_are_counted(monkeypatch, caplog):
    zeus(monkeypatch, WithoutRapl)
    with caplog.at_level("WARNING", logger="thrifty.hetero"):
        meter = ZeusMeter(gpus=[0], cpus=[0, 1])
    assert meter.source == "NVML"
    assert meter.joules(busy_s=1.0, whole_s=1.0) == 5.0
    assert "the energy of CPUs [0, 1] is not counted: No CPUs available." in caplog.text


def test_without_rapl_a_cpu_alone_is_an_error(monkeypatch):
    zeus(monkeypatch, WithoutRapl)
    with pytest.raises(HeteroError, match=r"GPUs \[\] and CPUs \[0\] cannot be read \(No CPUs"):
        ZeusMeter(cpus=[0])
