"""Both sides of the migration pages run, or at least parse as Python if the page says "not run"."""

from __future__ import annotations

import importlib
import runpy
import subprocess
import sys

import pytest

from ._pages import DOCS, Block, Reader, blocks


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("device")]


PAGES = {"optuna": "Optuna", "ray-tune": "Ray Tune"}


def sides(page: str) -> list[Block]:
    return blocks((DOCS / "migration" / f"{page}.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("page", "theirs"), PAGES.items())
def test_every_block_is_somebodys(page, theirs):
    found = sides(page)
    assert {b.title for b in found if b.language == "python"} == {theirs, "thrifty"}
    for block in found:
        if block.language == "python":
            compile(block.text, f"{page}.md", "exec")
    assert sum(b.title == theirs and not b.not_run for b in found) >= 3


@pytest.mark.sample(1)
@pytest.mark.parametrize("page", PAGES)
def test_our_side_of_a_page_runs_as_a_script(page, tmp_path, monkeypatch):
    """Our side runs as a script of its own, which may use workers without a guard."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "ours.py"
    # `th.optimize` runs the objective that Optuna's side defines.
    ours = (b for b in sides(page) if b.title == "thrifty" or "def objective" in b.text)
    script.write_text("\n".join(b.text for b in ours if not b.not_run))
    names = runpy.run_path(str(script), run_name="__main__")
    assert len(names["study"].trials) == 17
    assert names["study"].best_trial.value > 0.8
    assert names["frame"].shape[0] == 17
    assert names["model"] is not None
    reader = Reader(tmp_path, page=f"{page}.md")
    for block in sides(page):
        if block.language == "console":
            reader.read(block)


@pytest.mark.thorough
def test_optunas_side_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reader = Reader(tmp_path, page="optuna.md")
    for block in sides("optuna"):
        if block.title == "Optuna":
            reader.read(block)
    study = reader.names["optuna_study"]
    assert len(study.trials) == 17
    assert study.best_value > 0.8


@pytest.mark.thorough
def test_both_sides_of_optunas_page_run_in_the_order_of_the_page(tmp_path, monkeypatch):
    """A reader may paste all of it: neither side changes a variable that the other needs."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "both.py"
    script.write_text(
        "\n".join(b.text for b in sides("optuna") if b.language == "python" and not b.not_run)
    )
    names = runpy.run_path(str(script), run_name="__main__")
    assert names["optuna_study"].best_value > 0.8
    assert names["study"].best_trial.value > 0.8


def test_what_the_table_says_of_optuna_is_there():
    optuna = importlib.import_module("optuna")
    for name in (
        "RandomSampler",
        "GridSampler",
        "TPESampler",
        "GPSampler",
        "CmaEsSampler",
        "NSGAIISampler",
    ):
        assert hasattr(optuna.samplers, name)
    for name in ("SuccessiveHalvingPruner", "HyperbandPruner", "MedianPruner", "PatientPruner"):
        assert hasattr(optuna.pruners, name)


@pytest.mark.thorough
def test_ray_tunes(tmp_path):
    """Ray Tune's side runs in a process of its own.

    It runs two trials rather than seventeen, since each starts a process.
    """
    code = "\n".join(b.text for b in sides("ray-tune") if b.title == "Ray Tune" and not b.not_run)
    assert "num_samples=17" in code
    script = tmp_path / "theirs.py"
    script.write_text(
        "import ray\n"
        "ray.init(address='local', num_cpus=2, include_dashboard=False, log_to_driver=False)\n"
        + code.replace("num_samples=17", "num_samples=2")
        + (
            "\nassert len(results) == 2 and not results.errors\nassert 0 < "
            "best.metrics['accuracy'] <= 1\n"
        )
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
