"""Prior estimates for devices and networks that have not been measured."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given, strategies as st

from thrifty.cloud import (
    ACCELERATORS,
    HardwareEstimates,
    Interval,
    NetworkPriors,
    Offer,
    UncertaintyFactor,
)
from thrifty.core import CloudError


names = st.sampled_from(sorted(ACCELERATORS))


def machine(accelerator="V100", **options):
    place = {"cloud": "aws", "region": "us-east-1", "instance_type": "some.type"}
    return Offer(**place, accelerator=accelerator, price_usd_h=1.0, **options)


@given(names)
def test_the_profiled_device_takes_the_profiles_time(name):
    same = HardwareEstimates(profiled=name).compute(machine(name))
    # Machines of one type differ.
    assert same.low < same.median == 1.0 < same.high


@given(names, names)
def test_there_and_back_is_the_same_time(here, there):
    out = HardwareEstimates(profiled=here).compute(machine(there)).median
    back = HardwareEstimates(profiled=there).compute(machine(here)).median
    assert out * back == pytest.approx(1.0)


def test_a_faster_device_takes_less_time_and_nobody_knows_how_much():
    factor = HardwareEstimates(profiled="A100").compute(machine("H100"))
    # Speeds are the geometric means of arithmetic and memory speed.
    assert factor.median == pytest.approx(((19.5 * 1555) / (67 * 3350)) ** 0.5)
    assert factor.low == pytest.approx(factor.median / 2.4)
    assert factor.high == pytest.approx(factor.median * 2.4)


def test_where_a_speed_comes_from():
    estimates = HardwareEstimates(profiled="T4").probed(
        compute={"L4": Interval(median=0.5, low=0.4, high=0.6)}
    )
    found = {name: estimates.speed_from(machine(name, vcpus=8)) for name in ("T4", "L4", "V100")}
    assert found == {"T4": "profile", "L4": "probe", "V100": "measured pairs"}
    for name in ("H100", ""):
        assert estimates.speed_from(machine(name, vcpus=8)) == "data sheets"


def test_measured_devices_are_known_better_and_processors_worse():
    def width(profiled, accelerator):
        factor = HardwareEstimates(profiled=profiled).compute(machine(accelerator, vcpus=8))
        return factor.high / factor.median

    assert HardwareEstimates(profiled="T4").compute(machine("V100")).median == pytest.approx(0.44)
    assert width("T4", "V100") == pytest.approx(2.1)
    assert width("T4", "L4") == width("L4", "T4") == pytest.approx(2.4)
    assert [width("", "V100"), width("V100", "")] == pytest.approx([5.0, 5.0])
    assert width("", "") < 5.0


def test_twice_the_processors_take_half_the_time():
    estimates = HardwareEstimates(profiled_vcpus=4)
    assert estimates.compute(machine("", vcpus=8)).median == pytest.approx(0.5)
    assert estimates.compute(machine("T4", vcpus=8)).median < 0.1


def test_a_probe_replaces_the_guess():
    measured = Interval(median=0.5, low=0.4, high=0.6)
    estimates = HardwareEstimates(profiled="T4").probed(compute={"V100": measured})
    assert estimates.compute(machine("V100")) == measured
    assert estimates.compute(machine("A100")) == HardwareEstimates(profiled="T4").compute(
        machine("A100")
    )
    network = estimates.probed(network={"some.type": measured})
    assert network.network(machine()) == measured
    assert network.compute(machine("V100")) == measured
    later = network.probed(network={"other.type": measured}, compute={"T4": measured})
    assert later.network(machine()) == later.compute(machine("V100")) == measured


def test_processors_are_measured_by_the_type_of_machine():
    measured = Interval(median=0.5, low=0.4, high=0.6)
    estimates = HardwareEstimates().probed(compute={"some.type": measured})
    assert estimates.compute(machine("")) == measured
    assert estimates.compute(machine("T4")).median != 0.5


def test_a_network_is_as_fast_as_it_always_is():
    def gbps(**options):
        return HardwareEstimates().link(machine(**options)).bytes_per_s * 8e-9

    assert gbps(baseline_gbps=5.0, peak_gbps=25.0) == pytest.approx(0.8 * 5)
    assert gbps(peak_gbps=2.0) == pytest.approx(0.8 * 2)
    assert gbps() == pytest.approx(0.8 * 5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: NetworkPriors(tcp_gbps=0.0), "tcp_gbps is 0.0, and has to be positive"),
        (lambda: NetworkPriors(fabric_share=-1.0), "fabric_share is -1.0"),
        (lambda: NetworkPriors(observed=0.0), "observed is 0.0"),
        (lambda: NetworkPriors(widths={"tcp": 0.0}), r"`widths` must have positive factors"),
        (lambda: NetworkPriors(widths={"wifi": 1.0}), r"by tcp, fabric, linked, pcie, got"),
        (lambda: NetworkPriors(pcie_contention=-0.1), "pcie_contention=-0.1"),
        (
            lambda: NetworkPriors(straggling=Interval(median=0.1, low=0.2, high=0.3)),
            "0 <= low <= median <= high",
        ),
        (lambda: UncertaintyFactor(faster=0.5, slower=2.0), "factors of 1 or more, not faster=0.5"),
        (lambda: UncertaintyFactor(faster=1.0, slower=math.nan), "not faster=1.0, slower=nan"),
    ],
)
def test_priors_that_cannot_be(wrong, message):
    with pytest.raises(CloudError, match=re.escape(message)):
        wrong()


def test_few_flows_do_not_fill_a_wide_network():
    def gbps(nominal, **options):
        link = HardwareEstimates().link(machine(baseline_gbps=nominal, **options))
        return link.bytes_per_s * 8e-9

    assert gbps(25.0) == gbps(100.0) == pytest.approx(6.0)
    # InfiniBand and the like have no such limit, and 400 Gbit/s are not sold without them.
    assert gbps(100.0, fabric=True) == pytest.approx(40.0)
    assert gbps(400.0) == gbps(400.0, fabric=True) == pytest.approx(160.0)
    assert gbps(400.0, fabric=False) == pytest.approx(6.0)


def test_devices_without_a_link_of_their_own_share_the_host():
    def gb_s(accelerator, count):
        link = HardwareEstimates().link(machine(accelerator, accelerator_count=count))
        return link.inner_bytes_per_s / 1e9

    assert gb_s("T4", 2) == pytest.approx(2.4)
    assert gb_s("T4", 8) == pytest.approx(1.2)
    assert gb_s("unknown", 4) == gb_s("T4", 4)
    assert gb_s("A100", 8) == gb_s("A100", 2) == pytest.approx(0.7 * 150)


def test_a_step_of_several_devices_is_less_certain_the_more_they_are():
    median, low, high = HardwareEstimates().networks.rest([1, 2, 64])
    assert (median[0], low[0], high[0]) == (1.0, 1.0, 1.0)
    assert low[1] < 1 < median[1] < median[2] < high[2]
    assert high[2] / low[2] > high[1] / low[1] > 1


@pytest.mark.parametrize(
    ("offer", "inside", "between"),
    [
        (machine("A100", baseline_gbps=1600.0, accelerator_count=8), "linked", "fabric"),
        (machine("T4", baseline_gbps=50.0, accelerator_count=8), "pcie", "tcp"),
    ],
)
def test_each_kind_of_network_has_an_interval_of_its_own_width(offer, inside, between):
    widths = {"tcp": 2.0, "fabric": 3.0, "linked": 4.0, "pcie": 5.0}
    priors = NetworkPriors(widths=widths)
    assert priors.width(offer, several=False) == widths[inside]
    assert priors.width(offer, several=True) == widths[between]
    assert NetworkPriors(widths={}).width(offer, several=True) == 1.0


def test_links_inside_a_machine_are_known_apart_from_those_between_machines():
    linked, over_pcie = machine("A100", accelerator_count=8), machine("T4", accelerator_count=8)
    estimates = HardwareEstimates()
    assert estimates.inner(linked).high > estimates.inner(over_pcie).high > 1
    measured = Interval(median=2.0, low=1.9, high=2.1)
    probed = estimates.probed(inner={linked.instance_type: measured})
    assert probed.inner(linked) == measured
    assert probed.network(linked) == estimates.network(linked)


@pytest.mark.parametrize(
    ("gbps", "low", "high"),
    [
        ({"baseline_gbps": 10.0, "peak_gbps": 10.0}, 0.4, 1.8),
        ({"baseline_gbps": 10.0}, 0.4, 1.8),
        ({"baseline_gbps": 5.0, "peak_gbps": 7.0}, 0.4 * 4.0 / 5.6, 1.8),
        # a burst is no faster than few flows
        ({"baseline_gbps": 5.0, "peak_gbps": 25.0}, 0.4 * 4.0 / 6.0, 1.8),
        # only "up to" is known: perhaps much slower, never faster
        ({"peak_gbps": 10.0}, 0.4, 9.0),
        ({}, 0.08, 9.0),
        ({"baseline_gbps": 400.0}, 1 / 3, 2.5),
    ],
)
def test_a_network_is_the_less_known_the_less_its_name_says(gbps, low, high):
    factor = HardwareEstimates().network(machine(**gbps))
    assert (factor.median, factor.low, factor.high) == pytest.approx((1.0, low, high))


@pytest.mark.parametrize(
    ("estimates", "accelerator"),
    [(HardwareEstimates(), "V1000"), (HardwareEstimates(profiled="V1000"), "V100")],
)
def test_devices_that_nobody_knows(estimates, accelerator):
    with pytest.raises(CloudError, match=r"the speed of 'V1000' is not known: measure it.*A100"):
        estimates.compute(machine(accelerator))


def test_processors_that_nobody_has_counted():
    with pytest.raises(CloudError, match="how many it has is not known: add vCPUs"):
        HardwareEstimates().compute(machine(""))


def test_a_program_gets_a_share_of_a_device_s_memory():
    half = HardwareEstimates(usable_memory=0.5)
    assert half.usable_bytes(machine("T4", accelerator_memory_gib=16.0)) == 8 * 2**30
    assert half.usable_bytes(machine("T4", accelerator_memory_gib=None)) == math.inf


@pytest.mark.parametrize("share", [0.0, 1.1, math.nan])
def test_a_share_of_memory_is_a_share(share):
    with pytest.raises(CloudError, match=f"a share above 0 and up to 1, got {share}"):
        HardwareEstimates(usable_memory=share)
