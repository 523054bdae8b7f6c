"""A server of the Model Context Protocol: tools by which coding agents use thrifty.

Its tools answer with the documents that commands print with ``--json``.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar

import numpy as np
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import CallToolResult, TextContent, ToolAnnotations
from pydantic import Field

from thrifty import __version__
from thrifty.core import StudyNotFoundError, ThriftyError, UsageError, error_text, plain_logger
from thrifty.space import config_to_json
from thrifty.space._coordinates import read_config, whole_config
from thrifty.store import Store
from thrifty.store._steering_requests import ask, this_user
from thrifty.study import Study
from thrifty.study._reader import is_in_memory

from ._jobs import Budget, Job, Jobs, Studies, Usage, usage_of
from ._store_documents import act_document, best_document, explain_document, status_document
from ._study_documents import branch_document, cost_document, plan_document
from .documents import (
    SCHEMA_VERSION,
    ActDocument,
    BestDocument,
    BranchDocument,
    CostDocument,
    ExplainDocument,
    JobDocument,
    KnownDocument,
    PlanDocument,
    SpaceDocument,
    StatusDocument,
    StudyStatus,
    finite,
)


logger = plain_logger(__name__)

INSTRUCTIONS = """\
thrifty tunes neural networks and never trains the same thing twice: equal prefixes of
hyper-parameters, also of schedules, are trained once for all trials and studies of a task.
Before you train, ask `cost` what a configuration costs and what of it is known; `known` has its
metrics. A repeated configuration costs nothing. A schedule that changes late costs only the epochs
after the change.
`plan` says what a whole study would train.
`run` trains in the background and answers at once; ask `job` for the results. `stop` ends a job,
and `stop_study` a trial of it, or another study.
To change a trial from some epoch on, such as its learning rate, ask `branch` for the configuration
and its cost, and give that configuration to `run`: the epochs before are not trained again.
"""

_StudyName = Annotated[str, Field(description="Name of a study.")]
_Config = Annotated[
    dict[str, Any],
    Field(
        description=(
            "A configuration: hyper-parameters by name, as `space` and `best` write them; a "
            'schedule is an object such as {"schedule": "Step", "fields": {"value": 0.1, '
            '"milestones": [20]}}.'
        )
    ),
]
_Epochs = Annotated[
    int | None, Field(description="How many of their first epochs are meant; null: all.")
]
_Job = Annotated[
    str | int, Field(description='Identifier of a job, such as "job-1"; its number will do.')
]
_Made = TypeVar("_Made")

_AGENTS_STUDY = re.compile(r".+-agent-[0-9]+", re.DOTALL)
"""Names of studies that have the configurations of agents as trials."""


class Tools:
    """The tools of the server. Each method that ``make_server`` names is one of them.

    Args:
        studies: The studies whose configurations an agent may propose.
        default: Address of the database if no file and no option names one.
        budget: What the agent may train.
        jobs: Where it is trained.
    """

    def __init__(self, studies: Studies, *, default: str, budget: Budget, jobs: Jobs) -> None:
        self._studies = studies
        self._default = default
        self._budget = budget
        self._jobs = jobs
        self._lock = threading.Lock()
        self._seen: set[str] = set()
        """Addresses of databases in which an agent may have trained."""

    # -- what is there ------------------------------------------------------------------------

    def list_studies(self) -> list[StatusDocument]:
        """List the studies of each database: their states, trials and best values."""
        with self._lock:
            found = []
            for url in self._studies.urls(self._default):
                try:
                    with Store.open(url, create=False) as store:
                        found.append(status_document(store, url=url))
                except StudyNotFoundError:
                    continue  # nothing was trained there yet
            return _plain(found)

    def status(self, study: _StudyName) -> StatusDocument:
        """Say how far a study is: its trials by state, its best value, and its errors."""
        with self._store_of(study) as (store, url):
            return _plain(status_document(store, url=url, name=study))

    def best(self, study: _StudyName) -> BestDocument:
        """Return the best trial of a study with its configuration, or its Pareto front."""
        with self._store_of(study) as (store, _):
            return _plain(best_document(store, study))

    def explain(
        self,
        study: _StudyName,
        other: Annotated[
            str | None, Field(description="Another study; null: the one that is most similar.")
        ] = None,
    ) -> ExplainDocument:
        """Explain why two studies share training, or do not."""
        with self._store_of(study) as (store, _):
            return _plain(explain_document(store, study, other))

    # -- what would be trained ----------------------------------------------------------------

    def plan(self, study: _StudyName) -> PlanDocument:
        """Say how much a whole study would train, with and without sharing; train nothing."""
        with self._lock:
            _, found = self._studies.get(study)
            return _plain(plan_document(study, found.plan()))

    def space(self, study: _StudyName) -> SpaceDocument:
        """Return the hyper-parameters of a study, with their domains and an example of each."""
        with self._lock:
            _, found = self._studies.get(study)
            drawn = found.space.sample(np.random.default_rng(0))
            example = config_to_json(drawn)
            return {
                "schema_version": SCHEMA_VERSION,
                "study": study,
                "metric": list(found.goals.metrics),
                "mode": list(found.goals.modes),
                "max_epochs": found.algorithm.max_epochs,
                "hyper_parameters": [
                    {"name": name, "domain": repr(found.space[name]), "example": example.get(name)}
                    for name in found.space.names
                ],
            }

    def cost(
        self,
        study: _StudyName,
        configs: Annotated[list[_Config], Field(description="The configurations, at least one.")],
        epochs: _Epochs = None,
    ) -> CostDocument:
        """Say what training some configurations costs, and what is known of each already.

        Nothing is trained. Equal prefixes of the configurations are counted once.
        """
        with self._lock:
            _, found = self._studies.get(study)
            return _plain(cost_document(found, _some(configs), epochs=epochs))

    def branch(
        self,
        study: Annotated[
            str, Field(description="Name of a study, or of one that `run` has trained.")
        ],
        trial: Annotated[int, Field(description="Number of the trial to branch off.")],
        after: Annotated[int, Field(description="Epochs that both have in common.")],
        *,
        scale: Annotated[
            dict[str, float] | None,
            Field(description='Factors of hyper-parameters from there on, such as {"lr": 0.3}.'),
        ] = None,
        change: Annotated[
            dict[str, Any] | None,
            Field(description="New values or schedules of hyper-parameters from there on."),
        ] = None,
    ) -> BranchDocument:
        """Return a branch of a trial, which goes on differently from some epoch on, and its cost.

        Nothing is trained or enqueued: give its `config` to `run` to train it.
        """
        with self._lock:
            found = self._parent(study)
            made = found.branch(trial, after=after, scale=scale, change=read_config(change or {}))
            return _plain(branch_document(found, made, enqueued=False))

    def known(self, study: _StudyName, config: _Config, epochs: _Epochs = None) -> KnownDocument:
        """Return the metrics of each epoch of a configuration that is trained already.

        Each epoch says which study has trained it. Nothing is trained.
        """
        with self._lock:
            _, found = self._studies.get(study)
            whole = whole_config(found.space, read_config(config))
            document: KnownDocument = {
                "schema_version": SCHEMA_VERSION,
                "study": study,
                "config": config_to_json(whole),
                "epochs": [
                    {
                        "epoch": each.epoch,
                        "metrics": dict(each.metrics),
                        "studies": list(each.studies),
                        "kept": each.kept,
                    }
                    for each in found.known(whole, epochs=epochs)
                ],
            }
            return _plain(document)

    # -- training -----------------------------------------------------------------------------

    def run(
        self,
        study: _StudyName,
        configs: Annotated[list[_Config], Field(description="The configurations, at least one.")],
        epochs: _Epochs = None,
    ) -> JobDocument:
        """Train some configurations in the background; ask `job` for the results.

        Only what is not known is trained. It is refused if the budget does not allow it.
        """
        with self._lock:
            file, found = self._studies.get(study)
            if is_in_memory(found._repository()):
                raise UsageError(
                    f"study {study!r} is kept in memory, where a job cannot write; give it a file, "
                    'such as storage="sqlite:///thrifty.db"'
                )
            length = found.algorithm.max_epochs if epochs is None else epochs
            cost = cost_document(found, _some(configs), epochs=length)
            self._seen.update(self._studies.urls(self._default))
            used = self._used()
            left = cost["epochs_to_train"]
            self._budget.check(used, epochs=left)
            name = _agent_name(found, length)
            words = ["try", str(file), "--name", study, "--as", name, "--epochs", str(length)]
            words += ["--configs", "-", "--quiet", "--json"]
            # The limit counts all runs of this study. One more, because a study that has trained
            # its last epoch is done by itself.
            before = self._used_by(found.storage.url, re.compile(re.escape(name))).epochs
            words += ["--stop-epochs", str(before + int(left) + 1)]
            if self._budget.max_seconds is not None:
                words += ["--stop-seconds", str(self._budget.max_seconds - used.seconds)]
            given = [each["config"] for each in cost["configs"]]
            job = self._jobs.start(
                words, given=json.dumps(given), study=name, storage=found.storage.url
            )
            return self._job_document(job)

    def job(
        self,
        job: _Job,
        wait_s: Annotated[
            float,
            Field(
                description="Seconds to wait for the end of the job before answering.", ge=0, le=55
            ),
        ] = 0.0,
    ) -> JobDocument:
        """Say how far a job is, and return its results when it is done."""
        with self._lock:
            found = self._jobs.get(job)
        found.wait(wait_s)  # other tools answer meanwhile
        with self._lock:
            return self._job_document(found)

    def stop(self, job: _Job) -> JobDocument:
        """Stop a job at the end of an epoch. It keeps what it has trained; `run` goes on."""
        with self._lock:
            found = self._jobs.get(job)
            found.stop()
            return self._job_document(found)

    def stop_study(
        self,
        study: Annotated[
            str, Field(description="Name of a study; that of a job is its document's `study`.")
        ],
        trial: Annotated[
            int | None, Field(description="Number of a trial of it; null: the whole study.")
        ] = None,
    ) -> ActDocument:
        """Ask the process that runs a study to stop it, or one of its trials for good.

        That happens at the end of an epoch. The document says whether the request is still queued;
        if no process runs the study, the next one applies it before it trains. A trial that is
        stopped does not go on; the others do, and `run` trains what they share with it.
        """
        self._budget.check_allowed("stop studies")
        with self._store_of(study) as (store, _):
            who = f"agent of {this_user()}"
            act = ask(store, study, "stop" if trial is None else "stop trial", trial=trial, who=who)
            return _plain(act_document(study, act))

    # -- internals ----------------------------------------------------------------------------

    def _parent(self, study: str) -> Study:
        """Return a study of the files, or one that jobs have trained for such a study."""
        base, _, epochs = study.rpartition("-agent-")
        if study in self._studies.all or not _AGENTS_STUDY.fullmatch(study):
            return self._studies.get(study)[1]
        return self._studies.get(base)[1].only([], epochs=int(epochs), name=study)

    @contextmanager
    def _store_of(self, study: str) -> Iterator[tuple[Store, str]]:
        """Provide the database that has a study, and its address."""
        with self._lock:
            urls = self._studies.urls(self._default)
            for url in urls:
                try:
                    store = Store.open(url, create=False)
                except StudyNotFoundError:
                    continue
                with store:
                    if url != urls[-1] and store.studies.find(study) is None:
                        continue
                    yield store, url
                    return
            raise StudyNotFoundError(f"no database has study {study!r}; nothing was trained yet")

    def _used(self) -> Usage:
        """Return what agents have trained in all databases that this server has seen.

        A study that was renamed in its file counts, too.
        """
        found = [self._used_by(url, _AGENTS_STUDY) for url in self._seen]
        return Usage(
            epochs=sum(each.epochs for each in found), seconds=sum(each.seconds for each in found)
        )

    def _used_by(self, url: str, name: re.Pattern[str]) -> Usage:
        """Return what the studies of a database have trained whose names match."""
        try:
            with Store.open(url, create=False) as store:
                names = [each.name for each in store.studies.list() if name.fullmatch(each.name)]
                return usage_of(store, names)
        except StudyNotFoundError:
            return Usage()

    def _job_document(self, job: Job) -> JobDocument:
        output = job.output() or {}
        result: Any = dict(output) if output and "error" not in output else None
        document: JobDocument = {
            "schema_version": SCHEMA_VERSION,
            "job": job.id,
            "state": job.state,
            "study": job.study,
            "seconds": round(job.seconds, 1),
            "progress": self._progress(job),
            "result": result,
            "error": output.get("error"),
            "log": job.log(),
            "budget": self._budget.document(self._used()),
        }
        return _plain(document)

    def _progress(self, job: Job) -> StudyStatus | None:
        """Return how far a job's study is; None before it is in the database."""
        try:
            with Store.open(job.storage, create=False) as store:
                return status_document(store, url=job.storage, name=job.study)["studies"][0]
        except StudyNotFoundError:
            return None


def _agent_name(study: Study, epochs: int) -> str:
    """Return the name of the study that has the configurations of agents as trials."""
    return f"{study.name}-agent-{epochs}"


def _some(configs: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    if not configs:
        raise UsageError("give at least one configuration")
    return configs


def _with_messages(tool: Callable[..., Any]) -> Callable[..., Any]:
    """Return a tool whose errors reach the agent as a message, and never as a traceback."""

    @functools.wraps(tool)
    def answered(*args: Any, **options: Any) -> Any:
        try:
            found = tool(*args, **options)
            return _nothing_found() if found == [] else found
        except ThriftyError as error:
            raise ToolError(str(error)) from error
        except Exception as error:
            logger.exception("the tool %s failed", tool.__name__)
            raise ToolError(error_text(error)) from error

    return answered


def _nothing_found() -> CallToolResult:
    """Return the answer of ``list_studies`` where there are none; an empty list has no text."""
    text = (
        "There are no studies yet: nothing was trained in this database. To start, run a study "
        "with `thrifty run FILE`, or, if this server was started as `thrifty mcp FILE --allow-run`,"
        " ask `plan` or `space` for the study that the file defines, and then `run` to train."
    )
    return CallToolResult(
        content=[TextContent(type="text", text=text)], structured_content={"result": []}
    )


def _plain(document: _Made) -> _Made:
    """Return a document as plain data without numbers that JSON lacks."""
    found: _Made = finite(document)
    return found


def make_server(tools: Tools) -> MCPServer[Any]:
    """Return a server with all tools; its ``run`` serves standard input and output."""
    server = MCPServer(
        "thrifty", instructions=INSTRUCTIONS, version=__version__, log_level="WARNING"
    )
    reading: Sequence[Callable[..., Any]] = (
        tools.list_studies,
        tools.status,
        tools.best,
        tools.explain,
        tools.plan,
        tools.space,
        tools.cost,
        tools.branch,
        tools.known,
        tools.job,
    )
    for tool in reading:
        server.tool(annotations=ToolAnnotations(read_only_hint=True))(_with_messages(tool))
    training: Sequence[Callable[..., Any]] = (tools.run, tools.stop, tools.stop_study)
    for tool in training:
        hints = ToolAnnotations(read_only_hint=False, destructive_hint=False)
        server.tool(annotations=hints)(_with_messages(tool))
    return server
