"""A model is made once for a trial where a copy of it is certain to be the same."""

from __future__ import annotations

import copy
from importlib.util import find_spec

import pytest
import torch

import thrifty as th
from tests.integrations._drive import assert_a_resumed_trial_is_the_same, made_again_only, train
from tests.integrations.test_fresh_parameters import IGNORED, adapted, bert, lora, text_task
from thrifty.integrations import _model_copies
from thrifty.pack import HyperParameters


pytestmark = pytest.mark.slow


def hooked(hp):
    model = bert()
    model.classifier.register_forward_hook(lambda module, args, out: out * 2.0)
    return model


def dropping(hp):
    model = bert()
    model.dropout.p = hp.dropout
    return model


def fixed(epoch):
    return {"lr": 0.01, "dropout": 0.1}


def changing(epoch):
    return {"lr": 0.01 * (epoch + 1), "dropout": 0.1 if epoch < 2 else 0.3}


RATES = {"dropout": 0.1}


def reading_a_global(hp):
    model = bert()
    model.dropout.p = RATES["dropout"]
    return model


def changing_the_global(epoch):
    RATES["dropout"] = 0.1 if epoch < 4 else 0.5
    return fixed(epoch)


def trained(make, values):
    """Return metrics and tensors of a trial, and how often its model was made."""
    calls = []

    def counted(hp):
        calls.append(None)
        return make(hp)

    metrics, state = train(text_task(counted), values, epochs=6)
    return metrics, state.tensors, len(calls)


@pytest.mark.sample(4)
@IGNORED
@pytest.mark.parametrize(
    ("make", "values", "num"),
    [
        (lambda hp: bert(), changing, 1),
        (dropping, fixed, 1),
        (dropping, changing, 2),
        (reading_a_global, changing_the_global, 2),
        # Once more before the first epoch, to see which frozen parameters are the same; that call
        # is noted in `calls`, so that something in the closure has changed for the second epoch.
        pytest.param(
            lora,
            changing,
            3,
            marks=pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed"),
        ),
        # a class of the user: in the third epoch, it is made once more and found to be the same
        (adapted, fixed, 5),
        (adapted, changing, 5),
        # a function of the user in a hook, whose number differs: made for each epoch
        (hooked, fixed, 7),
    ],
    ids=[
        "library",
        "fixed",
        "changing",
        "global",
        "peft",
        "own class",
        "own class changing",
        "hook",
    ],
)
def test_copies_train_the_same_bits_as_models_made_for_each_epoch(monkeypatch, make, values, num):
    metrics, tensors, calls = trained(make, values)
    assert calls == num
    monkeypatch.setattr(_model_copies, "is_copyable", lambda model: False)
    monkeypatch.setattr(_model_copies, "made_again", made_again_only)
    wanted, others, _ = trained(make, values)
    assert metrics == wanted
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert (tensor == others[name]).all(), name


def test_a_function_that_reads_an_iterator_makes_each_model():
    rates = iter([0.1, 0.2, 0.3])

    def make(hp):
        return torch.nn.Dropout(next(rates))

    copies = _model_copies.ModelCopies(make)
    models = [copies.get(HyperParameters({}), seed=0) for _ in range(3)]
    assert [model.p for model in models] == [0.1, 0.2, 0.3]


def test_a_copy_of_a_task_makes_its_own_models():
    calls = []
    copies = _model_copies.ModelCopies(lambda hp: calls.append(None) or torch.nn.Linear(1, 1))
    first = copies.get(HyperParameters({}), seed=0)
    second = copy.deepcopy(copies).get(HyperParameters({}), seed=0)
    assert (first.weight == second.weight).all()
    assert len(calls) == 2


def test_a_resumed_trial_of_copies_is_the_same():
    assert_a_resumed_trial_is_the_same(lambda: text_task(dropping), changing)


def test_the_kept_model_is_not_taken_for_state(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("thrifty.pack.trial._state_check.SHORT_S", 0.0)
    study = th.Study(
        text_task(lambda hp: bert()),
        th.Space(lr=0.01),
        algorithm=th.GridSearch(max_epochs=2),
        metric="eval_loss",
        mode="min",
        storage=f"sqlite:///{tmp_path}/t.db",
        name="bert",
    )
    study.run(progress=False, executor=th.Local(threads=1))
    assert "not in the checkpoint" not in caplog.text
