"""The command ``thrifty export NAME``."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from thrifty.core import UsageError
from thrifty.integrations import export_optuna
from thrifty.space import config_to_json
from thrifty.store import Store, StudyInfo, TrialRecord, frame

from ._completion import complete_study
from ._options import say, storage_option


@click.command("export")
@click.argument("name", shell_complete=complete_study)
@storage_option
@click.option(
    "--format",
    "kind",
    type=click.Choice(["csv", "json", "parquet"]),
    help="What to write  [default: the ending of --out says it]",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where it goes  [default: what the command prints]",
)
@click.option(
    "--csv",
    "csv_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The same as --format csv --out FILE.",
)
@click.option(
    "--optuna", type=click.Path(path_type=Path), help="Write an Optuna database (SQLite)."
)
def export_command(
    *,
    name: str,
    storage: str,
    kind: str | None,
    out: Path | None,
    csv_file: Path | None,
    optuna: Path | None,
) -> None:
    """Copy study NAME for other tools: its trials as a table, or all of it for Optuna."""
    wanted: list[tuple[str, Path | None]] = [("csv", csv_file)] if csv_file is not None else []
    if kind is not None or out is not None:
        wanted.append((_kind(kind, out), out))
    if optuna is None and not wanted:
        raise UsageError(
            "say what to write: --format csv, json or parquet, --out FILE, or --optuna FILE"
        )
    if optuna is not None:
        export_optuna(storage, name, file=optuna)
        say(f"wrote {optuna}: open it with optuna-dashboard sqlite:///{optuna}")
    if not wanted:
        return
    with Store.open(storage, create=False) as store:
        info = store.studies.get(name)
        trials = store.studies.load(info.id).trials
    for each, file in wanted:
        content = _WRITERS[each](info, trials)
        if file is None:
            # Only files get the exact content: printed text may go to a terminal and is made plain.
            say(content, nl=False)
            continue
        _write(file, content)
        say(f"wrote {file}")


def _kind(kind: str | None, out: Path | None) -> str:
    found = kind or (out.suffix[1:].lower() if out is not None else "")
    if found not in _WRITERS:
        raise UsageError(
            f"{out}: its ending must be one of .{', .'.join(_WRITERS)}, or say --format"
        )
    if found == "parquet" and out is None:
        raise UsageError("parquet is no text: say --out FILE")
    return found


def _write(file: Path, content: str | bytes) -> None:
    # Write an unpaired surrogate as an escape.
    data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    try:
        file.write_bytes(data)
    except OSError as error:
        raise UsageError(
            f"cannot write {file}: {error.strerror}; name another place"
        ) from error


def _csv(info: StudyInfo, trials: Sequence[TrialRecord]) -> str:
    metrics = _metrics(info)
    names = sorted({key for trial in trials for key in trial.config})
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    objectives = [f"values_{each}" for each in metrics]
    writer.writerow(["number", "state", "epochs", "value", *objectives, *names])
    for trial in trials:
        writer.writerow([
            trial.number,
            _state(info, trial),
            trial.reached,
            trial.value,
            *((trial.objectives or {}).get(each) for each in metrics),
            *(str(trial.config.get(key, "")) for key in names),
        ])
    return out.getvalue()


def _json(info: StudyInfo, trials: Sequence[TrialRecord]) -> str:
    """Return the trials as a JSON list; schedules have the form stored in the database."""
    found = [
        {
            "number": trial.number,
            "state": _state(info, trial),
            "epochs": trial.reached,
            "value": _finite(trial.value),
            **({"values": _objectives(trial)} if _metrics(info) else {}),
            **({"violation": trial.violation} if "constraints" in info.spec else {}),
            "error": trial.error[1],
            "parent": trial.parent,
            "config": config_to_json(trial.config),
        }
        for trial in trials
    ]
    return json.dumps(found, indent=1) + "\n"


def _parquet(info: StudyInfo, trials: Sequence[TrialRecord]) -> bytes:
    """Return the columns of ``Study.trials_dataframe``."""
    names = list(dict.fromkeys(key for trial in trials for key in trial.config))
    rows = [
        {
            "number": trial.number,
            "state": _state(info, trial),
            "epochs": trial.reached,
            "value": trial.value,
            **{_whole(f"values_{m}"): (trial.objectives or {}).get(m) for m in _metrics(info)},
            **({"violation": trial.violation} if "constraints" in info.spec else {}),
            "error": trial.error[1],
            **{_whole(f"params_{key}"): _whole(trial.config.get(key)) for key in names},
        }
        for trial in trials
    ]
    out = io.BytesIO()
    frame(rows, backend="polars").write_parquet(out)
    return out.getvalue()


def _whole(value: Any) -> Any:
    """Return a text without unpaired surrogates, which Arrow rejects."""
    if not isinstance(value, str):
        return value
    return value.encode(errors="backslashreplace").decode()


_WRITERS: dict[str, Callable[[StudyInfo, Sequence[TrialRecord]], Any]] = {
    "csv": _csv,
    "json": _json,
    "parquet": _parquet,
}


def _metrics(info: StudyInfo) -> list[str]:
    """Return the objectives of a study with several; otherwise an empty list."""
    metric = info.spec.get("metric")
    return metric if isinstance(metric, list) else []


def _state(info: StudyInfo, trial: TrialRecord) -> str:
    """Return the trial's state as in ``TrialResult``."""
    if trial.state != "waiting":
        return trial.state
    return "done" if trial.reached >= info.spec.get("max_epochs", 0) else "paused"


def _objectives(trial: TrialRecord) -> dict[str, float | None]:
    return {name: _finite(value) for name, value in (trial.objectives or {}).items()}


def _finite(value: float | None) -> float | None:
    """Return None for values that are not finite, because JSON has no NaN or infinity."""
    return value if value is not None and math.isfinite(value) else None
