"""The Optuna storage behind ``optuna_storage``; the only file that imports optuna."""

from __future__ import annotations

import datetime
import math
from collections.abc import Container, Mapping, Sequence
from typing import Any, NoReturn

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.study._frozen import FrozenStudy
from optuna.trial import FrozenTrial, TrialState

from thrifty.core import StoreError
from thrifty.store import Store, StudyInfo, TrialRecord


# thrifty numbers the trials of each study from zero, but Optuna wants ids unique in a database.
TRIALS_PER_STUDY = 10**9


class OptunaView(BaseStorage):
    """A read-only Optuna storage; every read opens the thrifty database and sees current data."""

    def __init__(self, url: str) -> None:
        self._url = url
        with Store.open(url, create=False):
            pass

    # -- studies ----------------------------------------------------------------------

    def get_study_id_from_name(self, study_name: str) -> int:
        """Return the id of a study."""
        with self._store() as store:
            info = store.studies.find(study_name)
        if info is None:
            raise KeyError(study_name)
        return info.id

    def get_study_name_from_id(self, study_id: int) -> str:
        """Return the name of a study."""
        return self._info(study_id).name

    def get_study_directions(self, study_id: int) -> list[StudyDirection]:
        """Return the direction of each objective: minimise or maximise."""
        return _directions(self._info(study_id))

    def get_study_user_attrs(self, study_id: int) -> dict[str, Any]:
        """Return the specification from which the study was made."""
        return _user_attrs(self._info(study_id))

    def get_study_system_attrs(self, study_id: int) -> dict[str, Any]:
        """Return the names of the study's metrics, under the key that Optuna's plots read."""
        return _system_attrs(self._info(study_id))

    def get_all_studies(self) -> list[FrozenStudy]:
        """Return all studies."""
        with self._store() as store:
            infos = store.studies.made().values()
        return [
            FrozenStudy(
                study_name=info.name,
                direction=None,
                directions=_directions(info),
                user_attrs=_user_attrs(info),
                system_attrs=_system_attrs(info),
                study_id=info.id,
            )
            for info in infos
        ]

    # -- trials -----------------------------------------------------------------------

    def get_all_trials(
        self,
        study_id: int,
        deepcopy: bool = True,  # noqa: FBT001, FBT002 (Optuna's signature)
        states: Container[TrialState] | None = None,
    ) -> list[FrozenTrial]:
        """Return all trials of a study, or those in some states."""
        info = self._info(study_id)
        with self._store() as store:
            records = store.studies.load(study_id).trials
            curves = store.studies.curves(study_id, (_metrics(info) or [""])[0])
            attributes = store.studies.user_attrs(study_id)
        distributions = _distributions(records)
        trials = [
            _frozen(
                info,
                record,
                curve=curves[record.number],
                distributions=distributions,
                attributes=attributes.get(record.number, {}),
            )
            for record in records
        ]
        return [trial for trial in trials if states is None or trial.state in states]

    def get_trial(self, trial_id: int) -> FrozenTrial:
        """Return one trial."""
        study_id, number = divmod(trial_id, TRIALS_PER_STUDY)
        for trial in self.get_all_trials(study_id):
            if trial.number == number:
                return trial
        raise KeyError(trial_id)

    # -- writes, which a read-only view rejects ---------------------------------------

    def create_new_study(
        self, directions: Sequence[StudyDirection], study_name: str | None = None
    ) -> NoReturn:
        """Raise StoreError, because this storage is read-only."""
        self._refuse()

    def delete_study(self, study_id: int) -> NoReturn:
        """Raise StoreError, because this storage is read-only."""
        self._refuse()

    def set_study_user_attr(self, study_id: int, key: str, value: Any) -> NoReturn:
        """Raise StoreError, because this storage is read-only."""
        self._refuse()

    def set_study_system_attr(self, study_id: int, key: str, value: Any) -> NoReturn:
        """Raise StoreError, because this storage is read-only."""
        self._refuse()

    def create_new_trial(
        self, study_id: int, template_trial: FrozenTrial | None = None
    ) -> NoReturn:
        """Raise StoreError, because this storage is read-only."""
        self._refuse()

    def set_trial_param(  # noqa: PLR0917
        self,
        trial_id: int,
        param_name: str,
        param_value_internal: float,
        distribution: BaseDistribution,
    ) -> NoReturn:
        """Raise StoreError, because this storage is read-only."""
        self._refuse()

    def set_trial_state_values(
        self, trial_id: int, state: TrialState, values: Sequence[float] | None = None
    ) -> NoReturn:
        """Raise StoreError, because this storage is read-only."""
        self._refuse()

    def set_trial_intermediate_value(
        self, trial_id: int, step: int, intermediate_value: float
    ) -> NoReturn:
        """Raise StoreError, because this storage is read-only."""
        self._refuse()

    def set_trial_user_attr(self, trial_id: int, key: str, value: Any) -> NoReturn:
        """Raise StoreError, because this storage is read-only."""
        self._refuse()

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> NoReturn:
        """Raise StoreError, because this storage is read-only."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise StoreError(
            "this Optuna storage is a read-only view of a thrifty database; write a copy that "
            "can be changed with: thrifty export NAME --optuna FILE"
        )

    def _store(self) -> Store:
        return Store.open(self._url, create=False)

    def _info(self, study_id: int) -> StudyInfo:
        with self._store() as store:
            return store.studies.made()[study_id]


def copy(url: str, name: str, *, target: str) -> None:
    """Copy a study into another Optuna storage."""
    with Store.open(url, create=False) as store:
        store.studies.get(name)
    verbosity = optuna.logging.get_verbosity()
    # Optuna logs the study's name unescaped, and the name may contain terminal escape sequences.
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        optuna.copy_study(from_study_name=name, from_storage=OptunaView(url), to_storage=target)
    finally:
        optuna.logging.set_verbosity(verbosity)


def _metrics(info: StudyInfo) -> list[str]:
    metric = info.spec.get("metric", [])
    return metric if isinstance(metric, list) else [metric]


def _user_attrs(info: StudyInfo) -> dict[str, Any]:
    return {key: value for key, value in info.spec.items() if value is not None}


def _system_attrs(info: StudyInfo) -> dict[str, Any]:
    names = _metrics(info)
    return {"study:metric_names": names} if names else {}


def _directions(info: StudyInfo) -> list[StudyDirection]:
    mode = info.spec.get("mode")
    return [
        StudyDirection.MINIMIZE if each == "min" else StudyDirection.MAXIMIZE
        for each in (mode if isinstance(mode, list) else [mode])
    ]


def _values(info: StudyInfo, record: TrialRecord) -> list[float] | None:
    if record.objectives is not None:
        return [record.objectives[name] for name in _metrics(info)]
    return None if record.value is None else [record.value]


def _distributions(records: Sequence[TrialRecord]) -> dict[str, BaseDistribution]:
    """Return a distribution for each hyper-parameter, from its values in all trials.

    Numbers become ranges over these values; everything else becomes a choice among them.
    """
    seen: dict[str, list[Any]] = {}
    for record in records:
        for name, value in record.config.items():
            seen.setdefault(name, []).append(value)
    out: dict[str, BaseDistribution] = {}
    for name, values in seen.items():
        kinds = {type(value) for value in values}
        if kinds == {int}:
            out[name] = IntDistribution(min(values), max(values))
        elif kinds <= {int, float}:
            out[name] = FloatDistribution(min(values), max(values))
        else:
            out[name] = CategoricalDistribution(list(dict.fromkeys(str(v) for v in values)))
    return out


def _frozen(
    info: StudyInfo,
    record: TrialRecord,
    *,
    curve: Sequence[float],
    distributions: Mapping[str, BaseDistribution],
    attributes: Mapping[str, Any],
) -> FrozenTrial:
    state = _state(info, record)
    began = datetime.datetime.fromtimestamp(info.created_at)
    own = {name: distributions[name] for name in record.config}
    params = {
        name: str(value) if isinstance(own[name], CategoricalDistribution) else value
        for name, value in record.config.items()
    }
    finite = {epoch: value for epoch, value in enumerate(curve, start=1) if math.isfinite(value)}
    return FrozenTrial(
        number=record.number,
        state=state,
        value=None,
        values=_values(info, record) if state != TrialState.RUNNING else None,
        datetime_start=began,
        datetime_complete=None if state == TrialState.RUNNING else began,
        params=params,
        distributions=own,
        user_attrs={
            **attributes,
            "thrifty:epochs": record.reached,
            "thrifty:error": record.error[1],
        },
        # Optuna reads constraints here; a value above zero means infeasible.
        system_attrs={} if record.violation is None else {"constraints": [record.violation]},
        intermediate_values=finite,
        trial_id=info.id * TRIALS_PER_STUDY + record.number,
    )


def _state(info: StudyInfo, record: TrialRecord) -> TrialState:
    if record.state == "failed":
        return TrialState.FAIL
    horizon = info.spec.get("max_epochs", math.inf) if record.horizon is None else record.horizon
    if record.reached >= horizon:
        return TrialState.COMPLETE
    if record.state == "stopped" or (record.state == "waiting" and info.state == "done"):
        return TrialState.PRUNED
    return TrialState.RUNNING
