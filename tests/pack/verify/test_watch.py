"""Changes of values that code reads are noticed and attributed to a trial."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

from thrifty.pack.identity import reach
from thrifty.pack.verify import Keeper, Watch, training_places


FACTOR = 1.0
TABLE = {"factor": [1.0]}


class Net(nn.Module):
    gain = 1.0

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 1)
        self.scale, self.notes = 1.0, []

    def forward(self, x):
        return self.inner(x) * self.scale * self.gain * FACTOR * TABLE["factor"][0]


class Frozen:
    """Restores the shared values that a test has changed."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        globals()["FACTOR"] = Net.gain = 1.0
        TABLE["factor"][:] = [1.0]


def set_global(_):
    globals()["FACTOR"] = 2.0


@pytest.mark.parametrize(
    ("change", "name", "is_own"),
    [
        (set_global, "FACTOR", False),
        (lambda net: TABLE["factor"].__setitem__(0, 2.0), "TABLE", False),
        (lambda net: setattr(Net, "gain", 2.0), "Net.gain", False),
        (lambda net: setattr(net, "scale", 2.0), "model.scale", True),
        (lambda net: net.notes.append(1), "model.notes", True),
        (lambda net: net.inner.weight.requires_grad_(False), "model.inner", True),
        (lambda net: setattr(net, "inner", nn.Linear(2, 1)), "model", True),
        (lambda net: net.register_forward_hook(lambda *_: None), "model", True),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_change_is_named(change, name, is_own):
    with Frozen():
        net = Net()
        watch = Watch({"model": net})
        assert watch.changed() is None
        change(net)
        found = list(watch.changes())
        assert [each.name.split("test_watch.")[-1] for each in found] == [name]
        assert found[0].is_own == is_own
        watch.look()
        assert watch.changed() is None


def test_a_change_of_the_environment_is_seen_by_all(monkeypatch):
    class Reading(Net):
        def forward(self, x):
            return super().forward(x) * float(os.environ.get("THRIFTY_TEST_WATCH", "1"))

    watches = [Watch({"model": Reading()}) for _ in range(2)]
    assert watches[0].changed() is None
    monkeypatch.setenv("THRIFTY_TEST_WATCH", "1")
    change = watches[0].changed()
    assert change.name == "os.environ['THRIFTY_TEST_WATCH']"
    assert not change.objects.isdisjoint(watches[1].objects())


def test_the_memory_of_tensors_counts_where_that_is_asked_for():
    net = Net()
    loose, strict = Watch({"model": net}), Watch({"model": net}, memory=True)
    net.inner.weight.data = net.inner.weight.data.clone()
    assert loose.changed() is None
    assert strict.changed().name == "model.inner"


def test_what_two_trials_share_is_told_from_what_is_their_own():
    with Frozen():
        one, other = Net(), Net()
        watches = [Watch({"model": each}) for each in (one, other)]
        one.notes.append(1)
        TABLE["factor"][0] = 2.0
        shared = {
            change.name.split("test_watch.")[-1]: not change.objects.isdisjoint(
                watches[1].objects()
            )
            for change in watches[0].changes()
        }
        assert shared == {"model.notes": False, "TABLE": True}


def test_attributes_may_be_followed_in_another_way():
    net = Net()
    watch = Watch({"model": net}, ignored=[(net, "scale")])
    net.scale = 2.0
    assert watch.changed() is None


def test_what_an_installed_class_caches_is_no_change():
    net = Net()
    net.helper = Path("a") / "b"
    places = training_places({"model": net})
    watch, keeper = Watch({"model": net}), Keeper(places)
    assert str(net.helper) == "a/b"
    assert any(place.key == "_str" for place in places)
    assert watch.changed() is None
    assert keeper.changed() == []


def test_iterators_cannot_be_watched():
    net = Net()
    net.notes = itertools.count()
    assert Watch({"model": net}).unwatchable == "model.notes"
    assert not Watch({"model": Net()}).unwatchable


def test_all_changes_are_found_at_once():
    with Frozen():
        net = Net()
        watch = Watch({"model": net})
        set_global(net)
        net.scale = 3.0
        net.inner.weight.requires_grad_(False)
        assert {change.name.rpartition(".")[2] for change in watch.changes()} == {
            "FACTOR",
            "scale",
            "inner",
        }


def test_other_objects_that_are_equal_are_no_change():
    net = Net()
    net.scale, net.notes = float("1.5"), ["a"]
    watch = Watch({"model": net})
    net.scale, net.notes = float("1.5"), ["a"]
    assert watch.changed() is None


@pytest.mark.parametrize("memory", [True, False])
def test_memory_that_has_moved_is_a_change_where_it_matters(memory):
    net = Net()
    watch = Watch({"model": net}, memory=memory)
    net.inner.weight.data = net.inner.weight.data.clone()
    assert (watch.changed() is not None) is memory


def test_children_that_trade_places_with_their_neighbours_are_a_change():
    one, other = nn.Sequential(nn.ReLU()), nn.Sequential(nn.Tanh(), nn.Identity())
    net = nn.Sequential(one, other)
    watch = Watch({"model": net})
    one.add_module("1", other[0])  # in order, the same modules as before
    del other[0]
    assert watch.changed() is not None


def test_a_search_of_the_users_code_does_not_go_through_a_watch():
    net = Net()
    assert reach({"keeper": SimpleNamespace(model=net)}).functions
    assert not reach({"keeper": SimpleNamespace(watch=Watch({"model": net}))}).functions
