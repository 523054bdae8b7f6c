from __future__ import annotations

import multiprocessing
import pickle
import traceback
from importlib import import_module

import cloudpickle
import pytest
from hypothesis import given, strategies as st

import thrifty
import thrifty.core
from thrifty.core import (
    MissingExtraError,
    SystemClock,
    ThriftyError,
    derive_seed,
    require,
    step_seed,
)
from thrifty.testing import VirtualClock


@given(st.integers(0, 2**63 - 1), st.integers(0, 10**6))
def test_seeds_fit_into_63_bits(seed, step):
    assert 0 <= derive_seed(seed, "data", step) < 2**63
    assert 0 <= step_seed(seed, step) < 2**63


def test_streams_of_different_names_differ():
    names = [("data", 1), ("data", 2), ("model",), ("epoch", 1), ("data", "1")]
    assert len({derive_seed(0, *name) for name in names}) == len(names)


def test_a_missing_extra_is_an_import_error_that_says_what_to_install():
    error = MissingExtraError("pandas", extra="dataframe")
    assert isinstance(error, ImportError)
    assert isinstance(error, ThriftyError)
    assert "run: pip install pandas " in str(error)
    assert "pip install -c constraints.txt -e '.[dataframe]'" in str(error)


OWN_ERRORS = [
    each
    for each in vars(thrifty.core).values()
    if isinstance(each, type) and issubclass(each, ThriftyError)
]


@pytest.mark.parametrize("kind", OWN_ERRORS, ids=lambda kind: kind.__name__)
def test_a_traceback_names_the_place_to_import_an_error_from(kind):
    home = "thrifty" if kind.__name__ in thrifty.__all__ else "thrifty.core"
    assert kind.__module__ == home
    assert getattr(import_module(home), kind.__name__) is kind
    (line,) = traceback.format_exception_only(kind.__new__(kind))
    assert line.startswith(f"{home}.{kind.__name__}")


@pytest.mark.parametrize("kind", OWN_ERRORS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("library", [pickle, cloudpickle], ids=lambda each: each.__name__)
def test_an_error_comes_back_from_its_pickle_as_itself(library, kind):
    error = kind("lr", extra="none") if kind is MissingExtraError else kind("lr is 0")
    again = library.loads(library.dumps(error))
    assert (type(again), str(again)) == (kind, str(error))


def test_an_error_comes_back_from_another_process_as_itself():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        with pytest.raises(thrifty.SpaceError, match="low must not exceed high") as caught:
            pool.apply(thrifty.Int, (5, 1))
        assert type(caught.value) is thrifty.SpaceError


def test_a_broken_installation_is_not_taken_for_a_missing_one(tmp_path, monkeypatch):
    (tmp_path / "half_installed.py").write_text("import a_module_that_nobody_has")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingExtraError, match=r"cannot be imported .*a_module_that_nobody_has"):
        require("half_installed", extra="none")
    with pytest.raises(MissingExtraError, match="another_one is not installed; run: pip"):
        require("another_one.part", extra="none")


def test_clocks_go_forward():
    clock = SystemClock()
    assert clock.monotonic() <= clock.monotonic()
    assert clock.now() > 0
    virtual = VirtualClock(5.0)
    virtual.advance(2.0)
    assert (virtual.now(), virtual.monotonic()) == (7.0, 2.0)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (thrifty.Local, "executor is the class Local; give one"),
        (thrifty.testing.LineTask(), "executor is an object of LineTask; give one"),
    ],
)
def test_no_message_names_a_private_module(wrong, said):
    study = thrifty.Study(
        thrifty.testing.LineTask(),
        thrifty.Space(lr=0.1),
        algorithm=thrifty.GridSearch(max_epochs=1),
        metric="mse",
        mode="min",
        name="x",
        storage="sqlite://",
    )
    with pytest.raises(thrifty.UsageError, match=said) as caught:
        study.run(executor=wrong)
    assert "._" not in str(caught.value)
    assert "Local'>" not in str(caught.value)
