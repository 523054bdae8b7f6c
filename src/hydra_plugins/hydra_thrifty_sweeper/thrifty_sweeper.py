"""``hydra/sweeper: thrifty``: the sweeper as Hydra finds it, without what is slow to import.

Hydra runs this file at the start of each application, without registering it as a module. So it
imports nothing of thrifty before a sweep, and its annotations are no texts.
"""

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.errors import CompactHydraException
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class ThriftySweeperConf:
    """The options of the sweeper, and their defaults.

    Attributes:
        study_name: The study's name (default: that of the application).
        storage: A database address.
        metric: The metric to optimise, if jobs return several.
        direction: ``"minimize"`` or ``"maximize"``.
        n_trials: How many configurations are tried.
        n_jobs: How many jobs the launcher gets at a time.
        seed: The seed of sampling.
        params: What is searched, as on the command line: ``choice(a, b)``, ``range(1, 9)``,
            ``interval(0.1, 1)``, ``tag(log, interval(1e-4, 1))``, ``int(interval(1, 64))``.
    """

    _target_: str = "hydra_plugins.hydra_thrifty_sweeper.thrifty_sweeper.ThriftySweeper"
    study_name: str | None = None
    storage: str = "sqlite:///thrifty.db"
    metric: str = "value"
    direction: str = "minimize"
    n_trials: int = 20
    n_jobs: int = 1
    seed: int = 0
    params: dict[str, str] = field(default_factory=dict)


ConfigStore.instance().store(
    group="hydra/sweeper", name="thrifty", node=ThriftySweeperConf, provider="thrifty"
)


class ThriftySweeper(Sweeper):
    """Runs the jobs of a Hydra application that thrifty asks for, and tells it what they return.

    A job returns a number, or a dict of metrics. A configuration that a study of the same
    application and the same other settings knows is not run again. A sweep that was interrupted
    goes on where it was.

    Args:
        options: Those of ``ThriftySweeperConf``.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Take the application from Hydra."""
        self.hydra_context, self.config = hydra_context, config
        self._task_function = task_function

    def sweep(self, arguments: list[str]) -> dict[str, Any]:
        """Run all jobs, and write ``optimization_results.yaml`` into the folder of the sweep."""
        core = import_module("thrifty.core")
        with core.gc_paused():
            module = import_module("hydra_plugins.hydra_thrifty_sweeper._sweep")
        try:
            sweep = module.Sweep(
                context=self.hydra_context,
                function=self._task_function,
                config=self.config,
                validate=self.validate_batch_is_legal,
                **self._options,
            )
            return dict(sweep.run(arguments))
        except core.ThriftyError as error:
            # Hydra shows an error of this class in one line, and of others the whole stack.
            raise CompactHydraException(f"thrifty: {error}") from error
