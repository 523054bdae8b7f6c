"""The scripts of "Port your training script": plain PyTorch and thrifty give the same bits."""

from __future__ import annotations

import ast
import contextlib
import importlib
import os
import re
import runpy
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import thrifty as th
from tests.study.processes import die, exit_code, started
from thrifty.core import EpochDone
from thrifty.pack import AutoBackend, Member, TrialInputs


ROOT = Path(__file__).parents[2]
PORT = ROOT / "examples" / "port"


@dataclass(frozen=True, kw_only=True)
class Script:
    """What its two trials differ in, how many epochs they train together, and how it packs.

    ``packed`` are the attributes of the task with which it can be fused; None if it never can, for
    the reason ``why``.
    """

    knob: str
    values: tuple[Any, Any]
    num_unique: int
    packed: dict[str, Any] | None = field(default_factory=dict)
    why: str = ""


SCRIPTS = {
    "nanogpt": Script(
        knob="floor",
        values=(0.0, 1e-4),
        num_unique=9,
        packed={"precision": "fp32", "accumulate": 1},
        why="its precision is 'bf16-mixed'",
    ),
    "speedrun": Script(
        knob="last",
        values=(0.0, 0.01),
        num_unique=9,
        packed={"average": None},
        why="it averages its weights",
    ),
    "bert": Script(knob="floor", values=(0.0, 1e-4), num_unique=9),
    "gan": Script(
        knob="gamma",
        values=(0.1, 0.3),
        num_unique=7,
        packed=None,
        why=r"the task takes its steps itself \(step\)",
    ),
    "muon": Script(
        knob="cooldown", values=(1, 2), num_unique=7, packed=None, why="it has several optimizers"
    ),
}
every_script = pytest.mark.parametrize("name", SCRIPTS)


def load(name: str, kind: str) -> Any:
    if name == "bert":
        pytest.importorskip("transformers")
    return importlib.import_module(f"{name}_{kind}")


@pytest.fixture(autouse=True)
def _as_if_started_there(monkeypatch, tmp_path):
    """The folder of a script is on the path, and it writes into an empty one."""
    monkeypatch.syspath_prepend(PORT)
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def plainly(name: str, *, seed: int = 0) -> list[tuple[list[dict[str, float]], torch.nn.Module]]:
    """Return the curve and the model of each of the two trials, by the plain script."""
    plain, task = load(name, "plain"), load(name, "thrifty").study.task
    inputs = TrialInputs(task, {}, seed=seed)
    out = []
    for value in SCRIPTS[name].values:
        model = inputs.model()
        out.append((plain.train(model, inputs.batches, **{SCRIPTS[name].knob: value}), model))
    return out


def same_weights(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    one, other = a.state_dict(), b.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


# -- the same bits -------------------------------------------------------------------------------


class DieAfter:
    """Observer that kills the process when some epochs are trained."""

    def __init__(self, num_epochs: int) -> None:
        self._left = num_epochs

    def on_event(self, event: object) -> None:
        self._left -= isinstance(event, EpochDone)
        if not self._left:
            die()


ALONE = th.Local(pack="solo", threads=1)


def run_until_killed(name: str, num_epochs: int) -> None:
    study = load(name, "thrifty").study
    study.run(progress=False, executor=ALONE, observers=[DieAfter(num_epochs)])


@pytest.mark.sample(1)
@pytest.mark.slow
@every_script
def test_curves_and_weights_are_those_of_plain_pytorch_across_a_kill_and_a_branch(name):
    assert exit_code(started(run_until_killed, name, 3)) == -signal.SIGKILL
    study = load(name, "thrifty").study.run(progress=False, executor=ALONE)
    savings = study.savings
    assert savings.unique_epochs - savings.retrained_epochs == SCRIPTS[name].num_unique
    for trial, (curve, model) in zip(study.trials, plainly(name), strict=True):
        assert trial.curve == tuple(epoch[study.metric] for epoch in curve)
        assert same_weights(trial.load_model(), model.eval())
    assert not same_weights(*(trial.load_model() for trial in study.trials))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name", [name for name, each in SCRIPTS.items() if each.packed is not None]
)
@pytest.mark.slow
def test_packed_trials_are_those_of_plain_pytorch_within_rounding(name, monkeypatch, caplog):
    module, changes = load(name, "thrifty"), SCRIPTS[name].packed
    task = type("Packed", (type(module.study.task),), changes)()
    metric = module.study.metric.removeprefix("ema_")
    study = th.Study(
        task,
        module.study.space,
        algorithm=th.GridSearch(max_epochs=5),
        metric=metric,
        mode=module.study.mode,
        storage="sqlite:///packed.db",
        name=name,
    )
    study.run(progress=False, executor=th.Local(pack="fused", pack_size=2, threads=1))
    assert "trained by plain PyTorch" not in caplog.text
    if name == "nanogpt":
        monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: contextlib.nullcontext())
        monkeypatch.setattr(load(name, "plain"), "ACCUMULATE", 1)
    for trial, (curve, _) in zip(study.trials, plainly(name), strict=True):
        # The order of sums depends on measured times, and rounding grows over the epochs.
        assert trial.curve == pytest.approx([epoch[metric] for epoch in curve], rel=1e-3)


@pytest.mark.parametrize("name", [name for name, each in SCRIPTS.items() if each.why])
def test_what_cannot_be_packed_is_trained_alone_and_the_reason_is_said_once(name, caplog):
    backend = AutoBackend(load(name, "thrifty").study.task, prefer="fused")
    for slot in range(2):
        backend.put(slot, Member(values={"lr": 0.1}, seed=0))
    said = [r.getMessage() for r in caplog.records if "trained by plain PyTorch" in r.getMessage()]
    assert len(said) == 1
    assert re.search(SCRIPTS[name].why, said[0])


# -- the scripts ---------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.slow
@every_script
@pytest.mark.parametrize("kind", ["plain", "thrifty"])
def test_each_script_runs_as_it_is(name, kind, capsys):
    load(name, kind)
    runpy.run_path(os.fspath(PORT / f"{name}_{kind}.py"), run_name="__main__")
    assert len(re.findall(r"^.*\{'.*\d\}$", capsys.readouterr().out, re.MULTILINE)) == 2


def num_lines(path: Path) -> int:
    """Return how many lines hold code: neither blank, nor comments, nor docstrings."""
    text = path.read_text()
    described: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            described |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = enumerate(text.splitlines(), start=1)
    return sum(
        number not in described and not re.match(r"\s*(#|$)", line) for number, line in lines
    )


@every_script
def test_thrifty_needs_no_more_lines_than_plain_pytorch(name):
    assert num_lines(PORT / f"{name}_thrifty.py") <= num_lines(PORT / f"{name}_plain.py")


@every_script
def test_the_page_has_the_numbers_of_lines(name):
    page = (ROOT / "docs" / "how-to" / "port-your-script.md").read_text()
    plain, ours = (num_lines(PORT / f"{name}_{kind}.py") for kind in ("plain", "thrifty"))
    assert f" | {plain} | {ours} |\n" in page
    for kind in ("plain", "thrifty"):
        assert f": [`{name}_{kind}.py`](../../examples/port/{name}_{kind}.py)\n" in page
