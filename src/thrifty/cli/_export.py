"""The command ``export``: tables, databases for Optuna, adapters."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import click

from thrifty.agents import SCHEMA_VERSION
from thrifty.agents._store_documents import Seeds, last_values, trial_state
from thrifty.agents.documents import finite
from thrifty.core import StudyNotFoundError, UsageError
from thrifty.core._files import replacing
from thrifty.integrations import FineTune, export_optuna
from thrifty.pack import task_identity
from thrifty.space import config_to_json
from thrifty.store import Store, StudyInfo, TrialRecord, frame
from thrifty.store._epoch_times import attribute_text, counted, standard_deviation, stored_unit
from thrifty.store._reports import no_such_trial
from thrifty.store._trial_table import TableRow, table_of
from thrifty.study import Study

from ._options import complete_study, json_option, print_document, say, storage_option, trust_option
from ._train import load_stored_study


@click.command("export")
@click.argument("name", shell_complete=complete_study)
@storage_option
@click.option(
    "--format",
    "kind",
    type=click.Choice(["csv", "json", "parquet"]),
    help="Format of the table  [default: by the ending of --out]",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write  [default: standard output]",
)
@click.option(
    "--csv",
    "csv_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Short for --format csv --out FILE.",
)
@click.option(
    "--optuna", type=click.Path(path_type=Path), help="Write an Optuna database (SQLite)."
)
@click.option(
    "--adapter",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write a trial's adapter to a new folder, for peft, vLLM and the Hub.",
)
@click.option(
    "--trial", "number", type=int, help="Trial whose adapter is written  [default: the best one]"
)
@click.option(
    "--average",
    type=click.Choice(["ema", "swa", "none"]),
    help="Which averaged weights the adapter has  [default: those of the study's metric]",
)
@trust_option
@json_option
def export_command(
    *, name: str, storage: str, trust_file: bool, as_json: bool, **asked: Any
) -> None:
    """Export study NAME: trials as a table, the study for Optuna, or an adapter."""
    export = _Export(**asked)
    tables = export.tables()
    export.check(tables, as_json=as_json)
    written: list[Path] = []
    if export.adapter is not None:
        study = load_stored_study(name, storage=storage, trust_file=trust_file)
        _write_adapter(study, export.number, export.adapter, average=export.average)
        written.append(export.adapter)
    if export.optuna is not None:
        export_optuna(storage, name, file=export.optuna)
        written.append(export.optuna)
        say(f"wrote {export.optuna}: open it with optuna-dashboard sqlite:///{export.optuna}")
    if tables:
        written += _write_tables(name, storage=storage, wanted=tables)
    if as_json:
        document = {"schema_version": SCHEMA_VERSION, "study": name}
        print_document({**document, "written": [str(file) for file in written]})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Export:
    """What a command is asked to write; a field for each option."""

    kind: str | None
    out: Path | None
    csv_file: Path | None
    optuna: Path | None
    adapter: Path | None
    number: int | None
    average: str | None

    def tables(self) -> list[tuple[str, Path | None]]:
        """Return the format and file of each table; None for standard output.

        Raises:
            UsageError: A format does not fit its file.
        """
        wanted: list[tuple[str, Path | None]] = []
        if self.csv_file is not None:
            wanted.append(("csv", self.csv_file))
        if self.kind is not None or self.out is not None:
            wanted.append((_kind(self.kind, self.out), self.out))
        return wanted

    def check(self, tables: Sequence[tuple[str, Path | None]], *, as_json: bool) -> None:
        """Check that the options go together.

        Raises:
            UsageError: They do not.
        """
        if self.optuna is None and self.adapter is None and not tables:
            raise UsageError(
                "say what to write: --csv FILE, --format csv, json or parquet, --out FILE, "
                "--optuna FILE, or --adapter DIR"
            )
        if self.number is not None and self.adapter is None:
            raise UsageError("--trial says whose adapter to write; add --adapter DIR")
        if self.average is not None and self.adapter is None:
            raise UsageError("--average says which weights an adapter has; add --adapter DIR")
        if as_json and any(file is None for _, file in tables):
            raise UsageError("--json prints which files were written; name a file with --out FILE")


def _write_tables(
    name: str, *, storage: str, wanted: Sequence[tuple[str, Path | None]]
) -> list[Path]:
    """Write or print tables of a study's trials; return the files that were written.

    Args:
        name: Name of the study.
        storage: Address of the database.
        wanted: Format and file of each table; None for standard output.
    """
    written = []
    with Store.open(storage, create=False) as store:
        info = store.studies.current(name)
        stored = _Stored(
            info=info,
            trials=store.studies.load(info.id).trials,
            seeds=last_values(store, info),
            attributes=store.studies.user_attrs(info.id),
            metrics=store.studies.last_metrics(info),
        )
    for each, file in wanted:
        content = _WRITERS[each](stored)
        if file is None:
            # Only files get the exact content: printed text may go to a terminal and is made plain.
            say(content, nl=False)
            continue
        _write(file, content)
        written.append(file)
        say(f"wrote {file}")
    return written


def _write_adapter(
    study: Study, number: int | None, folder: Path, *, average: str | None = None
) -> None:
    """Write the adapter of a trial into a folder that appears when it is complete.

    Args:
        study: The study.
        number: Number of the trial; None for the best one.
        folder: The new folder.
        average: Which averaged weights it has: ``"ema"``, ``"swa"`` or ``"none"``; None for those
            that the study's metric is measured with.
    """
    if folder.exists():
        raise UsageError(f"{folder} exists already; name a new folder")
    if number is None:
        trial = study.best_trial
    else:
        known = {each.number: each for each in study.trials}
        if number not in known:
            raise UsageError(no_such_trial(study.name, number, num_trials=len(known)))
        trial = known[number]
    chosen = _average_of(study) if average is None else average
    kind = None if chosen == "none" else cast("Literal['ema', 'swa']", chosen)
    model: Any = trial.load_model(average=kind)
    if not hasattr(model, "peft_config"):
        what = type(model).__name__
        raise UsageError(
            f"the model of study {study.name!r} is a {what}, not a PeftModel, so it has no adapter "
            "to write; trial.load_model() returns the whole model"
        )
    try:
        with replacing(folder) as new:
            model.save_pretrained(new)
    except OSError as error:
        raise UsageError(f"cannot write {folder}: {error.strerror}; name another place") from error
    said = "" if chosen == "none" else f", with the weights of {chosen}"
    if chosen != "none" and average is None:
        said += f", which {study.metric} is measured with"
    say(f"wrote the adapter of trial {trial.number} to {folder}{said}")
    if _has_other_base(study):
        say(
            "warning: the files of the base model have changed since the study was made, and the "
            "adapter fits the former ones; load it onto a copy of those, or train a new study",
            err=True,
        )


def _average_of(study: Study) -> str:
    """Return which averaged weights the metric of a study is measured with."""
    kept = getattr(study.task, "average", None) or ()
    prefixes = [each.prefix for each in (kept if isinstance(kept, Sequence) else [kept])]
    found = [prefix for prefix in prefixes if study.metric.startswith(prefix)]
    return found[0].removesuffix("_") if found else "none"


def _has_other_base(study: Study) -> bool:
    """Return whether the base of a ``FineTune`` has other files than when its study was made."""
    if not isinstance(study.task, FineTune):
        return False
    try:
        with Store.open(study.storage.url, create=False) as store:
            stored = store.studies.get(study.name).spec["task"].get("training", {})
    except StudyNotFoundError:  # in memory
        return False
    now = task_identity(study.task).training
    return bool(stored.get(_BASE, now.get(_BASE)) != now.get(_BASE))


_BASE = "attribute base"
"""The part of the identity of a ``FineTune`` that is the base."""


def _kind(kind: str | None, out: Path | None) -> str:
    found = kind or (out.suffix[1:].lower() if out is not None else "")
    if found not in _WRITERS:
        raise UsageError(
            f"{out}: its extension must be one of .{', .'.join(_WRITERS)}, or pass --format"
        )
    if found == "parquet" and out is None:
        raise UsageError("parquet is a binary format; name a file with --out FILE")
    return found


def _write(file: Path, content: str | bytes) -> None:
    # Write an unpaired surrogate as an escape.
    data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    try:
        with replacing(file) as new:
            new.write_bytes(data)
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}; name another place") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """What the database has of a study's trials.

    ``attributes`` are the user attributes of trials that have some, and ``metrics`` all metrics of
    trials that have reported.
    """

    info: StudyInfo
    trials: Sequence[TrialRecord]
    seeds: Seeds
    attributes: Mapping[int, Mapping[str, Any]]
    metrics: Mapping[int, Mapping[str, float]]


def _csv(stored: _Stored) -> str:
    """Return the columns of ``Study.trials_dataframe``, with lists and dicts as JSON texts."""
    rows = _rows(stored)
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=rows[0] if rows else ["number"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _rows(stored: _Stored) -> list[dict[str, Any]]:
    """Return the table of the trials, with cells that a file can hold."""
    info = stored.info
    found = table_of(
        [
            TableRow(
                number=trial.number,
                state=trial_state(info, trial),
                epochs=trial.reached,
                value=trial.value,
                sd=_spread(stored.seeds.get(trial.number)),
                objectives=trial.objectives or {},
                violation=None if trial.value is None else trial.violation,
                metrics=stored.metrics.get(trial.number, {}),
                error=trial.error[1],
                config=trial.config,
                user_attrs=stored.attributes.get(trial.number, {}),
            )
            for trial in stored.trials
        ],
        objectives=_metrics(info) or [info.spec.get("metric", "")],
        has_constraints="constraints" in info.spec,
        num_seeds=info.num_seeds,
        unit=stored_unit(info.spec),
    )
    return [{_whole(name): _whole(cell) for name, cell in row.items()} for row in found]


def _json(stored: _Stored) -> str:
    """Return the trials as a JSON list; schedules have the form stored in the database."""
    info, seeds = stored.info, stored.seeds
    found = [
        {
            "number": trial.number,
            "state": trial_state(info, trial),
            "epochs": trial.reached,
            **counted(info.spec, trial.reached),
            "value": _finite(trial.value),
            **(_sd_and_seeds(seeds.get(trial.number)) if seeds else {}),
            **({"values": _objectives(trial)} if _metrics(info) else {}),
            **({"violation": trial.violation} if "constraints" in info.spec else {}),
            "metrics": finite(stored.metrics.get(trial.number, {})),
            "error": trial.error[1],
            "parent": trial.parent,
            "config": config_to_json(trial.config),
            "user_attrs": finite(stored.attributes.get(trial.number, {})),
        }
        for trial in stored.trials
    ]
    return json.dumps(found, indent=1) + "\n"


def _parquet(stored: _Stored) -> bytes:
    """Return the columns of ``Study.trials_dataframe``, with lists and dicts as JSON texts."""
    out = io.BytesIO()
    frame(_rows(stored), backend="polars").write_parquet(out)
    return out.getvalue()


def _spread(values: Sequence[float] | None) -> float | None:
    """Return the standard deviation over seeds; None if there are no values."""
    return standard_deviation(values) if values else None


def _sd_and_seeds(values: Sequence[float] | None) -> dict[str, Any]:
    """Return the standard deviation over seeds and their number."""
    if not values:
        return {"sd": None, "seeds": None}
    return {"sd": standard_deviation(values), "seeds": len(values)}


def _whole(value: Any) -> Any:
    """Return a cell that a table can hold: lists and dicts become JSON.

    Unpaired surrogates, which Arrow rejects, are escaped.
    """
    if isinstance(value, list | dict):
        value = attribute_text(value)
    if not isinstance(value, str):
        return value
    return value.encode(errors="backslashreplace").decode()


_WRITERS: dict[str, Callable[[_Stored], Any]] = {"csv": _csv, "json": _json, "parquet": _parquet}


def _metrics(info: StudyInfo) -> list[str]:
    """Return the objectives of a study with several; otherwise an empty list."""
    metric = info.spec.get("metric")
    return metric if isinstance(metric, list) else []


def _objectives(trial: TrialRecord) -> dict[str, float | None]:
    return {name: _finite(value) for name, value in (trial.objectives or {}).items()}


def _finite(value: float | None) -> float | None:
    """Return None for values that are not finite, because JSON has no NaN or infinity."""
    return value if value is not None and math.isfinite(value) else None
