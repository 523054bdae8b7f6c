"""Handing a fleet over to SkyPilot."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import yaml
from hypothesis import given, strategies as st

from thrifty.cloud import Fleet, Interval, MachineGroup, Offer
from thrifty.cloud._catalogue import Catalogue
from thrifty.cloud._skypilot import launch, refresh_skypilot, time_estimator, to_skypilot
from thrifty.core import CloudError, MissingExtraError


SOME = Interval(median=1.0, low=1.0, high=1.0)
P3 = Offer(
    cloud="aws",
    region="us-east-1",
    instance_type="p3.8xlarge",
    accelerator="V100",
    accelerator_count=4,
    vcpus=32,
    price_usd_h=12.24,
    spot_usd_h=3.672,
)
G4 = replace(
    P3,
    instance_type="g4dn.xlarge",
    accelerator="T4",
    accelerator_count=1,
    price_usd_h=0.526,
    spot_usd_h=None,
)


def rented(offer=P3, num=2, batch=32, **options):
    return MachineGroup(offer=offer, num=num, batch=batch, **options)


def fleet(*machines, **options):
    return Fleet(machines=machines, step_s=SOME, time_s=SOME, cost_usd=SOME, **options)


def task(*machines, **options):
    machines = machines or (rented(),)
    text = to_skypilot(fleet(*machines), **{"name": "digits", "run": "train.py", **options})
    return yaml.safe_load(text)


def test_the_machines_are_those_of_the_fleet():
    asked = task(rented(num=3))
    assert asked["num_nodes"] == 3
    assert asked["resources"] == {
        "infra": "aws/us-east-1",
        "instance_type": "p3.8xlarge",
        "use_spot": False,
    }


def test_equal_machines_of_several_zones_are_one_task():
    asked = task(rented(replace(P3, zone="a"), num=3), rented(replace(P3, zone="b"), num=2))
    assert asked["num_nodes"] == 5
    assert asked["resources"]["infra"] == "aws/us-east-1"


def test_an_offer_of_all_regions_leaves_the_region_to_skypilot():
    anywhere = replace(P3, cloud="lambda", region="any")
    assert task(rented(anywhere))["resources"]["infra"] == "lambda"
    asked = SimpleNamespace(
        cloud="Lambda",
        region="us-east-1",
        instance_type="p3.8xlarge",
        use_spot=False,
        accelerators=None,
    )
    assert time_estimator([anywhere], lambda offer, num, spot: 60.0)(asked) == 60


def test_spot_machines_are_recovered_in_their_region():
    resources = task(rented(spot=True))["resources"]
    assert resources["use_spot"] is True
    assert resources["job_recovery"] == "FAILOVER"


def test_google_is_told_which_gpus_to_add():
    offer = replace(P3, cloud="gcp", instance_type="n1-standard-32")
    assert task(rented(offer))["resources"]["accelerators"] == {"V100": 4}
    plain = replace(offer, accelerator="", accelerator_count=1)
    assert "accelerators" not in task(rented(plain))["resources"]


def test_the_plan_is_in_the_environment():
    assert task(rented(batch=48))["envs"] == {"THRIFTY_DEVICE_BATCH": "48"}
    micro = task(rented(batch=48, num_micro=3))["envs"]
    assert micro == {"THRIFTY_DEVICE_BATCH": "48", "THRIFTY_MICRO_BATCHES": "3"}
    mixed = task(rented(precision="bfloat16"))["envs"]
    assert mixed == {"THRIFTY_DEVICE_BATCH": "32", "THRIFTY_PRECISION": "bfloat16"}
    text = to_skypilot(
        fleet(rented(spot=True), checkpoint_s=600.4),
        name="digits",
        run="train.py",
        envs={"SEED": "7"},
    )
    assert yaml.safe_load(text)["envs"] == {
        "THRIFTY_DEVICE_BATCH": "32",
        "THRIFTY_CHECKPOINT_S": "600",
        "SEED": "7",
    }


def test_setup_and_folder_are_optional():
    assert {"setup", "workdir"}.isdisjoint(task())
    asked = task(setup="pip install a\npip install b\n", workdir=".")
    assert (asked["setup"], asked["workdir"]) == ("pip install a\npip install b\n", ".")


def test_each_machine_starts_a_process_for_each_device(tmp_path):
    program = tmp_path / "torchrun"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    found = subprocess.run(
        ["bash", "-c", task(run="train.py --name 'a b'")["run"]],
        env={
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SKYPILOT_NUM_NODES": "2",
            "SKYPILOT_NODE_RANK": "1",
            "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        },
        check=True,
        capture_output=True,
        text=True,
    )
    assert found.stdout.splitlines() == [
        "--nnodes=2",
        "--node-rank=1",
        "--nproc-per-node=4",
        "--master-addr=10.0.0.1",
        "--master-port=29500",
        "train.py",
        "--name",
        "a b",
    ]


lines = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc", "Zl", "Zp")))


@given(lines, st.dictionaries(lines, lines, max_size=2))
def test_texts_arrive_as_they_are(line, envs):
    asked = task(setup=line, envs=envs)
    assert asked["setup"] == line
    assert {name: asked["envs"][name] for name in envs} == envs


@pytest.mark.parametrize("name", ["digits", "a", "A-1_b.c", "a--b"])
def test_names_that_skypilot_takes(name):
    assert task(name=name)["name"] == name


@pytest.mark.parametrize("name", ["", "a b", "-a", "a-", "a---b", "a/b", "ä", "a\n"])
def test_names_that_it_does_not_take(name):
    with pytest.raises(CloudError, match="SkyPilot takes letters and digits"):
        task(name=name)


@pytest.mark.parametrize(
    "other",
    [
        rented(G4),
        rented(spot=True),
        rented(batch=16),
        rented(replace(P3, region="us-west-2")),
        rented(replace(P3, cloud="other")),
        rented(replace(P3, accelerator="A100")),
    ],
)
def test_machines_that_are_not_equal(other):
    with pytest.raises(CloudError, match=r"SkyPilot rents one VM type.* and this fleet is 2 x p3"):
        task(rented(), other)


def test_a_mixed_fleet_is_named_an_equal_one():
    # A T4 has 0.43 times the speed of a V100: 8 V100 and 2 T4 equal 9 V100 or 21 T4.
    with pytest.raises(
        CloudError, match=r"fast is 21 x g4dn\.xlarge \(1 T4 each\) at \$11\.05 an hour"
    ):
        task(rented(), rented(G4))
    with pytest.raises(
        CloudError, match=r"fast is 3 x p3\.8xlarge \(4 V100 each, spot\) at \$11\.02 an hour"
    ):
        task(rented(spot=True), rented(G4))


def test_what_computes_alike_needs_as_many_machines():
    with pytest.raises(
        CloudError, match=r"fast is 4 x p3\.8xlarge \(4 V100 each, spot\) at \$14\.69 an hour"
    ):
        task(rented(), rented(spot=True))
    odd = replace(P3, accelerator="unknown", instance_type="odd", price_usd_h=10.0)
    with pytest.raises(CloudError, match=r"fast is 4 x odd \(4 unknown each\) at \$40\.00 an hour"):
        task(rented(), rented(odd))


@given(st.integers(1, 200), st.integers(1, 200))
def test_machines_of_one_type_are_as_fast_as_so_many_of_them(one, other):
    with pytest.raises(CloudError, match=rf"fast is {one + other} x g4dn\.xlarge \(1 T4 each\) at"):
        task(rented(G4, num=one), rented(G4, num=other, batch=16))


def test_a_fleet_without_machines():
    with pytest.raises(CloudError, match="the fleet has no machines"):
        to_skypilot(fleet(), name="digits", run="train.py")


# the estimator


def resources(**options):
    plain = {
        "cloud": "AWS",
        "region": None,
        "instance_type": "p3.8xlarge",
        "use_spot": False,
        "accelerators": {"V100": 4},
    }
    return SimpleNamespace(**{**plain, **options})


def asked_for(offers, **options):
    """Return the arguments with which the estimate is called."""
    calls = []
    estimator = time_estimator(offers, lambda *call: calls.append(call) or 0.5, num=3)
    assert estimator(resources(**options)) == 1
    return calls[0]


WEST = replace(P3, region="us-west-2", price_usd_h=13.0, spot_usd_h=3.0)
PLAIN = replace(P3, accelerator="", accelerator_count=1, price_usd_h=20.0)


def test_the_estimate_is_for_the_machine_that_is_asked_for():
    assert asked_for([G4, P3]) == (P3, 3, False)
    assert asked_for([G4, P3], use_spot=True) == (P3, 3, True)
    assert asked_for([P3, WEST], region="us-west-2") == (WEST, 3, False)


def test_of_several_places_the_cheapest_counts():
    for both in ([P3, WEST], [WEST, P3]):
        assert asked_for(both)[0] == P3
        assert asked_for(both, use_spot=True)[0] == WEST


def test_machines_with_and_without_gpus_are_told_apart():
    both = [PLAIN, P3]
    assert asked_for(both)[0] == P3
    assert asked_for(both, accelerators=None)[0] == PLAIN
    assert asked_for([P3], accelerators=None)[0] == P3


def test_estimates_are_whole_seconds():
    estimator = time_estimator([P3], lambda offer, num, spot: 10.2)
    assert estimator(resources()) == 11


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"instance_type": "p4d"}, "the catalogue has no AWS p4d in any region; restrict"),
        ({"cloud": "GCP"}, "the catalogue has no GCP p3.8xlarge"),
        ({"region": "us-west-2"}, "no AWS p3.8xlarge in us-west-2; "),
        ({"accelerators": {"V100": 8}}, "no AWS p3.8xlarge"),
        ({"instance_type": "g4dn.xlarge", "accelerators": None, "use_spot": True}, "as spot"),
    ],
)
def test_machines_that_the_catalogue_lacks(options, message):
    with pytest.raises(CloudError, match=message):
        time_estimator([P3, G4], lambda *_: 1.0)(resources(**options))


# SkyPilot itself


@pytest.fixture
def sky(monkeypatch):
    """Install a stand-in for SkyPilot that records its calls."""
    calls = []

    def note(name):
        return lambda *args, **options: calls.append((name, args, options)) or name

    class Listed:
        def __init__(self, name, options):
            self.asked = name, options

        @property
        def columns(self):
            calls.append(("fetch", *self.asked))

    modules = {
        name: ModuleType(name) for name in ("sky", "sky.jobs", "sky.catalog", "sky.catalog.common")
    }
    # SkyPilot's from_yaml_config takes entries out of its argument, so this does too.
    from_config = SimpleNamespace(
        from_yaml_config=lambda config: {name: config.pop(name) for name in list(config)}
    )
    modules["sky"].Task = from_config
    modules["sky.jobs"].launch = note("job")
    modules["sky.catalog.common"].read_catalog = lambda name, **options: Listed(name, options)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return calls


@pytest.mark.parametrize("spot", [False, True])
def test_a_task_becomes_a_managed_job(spot, sky):
    text = to_skypilot(fleet(rented(spot=spot)), name="digits", run="train.py")
    assert launch(text) == "job"
    ((name, (asked,), options),) = sky
    assert (name, options) == ("job", {"name": "digits"})
    assert asked == yaml.safe_load(text)
    assert asked["num_nodes"] == 2


@pytest.mark.parametrize("text", ["a: [", "only text", "- a", "name: a", "resources: b"])
def test_what_is_no_task(sky, text):
    with pytest.raises(CloudError, match=r"the task (is no YAML|has no resources)"):
        launch(text)
    assert sky == []


def test_lists_are_fetched_whatever_their_age(sky):
    refresh_skypilot(["aws"])
    refresh_skypilot()
    names = ["aws", "aws", "azure", "gcp"]
    assert sky == [("fetch", f"{name}/vms.csv", {"pull_frequency_hours": 0}) for name in names]


def test_a_refresh_fetches_the_clouds_that_are_stored(sky, tmp_path):
    folder = tmp_path / "v7" / "lambda"
    folder.mkdir(parents=True)
    Catalogue(offers=(P3,)).save(folder / "vms.csv")
    assert len(Catalogue.from_skypilot(tmp_path, refresh=True)) == 1
    assert [call[1] for call in sky] == ["lambda/vms.csv"]


@pytest.mark.parametrize(
    "call",
    [
        lambda: launch("name: a"),
        refresh_skypilot,
        lambda: Catalogue.from_skypilot("none", refresh=True),
    ],
)
def test_without_skypilot(monkeypatch, call):
    for name in ("sky", "sky.catalog", "sky.catalog.common"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=r"\.\[sky\]"):
        call()


def test_without_yaml(monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(MissingExtraError, match=r"\.\[cloud\]"):
        to_skypilot(fleet(rented()), name="digits", run="train.py")


def test_long_lines_are_not_broken():
    text = to_skypilot(fleet(rented()), name="digits", run="train.py " + "--option " * 40)
    assert max(map(len, text.splitlines())) > 300
    assert math.isfinite(len(text))
