"""``make gpu`` says what it lacks before it begins."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.devices import chosen


SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "gpu.py"

pytestmark = pytest.mark.slow


def run(*args):
    return subprocess.run([sys.executable, str(SCRIPT), *args], capture_output=True, text=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu():
    done = run("tests")
    assert done.returncode == 2
    assert "sees no GPU here" in done.stderr


def test_a_step_that_is_not_one():
    done = run("games")
    assert done.returncode == 2
    assert "no step is called 'games'; the steps are doctor, tests, pack" in done.stderr


def script():
    """Return the script as a module."""
    spec = importlib.util.spec_from_file_location("gpu_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_step_runs_something_that_exists():
    steps = script().STEPS
    assert {"finetune", "sharing", "hetero", "energy", "cloud", "study"} <= set(steps)
    for name, step in steps.items():
        assert 0 < step.limit_s <= 540, name
        first, *rest = step.arguments
        if first == "-m":
            assert importlib.util.find_spec(rest[0]), name
        elif first != "-c":
            assert (SCRIPT.parents[1] / first).is_file(), name
    assert steps["energy"].bench == "bench_hetero"
    assert [steps[name].bench for name in ("doctor", "tests", "study")] == ["", "", ""]


def test_a_study_says_which_device_trained():
    done = subprocess.run(
        [sys.executable, str(SCRIPT.with_name("gpu_study.py")), "--device", "cpu",
         "--seconds", "10"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "th.Local() trains on cpu" in done.stdout
    assert '"name": "cpu-0"' in done.stdout
    assert "$ thrifty doctor" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there():
    config = SimpleNamespace(getoption=lambda name: "cuda")
    with pytest.raises(pytest.UsageError, match="--device cuda: PyTorch sees cpu here"):
        chosen(config)
