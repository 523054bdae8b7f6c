"""A sweep: jobs of a Hydra application as trials of a study."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import (
    IntervalSweep,
    Override,
    QuotedString,
    RangeSweep,
    Sweep as HydraSweep,
    Transformer,
)
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, RunMode, TaskFunction
from omegaconf import DictConfig, OmegaConf

from thrifty import Choice, External, Float, Int, KDESampler, RandomSearch, Space, Study
from thrifty.core import StudyMismatchError, TaskError, UsageError, error_text, fingerprint
from thrifty.pack.identity import identify
from thrifty.run import AskedTrial
from thrifty.run._ask_tell import checked_metrics
from thrifty.space import Domain


log = logging.getLogger(__name__)


class Sweep:
    """The study of one sweep, and the launcher that runs its jobs.

    Args:
        context: That of Hydra.
        function: The application.
        config: Its configuration.
        validate: Raises an error if Hydra cannot compose the configurations of some jobs.
        study_name: See ``ThriftySweeperConf`` for these.
        storage: A database address.
        metric: The metric.
        direction: Whether to minimise or maximise the metric.
        n_trials: How many configurations are tried.
        n_jobs: How many jobs run at a time.
        seed: The seed of sampling.
        params: What is searched.

    Raises:
        UsageError: An option is invalid.
    """

    def __init__(  # noqa: PLR0913 (Hydra's objects, and options of a configuration)
        self,
        *,
        context: HydraContext,
        function: TaskFunction,
        config: DictConfig,
        validate: Callable[[Sequence[Sequence[str]]], None],
        study_name: str | None,
        storage: str,
        metric: str,
        direction: str,
        n_trials: int,
        n_jobs: int,
        seed: int,
        params: Mapping[str, str],
    ) -> None:
        if direction not in {"minimize", "maximize"}:
            raise UsageError(
                f'hydra.sweeper.direction is {direction!r}; it is "minimize" or "maximize"'
            )
        if n_jobs < 1:
            raise UsageError(f"hydra.sweeper.n_jobs is {n_jobs}; at least one job at a time")
        self._study_name, self._storage, self._seed = study_name, storage, seed
        self._metric, self._direction = metric, direction
        self._num_trials, self._num_jobs = n_trials, n_jobs
        self._params = dict(params)
        self._context, self._function, self._config = context, function, config
        self._validate = validate
        self._launcher: Launcher = Plugins.instance().instantiate_launcher(
            hydra_context=context, task_function=function, config=config
        )

    def run(self, arguments: Sequence[str]) -> dict[str, Any]:
        """Run all jobs, and return what is best."""
        parser = OverridesParser.create(config_loader=self._context.config_loader)
        overrides = parser.parse_overrides([
            *(f"{name}={value}" for name, value in self._params.items()),
            *arguments,
        ])
        searched, fixed = _parts(overrides)
        study = self._study(searched, fixed)
        num_run = 0
        while batch := self._batch(study):
            jobs = [[*fixed.values(), *_values(trial, searched)] for trial in batch]
            self._validate(jobs)
            found = self._launcher.launch(jobs, initial_job_idx=num_run)
            num_run += len(jobs)
            for trial, job in zip(batch, found, strict=True):
                self._tell(study, trial, job)
        return self._written(study, num_run)

    def _study(self, searched: Mapping[str, _Searched], fixed: Mapping[str, str]) -> Study:
        name = self._study_name or str(self._config.hydra.job.name)
        return Study(
            External(str(self._config.hydra.job.name), version=self._version(searched, fixed)),
            Space(**{key: each.domain for key, each in searched.items()}),
            algorithm=RandomSearch(max_epochs=1, num_trials=self._num_trials, sampler=KDESampler()),
            metric=self._metric,
            mode="min" if self._direction == "minimize" else "max",
            storage=self._storage,
            name=name,
            seed=self._seed,
        )

    def _version(self, searched: Mapping[str, _Searched], fixed: Mapping[str, str]) -> str:
        """Identify the code of the application, and all settings that are not searched."""
        settings = OmegaConf.to_container(self._config, resolve=False)
        assert isinstance(settings, dict)
        settings.pop("hydra", None)
        for name in searched:
            _remove(settings, name.lstrip("+").split("."))
        try:
            code = dict(identify(_Application(self._function)).training)
        except TaskError as error:
            log.warning(
                "the code of the application has no identity (%s), so only its name tells it from "
                "another one; use another study_name after a change",
                error,
            )
            code = {}
        return fingerprint([code, settings, dict(fixed), self._groups(searched, fixed)])

    def _groups(
        self, searched: Mapping[str, _Searched], fixed: Mapping[str, str]
    ) -> dict[str, str]:
        """Return what the options of searched config groups contain, which their files say."""
        loader, name = self._context.config_loader, self._config.hydra.job.config_name
        found: dict[str, str] = {}
        for key, each in searched.items():
            domain = each.domain
            if not isinstance(domain, Choice) or not loader.get_group_options(key.lstrip("+")):
                continue
            for option in domain.options:
                composed = loader.load_configuration(
                    config_name=name,
                    overrides=[*fixed.values(), each.override(key, option)],
                    run_mode=RunMode.RUN,
                )
                settings = OmegaConf.to_container(composed, resolve=False)
                assert isinstance(settings, dict)
                settings.pop("hydra", None)
                found[f"{key}={option}"] = fingerprint(settings)
        return found

    def _batch(self, study: Study) -> list[AskedTrial]:
        """Return what to run now; nothing if the study is done.

        Raises:
            StudyMismatchError: The database has another sweep of this name.
        """
        try:
            first = study.ask()
        except StudyMismatchError as error:
            raise StudyMismatchError(
                f"{error}. To name this sweep: hydra.sweeper.study_name=NAME"
            ) from None
        batch = [] if first is None else [first]
        while batch and len(batch) < self._num_jobs:
            another = study.ask(wait=False)
            if another is None:
                break
            batch.append(another)
        return batch

    def _tell(self, study: Study, trial: AskedTrial, job: JobReturn) -> None:
        if job.status != JobStatus.COMPLETED:
            study.tell(trial, error=error_text(job._return_value))
            return
        try:
            metrics = checked_metrics(job.return_value, needed=[self._metric])
        except UsageError as error:
            study.tell(trial, error=f"a job must return a number or a dict of metrics: {error}")
        else:
            study.tell(trial, metrics)

    def _written(self, study: Study, num_run: int) -> dict[str, Any]:
        best = study.best_trial
        found = {
            "name": "thrifty",
            "best_value": best.value,
            "best_params": {name.lstrip("+"): value for name, value in best.config.items()},
            "jobs": num_run,
        }
        folder = Path(self._config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(OmegaConf.create(found), folder / "optimization_results.yaml")
        log.info("best %s: %s, of %s", self._metric, found["best_value"], found["best_params"])
        trials = study.trials  # those of a sweep that was stopped may not have ended
        known = sum(trial.state in ("done", "failed") for trial in trials) - num_run
        if known > 0:
            log.info("%d of %d trials were known and not run", known, len(trials))
        return found


class _Application:
    """What the identity of an application is made of."""

    def __init__(self, function: TaskFunction) -> None:
        self.function = function


@dataclass(frozen=True, slots=True)
class _Searched:
    """A key that is searched: its domain, and what an override says for values that are texts."""

    domain: Domain
    texts: Mapping[str, str] = field(default_factory=dict)

    def override(self, key: str, value: Any) -> str:
        text = self.texts.get(value, value) if isinstance(value, str) else value
        return f"{key}={'null' if text is None else text}"


def _parts(overrides: Sequence[Override]) -> tuple[dict[str, _Searched], dict[str, str]]:
    """Return what is searched, by key, and the other overrides, by key."""
    searched: dict[str, _Searched] = {}
    fixed: dict[str, str] = {}
    for override in overrides:
        key = override.get_key_element()
        searched.pop(key, None)  # the command line comes last, and counts
        fixed.pop(key, None)
        if override.is_sweep_override():
            searched[key] = _searched(override)
        else:
            fixed[key] = f"{key}={override.get_value_element_as_str()}"
    if not searched:
        raise UsageError(
            "the sweep has no key to search; name one in hydra.sweeper.params, or on "
            "the command line: lr='interval(0.01, 1)'"
        )
    return searched, fixed


def _searched(override: Override) -> _Searched:
    """Return the domain of an override that sweeps.

    Raises:
        UsageError: It chooses between sweeps.
    """
    value = override.value()
    if isinstance(value, IntervalSweep):
        low, high, log_scale = value.start, value.end, "log" in value.tags
        assert low is not None
        assert high is not None
        if isinstance(low, int) and isinstance(high, int):
            return _Searched(Int(low, high, log=log_scale))
        return _Searched(Float(low, high, log=log_scale))
    if isinstance(value, RangeSweep) and not value.shuffle:
        numbers = list(value.range())
        if all(isinstance(number, int) for number in numbers) and len(numbers) > 1:
            step = numbers[1] - numbers[0]
            if step > 0:
                return _Searched(Int(numbers[0], numbers[-1], step=step))
        return _Searched(Choice(numbers))
    options: list[Any] = []
    texts: dict[str, str] = {}
    for each in override.sweep_iterator(Transformer.identity):
        if isinstance(each, HydraSweep):
            raise UsageError(
                f"{override.input_line} chooses between sweeps; list the values, such as n=1,2,5,6"
            )
        if isinstance(each, bool | int | float) or each is None:
            options.append(each)
            continue
        option = each.text if isinstance(each, QuotedString) else Transformer.str(each)
        texts[option] = Transformer.str(each)
        options.append(option)
    return _Searched(Choice(options), texts)


def _values(trial: AskedTrial, searched: Mapping[str, _Searched]) -> list[str]:
    return [each.override(key, trial.config[key]) for key, each in searched.items()]


def _remove(settings: Any, path: Sequence[str]) -> None:
    """Remove a setting, which is searched, from nested dicts."""
    for part in path[:-1]:
        settings = settings.get(part) if isinstance(settings, dict) else None
    if isinstance(settings, dict):
        settings.pop(path[-1], None)
