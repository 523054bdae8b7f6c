"""The plot shows every worker and every change."""

from __future__ import annotations

import sys

import pytest

from tests.hetero.memberships import ThreadCluster
from thrifty.core import HeteroError, MissingExtraError
from thrifty.hetero import Load, SimulatedWorker, StepCurve, plot_steps, simulate_job

from .jobs import Worker


pytestmark = pytest.mark.slow


def test_a_simulation_is_plotted_with_its_changes():
    workers = [
        SimulatedWorker(name="fast", curve=StepCurve(sample_s=1.0)),
        SimulatedWorker(name="slow", curve=StepCurve(sample_s=3.0), joins_s=50.0),
    ]
    loads = [Load(worker="fast", begin_s=100.0, end_s=1e9, slowness=2.0)]
    run = simulate_job(workers, batch=12, num_steps=60, loads=loads)
    figure = plot_steps(run.steps)
    assert figure._repr_png_()[1:4] == b"PNG"
    above, below = figure.axes
    assert [text.get_text() for text in above.get_legend().get_texts()] == ["fast", "slow"]
    changes = sum(step.change is not None for step in run.steps)
    # Each axis has a line for each change, and the lower one has a line for each worker.
    assert changes > 0
    assert len(above.lines) == changes
    assert len(below.lines) == changes + 2


def test_the_reports_of_a_job_are_plotted():
    team = {name: Worker(lambda size, step: 1.0 + size) for name in ("a", "b")}
    done = ThreadCluster().run({name: worker.job(1) for name, worker in team.items()})
    above, _ = plot_steps(done["a"].reports).axes
    assert len(above.lines) == 1  # the workers' first meeting
    assert above.get_ylabel() == "samples of a step"


def test_no_steps():
    with pytest.raises(HeteroError, match="no steps to draw"):
        plot_steps([])


def test_matplotlib_is_an_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"matplotlib is not installed.*\.\[plots\]"):
        plot_steps([])
