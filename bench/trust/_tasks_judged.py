"""The tasks of ``_tasks`` in a study, packed and with shared stages, compared with plain loops."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

import thrifty as th

from ._packed import Verdict, _attempt, relative
from ._tasks import EPOCHS, Moving, train_plainly


def run_moving(one: Moving, *, pack: str) -> Verdict:
    """Run one task as a study and compare each trial with the plain loop, or check its refusal."""
    study, error = _attempt(lambda: _study(one, pack=pack))
    errors = [] if error is None else [error]
    texts = [f"{type(e).__name__}: {e}" for e in errors]
    if study is not None:
        texts += [trial.error for trial in study.trials if trial.state == "failed"]
    if texts:
        refused = one.refused or "?"
        is_clear = all(refused in text for text in texts) and all(
            isinstance(e, th.ThriftyError) for e in errors
        )
        how = "refused" if is_clear else "CRASH"
        return Verdict(name=one.name, how=how, deviation=0.0, why=texts[0].split("\n")[0])
    if one.refused is not None:
        return Verdict(
            name=one.name, how="trained", deviation=float("inf"), why="must be refused"
        )
    deviation = 0.0
    for trial in study.trials:
        wanted = train_plainly(one, trial.config)
        theirs, mine = dict(wanted.model.state_dict()), dict(trial.load_model().state_dict())
        deviation = max(
            deviation,
            relative(torch.tensor(trial.curve), torch.tensor(wanted.curve)),
            *(relative(mine[name], theirs[name]) for name in theirs),
        )
    return Verdict(name=one.name, how="trained", deviation=deviation)


def _study(one: Moving, *, pack: str) -> th.Study:
    folder = Path(tempfile.mkdtemp())
    study = th.Study(
        one.task(),
        one.space,
        algorithm=th.GridSearch(max_epochs=EPOCHS),
        metric="value",
        mode="min",
        storage=f"sqlite:///{folder / 'trust.db'}",
        name=one.name,
        seed=0,
    )
    study.run(
        progress=False,
        executor=th.Local(workers=1, threads=1, pack=pack, pack_size=4),  # type: ignore[arg-type]
    )
    return study
