"""What a plan says of quotas and capacity."""

from __future__ import annotations

import pytest

from tests.cloud._drawn_fleets import an_offer
from thrifty.cloud import MachineGroup
from thrifty.cloud.planning._fleet_options import availability_notes


def said(cloud, kind, *, num=2, spot=False, quotas=None, **changes):
    changes = {"accelerator": "H100", "accelerator_count": 8, "vcpus": 192.0, **changes}
    offer = an_offer(kind, cloud=cloud, spot_usd_h=1.0, **changes)
    machines = (MachineGroup(offer=offer, num=num, batch=1, spot=spot),)
    return availability_notes(machines, quotas=quotas or {})


@pytest.mark.parametrize(
    ("cloud", "kind", "spot", "quota"),
    [
        ("aws", "p5.48xlarge", False, "384 vCPUs of the quota 'Running On-Demand P instances'"),
        ("aws", "p5.48xlarge", True, "384 vCPUs of the quota 'All P Spot Instance Requests'"),
        (
            "aws",
            "g6e.48xlarge",
            False,
            "384 vCPUs of the quota 'Running On-Demand G and VT instances'",
        ),
        ("azure", "Standard_ND96isr_H100_v5", False, "384 vCPUs of the quota of its VM family"),
        ("azure", "Standard_ND96isr_H100_v5", True, "384 vCPUs of the quota for spot machines"),
        ("gcp", "a3-highgpu-8g", False, "16 H100 of the quota of GPUs"),
        ("gcp", "a3-highgpu-8g", True, "16 H100 of the quota of preemptible GPUs, or else of GPUs"),
        ("nebius", "gpu-h100-sxm_8gpu", False, "16 of the quota of GPUs"),
    ],
)
def test_a_quota_is_named_with_what_the_fleet_takes_of_it(cloud, kind, spot, quota):
    first, last = said(cloud, kind, spot=spot)
    assert first.startswith(f"quota: 2 x {kind} in east take {quota}; check it")
    assert last.startswith(f"capacity: whether 2 x {kind} (8 H100 each{', spot' * spot}) can be")


def test_processors_that_are_not_known_have_no_number():
    assert "take their vCPUs of" in said("aws", "p5.48xlarge", vcpus=float("nan"))[0]


@pytest.mark.parametrize("name", ["H100", "p5.48xlarge"])
def test_a_quota_that_the_user_gave_is_not_mentioned(name):
    (only,) = said("aws", "p5.48xlarge", quotas={name: 4})
    assert only.startswith("capacity: ")


def test_of_other_clouds_only_the_capacity_is_mentioned():
    (only,) = said("lambda", "gpu_8x_h100_sxm5")
    assert only.startswith("capacity: ")


def test_machines_without_gpus_are_left_out():
    assert said("aws", "c5.18xlarge", accelerator="", accelerator_count=1) == ()
