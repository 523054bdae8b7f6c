"""The identity of whole tasks: what affects training, evaluation, or neither."""

from __future__ import annotations

import dataclasses
import functools
import threading
import types

import pytest
import torch

from tests.pack.identity._projects import project
from thrifty.core import TaskError
from thrifty.hetero import HeteroTask
from thrifty.pack import SGD, AdamW, TaskIdentity, Trainable, task_identity
from thrifty.pack.identity import asking_legacy, note_moves
from thrifty.testing import FaultyTask, LineTask


pytestmark = pytest.mark.slow


HELPERS = """
import torch

SCALE = 2.0
TABLE = {"a": [1, 2], "b": [3]}
CLASSES = ("cat", "dog")
UNUSED = 1

def scale(x, *, by=SCALE):
    return x * by

def accuracy(out, y, k=1):
    return top(out, k)

def top(out, k):
    return out.topk(k)

class Net(torch.nn.Linear):
    gain = 1.0

    def forward(self, x):
        return super().forward(x) * self.gain
"""

TASK = """
import functools
import torch
import helpers
from helpers import Net, accuracy
from thrifty import SGD
from thrifty.testing import LineTask

def smooth(weight):
    def inner(x):
        return x * weight
    return inner

SMOOTH = smooth(0.5)

class Mine(LineTask):
    '''Doc.'''
    optimizer = SGD(lr="lr", momentum=0.9)
    margin = 0.1
    ks = (1, 5)

    def __init__(self, threshold=0.1):
        self.threshold = threshold
        self.top = 3

    def model(self, hp):
        return Net(1, 1)

    def loss(self, model, batch):
        '''Doc.'''
        x, y = batch
        return SMOOTH(helpers.scale(model(x))) + self._margin() + helpers.TABLE["a"][0]

    def _margin(self):
        return self.margin * self.threshold

    def _accuracy(self, out, y):
        return accuracy(out, y, self.top) + self.ks[0]

    def metrics(self, model, batch):
        x, y = batch
        return {"mse": self.loss(model, batch), "top": self._accuracy(model(x), y)}
"""


@pytest.fixture
def identity(tmp_path, monkeypatch):
    def of(old="", new="", *, task=TASK, helpers=HELPERS, **attributes) -> TaskIdentity:
        assert (old in task) or (old in helpers)
        mine = project(
            tmp_path,
            monkeypatch,
            task=task.replace(old, new) if old else task,
            helpers=helpers.replace(old, new) if old else helpers,
        )
        one = mine.Mine()
        vars(one).update(attributes)
        return task_identity(one)

    return of


def changed(one: TaskIdentity, two: TaskIdentity) -> tuple[set[str], set[str]]:
    def names(a, b):
        return {name for name in {*a, *b} if a.get(name) != b.get(name)}

    return names(one.training, two.training), names(one.evaluation, two.evaluation)


def test_components_have_names(identity):
    found = identity()
    assert set(found.training) == {
        "task", "optimizer", "package torch", "torch default dtype", "torch matmul precision",
        "class Mine", "class helpers.Net",
        "function Mine.__init__", "function Mine.model", "function Mine.loss",
        "function Mine._margin", "function helpers.scale", "function helpers.Net.forward",
        "function smooth.<locals>.inner", "closure smooth.<locals>.inner.<closure>.weight",
        "function thrifty.testing._executors.LineTask.adapt",
        "function thrifty.testing._executors.LineTask.data",
        "function thrifty.testing._executors.LineTask.model",
        "function thrifty.testing._executors.LineTask.loss",
        "class thrifty.testing._executors.LineTask",
        "attribute thrifty.testing._executors.LineTask.batch_size",
        "global thrifty.testing._executors.ArrayData",
        "Mine.__init__ default 'threshold'", "helpers.scale default 'by'",
        "attribute threshold", "attribute Mine.margin", "attribute helpers.Net.gain",
        "global SMOOTH", "global helpers.TABLE", "global Net",
    }  # fmt: skip
    assert found.training["global Net"] == "<helpers.Net>"
    assert found.training["attribute threshold"] == "0.1"
    assert set(found.evaluation) == {
        "function Mine.metrics", "function Mine._accuracy", "function helpers.accuracy",
        "function helpers.top", "attribute Mine.ks", "attribute top",
        "helpers.accuracy default 'k'", "function thrifty.testing._executors.LineTask.metrics",
        "global accuracy",
    }  # fmt: skip


TRAINING = {
    "a helper": ("return x * by", "return x + by"),
    "a default": ("by=SCALE", "by=3.0"),
    "a global by the default": ("SCALE = 2.0", "SCALE = 2.5"),
    "a value inside a global": ('"a": [1, 2]', '"a": [1, 3]'),
    "a closure": ("SMOOTH = smooth(0.5)", "SMOOTH = smooth(0.6)"),
    "the code of a closure": ("return x * weight", "return x - weight"),
    "a class attribute": ("margin = 0.1", "margin = 0.2"),
    "a class attribute of a model": ("gain = 1.0", "gain = 2.0"),
    "a method of a model": ("* self.gain", "+ self.gain"),
    "a base class": ("class Net(torch.nn.Linear)", "class Net(torch.nn.LazyLinear)"),
    "an attribute": ("threshold=0.1", "threshold=0.2"),
    "a private method": ("self.margin * self.threshold", "self.margin + self.threshold"),
    "the loss": ("batch\n        return SMOOTH", "batch\n        return -SMOOTH"),
    "an option of the optimizer": ("momentum=0.9", "momentum=0.8"),
    "clipping": ("momentum=0.9", "momentum=0.9, clip_norm=1.0"),
    "another optimizer": ("momentum=0.9", "momentum=0.9, foreach=True"),
    "a decorator": ("    def loss", "    @torch.enable_grad()\n    def loss"),
    "a decorator of a helper": ("def scale(x", "@torch.enable_grad()\ndef scale(x"),
    "a member that no code names": ("    margin = 0.1", "    margin = 0.1\n    other = 3"),
}

EVALUATION = {
    "metrics": ('{"mse": self.loss', '{"error": self.loss'),
    "a helper of metrics": ("return out.topk(k)", "return out.topk(k + 1)"),
    "a default": ("k=1", "k=2"),
    "a method that only metrics names": ("+ self.ks[0]", "+ self.ks[1]"),
    "a setting that only metrics reads": ("ks = (1, 5)", "ks = (1, 6)"),
    "an attribute that only metrics reads": ("self.top = 3", "self.top = 4"),
}

NOTHING = {
    "a comment": ("    margin = 0.1", "    # why\n    margin = 0.1  # because"),
    "a docstring": ("'''Doc.'''", "'''Another.'''"),
    "no docstring": ("'''Doc.'''", "pass"),
    "layout": ("self.margin * self.threshold", "(\n            self.margin\n * self.threshold)"),
    "an unused global": ("UNUSED = 1", "UNUSED = 2"),
    "an unused function": ("UNUSED = 1", "def unused():\n    return 1"),
    "an annotation": ("def model(self, hp):", "def model(self, hp) -> 'Net':"),
}


@pytest.mark.sample(10)
@pytest.mark.parametrize("edit", TRAINING.values(), ids=TRAINING)
def test_what_changes_training(identity, edit):
    training, _ = changed(identity(), identity(*edit))
    assert training


@pytest.mark.parametrize("edit", EVALUATION.values(), ids=EVALUATION)
def test_what_changes_only_evaluation(identity, edit):
    before, after = identity(), identity(*edit)
    training, evaluation = changed(before, after)
    if edit[0] == "self.top = 3":  # the method that sets it belongs to training
        assert training == {"function Mine.__init__"}
    else:
        assert not training
        assert before.training_digest == after.training_digest
    assert evaluation
    assert before.evaluation_digest != after.evaluation_digest


@pytest.mark.parametrize("edit", NOTHING.values(), ids=NOTHING)
def test_what_changes_nothing(identity, edit):
    assert identity() == identity(*edit)


def test_an_attribute_set_from_outside(identity):
    assert changed(identity(), identity(threshold=0.2)) == ({"attribute threshold"}, set())
    assert changed(identity(), identity(top=9)) == (set(), {"attribute top"})


def test_training_that_names_metrics_makes_them_a_part_of_it(identity):
    found = identity("return self.margin *", "self.metrics\n        return self.margin *")
    assert not found.evaluation
    assert "function helpers.top" in found.training


def test_training_that_names_a_helper_of_metrics(identity):
    found = identity("return self.margin *", "return self.ks[0] + self.margin *")
    assert "attribute Mine.ks" in found.training
    assert "function helpers.top" in found.evaluation


def test_names_that_training_computes_keep_all_members_in_training(identity):
    found = identity("return self.margin *", "return getattr(self, 'k' + 's') * self.margin *")
    assert "attribute Mine.ks" in found.training
    assert "attribute top" in found.training
    assert set(found.evaluation) >= {"function Mine.metrics"}


@pytest.mark.parametrize(
    "line", ["self.seen = 1", "model.scale = 1", "global SMOOTH; SMOOTH = None", "del self.top"]
)
def test_metrics_that_assign_are_a_part_of_training(identity, line):
    found = identity(
        "        x, y = batch\n        return {",
        f"        x, y = batch\n        {line}\n        return {{",
    )
    assert not found.evaluation


def test_metrics_may_have_objects_of_their_own(identity):
    meter = (
        "class Meter:\n    def add(self, x):\n        self.total = x\n        return x\nclass Mine"
    )
    found = identity(
        "class Mine",
        meter,
        task=TASK.replace(
            "x, y = batch\n        return {",
            "x, y = batch\n        m = Meter(); m.name = 1; m.add(x)\n        return {",
        ),
    )
    assert "function Meter.add" in found.evaluation


def test_a_joined_identity_counts_evaluation_as_training():
    found = TaskIdentity(training={"a": "1"}, evaluation={"b": "2"})
    assert found.joined() == TaskIdentity(training={"a": "1", "b": "2"}, evaluation={})
    assert TaskIdentity.from_json(found.to_json()) == found


def test_the_size_of_batches_for_evaluation_is_no_part_of_training():
    class Larger(LineTask):
        eval_batch_size = 7

    one, two = Larger(), Larger()
    two.eval_batch_size = 8
    assert changed(task_identity(one), task_identity(two)) == (set(), {"attribute eval_batch_size"})


def test_an_optimizer_on_the_task_counts_by_content():
    def of(optimizer):
        task = LineTask()
        task.optimizer = optimizer
        return task_identity(task).training["optimizer"]

    assert of(SGD(lr="lr")) == of(SGD(lr="lr"))
    assert len({of(SGD(lr="lr")), of(SGD(lr="x")), of(AdamW(lr="lr"))}) == 3


def test_attributes_with_default_reprs_lambdas_and_sets_have_content():
    class Thing:
        def __init__(self, x):
            self.x = x

    def of(x):
        task = LineTask()
        task.thing, task.function, task.names = Thing(x), lambda y: y + x, {"a", "b", "c"}
        return task_identity(task)

    assert of(1) == of(1)
    assert changed(of(1), of(2))[0] >= {"attribute thing", "attribute function"}


def test_an_attribute_without_content_is_an_error_that_names_it(tmp_path):
    task = LineTask()
    with (
        (tmp_path / "x").open("w") as task.file,
        pytest.raises(TaskError, match=r"LineTask\.file is an open file"),
    ):
        task_identity(task)


def test_what_a_task_says_itself_replaces_its_attributes(tmp_path):
    class Said(LineTask):
        rate = 1

        def __thrifty_identity__(self):
            return {"path": self.path, "function": self.function, "deep": [1, 2]}

    def of(path, function=len):
        task = Said()
        task.path, task.function, task.lock = path, function, threading.Thread()
        return task_identity(task)

    def helper():
        return inner()

    def inner():
        return 1

    assert of("a") == of("a")
    assert changed(of("a"), of("b"))[0] == {"attribute path"}
    assert "function " + inner.__qualname__ in of("a", helper).training
    assert any(name.endswith("Said.rate") for name in of("a").training)


class SaysItself(LineTask):
    def __init__(self, path):
        self.path = path
        self.cached  # noqa: B018 (computed once)
        other = types.SimpleNamespace()
        other.on_another_object = path

    @functools.cached_property
    def cached(self):
        return object()

    def __thrifty_identity__(self):
        return {"path": self.path, "weight": "a key that subclasses may have, too"}


class Weighted(SaysItself):
    __slots__ = ("slow",)

    def __init__(self, path, weight):
        self.weight = weight
        super().__init__(path)


@pytest.mark.parametrize("key", ["weight", "slow", "later", "on_another_object"])
def test_what_a_base_class_says_leaves_out_no_attribute_of_a_subclass(key):
    def of(value):
        task = Weighted("a", 1)
        setattr(task, key, value)
        return task_identity(task)

    assert of(1) == of(1)
    assert changed(of(1), of(2))[0] == {f"attribute {key} of Weighted"}


@pytest.mark.parametrize(("option", "value"), [("precision", "bf16-mixed"), ("accumulate", 4)])
def test_options_that_are_set_on_a_task_count_beside_what_it_says(option, value):
    task = Weighted("a", 1)
    before = task_identity(task)
    setattr(task, option, value)
    assert changed(before, task_identity(task))[0] == {f"attribute {option} of Weighted"}


def test_identity_can_be_taken_over():
    class Own(LineTask):
        def identity(self):
            return {"what": "mine", "number": 3}

    assert task_identity(Own()) == TaskIdentity(
        training={"what": "mine", "number": "3"}, evaluation={}
    )


def test_an_override_that_extends_the_old_identity_gets_it_when_asked():
    class Own(LineTask):
        def identity(self):
            return {**super().identity(), "more": "x"}

    task = Own()
    assert "function" in " ".join(task.identity())
    with asking_legacy():
        assert set(task.identity()) == {"class", "source", "attributes", "version", "more"}


def test_what_torch_is_set_to_is_a_part_of_training():
    before = task_identity(LineTask())
    torch.set_default_dtype(torch.float64)
    try:
        after = task_identity(LineTask())
    finally:
        torch.set_default_dtype(torch.float32)
    assert changed(before, after) == ({"torch default dtype"}, set())


def test_a_trainable_is_all_training():
    class Own(Trainable):
        def setup(self, hp, *, seed, device): ...
        def train(self, epoch, hp): ...
        def evaluate(self):
            return {"x": 1.0}

        def state(self): ...
        def load_state(self, state): ...

    found = task_identity(Own())
    assert not found.evaluation
    assert any(name.endswith("Own.evaluate") for name in found.training)


def test_a_task_for_several_processes_is_the_task():
    one, two = HeteroTask(LineTask(), workers=2), HeteroTask(LineTask(), workers=3)
    assert task_identity(one) == task_identity(two) != task_identity(LineTask())
    with asking_legacy():
        assert one.identity()["trained by"] == "HeteroTask"


CACHE: dict = {}
COUNT = 0


class Caching(LineTask):
    def data(self, hp):
        global COUNT
        COUNT += 1
        CACHE["x"] = torch.ones(1)
        self.rows = [1]
        self.worker = threading.Thread()
        return super().data(hp)


@pytest.fixture
def caching():
    global COUNT
    CACHE.clear()
    COUNT = 0
    return Caching()


def test_what_a_task_changes_itself_does_not_change_what_it_is(caching):
    before = task_identity(caching)
    for _ in range(2):
        now = task_identity(caching)
        caching.data({})
        note_moves(caching, now)
        assert task_identity(caching) == before


def test_what_the_user_changes_afterwards_counts(caching):
    global COUNT
    before = task_identity(caching)
    caching.data({})
    note_moves(caching, before)
    COUNT = 77
    assert "global COUNT" in changed(before, task_identity(caching))[0]
    COUNT = 1
    caching.rows = [2]
    assert changed(before, task_identity(caching))[0] == {"attribute rows"}


def test_another_task_has_its_own_attributes(caching):
    before = task_identity(caching)
    caching.data({})
    note_moves(caching, before)
    other = Caching()
    assert task_identity(other) == task_identity(caching)
    other.rows = [1]
    assert changed(task_identity(caching), task_identity(other))[0] == {"attribute rows"}


def test_faults_of_a_testing_task_are_no_part_of_it(tmp_path):
    assert task_identity(FaultyTask(fuse="a")) == task_identity(FaultyTask(fuse="b"))


# -- classes that code makes ---------------------------------------------------------------------


def _by_type(base, **members):
    return type("Made", (base,), members)


def _by_new_class(base, **members):
    return types.new_class("Made", (base,), {}, lambda namespace: namespace.update(members))


@pytest.mark.parametrize("make", [_by_type, _by_new_class])
def test_the_code_of_a_class_that_code_makes_is_part_of_the_identity(make):
    def doubled(self, model, batch):
        return 2 * LineTask.loss(self, model, batch)

    def halved(self, model, batch):
        return 0.5 * LineTask.loss(self, model, batch)

    made = make(LineTask, loss=doubled)
    assert made.__module__ in ("abc", "types")
    assert made().identity() == make(LineTask, loss=doubled)().identity()
    assert made().identity() != make(LineTask, loss=halved)().identity()
    assert made().identity() != make(LineTask)().identity()
    assert make(LineTask, batch_size=4)().identity() != make(LineTask, batch_size=8)().identity()


def test_the_code_of_a_made_dataclass_that_a_task_holds_is_part_of_the_identity():
    def holding(factor):
        code = f"lambda self: {factor}"
        kind = dataclasses.make_dataclass("Config", ["x"], namespace={"factor": eval(code)})
        task = LineTask()
        task.config = kind(1)
        return task

    assert holding(1).identity() == holding(1).identity()
    assert holding(1).identity() != holding(2).identity()
