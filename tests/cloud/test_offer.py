"""One machine that can be rented."""

from __future__ import annotations

import math

import pytest

from thrifty.cloud import ACCELERATORS, Offer
from thrifty.core import CloudError


PLACE = {"cloud": "aws", "region": "us-east-1", "instance_type": "p3.2xlarge"}


def test_it_has_a_price_either_way():
    offer = Offer(**PLACE, price_usd_h=3.06, spot_usd_h=0.9)
    assert (offer.usd_h(spot=False), offer.usd_h(spot=True)) == (3.06, 0.9)
    assert Offer(**PLACE, price_usd_h=3.06).usd_h(spot=True) is None
    assert Offer(**PLACE, price_usd_h=None, spot_usd_h=0.9).usd_h(spot=False) is None


def test_its_name_says_where_it_is():
    assert str(Offer(**PLACE, price_usd_h=1.0)) == "aws p3.2xlarge in us-east-1"
    assert str(Offer(**PLACE, zone="use1-az2", price_usd_h=1.0)) == "aws p3.2xlarge in use1-az2"


def test_devices_are_its_gpus_or_else_the_machine():
    gpus = Offer(**PLACE, accelerator="V100", accelerator_count=4, price_usd_h=1.0)
    assert (gpus.device, Offer(**PLACE, price_usd_h=1.0).device) == ("V100", "p3.2xlarge")


def test_a_device_has_the_memory_of_one_gpu_or_else_of_the_machine():
    memory = {"memory_gib": 61.0, "price_usd_h": 1.0}
    gpu = Offer(**PLACE, **memory, accelerator="V100", accelerator_memory_gib=16.0)
    assert gpu.device_memory_bytes == 16 * 2**30
    assert Offer(**PLACE, **memory).device_memory_bytes == 61 * 2**30


def test_memory_that_nobody_knows():
    assert Offer(**PLACE, price_usd_h=1.0).device_memory_bytes is None
    gpu = Offer(**PLACE, accelerator="V100", memory_gib=61.0, price_usd_h=1.0)
    assert gpu.device_memory_bytes is None


@pytest.mark.parametrize(
    "name", ["price_usd_h", "spot_usd_h", "baseline_gbps", "peak_gbps", "accelerator_memory_gib"]
)
@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_prices_and_sizes_that_make_no_sense(name, value):
    with pytest.raises(CloudError, match=rf"{name} is {value}, and has to be 0 or more"):
        Offer(**PLACE, **{"price_usd_h": 1.0, name: value})
    assert Offer(**PLACE, **{"price_usd_h": 1.0, name: 0.0})


@pytest.mark.parametrize("name", ["vcpus", "memory_gib"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf])
def test_machines_without_processors_or_memory(name, value):
    with pytest.raises(CloudError, match=rf"{name} is {value}, and has to be more than 0"):
        Offer(**PLACE, price_usd_h=1.0, **{name: value})


def test_at_least_one_device_computes():
    with pytest.raises(CloudError, match="accelerator_count is 0, and has to be 1 or more"):
        Offer(**PLACE, accelerator="V100", accelerator_count=0, price_usd_h=1.0)


def test_it_has_a_price():
    with pytest.raises(CloudError, match=r"aws p3\.2xlarge in us-east-1 has no price"):
        Offer(**PLACE, price_usd_h=None)


def test_newer_accelerators_are_faster():
    order = ["K80", "T4", "V100", "A100", "A100-80GB", "H100", "H200", "B200"]
    speeds = [ACCELERATORS[name].speed for name in order]
    assert speeds == sorted(set(speeds))
    assert ACCELERATORS["V100"].speed == pytest.approx(math.sqrt(15.7 * 900))


def test_every_data_sheet_is_possible():
    for name, sheet in ACCELERATORS.items():
        assert 0 < sheet.tflops < 1000, name
        assert 100 < sheet.gb_s < 20_000, name
        assert 8 <= sheet.memory_gib < 400, name
        # A ring inside a machine is slower than memory.
        assert 0 <= sheet.inner_gb_s < sheet.gb_s, name


def test_an_offer_of_all_regions_says_so():
    assert str(Offer(**{**PLACE, "region": "any"}, price_usd_h=1.0)).endswith(" in any region")
