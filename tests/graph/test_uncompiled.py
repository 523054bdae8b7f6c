from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.depth import IS_THOROUGH
from thrifty.graph.kernels import COMPILED


pytestmark = pytest.mark.slow


HERE = Path(__file__).parent
SUITE = [
    "test_kernels.py",
    "test_relabel.py",
    "test_sampler.py",
    *(["test_sampler_input.py", "test_uniformity.py"] if IS_THOROUGH else []),
]


@pytest.mark.thorough
@pytest.mark.skipif(not COMPILED, reason="this is the suite that it runs")
def test_the_sampler_s_suite_passes_without_a_compiler():
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, *(str(HERE / name) for name in SUITE)],
        cwd=HERE.parents[1],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
