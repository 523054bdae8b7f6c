"""The parts of benchmarks for machines with a GPU, as far as a CPU can run them."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bench.cloud import this_gpu
from bench.hetero import energy
from bench.sharing import gpu


def run(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("name", "sheet"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("Tesla T4", "T4"),
        ("cpu", None),
    ],
)
def test_a_gpu_has_a_data_sheet(name, sheet):
    assert this_gpu.accelerator_of(name) == sheet


def test_a_gpu_by_data_sheets():
    here = {"MLP": {16: 0.05, 32: 0.1}}
    there = {"MLP": {16: 0.001, 32: 0.001}}
    row = this_gpu._by_sheet(here, there, gpu="NVIDIA H100 80GB HBM3")
    assert row["accelerator"] == "H100"
    assert row["steps"] == 2
    assert this_gpu._by_sheet(here, there, gpu="cpu") == {}


def test_a_step_between_two_probes_is_forecast_from_other_networks():
    batch = np.array([16, 32, 64, 128])

    def steps(work, *, speed):
        return {int(b): 1e-3 + work * float(b) / speed for b in batch}

    names = {"a": 1e-4, "b": 1e-3, "c": 3e-4, "d": 1e-5}
    here = {name: steps(work, speed=1) for name, work in names.items()}
    there = {name: steps(work, speed=20) for name, work in names.items()}
    *rows, last = this_gpu._from_others(here, there)
    assert [row["network"] for row in rows] == list(names)
    assert last["thrifty"] < last["ratio of the tried step"]


class Counter:
    """A GPU's counter that is updated every tenth call, and a meter that reads it."""

    def __init__(self):
        self.calls = 0
        self.read = 0.0

    def joules(self, **_):
        self.calls += 1
        now = float(self.calls // 10)
        out, self.read = now - self.read, now
        return out


def test_joules_of_short_windows_add_up():
    counter = Counter()
    load = SimpleNamespace(step=lambda: None)
    nvml = SimpleNamespace(joules=lambda: float(counter.calls // 10))
    row = energy._measured(load, counter, nvml, seconds=0.02, windows=2)
    assert row["steps"] > 20
    assert row["steps without an update"] > 0.8 * row["steps"]
    assert row["ZeusMeter, J"] == row["NVML's counter, J"]
    (found, off) = energy._goals([{"load": "x", **row}])
    assert found.holds
    assert off.value == 0


def test_idle_counts_no_steps():
    load = SimpleNamespace(step=lambda: pytest.fail("idle"))
    row = energy._measured(load, None, None, seconds=0.01, windows=0)
    assert row["ZeusMeter, J"] is row["NVML's counter, J"] is None


@pytest.mark.slow
@pytest.mark.thorough
def test_devices_that_train_together_have_the_answer_of_one():
    found = run("bench.bench_hetero", "--device", "cpu", "--quick", "--only", "mixed")
    answers = [goal for goal in found["goals"] if "answer" in goal["name"]]
    assert len(answers) == 6
    assert all(goal["holds"] for goal in found["goals"])


@pytest.mark.slow
def test_shared_trials_have_the_bits_of_trials_alone(monkeypatch, capsys):
    """The benchmark starts a process for each method; here they run in this one."""

    def method(module, name, *flags):
        monkeypatch.setattr(sys, "argv", [module, name, *flags])
        gpu.main()
        return results.pop()

    results = []
    monkeypatch.setattr(gpu, "in_fresh_process", method)
    monkeypatch.setattr(gpu, "say_result", results.append)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        gpu.run("cpu", quick=True)
    finally:
        torch.use_deterministic_algorithms(False)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(found["goals"]) == 4
    assert all(goal["holds"] for goal in found["goals"])
