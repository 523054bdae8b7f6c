"""Energy in joules by a model, or by counters as Zeus reads them."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given, strategies as st

from thrifty.core import HeteroError, MissingExtraError
from thrifty.hetero import Power, PowerMeter, ZeusMeter


RANGE_MJ = 262_143_328.85
"""Where RAPL's counter of a package wraps around."""


class Machine:
    """A stand-in for the zeus package on a machine whose counters move as a test says.

    Numbers are millijoules, as Zeus reads them.
    """

    def __init__(self, *, gpus=(), cpus=(), dram=(), old_gpus=()):
        self.gpus = dict(gpus)
        self.cpus = dict(cpus)
        self.dram = dict(dram)
        self.old = dict(old_gpus)
        self.made = []

    def install(self, monkeypatch):
        package, device = ModuleType("zeus"), ModuleType("zeus.device")
        monitor = ModuleType("zeus.monitor")
        device.get_gpus = self.get_gpus
        device.get_cpus = self.get_cpus
        monitor.ZeusMonitor = self.monitor
        monkeypatch.setitem(sys.modules, "zeus", package)
        monkeypatch.setitem(sys.modules, "zeus.device", device)
        monkeypatch.setitem(sys.modules, "zeus.monitor", monitor)
        return self

    def get_gpus(self):
        if not {**self.gpus, **self.old}:
            raise RuntimeError("NVML and AMDSMI unavailable.")
        return SimpleNamespace(
            supports_get_total_energy_consumption=lambda gpu: gpu not in self.old,
            get_total_energy_consumption=lambda gpu: self.gpus[gpu],
        )

    def get_cpus(self):
        if not self.cpus:
            raise RuntimeError("RAPL unavailable.")
        return SimpleNamespace(
            get_total_energy_consumption=lambda cpu: SimpleNamespace(
                cpu_mj=self.cpus[cpu], dram_mj=self.dram.get(cpu)
            )
        )

    def monitor(self, **options):
        self.made.append(options)
        return Monitor(self.old)


class Monitor:
    """A stand-in for ``ZeusMonitor``, which has one open window for each name."""

    def __init__(self, spent_j):
        self.spent_j = spent_j
        self.open = set()

    def begin_window(self, key):
        assert key not in self.open
        self.open.add(key)

    def end_window(self, key):
        self.open.remove(key)
        return SimpleNamespace(gpu_energy=dict(self.spent_j))


def read(meter):
    joules = meter.joules(busy_s=1.0, whole_s=1.0)
    assert type(joules) is float
    return joules


def test_a_model_counts_work_and_waiting():
    meter = PowerMeter(Power(idle_w=2.0, busy_w=5.0))
    assert meter.joules(busy_s=3.0, whole_s=7.0) == 3 * 5 + 4 * 2
    assert meter.joules(busy_s=1.0, whole_s=1.0) == 5.0
    assert meter.source == "modelled"


def test_counters_of_all_parts_are_added(monkeypatch):
    machine = Machine(gpus={0: 500, 1: 7000}, cpus={0: 100.0}, dram={0: 50.0}).install(monkeypatch)
    meter = ZeusMeter(gpus=[0, 1], cpus=[0])
    assert read(meter) == 0.0
    machine.gpus = {0: 10_500, 1: 27_000}
    machine.cpus, machine.dram = {0: 4100.0}, {0: 1550.0}
    assert read(meter) == 35.5
    assert read(meter) == 0.0


def test_only_named_parts_are_counted(monkeypatch):
    machine = Machine(gpus={0: 0, 1: 0}, cpus={0: 0.0, 1: 0.0}).install(monkeypatch)
    meter = ZeusMeter(gpus=[1], cpus=[0])
    machine.gpus = {0: 9000, 1: 1000}
    machine.cpus = {0: 500.0, 1: 9000.0}
    assert read(meter) == 1.5


@given(
    updates=st.lists(st.integers(0, 400_000), min_size=1, max_size=60),
    reads=st.sets(st.integers(0, 60)),
    begin=st.integers(0, 10**9),
)
def test_readings_add_up_to_what_the_counter_moved(updates, reads, begin):
    """Each joule is counted once, at whatever moments the meter is read."""
    machine = Machine(gpus={0: begin})
    with pytest.MonkeyPatch.context() as monkeypatch:
        machine.install(monkeypatch)
        meter = ZeusMeter(gpus=[0])
        told = 0.0
        for at, more in enumerate(updates):
            machine.gpus[0] += more
            if at in reads:
                told += read(meter)
        told += read(meter)
    assert told == pytest.approx((machine.gpus[0] - begin) / 1000, abs=1e-6)


@given(
    steps=st.lists(st.tuples(st.floats(0, RANGE_MJ / 4), st.booleans()), min_size=1, max_size=40),
    begin=st.floats(0, RANGE_MJ, exclude_max=True),
)
def test_a_counter_that_wraps_around_loses_nothing(steps, begin):
    """Zeus adds the range of a counter that has wrapped around, but not at once."""
    whole, noticed = begin, 0
    machine = Machine(cpus={0: begin})
    with pytest.MonkeyPatch.context() as monkeypatch:
        machine.install(monkeypatch)
        meter = ZeusMeter(cpus=[0])
        readings = []
        for more, notices in steps:
            whole += more
            wraps, raw = divmod(whole, RANGE_MJ)
            if notices:
                noticed = wraps
            machine.cpus[0] = raw + noticed * RANGE_MJ
            readings.append(read(meter))
        machine.cpus[0] = whole
        readings.append(read(meter))
    assert min(readings) >= 0.0
    assert sum(readings) == pytest.approx((whole - begin) / 1000, rel=1e-9, abs=1e-3)


@pytest.mark.parametrize(
    ("parts", "source"),
    [({"gpus": [0]}, "NVML"), ({"cpus": [0]}, "RAPL"), ({"gpus": [1], "cpus": [0]}, "NVML+RAPL")],
)
def test_counters_are_named(monkeypatch, parts, source):
    Machine(gpus={0: 0, 1: 0}, cpus={0: 0.0}).install(monkeypatch)
    assert ZeusMeter(**parts).source == source


@pytest.mark.parametrize("parts", [{}, {"gpus": []}, {"gpus": [], "cpus": []}])
def test_something_has_to_be_counted(parts):
    with pytest.raises(HeteroError, match="name the GPUs or the CPU packages"):
        ZeusMeter(**parts)


def test_counters_that_cannot_be_read_are_said(monkeypatch):
    Machine(gpus={0: 0}).install(monkeypatch)
    with pytest.raises(
        HeteroError, match=r"CPUs \[0\] cannot be read \(RAPL unavailable.*PowerMeter"
    ):
        ZeusMeter(cpus=[0])


def test_without_zeus_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "zeus", None)
    monkeypatch.delitem(sys.modules, "zeus.device", raising=False)
    with pytest.raises(MissingExtraError, match=r"zeus is not installed.*\.\[energy\]"):
        ZeusMeter(gpus=[0], cpus=[0])


def test_watts_are_polled_only_without_a_counter(monkeypatch):
    """Zeus estimates short windows of a GPU before Volta. Beside a counter, that counts twice."""
    machine = Machine(gpus={0: 0}, old_gpus={1: 6.0}).install(monkeypatch)
    ZeusMeter(gpus=[0])
    assert machine.made == []
    meter = ZeusMeter(gpus=[0, 1])
    assert machine.made == [{"gpu_indices": [1], "cpu_indices": [], "approx_instant_energy": True}]
    machine.gpus[0] = 500
    assert read(meter) == 6.5
    assert read(meter) == 6.0


def test_without_rapl_gpus_are_counted(monkeypatch, caplog):
    machine = Machine(gpus={0: 0}).install(monkeypatch)
    with caplog.at_level("WARNING", logger="thrifty.hetero"):
        meter = ZeusMeter(gpus=[0], cpus=[0, 1])
    assert meter.source == "NVML"
    machine.gpus[0] = 5000
    assert read(meter) == 5.0
    assert "the energy of CPUs [0, 1] is not counted: RAPL unavailable." in caplog.text


def test_a_gpu_that_is_not_there_is_an_error(monkeypatch):
    Machine(cpus={0: 0.0}).install(monkeypatch)
    with pytest.raises(HeteroError, match=r"GPUs \[0\] and CPUs \[\] cannot be read \(NVML and"):
        ZeusMeter(gpus=[0], cpus=[0])
