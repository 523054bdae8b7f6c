"""``thrifty demo``: tune a real network on real data, in a minute on any machine.

A still smaller task is here for ``thrifty doctor``: it trains one epoch of two tiny trials on a
back-end, to check that it works.
"""

from __future__ import annotations

import math
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import torch

import thrifty as th
from thrifty.pack import (
    SGD,
    ArrayData,
    Backend,
    ConcatenatedBackend,
    EpochPlan,
    FusedBackend,
    HyperParameters,
    Member,
    SoloBackend,
    Task,
    borrowed_streams,
)

from ._options import json_option, say
from ._train import run_and_show


class Digits(th.Task):
    """A small network on scikit-learn's 1,797 handwritten digits."""

    optimizer = th.SGD(lr="lr", momentum=0.9)
    batch_size = 32

    def data(self, hp: th.HyperParameters) -> th.ArrayData:
        """Return 1,437 training and 360 validation images, split at random."""
        try:
            x, y = import_module("sklearn.datasets").load_digits(return_X_y=True)
        except ImportError:
            raise th.MissingExtraError("scikit-learn", extra="demo") from None
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        x, y = torch.tensor(x / 16, dtype=torch.float32)[order], torch.tensor(y)[order]
        return th.ArrayData(train=(x[:1437], y[:1437]), valid=(x[1437:], y[1437:]))

    def model(self, hp: th.HyperParameters) -> torch.nn.Module:
        """Return a network with two hidden layers."""
        return torch.nn.Sequential(
            torch.nn.Linear(64, 128),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(128, 64),
            torch.nn.ReLU(),
            torch.nn.Linear(64, 10),
        )

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Return the cross-entropy."""
        images, labels = batch
        return torch.nn.functional.cross_entropy(model(images), labels)

    def metrics(self, model: torch.nn.Module, batch: Any) -> Mapping[str, Any]:
        """Return the share of correctly classified images."""
        images, labels = batch
        return {"accuracy": (model(images).argmax(1) == labels).float().mean()}


def demo_study(folder: Path) -> th.Study:
    """Return a study of 81 trials over learning-rate schedules, with Hyperband and SQLite."""
    lr = th.Choice([0.1, 0.05, 0.02])
    space = th.Space(
        lr=th.Choice([
            th.Step(lr, [th.Int(9, 36, step=9)], gamma=th.Choice([0.1, 0.3])),
            th.WSD(lr, cooldown=th.Int(9, 36, step=9)),
            th.Warmup(3, th.Cosine(lr)),
            th.REX(lr),
        ])
    )
    return th.Study(
        Digits(),
        space,
        algorithm=th.Hyperband(max_epochs=54, eta=3, num_trials=81),
        metric="accuracy",
        storage=f"sqlite:///{folder / 'demo.db'}",
        name="digits",
    )


study = demo_study(Path("demo"))
"""The study that ``plot``, ``importance`` and ``resume`` load for a demo's database."""


@click.command("demo")
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("demo"),
    show_default=True,
    help="Folder for the database and the plots.",
)
@click.option("--quiet", is_flag=True, help="No progress display.")
@json_option
def demo_command(*, folder: Path, quiet: bool, as_json: bool) -> None:
    """Tune a network on handwritten digits: 81 trials, about ten seconds of training.

    A second run only shows the results.
    """
    asked = demo_study(folder)
    asked.file = Path(__file__)
    say(asked.plan())
    # One thread: for a network this small, more threads cost more than they gain, above all on a
    # busy machine.
    run_and_show(
        asked,
        executor=th.Local(threads=1),
        progress=not quiet,
        as_json=as_json,
        pictures=lambda: _draw(asked, folder),
    )
    say(f"status: {shlex.join([_program(), 'status', '--storage', _storage(folder)])}")
    say(f"dashboard: {_dashboard(folder)}")


def _dashboard(folder: Path) -> str:
    """Return the command that shows the demo in the dashboard, and what it lacks."""
    command = shlex.join([_program(), "dashboard", _storage(folder), "--open"])
    missing = any(find_spec(package) is None for package in ("fastapi", "uvicorn"))
    return command + (" (first install the extra 'web')" if missing else "")


def _program() -> str:
    """Return how to start thrifty: ``make demo`` puts nothing on the PATH."""
    beside = Path(sys.executable).with_name("thrifty")
    return str(beside) if shutil.which("thrifty") is None and beside.exists() else "thrifty"


def _storage(folder: Path) -> str:
    return f"sqlite:///{folder / 'demo.db'}"


def _draw(study: th.Study, folder: Path) -> Sequence[Path]:
    """Write pictures of the study, and say so; return their files."""
    forest, curves = folder / "forest.png", folder / "curves.png"
    try:
        study.plot_forest().savefig(forest, dpi=120)
        study.plot_learning_curves().savefig(curves, dpi=120)
    except th.MissingExtraError as error:
        say(f"no pictures: {error}")
        return ()
    say(f"pictures: {forest}, {curves}")
    return forest, curves


_BACKENDS: Mapping[str, Any] = {
    "solo": SoloBackend,
    "concatenated": ConcatenatedBackend,
    "fused": FusedBackend,
}


class _Line(Task):
    """Sixteen points on a line."""

    optimizer = SGD(lr="lr", momentum=0.9)
    batch_size = 8

    def data(self, hp: HyperParameters) -> ArrayData:
        x = torch.linspace(-1, 1, 16)[:, None]
        return ArrayData(train=(x, 2 * x), valid=(x, 2 * x))

    def model(self, hp: HyperParameters) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(model(x), y)

    def metrics(self, model: torch.nn.Module, batch: Any) -> Mapping[str, Any]:
        return {"mse": self.loss(model, batch)}


def tiny_step(name: str, *, device: str | None) -> tuple[str, str]:
    """Return ``("ok", detail)`` or ``("broken", reason)``; an error at the start is raised.

    ``device`` defaults to the first GPU, or else the CPU.
    """
    where = device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    backend: Backend = _BACKENDS[name](_Line(), device=where)
    slots = range(1 if name == "solo" else 2)
    members = {slot: Member(values={"lr": 0.01 * (slot + 1)}, seed=0) for slot in slots}
    with borrowed_streams():
        for slot, member in members.items():
            backend.put(slot, member)
        plans = {slot: EpochPlan(epoch=0, values=m.values) for slot, m in members.items()}
        outcomes = dict(backend.step(plans))
        while len(outcomes) < len(members):
            outcomes.update(backend.step({}))
    for outcome in outcomes.values():
        if isinstance(outcome, Exception):
            return "broken", f"{type(outcome).__name__}: {outcome}"
        if not math.isfinite(outcome["mse"]):
            return "broken", f"an epoch gave {outcome['mse']}"
    return "ok", f"{len(members)} trial{'s' * (len(members) > 1)} on {where}"
