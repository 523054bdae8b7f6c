"""Studies with freeze-thaw: stopped and resumed, they decide as if never stopped."""

import pytest

import thrifty as th
from thrifty.testing import LineTask


pytestmark = pytest.mark.slow


SPACES = {
    "rates": th.Space(lr=th.Float(0.001, 0.1, log=True)),
    "schedules": th.Space(
        lr=th.Choice([th.Step(0.05, [e], gamma=g) for e in (2, 4, 6) for g in (0.1, 0.5)])
    ),
}


def study(folder, space):
    return th.Study(
        LineTask(),
        space,
        algorithm=th.FreezeThaw(max_epochs=9, num_trials=12, budget_epochs=50),
        metric="mse",
        mode="min",
        storage=f"sqlite:///{folder}.db",
        name="freeze-thaw",
    )


def run(each, **options):
    each.run(progress=False, executor=th.Local(pack="solo", threads=1), **options)
    return [(trial.config, trial.epochs, trial.curve) for trial in each.trials]


@pytest.mark.parametrize("space", SPACES)
def test_stopped_and_resumed_it_decides_as_if_never_stopped(tmp_path, space):
    whole = run(study(tmp_path / "whole", SPACES[space]))
    parts = []
    for epochs in (10, 25, 40, None):
        stop = None if epochs is None else th.StopWhen(epochs=epochs)
        parts = run(study(tmp_path / "parts", SPACES[space]), stop=stop)
    assert parts == whole
    assert max(epochs for _, epochs, _ in whole) == 9
