"""The training to plan for, reduced to what its time and cost depend on."""

from __future__ import annotations

from dataclasses import dataclass

from thrifty.core import CloudError
from thrifty.perf import StepProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One training, or many that run side by side.

    Args:
        profile: profile of a step on a device that you have.
        steps: steps of one training.
        global_batch: samples of a step, on all machines of a training together.
        parallelism_phases: phases of a study, ``((trainings, steps), ...)``: how many
            trainings can run side by side, and for how many steps each. This is the width of
            the stage forest over time. None: one training of ``steps`` steps.
        state_bytes: bytes of model and optimizer in a checkpoint.
        setup_s: seconds from renting a machine until its first step.

    Raises:
        CloudError: a number is out of range.
    """

    profile: StepProfile
    steps: int
    global_batch: int
    parallelism_phases: tuple[tuple[int, int], ...] | None = None
    state_bytes: float = 0.0
    setup_s: float = 180.0

    def __post_init__(self) -> None:
        if self.steps < 1 or self.global_batch < 1:
            raise CloudError(
                f"there is at least one step of one sample, not steps={self.steps}, "
                f"global_batch={self.global_batch}"
            )
        if not (self.state_bytes >= 0 and self.setup_s >= 0):
            raise CloudError(
                f"bytes and seconds are not negative: state_bytes={self.state_bytes}, "
                f"setup_s={self.setup_s}"
            )
        if self.parallelism_phases is not None and (
            not self.parallelism_phases
            or any(width < 1 or steps < 1 for width, steps in self.parallelism_phases)
        ):
            raise CloudError(
                "parallelism_phases are pairs (trainings, steps), both 1 or more, "
                f"not {self.parallelism_phases}"
            )
