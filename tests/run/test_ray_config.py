"""Messages about a Ray cluster before it exists."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from thrifty.core import MissingExtraError, UsageError
from thrifty.run import Ray
from thrifty.run._ray import _absolute, _Connection, _room, _warn_about, _warn_too_small
from thrifty.testing import LineTask


class FakeRay:
    """The part of Ray that a connection needs."""

    def __init__(self, *, connected=False, error=None):
        self.connected = connected
        self.error = error
        self.asked = []
        self.shutdowns = 0

    def is_initialized(self):
        return self.connected

    def init(self, **options):
        if self.error is not None:
            raise self.error
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))
        self.asked.append(options)
        self.connected = True

    def shutdown(self):
        self.shutdowns += 1
        self.connected = False


def node(address="10.0.0.1", *, alive=True, **resources):
    return {"Alive": alive, "NodeManagerAddress": address, "Resources": resources}


@pytest.mark.parametrize("option", ["workers", "threads", "pack_size"])
def test_needs_at_least_one(option):
    with pytest.raises(UsageError, match=rf"Ray\({option}=0\): needs at least one"):
        Ray(**{option: 0})


def test_an_unknown_way_to_pack():
    with pytest.raises(UsageError, match="it is one of 'auto', 'fused'"):
        Ray(pack="batched")


@pytest.mark.parametrize("margin", [0, -1, 1.1, float("nan")])
def test_a_margin_is_a_share(margin):
    with pytest.raises(UsageError, match="a share above 0 and at most 1"):
        Ray(memory_margin=margin)


@pytest.mark.parametrize("amount", [-1, 0.00001, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["num_cpus", "num_gpus", "cups"])
def test_resources_are_amounts(name, amount):
    options = {"resources": {name: amount}} if name == "cups" else {name: amount}
    with pytest.raises(UsageError, match=f"{amount} of "):
        Ray(workers=1, **options)


@pytest.mark.parametrize(("name", "instead"), [("CPU", "num_cpus=2"), ("GPU", "num_gpus=2")])
def test_some_resources_have_options_of_their_own(name, instead):
    with pytest.raises(UsageError, match=f"say {instead} instead"):
        Ray(resources={name: 2})


def test_a_fraction_of_a_gpu_or_whole_ones():
    with pytest.raises(UsageError, match="a fraction of one GPU, or whole ones"):
        Ray(num_gpus=1.5)
    Ray(num_gpus=2)


def test_workers_that_need_nothing_have_to_be_counted():
    with pytest.raises(UsageError, match="say how many with workers="):
        Ray(num_cpus=0)
    Ray(num_cpus=0, workers=3)
    Ray(num_cpus=0, num_gpus=1)


@pytest.mark.parametrize(
    ("options", "margin"),
    [
        ({}, 0.9),
        ({"num_gpus": 1}, 0.9),
        ({"num_gpus": 2, "memory_margin": 0.8}, 0.8),
        ({"num_gpus": 0.5}, 0.45),
        ({"num_gpus": 0.5, "memory_margin": 0.3}, 0.3),
    ],
)
def test_who_has_a_part_of_a_gpu_has_a_part_of_its_memory(options, margin):
    assert Ray(**options).memory_margin == pytest.approx(margin)


def test_how_many_workers_is_not_known_without_a_cluster(monkeypatch):
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    assert Ray().num_workers == 1
    assert Ray(workers=5).num_workers == 5


def test_ray_is_not_installed(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"\.\[ray\]"):
        Ray().open(LineTask(), checkpoints=str(tmp_path), folder="plan")


@pytest.mark.parametrize(
    ("nodes", "needs", "room"),
    [
        ([node(CPU=4)], {"CPU": 1}, 4),
        ([node(CPU=4), node(CPU=3)], {"CPU": 2}, 3),
        ([node(CPU=4), node(CPU=4, alive=False)], {"CPU": 1}, 4),
        ([node(CPU=0.3)], {"CPU": 0.1}, 3),
        ([node(CPU=8, GPU=2)], {"CPU": 1, "GPU": 1}, 2),
        ([node(CPU=8, GPU=4)], {"GPU": 2}, 2),
        ([node(CPU=8, GPU=3)], {"GPU": 0.6}, 3),
        ([node(CPU=8, GPU=2)], {"GPU": 0.3}, 6),
        ([node(CPU=8)], {"GPU": 1}, 0),
        ([node(CPU=8, cups=3)], {"CPU": 1, "cups": 1}, 3),
        ([], {"CPU": 1}, 0),
    ],
)
def test_workers_that_fit_on_the_live_nodes_are_counted(nodes, needs, room):
    assert _room(nodes, needs) == room


def test_there_is_always_room_for_who_needs_nothing():
    assert _room([node(CPU=1)], {}) > 10**6


def test_who_has_connected_disconnects():
    ray = FakeRay()
    first = _Connection.join(ray, Ray(address="10.0.0.1:6379", runtime_env={"pip": ["x"]}))
    second = _Connection.join(ray, Ray())
    assert first is second
    (options,) = ray.asked
    assert options["address"] == "10.0.0.1:6379"
    assert options["runtime_env"] == {"pip": ["x"]}
    first.leave(ray)
    assert ray.shutdowns == 0
    second.leave(ray)
    assert ray.shutdowns == 1
    again = _Connection.join(ray, Ray())
    assert len(ray.asked) == 2
    again.leave(ray)


def test_the_user_s_own_connection_stays():
    ray = FakeRay(connected=True)
    _Connection.join(ray, Ray()).leave(ray)
    assert not ray.asked
    assert not ray.shutdowns


def test_a_connection_that_was_cut_by_somebody_else():
    ray = FakeRay()
    old = _Connection.join(ray, Ray())
    ray.connected = False
    new = _Connection.join(ray, Ray())
    assert len(ray.asked) == 2
    old.leave(ray)
    assert not ray.shutdowns
    new.leave(ray)
    assert ray.shutdowns == 1


@pytest.mark.parametrize("error", [ConnectionError, ValueError, RuntimeError])
def test_no_cluster_at_the_address(error):
    with pytest.raises(UsageError, match=r"Ray\(address='10.0.0.1'\): cannot connect .*\(no way\)"):
        _Connection.join(FakeRay(error=error("no\nway")), Ray(address="10.0.0.1"))
    with pytest.raises(UsageError, match=r"Ray\(\): cannot connect"):
        _Connection.join(FakeRay(error=error("no way")), Ray())


def test_sigterm_stays_what_it_was():
    before = signal.getsignal(signal.SIGTERM)
    ray = FakeRay()
    _Connection.join(ray, Ray()).leave(ray)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_study_in_a_thread():
    ray = FakeRay()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(_Connection.join, ray, Ray()).result().leave(ray)
    assert ray.shutdowns == 1


@pytest.mark.parametrize(
    ("given", "absolute"),
    [
        ("/srv/states", "/srv/states"),
        ("s3://bucket/states", "s3://bucket/states"),
        ("file:///srv/states", "file:///srv/states"),
        ("simplecache::s3://bucket/x", "simplecache::s3://bucket/x"),
    ],
)
def test_addresses_stay(given, absolute):
    assert _absolute(given) == absolute


def test_folders_are_the_study_s(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert _absolute("states") == str(tmp_path / "states")


@pytest.mark.parametrize(
    ("checkpoints", "machines", "warned"),
    [
        ("/srv/states", ["a", "b"], True),
        ("file:///srv/states", ["a", "b"], True),
        ("s3://bucket/states", ["a", "b"], False),
        ("/srv/states", ["a"], False),
        ("/srv/states", ["a", "a"], False),
    ],
)
def test_a_folder_has_to_be_everybody_s(caplog, checkpoints, machines, warned):
    with caplog.at_level(logging.WARNING):
        _warn_about(checkpoints, [node(each) for each in machines])
    assert bool(caplog.records) == warned


def test_a_cluster_on_which_no_machine_is_large_enough(caplog):
    nodes = [node("a", CPU=4), node("b", CPU=4, cups=1)]
    with caplog.at_level(logging.WARNING):
        _warn_too_small(Ray(num_gpus=1), nodes)
        _warn_too_small(Ray(num_cpus=8, resources={"cups": 1}), nodes)
    no_gpu, too_large = [record.getMessage() for record in caplog.records]
    assert "each needs 1 CPU, 1 GPU, and the whole cluster has 8 CPU, 0 GPU on 2 mach" in no_gpu
    assert "lower num_cpus or num_gpus of th.Ray(...)" in no_gpu
    assert "each needs 8 CPU, 1 cups, and the whole cluster has 8 CPU, 1 cups" in too_large
    assert "lower num_cpus or resources of th.Ray(...)" in too_large
