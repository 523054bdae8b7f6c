"""Hydra's sweeper: jobs are asked for, told, and not run again."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

from tests.study.processes import run_script


pytestmark = pytest.mark.slow

APPLICATION = """
import hydra

@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg):
    with open(cfg.log, "a") as file:
        file.write(f"{cfg.lr} {cfg.net.width} {cfg.db.name}\\n")
    if cfg.net.width == 12:
        raise ValueError("unlucky")
    return {"error": (cfg.lr - 0.1) ** 2 + cfg.net.width / 100, "size": cfg.net.width}

if __name__ == "__main__":
    main()
"""
CONFIG = """
defaults:
  - db: mysql
  - _self_
  - override hydra/sweeper: thrifty
log: LOG
lr: 0.1
net:
  width: 8
hydra:
  sweeper:
    n_trials: 8
    n_jobs: 3
    metric: error
    study_name: sweep
    params:
      lr: tag(log, interval(0.001, 1))
      net.width: range(4, 17, 4)
"""


@pytest.fixture
def folder(tmp_path):
    conf = tmp_path / "conf"
    (conf / "db").mkdir(parents=True)
    (tmp_path / "app.py").write_text(APPLICATION)
    (conf / "config.yaml").write_text(CONFIG.replace("LOG", str(tmp_path / "log")))
    for name in ("mysql", "postgresql"):
        (conf / "db" / f"{name}.yaml").write_text(f"name: {name}\n")
    return tmp_path


ENVIRONMENT = {"HYDRA_FULL_ERROR": "0"}


def in_a_new_process(folder, *arguments):
    """Run the application as a user does, with a Python that has nothing loaded yet."""
    found = subprocess.run(
        [sys.executable, "app.py", *arguments],
        cwd=folder,
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=180,
    )
    return found.returncode, found.stdout + found.stderr


def in_a_fork(folder, *arguments):
    return run_script(folder / "app.py", *arguments, environment=ENVIRONMENT)


def sweep(folder, *arguments, run=in_a_fork, fails=False):
    """Run a sweep; return what it says, and how many jobs have run."""
    log = folder / "log"
    log.unlink(missing_ok=True)
    code, said = run(folder, "-m", *arguments)
    assert (code != 0) == fails, said
    jobs = log.read_text().splitlines() if log.exists() else []
    return said, jobs


def results(folder):
    (path,) = sorted(Path(folder).glob("multirun/*/*/optimization_results.yaml"))[-1:]
    return yaml.safe_load(path.read_text())


def test_jobs_run_once_whatever_is_swept(folder):
    text, jobs = sweep(folder, "db=mysql,postgresql", run=in_a_new_process)
    assert len(jobs) == 8
    assert {job.split()[2] for job in jobs} == {"mysql", "postgresql"}
    assert all(0.001 <= float(job.split()[0]) <= 1 for job in jobs)
    widths = [int(job.split()[1]) for job in jobs]
    assert set(widths) <= {4, 8, 12, 16}
    best = results(folder)
    alive = [job.split() for job in jobs if job.split()[1] != "12"]
    expected = min((float(lr) - 0.1) ** 2 + int(width) / 100 for lr, width, _ in alive)
    assert best["best_value"] == expected
    assert set(best["best_params"]) == {"lr", "net.width", "db"}
    text, jobs = sweep(folder, "db=mysql,postgresql")
    assert jobs == []
    assert "8 of 8 trials were known and not run" in text
    assert results(folder)["best_value"] == expected
    # More trials of the same study.
    _, jobs = sweep(folder, "db=mysql,postgresql", "hydra.sweeper.n_trials=10")
    assert len(jobs) == 2


def test_texts_are_what_the_command_line_says(folder):
    source = (folder / "app.py").read_text()
    (folder / "app.py").write_text(source.replace("{cfg.db.name}", "{cfg.text}"))
    config = folder / "conf" / "config.yaml"
    config.write_text(config.read_text().replace("lr: 0.1\n", "lr: 0.1\ntext: null\n", 1))
    texts = "text=choice('c,d',plain,'1',true)"
    _, jobs = sweep(folder, texts, "lr=0.1", "net.width=4", "hydra.sweeper.n_trials=40")
    assert sorted(job.split()[2] for job in jobs) == ["1", "True", "c,d", "plain"]
    assert results(folder)["best_params"]["text"] in ["c,d", "plain", "1", True]
    _, jobs = sweep(folder, "db=glob(*)", "lr=0.1", "net.width=4", "hydra.sweeper.study_name=glob")
    assert len(jobs) == 2


def test_what_has_changed_runs_again(folder):
    arguments = ("db=mysql,postgresql", "hydra.sweeper.n_trials=3")
    sweep(folder, *arguments)
    (folder / "conf" / "db" / "postgresql.yaml").write_text("name: other\n")
    text, _ = sweep(folder, *arguments, fails=True)
    assert "sweep" in text
    (folder / "conf" / "db" / "postgresql.yaml").write_text("name: postgresql\n")
    source = (folder / "app.py").read_text()
    (folder / "app.py").write_text(source.replace("/ 100", "/ 200"))
    _, jobs = sweep(folder, *arguments, "hydra.sweeper.study_name=second")
    assert len(jobs) == 3
    (folder / "app.py").write_text((folder / "app.py").read_text() + "\n# a remark\n")
    _, jobs = sweep(folder, *arguments, "hydra.sweeper.study_name=fourth")
    assert jobs == []


def test_a_failed_job_is_a_failed_trial(folder):
    text, jobs = sweep(folder, "net.width=choice(4,12)", "lr=0.5", "hydra.sweeper.n_trials=6")
    assert sorted({job.split()[1] for job in jobs}) == ["12", "4"]
    assert len(jobs) == 2
    assert "unlucky" in text
    assert results(folder)["best_params"] == {"net.width": 4}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hydra.sweeper.direction=up"], "minimize"),
        (["hydra.sweeper.n_jobs=0"], "at least one job"),
        (["hydra.sweeper.metric=other"], "other"),
        (["width=range(1,3),range(5,7)"], "chooses between sweeps; list the values"),
    ],
)
def test_bad_options_are_said(folder, arguments, message):
    text, _ = sweep(folder, *arguments, fails=True)
    assert message in text
    # Hydra takes a tracer for a debugger, and shows it whole stacks: so do runs of coverage.
    if sys.gettrace() is None:
        assert "Traceback" not in text
        assert "File " not in text


def test_there_must_be_something_to_search(folder):
    config = folder / "conf" / "config.yaml"
    config.write_text(config.read_text().partition("    params:")[0])
    text, _ = sweep(folder, fails=True)
    assert "no key to search" in text


def test_a_job_that_returns_nothing_fails(folder):
    source = (folder / "app.py").read_text()
    (folder / "app.py").write_text(source.replace("    return", "    found ="))
    text, _ = sweep(folder, "hydra.sweeper.n_trials=2", fails=True)
    assert "a job must return a number or a dict of metrics" in text


def test_an_application_without_a_sweep_imports_no_torch(folder):
    found = subprocess.run(
        [
            sys.executable,
            "-c",
            textwrap.dedent("""
                import sys
                sys.argv = ["app.py"]
                exec(open("app.py").read().replace('"__main__"', '"no"'), {"__name__": "__main__"})
                from hydra.core.plugins import Plugins
                Plugins.instance()
                assert "hydra_plugins" in sys.modules
                assert "torch" not in sys.modules
            """),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert found.returncode == 0, found.stderr


FEW = "hydra.sweeper.n_trials=5"
"""The page tries 50 configurations, which takes ten times as long."""


def test_the_page_runs_as_it_is_printed(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "hydra.md").read_text()
    (tmp_path / "conf").mkdir()
    for name, text in re.findall(r'^```\w+ title="([^"]*)"\n(.*?)^```', page, re.M | re.S):
        (tmp_path / name).write_text(text)
    commands = [line for line in page.splitlines() if line.startswith("python app.py")]
    assert len(commands) == 2
    for command in commands:
        _, _, *arguments = shlex.split(command)
        code, said = in_a_fork(tmp_path, *arguments, FEW)
        assert not code, said
        assert results(tmp_path)["best_params"]["net.width"] in range(16, 129)
    # without the name, the second command is refused, and the message names the option
    code, said = in_a_fork(tmp_path, *arguments[:-1], FEW)
    assert code
    assert "To name this sweep: hydra.sweeper.study_name=NAME" in said
