"""Ten scripts like those of Optuna: they run as they are, and need few changes to share."""

from __future__ import annotations

import difflib
import importlib.util
from pathlib import Path

import optuna
import pytest

import thrifty as th


pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "examples" / "optuna"
EPOCHS = {
    "boosting": 9,
    "classifiers": 1,
    "convolution": 9,
    "layers": 9,
    "pruning": 27,
    "quadratic": 1,
    "regressor": 9,
    "user_attributes": 1,
    "with_arguments": 1,
    "with_lightning": 3,
}
MAXIMIZED = {
    "boosting", "classifiers", "convolution", "layers", "with_arguments", "with_lightning",
}  # fmt: skip


def load(path):
    spec = importlib.util.spec_from_file_location(f"optuna_script_{path.parent.name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_scripts_are_all_here():
    names = {path.stem for path in FOLDER.glob("*.py")}
    assert names == set(EPOCHS) == {path.stem for path in (FOLDER / "ported").glob("*.py")}
    assert len(names) == 10


@pytest.mark.sample(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", EPOCHS)
def test_a_script_gives_the_values_that_it_gives_under_optuna(name):
    objective = load(FOLDER / f"{name}.py").objective
    study = th.optimize(
        objective,
        n_trials=4,
        max_epochs=EPOCHS[name],
        direction="maximize" if name in MAXIMIZED else "minimize",
        storage="sqlite://",
        progress=False,
    )
    assert not [trial.error for trial in study.trials if trial.state == "failed"]
    done = [trial for trial in study.trials if trial.epochs == EPOCHS[name]]
    assert done
    for trial in done[:2]:
        assert trial.value == objective(optuna.trial.FixedTrial(dict(trial.config)))
    assert study.savings.unique_epochs == sum(trial.epochs for trial in study.trials)


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", EPOCHS)
def test_a_ported_script_gives_them_too_in_parts(name, tmp_path):
    """The port stops half-way, and goes on from its state."""
    objective = load(FOLDER / f"{name}.py").objective
    ported = load(FOLDER / "ported" / f"{name}.py").objective
    epochs = 1 if name == "with_lightning" else EPOCHS[name]
    metric = "error" if name in {"pruning", "regressor", "user_attributes"} else "accuracy"

    def study():
        return th.Study(
            ported,
            algorithm=th.Enqueued(max_epochs=epochs),
            metric="value" if name == "quadratic" else metric,
            mode="min" if metric == "error" else "max",
            storage=f"sqlite:///{tmp_path}/t.db",
            name=name,
        )

    first = study()
    space = th.optimize(objective, n_trials=1, storage="sqlite://", progress=False).best_trial
    first.enqueue_trial(space.config)
    first.run(progress=False, stop=th.StopWhen(epochs=max(epochs // 2, 1)))
    done = study().run(progress=False).best_trial
    assert done.epochs == epochs
    assert done.value == objective(optuna.trial.FixedTrial(dict(space.config)))


@pytest.mark.parametrize("name", EPOCHS)
def test_a_port_changes_few_lines(name):
    before, after = (
        path.read_text().splitlines()
        for path in (FOLDER / f"{name}.py", FOLDER / "ported" / f"{name}.py")
    )
    changed = [
        line for line in difflib.ndiff(before, after) if line[:2] == "+ " and line[2:].strip()
    ]
    assert len(changed) <= 10
