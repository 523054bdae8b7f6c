"""Run six small studies and print digests of all that they compute.

Two versions of thrifty behave the same if they print the same lines. Digests cover what every trial
reached and the tensors of its checkpoint, without times, hosts and processes. Run it once for each
checkout, and compare what they print:

    PYTHONPATH=OLD/src:OLD python scripts/compare_studies.py --keep databases > before.txt
    python scripts/compare_studies.py > after.txt
    python scripts/compare_studies.py --resume databases >> after.txt

``--keep`` also writes databases of studies that stopped half-way, and ``--resume`` ends them: the
epochs of both must add up to the epochs of a study that never stopped.

The studies use only names that thrifty has had since before its redesign.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import thrifty as th


HALF = 20
"""After how many trained epochs a study of ``--keep`` stops."""


class Rings(th.Task):
    """Tell apart points of two rings."""

    optimizer = th.SGD(lr="lr", momentum=0.9)
    batch_size = 32

    def data(self, hp: Any) -> th.ArrayData:
        """Return the points, and the ring of each."""
        points = torch.randn(384, 8, generator=torch.Generator().manual_seed(0))
        ring = (points.norm(dim=1) > 2.7).long()
        return th.ArrayData(train=(points[:256], ring[:256]), valid=(points[256:], ring[256:]))

    def model(self, hp: Any) -> torch.nn.Module:
        """Return a perceptron with dropout, so that random streams count, too."""
        return torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 2)
        )

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Return the cross-entropy."""
        points, ring = batch
        return F.cross_entropy(model(points), ring)

    def metrics(self, model: torch.nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        """Return the cross-entropy of data that training does not see."""
        return {"loss": self.loss(model, batch)}


class OwnLoop(th.Trainable):
    """Train one weight with a loop of its own."""

    def setup(self, hp: Any, *, seed: int, device: torch.device) -> None:
        """Draw the first weight."""
        generator = torch.Generator().manual_seed(seed)
        self.weight = torch.randn(3, generator=generator, dtype=torch.float64)

    def train(self, epoch: int, hp: Any) -> None:
        """Take one step towards zero."""
        self.weight = self.weight * (1 - hp.lr) + 0.01 * torch.randn(3, dtype=torch.float64)

    def evaluate(self) -> dict[str, float]:
        """Return the distance from zero."""
        return {"loss": float(self.weight.norm())}

    def state(self) -> Any:
        """Return the weight."""
        return {"weight": self.weight}

    def load_state(self, state: Any) -> None:
        """Restore the weight."""
        self.weight = state["weight"]


def _schedules() -> th.Space:
    rate = th.Choice([0.2, 0.1, 0.05])
    drop = th.Int(3, 9, step=3)
    return th.Space(
        lr=th.Choice([th.Step(rate, [drop]), th.WSD(rate, cooldown=drop), th.REX(rate)])
    )


def _rates() -> th.Space:
    return th.Space(lr=th.Float(0.01, 0.5, log=True))


def _sharing(storage: str) -> th.Study:
    halving = th.SuccessiveHalving(
        max_epochs=12, num_trials=21, min_epochs=3, sampler=th.GridSampler()
    )
    return _study(Rings(), _schedules(), halving, storage=storage)


def _fused(storage: str) -> th.Study:
    return _study(Rings(), _rates(), th.RandomSearch(max_epochs=5, num_trials=8), storage=storage)


def _own_loop(storage: str) -> th.Study:
    population = th.PopulationBasedTraining(max_epochs=8, population=6, interval=2, explore=("lr",))
    return _study(OwnLoop(), _rates(), population, storage=storage)


def _study(task: Any, space: th.Space, algorithm: Any, *, storage: str) -> th.Study:
    return th.Study(
        task, space, algorithm=algorithm, metric="loss", mode="min", storage=storage, name="study"
    )


ONE = th.Local(workers=1, threads=1, pack="solo")
TWO = th.Local(workers=2, threads=1, pack="solo")
FUSED = th.Local(workers=1, threads=1, pack="fused", pack_size=4)


def _trained(study: th.Study, executor: Any) -> str:
    """Run a study, and return a digest of its trials and their checkpoints."""
    study.run(executor=executor, progress=False)
    out = hashlib.blake2b(digest_size=8)
    num_tensors = 0
    for trial in sorted(study.trials, key=lambda trial: trial.number):
        facts = trial.number, trial.config, trial.state, trial.epochs, trial.curve, trial.parent
        out.update(repr((*facts, dict(trial.values))).encode())
    if isinstance(study.task, th.Task):
        for trial in study.trials:
            if trial.state == "done":
                for name, tensor in trial.load_model().state_dict().items():
                    out.update(name.encode() + tensor.contiguous().numpy().tobytes())
                    num_tensors += 1
    return (
        f"{out.hexdigest()}  {len(study.trials)} trials, {num_tensors} tensors, "
        f"{study.savings.trial_epochs} trial-epochs, {study.savings.unique_epochs} trained"
    )


def _simulated() -> str:
    """Simulate a study of 200 trials on 20 workers that fail, and return a digest of the result."""
    result = th.simulate(
        th.ASHA(max_epochs=27, num_trials=200),
        _schedules(),
        workers=20,
        epoch_s=30.0,
        faults=th.Faults(mean_between_failures_s=3_600, repair_s=60),
    )
    names = [
        *("end_to_end_s", "busy_s", "bound_s", "num_trials", "num_failed", "trial_epochs"),
        *("unique_epochs", "epochs_redone", "failures", "best_value"),
    ]
    facts = repr([(name, getattr(result, name)) for name in names])
    return (
        f"{hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()}  {result.num_trials} "
        f"trials, {result.trial_epochs} trial-epochs, {result.unique_epochs} trained"
    )


@contextlib.contextmanager
def _postgresql() -> Iterator[str]:
    for module in ("bench.common.postgresql", "thrifty.testing"):  # where it is, and where it was
        with contextlib.suppress(ImportError, AttributeError):
            server = importlib.import_module(module).PrivatePostgreSQL
            break
    with server() as started:
        yield started.new_database("studies")


def _ray() -> Any:
    paths = os.pathsep.join(sys.path)  # so that Ray's workers import the same checkout
    return th.Ray(
        workers=2, threads=1, pack="solo", runtime_env={"env_vars": {"PYTHONPATH": paths}}
    )


Body = Callable[[Path], str]


def _on_postgresql(folder: Path) -> str:  # noqa: ARG001
    with _postgresql() as storage:
        return _trained(_sharing(storage), TWO)


STUDIES: dict[str, Body] = {
    "schedules, SQLite, one worker": lambda f: _trained(_sharing(_file(f, "shared")), ONE),
    "schedules, PostgreSQL, two workers": _on_postgresql,
    "schedules, SQLite, Ray": lambda f: _trained(_sharing(_file(f, "ray")), _ray()),
    "fused, SQLite, one worker": lambda f: _trained(_fused(_file(f, "fused")), FUSED),
    "own loop, SQLite, one worker": lambda f: _trained(_own_loop(_file(f, "own")), ONE),
    "simulated, 20 workers with failures": lambda _: _simulated(),
}

HALVES = {"schedules": _sharing, "own loop": _own_loop}


def _file(folder: Path, name: str) -> str:
    return f"sqlite:///{folder / name}.db"


def main() -> None:
    """Run the studies, and print one line for each."""
    parser = argparse.ArgumentParser(description="Digests of six small studies.")
    parser.add_argument("--keep", type=Path, help="write databases of stopped studies here")
    parser.add_argument("--resume", type=Path, help="only end the studies that --keep wrote")
    options = parser.parse_args()
    print(f"thrifty from {Path(th.__file__).parent}", file=sys.stderr)
    if options.resume is not None:
        for name, make in HALVES.items():
            storage = _file(options.resume, name.replace(" ", "_"))
            before = make(storage).savings.unique_epochs
            line = _trained(make(storage), ONE)
            print(f"{name}, resumed after {before} trained: {line}")
        return
    with tempfile.TemporaryDirectory() as folder:
        for name, run in STUDIES.items():
            print(f"{name}: {run(Path(folder))}", flush=True)
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
        for name, make in HALVES.items():
            study = make(_file(options.keep, name.replace(" ", "_")))
            study.run(executor=ONE, stop=th.StopWhen(epochs=HALF), progress=False)
            assert study.savings.unique_epochs < 60


if __name__ == "__main__":
    main()
