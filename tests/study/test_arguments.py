"""Invalid arguments give one clear error each, as soon as they are passed."""

import copy
import inspect
import math
import pickle
import re

import numpy as np
import pytest

import thrifty as th
from tests.study.helpers import make_study
from thrifty.core import AlgorithmError, UsageError
from thrifty.integrations.functions import _optimize
from thrifty.run import Local, Ray
from thrifty.search import Algorithm
from thrifty.study import StopWhen, Storage, Study, _study


class Odd(Algorithm):
    def __init__(self, max_epochs):
        self.max_epochs = max_epochs

    def ask(self, history, space, *, num, rng):
        return []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": None}, "name is None; it must be a text"),
        ({"name": 3}, "name is 3; it must be a text"),
        ({"name": b"digits"}, "it must be a text"),
        ({"name": ""}, "name is ''; give the study a name"),
        ({"name": " \t"}, "give the study a name"),
        ({"name": "x" * 256}, "name has 256 characters; it may have at most 255"),
        ({"name": "a\0b"}, "must not have NULs"),
        ({"name": "\udc80"}, "characters that UTF-8 cannot encode"),
        ({"seed": -1}, "seed is -1; it must be from 0"),
        ({"seed": 2**63}, "it must be from 0 to 2\\*\\*63 - 1"),
        ({"seed": 10**400}, "it must be from 0"),
        ({"seed": "0"}, "seed is '0'; it must be an integer"),
        ({"seed": 0.0}, "seed is 0.0; it must be an integer"),
        ({"seed": True}, "seed is True; it must be an integer"),
        ({"seed": np.True_}, "it must be an integer"),
        ({"seed": None}, "seed is None; it must be an integer"),
        ({"metric": ""}, "metric is ''; name at least one metric"),
        ({"metric": ["mse", ""], "mode": ["min", "min"]}, "name at least one metric"),
        ({"metric": ["mse", "mse"], "mode": ["min", "min"]}, "each only once"),
        ({"metric": []}, "name at least one metric"),
        ({"metric": None}, "must be a metric's name"),
        ({"mode": 1}, "mode is 1; it must be"),
        ({"storage": None}, "storage is None; give an address such as 'sqlite:///thrifty.db'"),
        ({"storage": 3}, "storage is 3"),
    ],
)
def test_what_makes_no_study(options, message):
    with pytest.raises(UsageError, match=message):
        make_study("", **options)


@pytest.mark.parametrize("max_epochs", [0, -1, 3.0, "3", None, True, math.nan, np.int64(3)])
def test_a_number_of_epochs_that_is_none(max_epochs):
    with pytest.raises(AlgorithmError, match=r"Odd.max_epochs is .*must be an integer, 1 or more"):
        make_study("", algorithm=Odd(max_epochs))


def test_seeds_and_names_at_their_limits():
    assert make_study("", seed=2**63 - 1, name="x" * 255).seed == 2**63 - 1
    seed = make_study("", seed=np.int64(7)).seed
    assert (seed, type(seed)) == (7, int)


@pytest.mark.parametrize("kind", [Local, Ray])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": True}, r"\(workers=True\): workers must be an integer"),
        ({"workers": 2.0}, r"\(workers=2.0\): workers must be an integer"),
        ({"workers": "2"}, "workers must be an integer"),
        ({"workers": 0}, "needs at least one"),
        ({"threads": 1.0}, "threads must be an integer"),
        ({"pack_size": False}, "pack_size must be an integer"),
        ({"memory_margin": "0.9"}, "memory_margin='0.9'\\): it must be a number"),
        ({"memory_margin": True}, "it must be a number"),
        ({"memory_margin": math.nan}, "a share above 0"),
    ],
)
def test_what_makes_no_executor(kind, options, message):
    with pytest.raises(UsageError, match=message):
        kind(**options)


@pytest.mark.parametrize("devices", ["cpu", (0, 1), [None]])
def test_devices_are_names(devices):
    with pytest.raises(UsageError, match="give a list of names"):
        Local(devices=devices)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"epochs": 0},
        {"epochs": 2.0},
        {"epochs": True},
        {"epochs": "5"},
        {"seconds": -1},
        {"seconds": math.nan},
        {"seconds": math.inf},
        {"seconds": "60"},
        {"target": math.nan},
        {"target": math.inf},
        {"target": True},
        {"target": "0.9"},
    ],
)
def test_what_stops_no_run(options):
    with pytest.raises(UsageError, match=r"StopWhen\("):
        StopWhen(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"executor": "local"}, "executor is 'local'; give one such as thrifty.Local"),
        ({"executor": Local}, "give one such as thrifty.Local"),
        ({"stop": 5}, r"stop is 5; give thrifty.StopWhen"),
        ({"observers": 3}, "observers is 3; give a list"),
        ({"observers": [object()]}, r"with a method on_event\(event\)"),
    ],
)
def test_what_makes_no_run(tmp_path, options, message):
    with pytest.raises(UsageError, match=message):
        make_study(tmp_path).run(progress=False, **options)
    assert not list(tmp_path.iterdir()), "nothing was begun"


def test_an_address_and_a_storage_are_taken():
    assert Storage.of("sqlite://") == Storage.of(Storage(url="sqlite://"))


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("best_value", "a Study has no attribute 'best_value'; use study.best_trial.value"),
        ("best_params", "use study.best_trial.config"),
        ("optimize", r"use study.run\(\)"),
        ("nonsense", "'Study' object has no attribute 'nonsense'"),
    ],
)
def test_an_attribute_of_another_library_has_advice(tmp_path, name, advice):
    study = make_study(tmp_path)
    with pytest.raises(AttributeError, match=advice):
        getattr(study, name)
    assert not hasattr(study, name)


def test_the_error_of_a_property_is_not_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(Study, "unit", property(lambda self: self.goals.nonsense))
    with pytest.raises(AttributeError, match="'Goals' object has no attribute 'nonsense'"):
        make_study(tmp_path).unit  # noqa: B018 (read for its error)


def test_a_study_can_be_copied_before_it_has_attributes(tmp_path):
    study = copy.copy(make_study(tmp_path))
    assert study.name == "s"
    assert not hasattr(Study.__new__(Study), "task")


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("Categorical", "module 'thrifty' has no attribute 'Categorical'; use thrifty.Choice"),
        ("Uniform", "use thrifty.Float"),
        ("create_study", "use thrifty.Study"),
        ("Nonsense", "no attribute 'Nonsense'$"),
    ],
)
def test_a_name_of_another_library_has_advice(name, advice):
    with pytest.raises(AttributeError, match=advice):
        getattr(th, name)


def test_the_advice_names_what_there_is(tmp_path):
    assert {text.partition("(")[0] for text in th._ELSEWHERE.values()} <= {*th.__all__}
    assert not th._ELSEWHERE.keys() & {*th.__all__}


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"direction": "minimize"}, r"Study\(\) has no argument 'direction'; write mode=\"min\""),
        ({"sampler": None}, "write algorithm=th.RandomSearch"),
        ({"workers": 2}, r"write study.run\(executor=th.Local\(workers=...\)\) instead"),
        ({"nonsense": 2}, r"Study\(\) has no argument 'nonsense'; it has: task, space, "),
        ({"sed": 2}, r"Study\(\) has no argument 'sed'; did you mean seed\? It has: task, "),
    ],
)
def test_an_argument_of_another_library_has_advice(tmp_path, options, advice):
    with pytest.raises(TypeError, match=advice):
        make_study(tmp_path, **options)


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"workers": 2}, r"Study.run\(\) has no argument 'workers'; write executor=th.Local"),
        ({"timeout": 60}, r"write stop=th.StopWhen\(seconds=...\) instead"),
        ({"nonsense": 2}, "'nonsense'; it has: executor, stop, progress, observers$"),
        ({"observer": []}, r"'observer'; did you mean observers\? It has: executor, stop, "),
    ],
)
def test_an_argument_of_a_run_of_another_library_has_advice(tmp_path, options, advice):
    with pytest.raises(TypeError, match=advice):
        make_study(tmp_path).run(**options)


class Mine(th.RandomSearch):
    pass


@pytest.mark.parametrize(
    ("make", "options", "advice"),
    [
        (
            th.ASHA,
            {"max_epoch": 9},
            r"ASHA\(\) .* 'max_epoch'; did you mean max_epochs\? It has: m",
        ),
        (th.Hyperband, {"nonsense": 9}, r"Hyperband\(\) .* 'nonsense'; it has: max_epochs, "),
        (
            th.BOHB,
            {"max_epoch": 9},
            r"BOHB\(\) .* did you mean max_epochs\? It has: max_epochs, eta",
        ),
        (Mine, {"n_trials": 9}, r"Mine\(\) has no argument 'n_trials'; did you mean num_trials\?"),
        (Odd, {"max_epoch": 9}, r"Odd\(\) .* did you mean max_epochs\? It has: max_epochs$"),
        (
            th.optimize,
            {"trials": 9},
            r"optimize\(\) .* did you mean n_trials\? It has: objective, ",
        ),
    ],
)
def test_a_misspelt_argument_has_advice(make, options, advice):
    with pytest.raises(TypeError, match=advice):
        make(**options)


def test_advice_changes_no_algorithm():
    made = th.ASHA(max_epochs=9, num_trials=3)
    assert copy.deepcopy(made) == pickle.loads(pickle.dumps(made)) == made
    assert [*inspect.signature(th.ASHA).parameters][:2] == ["max_epochs", "num_trials"]
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'num_trials'"):
        th.ASHA(max_epochs=9)


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        (th.GridSearch, r"GridSearch\(max_epochs=...\)"),
        (th.ASHA, r"ASHA\(max_epochs=..., num_trials=...\)"),
        (Odd, r"Odd\(max_epochs\)"),
    ],
)
def test_a_class_has_advice_that_makes_an_instance(tmp_path, kind, call):
    name = kind.__name__
    with pytest.raises(
        UsageError, match=f"algorithm is the class {name}; give an instance: {call}$"
    ):
        make_study(tmp_path, algorithm=kind)


@pytest.mark.parametrize(
    ("function", "advice"),
    [
        (Study, _study._STUDY_ARGUMENTS),
        (Study.run, _study._RUN_ARGUMENTS),
        (th.optimize, _optimize._ARGUMENTS),
    ],
)
def test_no_argument_that_exists_has_advice(function, advice):
    has = inspect.signature(function).parameters
    assert not advice.keys() & has.keys()
    for text in advice.values():
        for name in re.findall(r"th\.(\w+)", text):
            assert name in th.__all__
        own, argument = re.match(r"(\w+)=|", text).group(0, 1)
        assert not own or argument in has


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("gpu", r"Local\(devices=\['gpu'\]\): PyTorch knows no such device; give 'cpu'"),
        ("cuda", "say which GPU, such as 'cuda:0'"),
        ("cuda:99", r"this PyTorch sees .* GPUs?; leave devices out"),
    ],
)
def test_devices_that_are_not_there_are_refused_when_a_run_begins(device, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        make_study(tmp_path).run(progress=False, executor=Local(devices=(device,)))
