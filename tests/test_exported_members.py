from __future__ import annotations

import importlib

import pytest

import thrifty


PACKAGES = [
    "core",
    "space",
    "perf",
    "pack",
    "graph",
    "nn",
    "search",
    "plan",
    "store",
    "run",
    "study",
    "testing",
    "web",
]


@pytest.mark.parametrize("name", PACKAGES)
def test_all_is_what_a_package_shows(name):
    module = importlib.import_module(f"thrifty.{name}")
    public = {
        key
        for key, value in vars(module).items()
        if not key.startswith("_") and not isinstance(value, type(thrifty))
    }
    assert set(module.__all__) == public


def test_integrations_are_there_when_they_are_asked_for():
    found = {name: getattr(thrifty.integrations, name) for name in thrifty.integrations.__all__}
    assert all(value.__module__.startswith("thrifty.integrations") for value in found.values())
    assert set(found) <= set(dir(thrifty.integrations))
    with pytest.raises(AttributeError, match="no attribute 'Keras'"):
        thrifty.integrations.Keras  # noqa: B018


def test_every_name_of_the_face_is_there():
    for name in thrifty.__all__:
        assert getattr(thrifty, name).__module__.startswith("thrifty")
    assert set(thrifty.__all__) <= set(dir(thrifty))
    with pytest.raises(AttributeError, match="no attribute 'Hyperbola'"):
        thrifty.Hyperbola  # noqa: B018
