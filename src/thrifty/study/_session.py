"""One run of a study: executor, live progress, signals and stop conditions around the loop."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Literal, Self

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress as RichProgress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from thrifty.core import (
    ActivationsKept,
    Clock,
    EpochDone,
    StateError,
    fingerprint,
    gc_frozen,
    plain_logger,
    plain_text,
)
from thrifty.pack import SelfDescribing
from thrifty.run import Executor, ExecutorConfig
from thrifty.store import Heartbeat, Lease, PlanInfo, Store, StudyInfo, StudyMoved, failure_groups
from thrifty.store._address import shell_command
from thrifty.store._reports import error_key, trials_text

from ._housekeeping import DiskBudget, Packing, PassedStates, with_threads_of
from ._ledger import Ledger, is_done
from ._loop import Observer, RunLoop, Steering, StopOnSignal, StopWhen, tell, tell_news
from ._reader import Provenance, is_in_memory
from ._repository import StudyRepository
from ._trial_events import (
    StudyBegan,
    StudyEnded,
    TrialAdvanced,
    TrialBegan,
    TrialEnded,
    failure_text,
)


logger = plain_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What a call of ``Study.run`` asks for.

    Attributes:
        executor: Where to train.
        stop: The conditions that stop the run early; None if there are none.
        progress: Whether to show the progress on the terminal.
        observers: Observers of all events.
        began: When the run began, by the monotonic clock.
    """

    executor: ExecutorConfig
    stop: StopWhen | None
    progress: bool
    observers: Sequence[Observer]
    began: float


class Session:
    """One run of a study: its workers, its loop, and what people see and ask of it meanwhile.

    Args:
        repository: The study's records.
        ledger: What the study knows.
        store: The open database.
        lease: The lease on the study.
        options: What the run is asked for.
    """

    def __init__(
        self,
        repository: StudyRepository,
        ledger: Ledger,
        *,
        store: Store,
        lease: Lease,
        options: RunOptions,
    ) -> None:
        self._repository = repository
        self._ledger = ledger
        self._store = store
        self._lease = lease
        self._options = options
        self._failed_before = frozenset(ledger.errors)
        self._plan = store.plans.get(ledger.plan_id)
        self._executor = with_threads_of(
            ledger.plan_id, options.executor, store=store, name=repository.name
        )
        ledger.threads = self._executor.threads
        self._driver = store.drive(lease, revision=ledger.revision)
        self._steering = Steering()

    def train(self) -> bool:
        """Train until the algorithm is done or a stop is requested; record which it was.

        Returns:
            Whether the algorithm is done.
        """
        ledger, repository = self._ledger, self._repository
        self._driver.record([StudyMoved(study=ledger.study_id, state="running")])
        observers = [*self._options.observers]
        ending = _Ending(observers, ledger)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._recorded(ending))
            self._enter_surroundings(stack, observers)
            signals = stack.enter_context(StopOnSignal())
            self._begin_steering()
            reason = self._stop_reason()
            loop = self._open_loop(stack, observers=observers, signals=signals, reason=reason)
            stack.enter_context(ending)
            _begin(repository, ledger, observers, info=self._lease.study, plan=self._plan)
            done = loop.run()
            if done:
                loop.hold_budget_at_the_end()
            ending.state = "done" if done else "stopped"
            ending.signal = None if done else signals.number
        self._steering.end(ledger, self._driver, state=ending.state)
        say_where_from(
            repository,
            ledger,
            store=self._store,
            progress=self._options.progress,
            is_stopped=not done,
        )
        how = "" if done else _how_to_go_on(repository, self._lease.study)
        _say_how_it_ended(
            repository, ledger, how=how, why=reason(), failed_before=self._failed_before
        )
        return done

    @contextlib.contextmanager
    def _recorded(self, ending: _Ending) -> Iterator[None]:
        """Provide a context that records that the run has ended if it ends at once.

        That is after a second Ctrl-C, or if running the study again would raise the same error.
        """
        try:
            yield
        except (StateError, KeyboardInterrupt):
            state = "done" if ending.state == "done" else "stopped"
            self._steering.end(self._ledger, self._driver, state=state)
            raise

    def _enter_surroundings(self, stack: contextlib.ExitStack, observers: list[Observer]) -> None:
        """Enter what is around all training: the heartbeat and the progress bar, an observer."""
        repository = self._repository
        stack.enter_context(gc_frozen())
        if not is_in_memory(repository):
            # The loop of a study that trains in this process looks up only between epochs.
            stack.enter_context(Heartbeat(self._lease))
        if self._options.progress:
            bar = Progress(repository.name, self._ledger, clock=repository.clock)
            observers.append(stack.enter_context(bar))

    def _begin_steering(self) -> None:
        """Apply what was requested before the run; if that lets it wait, log how it can go on."""
        steering, repository = self._steering, self._repository
        steering.begin(self._ledger, self._driver)
        if steering.is_paused:
            command = shell_command("resume", name=repository.name, url=repository.storage.url)
            logger.warning(
                "study %r waits: %s paused it before this run. To let it go on: %s",
                repository.name,
                steering.paused_by,
                command,
            )

    def _stop_reason(self) -> Callable[[], str]:
        """Return a function that gives the reason to stop, or an empty string."""
        stop, clock = self._options.stop, self._repository.clock
        return self._steering.or_asked(
            _never if stop is None else stop.watch(self._ledger, clock, began=self._options.began)
        )

    def _open_loop(
        self,
        stack: contextlib.ExitStack,
        *,
        observers: Sequence[Observer],
        signals: StopOnSignal,
        reason: Callable[[], str],
    ) -> RunLoop:
        """Open the workers, which the stack closes, and return the loop that keeps them busy.

        Args:
            stack: The contexts of the run.
            observers: All observers.
            signals: The signals that have been received.
            reason: A function that gives the reason to stop, or an empty string.
        """
        recipe, clock, ledger = self._repository.recipe, self._repository.clock, self._ledger
        store, lease, stop = self._store, self._lease, self._options.stop
        leftovers = store.remove_leftovers(lease, folder=self._plan.identity)
        curves = store.curves.all()
        workers = self._open_workers(curves)
        stack.callback(workers.close)
        return RunLoop(
            ledger=ledger,
            algorithm=recipe.algorithm,
            space=recipe.space,
            executor=workers,
            store=store,
            lease=lease,
            driver=self._driver,
            clock=clock,
            seed=recipe.seed,
            plan_id=ledger.plan_id,
            budget=self._disk_budget(other_bytes=leftovers.left_bytes),
            observers=observers,
            packing=self._packing(known=curves.keys()),
            passed=PassedStates(store, clock=clock, shared=lease.shared),
            steering=self._steering,
            stop_requested=lambda: signals.requested() or workers.was_stopped or bool(reason()),
            epochs_left=lambda: math.inf if stop is None else stop.epochs_left(ledger),
        )

    def _open_workers(self, curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> Executor:
        """Open the workers.

        Args:
            curves: The known pack curves.
        """
        store, ledger = self._store, self._ledger
        ledger.refused = store.plans.refusals(ledger.plan_id)
        return self._executor.open(
            self._repository.recipe.task,
            checkpoints=store.checkpoints.root,
            folder=self._plan.identity,
            curves=curves,
            refused=ledger.refused,
            max_base_bytes=self._repository.storage.max_base_bytes,
        )

    def _disk_budget(self, *, other_bytes: int) -> DiskBudget:
        """Return the budget of the plan's folder, in which other files take some bytes."""
        limit = self._repository.storage.disk_budget_bytes
        return DiskBudget(limit, folder=self._plan.identity, other_bytes=other_bytes)

    def _packing(self, *, known: Collection[str]) -> Packing:
        """Return how trials are packed.

        Args:
            known: Keys of the known pack curves.
        """
        return Packing(
            num_workers=self._executor.num_workers,
            fixed_size=self._executor.pack_size,
            memory_margin=self._executor.memory_margin,
            known=known,
        )


def _how_to_go_on(repository: StudyRepository, info: StudyInfo) -> str:
    """Return how a stopped study goes on, with the command if its file is recorded."""
    if is_in_memory(repository) or not info.spec.get("file"):
        return "run it again to go on"
    url = repository.storage.url
    return f"run it again to go on ({shell_command('resume', name=repository.name, url=url)})"


def _say_how_it_ended(
    repository: StudyRepository,
    ledger: Ledger,
    *,
    how: str,
    why: str,
    failed_before: frozenset[int],
) -> None:
    """Log which trials failed in a run, and what is left to do.

    ``how`` says how the study goes on; it is empty if the study is done.
    """
    if not say_if_all_failed(repository, ledger):
        ledger.failure_log.say_all(ledger.errors, before=failed_before)
    if how:
        because = f": {why}" if why else ""
        logger.warning("study %r was stopped%s; %s", repository.name, because, how)


def say_if_all_failed(repository: StudyRepository, ledger: Ledger) -> bool:
    """Log a warning and what to do if every trial of a study has failed; return whether it has."""
    if not ledger.errors or len(ledger.errors) < len(ledger.history):
        return False
    delete = "" if is_in_memory(repository) else f" ({repository.delete_command})"
    logger.warning(
        "study %r has no results, because all its trials failed:\n%s\n"
        "Correct the cause and run it again. A corrected task takes the place of this study; if "
        "the cause is outside of the task, delete the study%s first",
        repository.name,
        failure_text(failure_groups(ledger.errors)),
        delete,
    )
    return True


def say_what_was_not_checked(repository: StudyRepository, ledger: Ledger, *, error: str) -> None:
    """Log a warning if the dry run before training has failed, unless a trial fails with its error.

    Args:
        repository: The study.
        ledger: The ledger at the end of the run.
        error: The error of the dry run; empty if it passed.
    """
    known = {error_key(message) for _, message, _ in ledger.errors.values()}
    if error and error_key(error) not in known:
        task = type(repository.recipe.task).__name__
        logger.warning(
            "the dry run before training failed with %s, although no trial did; so thrifty could "
            "not check beforehand that %s follows every schedule and reports the metrics that the "
            "study needs",
            error,
            task,
        )


def say_where_from(
    repository: StudyRepository,
    ledger: Ledger,
    *,
    store: Store,
    progress: bool,
    finished: bool = False,
    is_stopped: bool = False,
) -> None:
    """Print where the results of a run come from, on the terminal or in the log.

    ``finished`` says that the study was done before this run. It then says that nothing is left,
    even if no epoch is known because all trials have failed. ``is_stopped`` says that trials are
    left to train.
    """
    found = Provenance.of(ledger)
    made = store.studies.made() if found.known else {}
    text = found.text(made, own=ledger.study_id, is_stopped=is_stopped)
    if not text and finished:
        text = (
            f"{len(ledger.errors):,} of {trials_text(len(ledger.history))} failed; nothing to train"
        )
    if text:
        say(repository.name, text, progress=progress)


def defining_file(study: object, *, task: object) -> str | None:
    """Return the file that commands load to find a study by its name; None if there is no file.

    That is the program, the module of the task, or another module (a command loads files as
    modules), whichever has the study at its top level. For a study that a function has made, it is
    the module of the task, or the program if the class of the task is one of thrifty, such as
    ``FineTune``.
    """
    found = file_of(study)
    if found is not None:
        return found
    home = task.module if isinstance(task, SelfDescribing) else type(task).__module__
    program, module = sys.modules.get("__main__"), sys.modules.get(home)
    is_ours = home.partition(".")[0] == __package__.partition(".")[0]
    if not is_ours:
        return getattr(module, "__file__", None)
    return None if _is_command(program) else getattr(program, "__file__", None)


def file_of(study: object) -> str | None:
    """Return the file of the module that has a study at its top level; None if none has."""
    for each in (sys.modules.get("__main__"), *list(sys.modules.values())):
        space = getattr(each, "__dict__", {})
        if "__file__" in space and any(value is study for value in list(space.values())):
            return getattr(each, "__file__", None)
    return None


def _is_command(program: ModuleType | None) -> bool:
    """Return whether the program is thrifty's own command, which defines no study."""
    main = getattr(program, "main", None)
    return getattr(main, "__module__", "").partition(".")[0] == __package__.partition(".")[0]


def say(name: str, text: str, *, progress: bool) -> None:
    """Print a line about a study on the terminal, or log it."""
    if progress:
        # Names come from the user and may contain markup characters: print them as plain text.
        Console(stderr=True).print(Text(f"study {name!r}: {text}"), soft_wrap=True)
    else:
        logger.info("study %r: %s", name, text)


def _begin(
    repository: StudyRepository,
    ledger: Ledger,
    observers: Sequence[Observer],
    *,
    info: StudyInfo,
    plan: PlanInfo,
) -> None:
    """Tell observers the state of the study, then the events from reading it."""
    goals, news = repository.recipe.goals, ledger.news
    key = {"plan": plan.identity, "name": info.name, "at": info.created_at}
    began = StudyBegan(
        study=info.name,
        key=fingerprint(key),
        metrics=goals.metrics,
        modes=goals.modes,
        resumed=len(ledger.history) > 0,
    )
    tell(observers, began)
    stood = {e.trial: e.first_epoch - 1 for e in news if isinstance(e, TrialAdvanced)}
    ended = {e.trial for e in news if isinstance(e, TrialEnded)}
    for trial in ledger.history:
        may_go_on = trial.state == "running" or (trial.state == "waiting" and not is_done(trial))
        if may_go_on or trial.number in ended:
            at = stood.get(trial.number, trial.reached)
            one = TrialBegan(trial=trial.number, config=trial.config, parent=trial.parent, epoch=at)
            tell(observers, one)
    tell_news(observers, ledger)


class _Ending:
    """A context that tells observers how a run ended, even if an error ended it."""

    def __init__(self, observers: Sequence[Observer], ledger: Ledger) -> None:
        self.state: Literal["done", "stopped", "failed"] = "failed"
        self.signal: int | None = None
        self._observers = observers
        self._ledger = ledger

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        best = self._ledger.best_trial
        ended = StudyEnded(
            state=self.state,
            best_trial=None if best is None else best.number,
            best_value=self._ledger.best_value,
            signal=self.signal,
        )
        tell(self._observers, ended)


def _never() -> str:
    return ""


REDRAW_S = 0.1


class _TwoLines(RichProgress):
    """A progress bar with a line of details below it; both fit a terminal of 80 columns."""

    detail = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        if self.detail:
            yield Text(f"  {self.detail}", no_wrap=True, overflow="ellipsis")


class Progress:
    """A progress display on the terminal; without one, a line is printed now and then."""

    def __init__(self, name: str, ledger: Ledger, *, clock: Clock) -> None:
        self._metric = plain_text(ledger.goals.metrics[0])
        self._ledger = ledger
        self._clock = clock
        self._bar = _TwoLines(
            SpinnerColumn(),
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn(f"unique {ledger.unit.name}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}", markup=False),
            console=_console(),
            refresh_per_second=8,
        )
        self._task = self._bar.add_task(plain_text(name), total=None, left="")
        self._drawn = 0.0
        self._began = clock.monotonic()
        self._done_before: int | None = None

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            if self._done_before is None:
                self._hide()
            else:
                # Trials have reported since the last epoch ended.
                elapsed_s = self._clock.monotonic() - self._began
                self._draw(self._ledger, elapsed_s=elapsed_s, is_last=True)
            if self._bar.console.is_jupyter:
                self._bar.refresh()  # in a notebook, stopping does not draw the last state
        finally:
            self._bar.stop()

    def on_event(self, event: object) -> None:
        """Redraw after an epoch, at most every ``REDRAW_S`` seconds, and at the end.

        What keeping activations takes and saves is a line of its own.
        """
        now, ledger = self._clock.monotonic(), self._ledger
        if isinstance(event, ActivationsKept):
            self._bar.console.print(str(event), markup=False, highlight=False)
        if not isinstance(event, EpochDone):
            return
        if self._done_before is None:
            self._done_before = ledger.epochs.num_trained - 1
        finished = ledger.plan.num_epochs_done >= ledger.plan.num_epochs_needed
        if now - self._drawn >= REDRAW_S or finished:
            self._drawn = now
            self._draw(ledger, elapsed_s=now - self._began)

    def _hide(self) -> None:
        """Show no bar for a run in which no epoch ended: a line says why that is."""
        self._bar.live.transient = True

    def _draw(self, ledger: Ledger, *, elapsed_s: float, is_last: bool = False) -> None:
        plan, history, unit = ledger.plan, ledger.history, ledger.unit
        # The plan also has what other studies of the task have trained.
        others = plan.num_epochs_done - ledger.epochs.num_trained
        done, needed = ledger.epochs.num_trained, plan.num_epochs_needed - others
        trained = done - (self._done_before or 0)
        left_s = (needed - done) * elapsed_s / max(trained, 1)
        best = "" if ledger.best_value is None else f"  best {self._metric} {ledger.best_value:.4g}"
        failed = f" ({len(ledger.errors)} failed)" if ledger.errors else ""
        shared = f"{unit.count(ledger.epochs.num_saved):,} {unit.name} saved"
        self._bar.detail = f"{trials_text(len(history))}{failed}{best}  {shared}"
        self._bar.update(
            self._task,
            completed=unit.count(done),
            total=unit.count(max(needed, done)),
            left=f"about {left_s:.0f} s left" if needed > done and not is_last else "",
        )


def _console() -> Console:
    """Return the console of the progress display.

    In a notebook rich needs ipywidgets. Without them it would warn and show nothing, so the bar is
    printed once, at the end, as on any other output that is not a terminal.
    """
    console = Console(stderr=True)
    if console.is_jupyter and find_spec("ipywidgets") is None:
        return Console(stderr=True, force_jupyter=False)
    return console
