"""A study object never reports anything older than the database."""

import pytest
from sqlalchemy import Engine, event

from tests.study.helpers import SOLO, StopAfter, make_study
from thrifty.core import StoreUnreachableError, StudyNotFoundError
from thrifty.search import RandomSearch
from thrifty.space import Float, Space
from thrifty.store import Store
from thrifty.study import StopWhen, Storage
from thrifty.study._repository import StudyRepository


pytestmark = pytest.mark.slow


MANY = RandomSearch(max_epochs=1, num_trials=40)


def some(folder, **options):
    options.setdefault("algorithm", RandomSearch(max_epochs=4, num_trials=4))
    return make_study(folder, space=Space(lr=Float(0.01, 0.1)), **options)


def run(study, **options):
    return study.run(progress=False, executor=SOLO, **options)


@pytest.fixture
def reads(monkeypatch):
    """Record the reads of the database."""
    found, load = [], StudyRepository.load
    monkeypatch.setattr(StudyRepository, "load", lambda *args: found.append(1) or load(*args))
    return found


def test_a_later_run_of_another_object_is_seen(tmp_path):
    first = run(some(tmp_path), observers=[StopAfter(6)])
    before = [t.epochs for t in first.trials]
    run(some(tmp_path))
    assert [t.epochs for t in first.trials] == [4, 4, 4, 4] != before
    assert first.savings.trial_epochs == 16
    assert first.best_trial.epochs == 4
    assert list(first.trials_dataframe()["epochs"]) == [4, 4, 4, 4]
    assert sum(s.stop - s.start for s in first.forest()) == 16


def test_a_run_under_way_is_seen_from_elsewhere_and_here(tmp_path):
    other, seen = some(tmp_path), []

    class Look:
        def on_event(self, event):
            seen.append((sum(t.epochs for t in here.trials), sum(t.epochs for t in other.trials)))

    here = some(tmp_path)
    run(here, observers=[Look()])
    assert all(elsewhere <= mine for mine, elsewhere in seen)
    assert max(elsewhere for _, elsewhere in seen) > 0
    assert sum(t.epochs for t in other.trials) == 16


@pytest.fixture
def writing_between_queries(tmp_path):
    """Let another process train a trial of study "s" before each query of this one."""
    writer, is_writing, num_trained = some(tmp_path, algorithm=MANY), [], [1]
    run(writer, stop=StopWhen(epochs=1))

    def write(connection, cursor, statement, *args) -> None:
        if statement.startswith("SELECT") and not is_writing:
            is_writing.append(1)
            num_trained[0] += 1
            run(writer, stop=StopWhen(epochs=num_trained[0]))
            is_writing.clear()

    event.listen(Engine, "before_cursor_execute", write)
    yield num_trained
    event.remove(Engine, "before_cursor_execute", write)


READS = {
    "trials": lambda study: study.trials,
    "plan": lambda study: study.plan(),
    "notebook": lambda study: study._repr_html_(),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_a_study_is_read_while_another_process_writes(tmp_path, writing_between_queries, read):
    assert read(some(tmp_path, algorithm=MANY))
    assert 3 < writing_between_queries[0] < 40


def test_a_study_that_another_process_runs_is_learnt_from(tmp_path, writing_between_queries):
    later = some(tmp_path, algorithm=MANY, name="later", warm_start="s")
    with Store.open(later.storage.url) as store:
        assert later._repository().priors(store, ["s"])


def test_records_are_read_again_only_if_they_have_changed(tmp_path, reads):
    study = run(some(tmp_path))
    assert len(reads) == 1
    assert study.trials
    assert study.best_trial
    assert len(reads) == 1, "no other process can have written"
    other = some(tmp_path)
    assert len(other.trials) == len(other.trials) == 4
    assert len(reads) == 2
    other.enqueue_trial({"lr": 0.05})
    assert study.trials
    assert len(reads) == 3


def test_a_shared_plan_is_read_anew_after_a_run(tmp_path, reads):
    storage = Storage(url=f"sqlite:///{tmp_path}/t.db", shared=True)
    study = run(some(tmp_path, storage=storage))
    assert study.trials
    assert study.trials
    assert len(reads) == 2


def test_another_study_of_the_same_name_is_seen(tmp_path):
    study = run(some(tmp_path))
    with Store.open(study.storage.url) as store:
        store.trash.put(store.studies.get("s"), who="me")
    with pytest.raises(StudyNotFoundError, match="study 's' is not in "):
        study.trials  # noqa: B018
    run(some(tmp_path, algorithm=RandomSearch(max_epochs=4, num_trials=2)))
    assert len(study.trials) == 2


def test_a_study_in_memory_is_known_after_its_run():
    study = run(some("", storage="sqlite://"))
    assert len(study.trials) == 4


def test_a_database_that_does_not_answer_leaves_what_was_read(tmp_path, monkeypatch, caplog):
    study = run(some(tmp_path))

    def away(*args, **options):
        raise StoreUnreachableError("no server answers")

    monkeypatch.setattr(Store, "open", away)
    assert len(study.trials) == 4
    assert "no server answers; this is what was read of the study before" in caplog.text
    with pytest.raises(StoreUnreachableError):
        some(tmp_path).trials  # noqa: B018


def test_after_an_error_the_database_is_read(tmp_path):
    class Fails:
        left = 10

        def on_event(self, event):
            self.left -= 1
            if not self.left:
                raise RuntimeError("an observer's own")

    study = some(tmp_path)
    with pytest.raises(RuntimeError, match="an observer's own"):
        run(study, observers=[Fails()])
    assert [t.epochs for t in study.trials] == [t.epochs for t in some(tmp_path).trials]


@pytest.mark.parametrize("step", ["lease", "drive"])
def test_a_run_whose_study_is_deleted_meanwhile_ends_with_one_error(tmp_path, monkeypatch, step):
    """The other process deletes it before this one has a lease, or after it has lost it."""
    original = getattr(Store, step)

    def after_deletion(store, held, **options):
        with Store.open(f"sqlite:///{tmp_path}/t.db") as other:
            if step == "drive":
                held.release()
            other.trash.put(other.studies.get("s"), who="me")
        return original(store, held, **options)

    monkeypatch.setattr(Store, step, after_deletion)
    with pytest.raises(StudyNotFoundError, match="study 's' was deleted while"):
        run(some(tmp_path))
    monkeypatch.undo()
    assert len(run(some(tmp_path)).trials) == 4
