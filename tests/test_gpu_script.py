"""``make gpu`` says what it lacks before it begins."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--device", "cuda", "tests/pack/test_counters.py"],
        cwd=SCRIPT.parents[1], capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode
    assert "--device cuda: PyTorch sees cpu here" in done.stdout + done.stderr
