from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

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
    assert "in the checkout of thrifty: pip install -e '.[dataframe]'" in str(error)


def test_a_broken_installation_is_not_taken_for_a_missing_one(tmp_path, monkeypatch):
    (tmp_path / "half_installed.py").write_text("import a_module_that_nobody_has")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        MissingExtraError, match=r"cannot be imported .*a_module_that_nobody_has"
    ):
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
