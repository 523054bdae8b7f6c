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
from thrifty.pack._state import seed_everything


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


def trained(monkeypatch, make, values, *, epochs=6):
    """Return metrics and tensors of a trial, and how often its model was made for it."""
    calls = []
    counted = lambda *args: (calls.append(None), seed_everything(*args))  # noqa: E731
    monkeypatch.setattr(_model_copies, "seed_everything", counted)
    metrics, state = train(text_task(make), values, epochs=epochs)
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
        pytest.param(
            lora,
            changing,
            1,
            marks=pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed"),
        ),
        # a class of the user: in the third epoch, it is made once more and found to be the same
        (adapted, fixed, 4),
        (adapted, changing, 4),
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
    metrics, tensors, calls = trained(monkeypatch, make, values)
    assert calls == num
    monkeypatch.setattr(_model_copies, "is_copyable", lambda model: False)
    monkeypatch.setattr(_model_copies, "made_again", made_again_only)
    wanted, others, _ = trained(monkeypatch, make, values)
    assert metrics == wanted
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert (tensor == others[name]).all(), name


class Scaled(torch.nn.Module):
    """A class of the user, which keeps a number."""

    def __init__(self, scale):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(2))
        self.scale = scale


def copies_of(make, values):
    """Return the models of epochs, and for how many of them one was made."""
    copies, calls = _model_copies.ModelCopies(make), []
    make_one = copies._made
    copies._made = lambda *args, **options: (calls.append(None), make_one(*args, **options))[1]
    return [copies.get(HyperParameters(each), seed=0) for each in values], len(calls)


def test_a_number_that_is_kept_is_that_of_each_epoch():
    rates = [0.1 / (1 + epoch) for epoch in range(20)]
    models, num = copies_of(lambda hp: Scaled({"rate": [hp.rate]}), [{"rate": r} for r in rates])
    assert [model.scale["rate"] for model in models] == [[rate] for rate in rates]
    assert all(type(model.scale["rate"][0]) is float for model in models)
    assert len({id(model) for model in models}) == 20
    assert num == 3 + 2  # compared again after 8 and 16 copies


def test_a_number_that_changes_late_is_kept_from_then_on():
    values = [{"rate": 0.1 if epoch < 5 else 0.1 / epoch, "width": 2} for epoch in range(12)]
    models, num = copies_of(lambda hp: Scaled((hp.rate, hp.width)), values)
    assert [model.scale for model in models] == [(v["rate"], v["width"]) for v in values]
    assert num == 3 + 3


@pytest.mark.parametrize("values", [[True, False], ["a", "b"], [1, 1.5], [None, 0.1], [(1,), (2,)]])
def test_what_is_no_number_is_made_for_each_epoch(values):
    values = [values[epoch % 2] for epoch in range(8)]
    models, num = copies_of(lambda hp: Scaled(hp.scale), [{"scale": scale} for scale in values])
    assert [model.scale for model in models] == values
    assert num == 8


def test_an_error_of_the_function_is_its_own():
    def make(hp):
        if hp.rate > 0.3:
            raise ValueError("too fast")
        return Scaled(hp.rate)

    with pytest.raises(ValueError, match="too fast"):
        copies_of(make, [{"rate": 0.1 * epoch} for epoch in range(8)])


def test_a_file_that_changes_is_noticed_later(tmp_path, caplog):
    file = tmp_path / "scale.txt"
    file.write_text("1.0")
    copies = _model_copies.ModelCopies(lambda hp: Scaled(float(file.read_text())))
    scales = []
    for epoch in range(20):
        if epoch == 5:
            file.write_text("2.0")
        scales.append(copies.get(HyperParameters({}), seed=0).scale)
    assert scales == [1.0] * 10 + [2.0] * 10
    assert "makes another model now" in caplog.text
    assert caplog.text.count("WARNING") == 1


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
