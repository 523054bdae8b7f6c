"""What is to be trained, as far as its time and cost depend on it."""

from __future__ import annotations

from dataclasses import dataclass

from thrifty.core import CloudError
from thrifty.perf import StepProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One training, or many that run side by side.

    Args:
        profile: of a step, on a device at hand.
        steps: of one training.
        global_batch: samples of a step, on all its machines together.
        widths: of a study: how many trainings can run side by side while the next of so many steps each is trained, ``((trainings, steps), ...)``; the stage forest's width over time. None: one training of ``steps`` steps.
        state_bytes: of model and optimiser, in a checkpoint.
        setup_s: from renting a machine until its first step.

    Raises:
        CloudError: a number makes no sense.
    """

    profile: StepProfile
    steps: int
    global_batch: int
    widths: tuple[tuple[int, int], ...] | None = None
    state_bytes: float = 0.0
    setup_s: float = 180.0

    def __post_init__(self) -> None:
        if self.steps < 1 or self.global_batch < 1:
            raise CloudError(
                f"there is at least one step of one sample, not steps={self.steps}, global_batch={self.global_batch}"
            )
        if not (self.state_bytes >= 0 and self.setup_s >= 0):
            raise CloudError(
                f"bytes and seconds are not negative: state_bytes={self.state_bytes}, setup_s={self.setup_s}"
            )
        if self.widths is not None and (
            not self.widths or any(width < 1 or steps < 1 for width, steps in self.widths)
        ):
            raise CloudError(
                f"widths are pairs (trainings, steps), both 1 or more, not {self.widths}"
            )
