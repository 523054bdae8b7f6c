"""Mixed precision: which devices have units for it, and how much faster they train."""

from __future__ import annotations

from thrifty.perf import PRECISIONS, Precision, StepProfile

from ._accelerators import ACCELERATORS
from ._hardware import HardwareEstimates
from ._offer import Interval, Offer


_SAME = Interval(median=1.0, low=1.0, high=1.0)

_VOLTA = Interval(median=1 / 2.5, low=1 / 4.0, high=1.0)
_AMPERE = Interval(median=1 / 1.7, low=1 / 3.5, high=1.0)
"""Factors of autocast on the seconds in single precision.

NVIDIA's DeepLearningExamples report 1.9 to 4.0 times the throughput for twelve trainings on one
V100, and 1.04 to 2.8 times for twenty on one A100, there compared with TF32. PyTorch multiplies
matrices without TF32 unless told otherwise, so the gain may be larger. Those networks were chosen
to show the gain, and small ones are bound by launches, so the other end is no gain at all. Newer
devices count like an A100, because there are no such measurements of them.
"""


def precision_of(
    offer: Offer,
    *,
    allowed: tuple[Precision, ...] | None,
    profile: StepProfile,
    estimates: HardwareEstimates,
) -> tuple[Precision, Interval]:
    """Return the fastest precision of a device, and its factor on the seconds it takes otherwise.

    Those are the seconds by ``estimates``, in the precision of the profile.

    Args:
        offer: machine with the device.
        allowed: precisions to choose among; None: only the profile's. Devices without units for any
            of them train in float32.
        profile: profile of a step, with its precision.
        estimates: tell whether the device itself was measured.
    """
    known = _mixed(offer.accelerator)
    wanted = (profile.precision,) if allowed is None else allowed
    possible = [each for each in PRECISIONS if each in wanted and each in known]
    if "float32" in wanted or not possible:
        possible.insert(0, "float32")
    measured = estimates.speed_from(offer) in {"probe", "profile"}
    here = offer.accelerator if measured else estimates.profiled
    before = _factor(here, profile.precision)
    choice = min(possible, key=lambda each: _factor(offer.accelerator, each).median)
    after = _factor(offer.accelerator, choice)
    if choice == profile.precision and after == before:
        return choice, _SAME
    return choice, Interval(
        median=after.median / before.median,
        low=after.low / before.high,
        high=after.high / before.low,
    )


def _factor(accelerator: str, precision: Precision) -> Interval:
    mixed = _mixed(accelerator)
    if precision not in mixed:
        return _SAME
    return _AMPERE if "bfloat16" in mixed else _VOLTA


def _mixed(accelerator: str) -> tuple[Precision, ...]:
    """Return the types of 16 bits that it has units for; none where its data sheet is not known."""
    known = ACCELERATORS.get(accelerator)
    return () if known is None else known.mixed
