"""A model is made once for a trial where a copy of it is certain to be the same."""

from __future__ import annotations

import colorsys
import copy
import math
import sys
import types
from collections.abc import Iterable
from importlib.util import find_spec

import pytest
import torch
from torch.nn.utils import prune

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


def linear(attribute):
    """Return a function that makes a model of torch with an attribute."""

    def make(hp):
        model = torch.nn.Linear(2, 1)
        model.extra = attribute(hp)
        return model

    return make


def containing_itself(hp):
    out = {}
    out["self"] = out
    return out


def adding_to_a_list_of_its_own(hp):
    model = torch.nn.Linear(2, 1)
    model.log = []
    model.add = model.log.append
    return model


def pruned(hp):
    model = torch.nn.Linear(4, 1)
    prune.l1_unstructured(model, "weight", amount=0.5)
    return model


class Rounded:
    """Looks at its number when it is copied."""

    def __init__(self, rate):
        self.rate = rate

    def __getstate__(self):
        return {"rate": float(self.rate)}


RATE_NOW = 0.0


def writing_a_global(hp):
    global RATE_NOW
    RATE_NOW = hp.rate
    return Scaled(hp.rate)


def writing_elsewhere(hp):
    vars(colorsys)["rate"] = hp.rate
    return Scaled(hp.rate)


def keeping_all_elsewhere(hp):
    vars(colorsys)["hp"] = hp
    return Scaled(hp.rate)


def leaving_if_something_fails(hp):
    try:
        return Scaled(torch.full((1,), hp.rate))
    except Exception:  # noqa: BLE001
        sys.exit(1)


def in_double(hp):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    model = Scaled(torch.full((1,), hp.rate))
    torch.set_default_dtype(before)
    return model


def used(model):
    model.add(1)
    return list(model.log)


def without_norm(model):
    out = model(torch.ones(1, 2)).item()
    torch.nn.utils.parametrize.remove_parametrizations(model, "weight")
    return out


FASTER = [{"rate": 0.1 * (epoch + 1)} for epoch in range(12)]
WIDER = [{"rate": epoch + 1} for epoch in range(12)]


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("make", "values", "look"),
    [
        (lambda hp: torch.nn.utils.weight_norm(torch.nn.Linear(2, 1)), FASTER, len),
        (pruned, FASTER, len),
        (linear(lambda hp: math), FASTER, lambda m: m.extra),
        (linear(lambda hp: list({"a": 1}.keys())), FASTER, lambda m: m.extra),
        (linear(lambda hp: types.MappingProxyType({"a": 1})), FASTER, lambda m: dict(m.extra)),
        (linear(containing_itself), FASTER, lambda m: m.extra["self"] is m.extra),
        (linear(lambda hp: hp), FASTER, lambda m: m.extra.rate),
        (linear(str), FASTER, lambda m: m.extra),
        (
            lambda hp: torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 1)),
            FASTER,
            without_norm,
        ),
        (adding_to_a_list_of_its_own, FASTER, used),
        (
            lambda hp: Scaled(hp.rate),
            [{"rate": 1}] * 5 + [{"rate": 1.0}] * 3 + [{"rate": True}] * 2,
            lambda m: repr(m.scale),
        ),
        (
            lambda hp: Scaled(hp.rate),
            [{"rate": (1, 2)}] * 5 + [{"rate": (1.0, 2.0)}] * 3,
            lambda m: repr(m.scale),
        ),
        (
            lambda hp: Scaled(hp.rate),
            [{"rate": 0.0}] * 5 + [{"rate": -0.0}] * 3 + [{"rate": math.nan}] * 5,
            lambda m: repr(m.scale),
        ),
        (lambda hp: Scaled(f"{hp}"), FASTER, lambda m: m.scale),
        (lambda hp: Scaled(type(hp.rate) is int and hp.rate > 5), WIDER, lambda m: m.scale),
        (
            lambda hp: Scaled((hp.rate, not callable(hp.rate) and hp.rate > 0.5)),
            FASTER,
            lambda m: m.scale,
        ),
        (
            lambda hp: Scaled((hp.rate, not isinstance(hp.rate, Iterable) and hp.rate > 0.5)),
            FASTER,
            lambda m: m.scale,
        ),
        (leaving_if_something_fails, FASTER, lambda m: m.scale.item()),
        (in_double, FASTER, lambda m: (m.scale.dtype, torch.get_default_dtype())),
        (lambda hp: Scaled(Rounded(hp.rate)), FASTER, lambda m: m.scale.rate),
        (writing_a_global, FASTER, lambda m: RATE_NOW),
        (keeping_all_elsewhere, FASTER, lambda m: vars(colorsys)["hp"].rate),
        (writing_elsewhere, FASTER, lambda m: vars(colorsys)["rate"]),
    ],
)
def test_a_model_is_what_would_be_made(make, values, look):
    copies = _model_copies.ModelCopies(make)
    found = [looked(copies.get(HyperParameters(each), seed=0), look) for each in values]
    wanted = []
    for each in values:
        seed_everything(0)
        wanted.append(looked(make(HyperParameters(each)), look))
    assert repr(found) == repr(wanted)


SCRIPT = """
from tests.integrations.test_model_copies import HyperParameters, Scaled
from thrifty.integrations._model_copies import ModelCopies

def make(hp):
    globals()["rate"] = hp.rate
    return Scaled(hp.rate)

copies = ModelCopies(make)
for number in range(1, 7):
    copies.get(HyperParameters({"rate": number / 10}), seed=0)
    assert rate == number / 10, (rate, number)
"""


def test_variables_of_the_script_that_is_at_work_are_looked_at():
    exec(SCRIPT, {"__name__": "__main__"})


def looked(model, look):
    tensors = [tensor.tolist() for tensor in model.state_dict().values()]
    return tensors, None if look is len else look(model)


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
