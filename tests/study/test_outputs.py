"""A wrong return value of a task is reported once, with the name of the method.

Where possible it is reported before training.
"""

from __future__ import annotations

import logging
import re

import numpy as np
import pytest

from tests.pack._toys import Toy
from thrifty.core import StateError, TaskError
from thrifty.run import Local
from thrifty.search import GridSearch
from thrifty.space import Choice, Space
from thrifty.store import Store
from thrifty.study import Study


pytestmark = pytest.mark.slow


def study_of(task, tmp_path):
    return Study(
        task,
        Space(lr=Choice([0.05, 0.02]), width=8),
        algorithm=GridSearch(max_epochs=2),
        metric="mse",
        mode="min",
        storage=f"sqlite:///{tmp_path}/a.db",
        name="a",
    )


def run(study):
    study.run(progress=False, executor=Local(pack="solo", threads=1))


class Measured(Toy):
    def metrics(self, model, batch):
        return self.changed(super().metrics(model, batch)["mse"])


WRONG = {
    "a str .* as 'mse'": lambda mse: {"mse": f"{float(mse):.4f}"},
    "a str .'good'. as 'note'": lambda mse: {"mse": mse, "note": "good"},
    r"a Tensor of shape \(3,\) as 'mse'": lambda mse: {"mse": mse.expand(3)},
    r"a ndarray of shape \(2,\) as 'mse'": lambda _: {"mse": np.zeros(2)},
    "a tuple": lambda mse: (mse,),
    r"a Tensor of shape \(\)": lambda mse: mse,
    "nothing": lambda _: None,
}


@pytest.mark.parametrize("said", WRONG)
def test_metrics_that_are_no_numbers_are_an_error_before_training(said, tmp_path):
    class Wrong(Measured):
        changed = staticmethod(WRONG[said])

    with pytest.raises(TaskError, match=f"Wrong.metrics returned {said}"):
        run(study_of(Wrong(), tmp_path))


@pytest.mark.parametrize(
    "value", [float, np.float32, lambda mse: np.array([float(mse)]), lambda mse: mse > 0]
)
def test_metrics_may_be_numbers_of_any_kind(value, tmp_path):
    class Right(Measured):
        def changed(self, mse):
            return {"mse": value(mse)}

    study = study_of(Right(), tmp_path)
    run(study)
    assert [len(trial.curve) for trial in study.trials] == [2, 2]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (lambda loss: loss.item(), "a float"),
        (lambda loss: loss.expand(2), r"a Tensor of shape \(2,\)"),
    ],
)
def test_a_loss_that_is_no_tensor_of_one_element(value, said, tmp_path, caplog):
    class Wrong(Toy):
        def loss(self, model, batch):
            return value(super().loss(model, batch))

        def metrics(self, model, batch):
            return {"mse": 0.5}

    with caplog.at_level(logging.WARNING, logger="thrifty"):
        run(study_of(Wrong(), tmp_path))
    lines = [line for line in caplog.messages if "failed" in line]
    assert [line.split(" failed")[0] for line in lines[:1]] == ["trial 0"]
    assert "trials 0, 1 failed" in lines[-1]
    assert all(re.search(f"Wrong.loss returned {said}", line) for line in lines)


class Counting(Toy):
    """Task that keeps a training variable outside of the state."""

    def __init__(self):
        self.num_steps = 0

    def loss(self, model, batch):
        self.num_steps += 1
        return super().loss(model, batch) * (1 + 0.1 * self.num_steps)


def test_a_study_that_ends_with_an_error_is_not_shown_as_killed(tmp_path, caplog):
    with pytest.raises(StateError, match="Counting keeps state outside"):
        run(study_of(Counting(), tmp_path))
    assert not [line for line in caplog.messages if "keeps state" in line], "it is said once"
    with Store.open(f"sqlite:///{tmp_path}/a.db") as store:
        assert store.studies.summary("a").state == "stopped"
