"""Mixed fleets with the lowest hourly price for a given step time, by integer programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from thrifty.core import MissingExtraError
from thrifty.perf import StepProfile

from ._plan_devices import Devices
from ._plan_steps import replayed_s


_MOST_PROGRAMS = 30
"""Most integer programs per step time; with few types, fewer suffice."""

_GAP = 0.01
"""Share of the price by which another fleet may still be cheaper.

Estimates of machines are much less exact than that.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Types of machines that can be mixed in one fleet.

    Given the number of machines and the slowest link, the times of all all-reduces are known, so
    each device can train a known number of samples within the step time. What remains is a covering
    program: enough devices for the global batch, at the lowest price. One program is solved for
    each number of machines and each slowest link, the most promising first, until no other can be
    cheaper by more than 1 %, or thirty are solved.

    Args:
        profile: profile of a step.
        global_batch: samples of a step.
        devices: estimates for each type.
        end: end of the estimates that counts: 0 for medians, 2 for high ends.
        usd_h: dollars per hour of a machine of each type.
        allowed: most machines of each type, by all quotas that apply to it.
        shared: most machines of several types together: a mask of the types, and the number.
        max_nodes: most machines of all types together.
    """

    profile: StepProfile
    global_batch: int
    devices: Devices
    end: int
    usd_h: np.ndarray
    allowed: np.ndarray
    shared: Sequence[tuple[np.ndarray, int]]
    max_nodes: int

    def cheapest(self, step_s: float) -> np.ndarray | None:
        """Return the number of machines of each type; None if no fleet reaches this step time."""
        nodes = np.arange(1, self.max_nodes + 1)
        samples = self._samples(step_s, nodes)
        bounds = self._bounds(samples, nodes)
        best, best_usd_h = self._of_one_type(samples, nodes)
        for world in np.argsort(bounds, axis=None, kind="stable")[:_MOST_PROGRAMS]:
            link, size = np.unravel_index(world, bounds.shape)
            if not bounds[link, size] < best_usd_h * (1 - _GAP):
                break
            nums = self._program(samples[link, size], int(nodes[size]))
            if nums is not None and nums @ self.usd_h < best_usd_h:
                best, best_usd_h = nums, float(nums @ self.usd_h)
        return best

    def _of_one_type(
        self, samples: np.ndarray, nodes: np.ndarray
    ) -> tuple[np.ndarray | None, float]:
        """Return the cheapest fleet of one type, and its price.

        A mixed fleet must beat this price.
        """
        needed = -(-self.global_batch // np.maximum(samples, 1))
        possible = (samples > 0) & (needed <= np.minimum(nodes[:, None], self.allowed))
        usd_h = np.where(possible, needed * self.usd_h, np.inf)
        place = np.unravel_index(np.argmin(usd_h), usd_h.shape)
        if not possible[place]:
            return None, math.inf
        nums = np.zeros(len(self.usd_h), int)
        nums[place[-1]] = needed[place]
        return nums, float(usd_h[place])

    def _bounds(self, samples: np.ndarray, nodes: np.ndarray) -> np.ndarray:
        """Return lower bounds of the hourly price, by slowest link and number of machines.

        They are the optima for fractional numbers of machines. Such a fleet has at most two types:
        one that trains less than its share of the samples, and one that trains more.
        """
        share = self.global_batch / nodes[:, None, None]
        slow, quick = samples[..., :, None], samples[..., None, :]
        alone = np.where(samples >= share[..., 0], self.usd_h, np.inf).min(axis=-1)
        with np.errstate(divide="ignore", invalid="ignore"):
            part = (share - slow) / (quick - slow)
            both = part * self.usd_h + (1 - part) * self.usd_h[:, None]
        both = np.where((slow < share) & (quick > share), both, np.inf).min(axis=(-1, -2))
        out: np.ndarray = np.minimum(alone, both) * nodes
        return out

    def _samples(self, step_s: float, nodes: np.ndarray) -> np.ndarray:
        """Return the samples that a machine of each type can train within ``step_s``.

        The shape is [slowest links, sizes, types]. Types with a slower link have 0.
        """
        sums = self.devices.sums_s(self.profile.bucket_bytes, nodes)[self.end]
        paces = np.unique(sums.sum(axis=-1), axis=0)
        slower = paces[..., None] < sums.sum(axis=-1).T
        worlds = np.where(slower[..., None], 0.0, sums.transpose(1, 0, 2)).max(axis=2)
        most = np.minimum(self.devices.most, self.global_batch)
        low = np.zeros(slower.shape, int)
        high = np.broadcast_to(most + 1, slower.shape)
        for _ in range(self.global_batch.bit_length() + 1):
            middle = (low + high) // 2
            took = replayed_s(
                self.profile,
                batch=middle[..., None],
                compute=self.devices.compute[self.end][:, None],
                sums_s=worlds[:, :, None],
            )
            quick = (took <= step_s) & (middle > 0)
            low, high = np.where(quick, middle, low), np.where(quick, high, middle)
            high = np.maximum(high, low + 1)
        out: np.ndarray = np.where(slower, 0, low) * self.devices.per_node
        return out

    def _program(self, samples: np.ndarray, num: int) -> np.ndarray | None:
        """Return the cheapest ``num`` machines that can train the global batch, or None."""
        try:
            from scipy.optimize import Bounds, LinearConstraint, milp  # noqa: PLC0415
        except ImportError as error:
            raise MissingExtraError("scipy", extra="cloud") from error
        rows = [LinearConstraint(samples, self.global_batch, np.inf)]
        rows.append(LinearConstraint(np.ones(len(samples)), num, num))
        for places, most in self.shared:
            rows.append(LinearConstraint(places.astype(float), 0, most))
        found = milp(
            self.usd_h,
            integrality=np.ones(len(samples)),
            bounds=Bounds(0, np.where(samples > 0, self.allowed, 0)),
            constraints=rows,
            options={"mip_rel_gap": _GAP},
        )
        if found.x is None:
            return None
        nums = np.rint(found.x).astype(int)
        # Solvers meet constraints only up to a tolerance, but samples are whole numbers.
        return nums if nums @ samples >= self.global_batch else None
