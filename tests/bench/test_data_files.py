"""A benchmark without its data says what is missing."""

from __future__ import annotations

import pytest

from bench.common.harness import data_file


def test_a_missing_file_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("THRIFTY_DATA", str(tmp_path))
    with pytest.raises(SystemExit, match=r"reads graphs/cora\.npz, which is not .* THRIFTY_DATA"):
        data_file("graphs", "cora.npz")


def test_a_file_that_is_there_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("THRIFTY_DATA", str(tmp_path))
    (tmp_path / "graphs").mkdir()
    assert data_file("graphs") == tmp_path / "graphs"
