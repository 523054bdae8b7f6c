"""Values that code keeps for later trials or epochs, without a checkpoint that holds them."""

from __future__ import annotations

import functools
import logging
import random
import tempfile
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import thrifty as th
from thrifty.core import StateError, replica_seed


pytestmark = pytest.mark.slow


X = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
TABLE: dict[object, torch.Tensor] = {}
SCALE: torch.Tensor | None = None
ROWS: list[int] | None = None


@functools.cache
def by_width(width):
    return torch.randn(width, 2)


@functools.lru_cache
def noise(size):
    return torch.randn(size)


@functools.lru_cache
def ramp(size):
    return torch.linspace(0.5, 1.5, size)


@functools.cache
def shuffled(seed=0):
    """Shuffle rows as user code does that seeds the global stream."""
    np.random.seed(seed)  # noqa: NPY002
    rows = np.random.permutation(64)  # noqa: NPY002
    return X[rows], Y[rows]


WEIGHTS = {"weight": torch.eye(8), "bias": torch.zeros(8)}


@functools.cache
def pretrained():
    """Return a network that is drawn, and then loaded."""
    network = torch.nn.Linear(8, 8)
    network.load_state_dict(WEIGHTS)
    return network.requires_grad_(requires_grad=False)


@functools.cache
def random_backbone():
    return torch.nn.Linear(8, 8).requires_grad_(requires_grad=False)


class Holder:
    """An object without attributes."""


class Drawn:
    """An object that draws."""

    def __init__(self):
        self.scale = torch.rand(8)


HOLDER = Holder()


@functools.cache
def drawn_object():
    return Drawn()


def held():
    if not hasattr(held, "scale"):
        held.scale = torch.rand(8)
    return held.scale


@pytest.fixture(autouse=True)
def as_in_a_new_process():
    forget()


def forget():
    """Empty tables and caches."""
    global SCALE, ROWS
    TABLE.clear()
    caches = (by_width, noise, ramp, shuffled, pretrained, random_backbone, drawn_object)
    for each in caches:
        each.cache_clear()
    SCALE = ROWS = ClassAttribute.scale = None
    for each in (HOLDER, held):
        vars(each).clear()


class Plain(th.Task):
    optimizer = th.SGD(lr=0.1)
    batch_size = 32

    def data(self, hp):
        return th.ArrayData(train=(X, Y), valid=(X, Y))

    def model(self, hp):
        return torch.nn.Sequential(
            torch.nn.Linear(8, hp.width), torch.nn.ReLU(), torch.nn.Linear(hp.width, 2)
        )

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model, batch):
        return {"loss": F.cross_entropy(model(batch[0]), batch[1])}


class TableInModel(Plain):
    def model(self, hp):
        if "p" not in TABLE:
            TABLE["p"] = torch.randn(8)
        model = super().model(hp)
        model[0].weight.data += TABLE["p"]
        return model


class CacheByWidth(Plain):
    """A task whose first trial of each width draws what later ones of that width get."""

    def model(self, hp):
        model = super().model(hp)
        if hp.width > 8:
            model[2].weight.data += by_width(hp.width).T
        return model


class ClassAttribute(Plain):
    scale: torch.Tensor | None = None

    def model(self, hp):
        if ClassAttribute.scale is None:
            ClassAttribute.scale = torch.rand(8)
        model = super().model(hp)
        model[0].weight.data *= ClassAttribute.scale
        return model


class NewAttribute(Plain):
    """A task that keeps what it draws in an attribute that did not exist before."""

    def scale(self):
        if not hasattr(HOLDER, "scale"):
            HOLDER.scale = torch.rand(8)
        return HOLDER.scale

    def model(self, hp):
        model = super().model(hp)
        model[0].weight.data *= self.scale()
        return model


class AttributeOfAFunction(NewAttribute):
    def scale(self):
        return held()


class ObjectInCache(NewAttribute):
    def scale(self):
        return drawn_object().scale


class RandomBackbone(Plain):
    """A task whose frozen layer is drawn for the first trial."""

    def model(self, hp):
        first = torch.nn.Linear(8, hp.width)
        return torch.nn.Sequential(random_backbone(), first, torch.nn.Linear(hp.width, 2))


class GlobalInLoss(Plain):
    def loss(self, model, batch):
        global SCALE
        if SCALE is None:
            SCALE = torch.rand(8)
        return F.cross_entropy(model(batch[0] * SCALE), batch[1])


class CacheInLoss(Plain):
    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0] * noise(8)), batch[1])


class CacheInMetrics(Plain):
    def metrics(self, model, batch):
        return {"loss": F.cross_entropy(model(batch[0] * noise(8)), batch[1])}


class TableInAdapt(Plain):
    def adapt(self, model, hp):
        if "a" not in TABLE:
            TABLE["a"] = torch.rand(8)
        model.scale = TABLE["a"]

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0] * model.scale), batch[1])


class Loop(th.Trainable):
    """A loop of its own."""

    def setup(self, hp, *, seed, device):
        self.model = torch.nn.Linear(8, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01 * hp.width)

    def inputs(self, epoch):
        return X

    def train(self, epoch, hp):
        x = self.inputs(epoch)
        for rows in torch.randperm(64).split(32):
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x[rows]), Y[rows]).backward()
            self.optimizer.step()

    def evaluate(self):
        with torch.no_grad():
            return {"loss": F.cross_entropy(self.model(X), Y).item()}

    def state(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


class CacheInSetup(Loop):
    def setup(self, hp, *, seed, device):
        self.noise = noise(8)
        super().setup(hp, seed=seed, device=device)

    def inputs(self, epoch):
        return X * self.noise


class CacheInTrain(Loop):
    def inputs(self, epoch):
        return X * noise(8)


class CacheInALaterEpoch(Loop):
    def inputs(self, epoch):
        return X * noise(8) if epoch > 1 else X


@th.trainable
def cache_in_a_function(trial):
    width = trial.suggest_categorical("width", [8, 16])
    scale = noise(8)
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * width)
    for _ in trial.epochs({"model": model, "optimizer": optimizer}):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X * scale), Y)
        loss.backward()
        optimizer.step()
        yield {"loss": loss.item()}


def curves(task, widths=(8, 16), **options):
    """Run a study, and return the curve of each width."""
    study = th.Study(
        task,
        th.Space(width=th.Choice(list(widths))),
        name="kept",
        algorithm=th.GridSearch(max_epochs=4),
        metric="loss",
        mode="min",
        storage=f"sqlite:///{tempfile.mkdtemp()}/kept.db",
    )
    study.run(progress=False, executor=th.Local(threads=1, **options))
    return {trial.config["width"]: trial.curve for trial in study.trials}


def name_of(task):
    return getattr(task, "name", type(task).__name__)


DRAWN_ONCE = [
    (TableInModel(), "TABLE"),
    (CacheByWidth(), "by_width"),
    (ClassAttribute(), "ClassAttribute.scale"),
    (NewAttribute(), "HOLDER.scale"),
    (AttributeOfAFunction(), "held.scale"),
    (ObjectInCache(), "drawn_object"),
    (RandomBackbone(), "random_backbone"),
    (CacheInLoss(), "noise"),
    (CacheInMetrics(), "noise"),
    (CacheInSetup(), "noise"),
    (CacheInTrain(), "noise"),
    (CacheInALaterEpoch(), "noise"),
    (cache_in_a_function, "noise"),
]


@pytest.mark.parametrize(("task", "what"), DRAWN_ONCE, ids=[name_of(t) for t, _ in DRAWN_ONCE])
def test_random_numbers_kept_for_later_trials_are_refused(task, what):
    with pytest.raises(StateError, match="keeps random numbers that it has drawn for one") as found:
        curves(task)
    assert what in str(found.value)


class WidthFromData(Plain):
    """Lets its data tell the model a size."""

    def data(self, hp):
        data = super().data(hp)
        self.width = hp.width
        return data

    def model(self, hp):
        return torch.nn.Sequential(torch.nn.Linear(8, self.width), torch.nn.Linear(self.width, 2))


def test_what_data_tells_the_model_is_named():
    with pytest.raises(StateError, match=r"WidthFromData.data sets 'task\.width', and model reads"):
        curves(WidthFromData())


@pytest.mark.parametrize("task", [TableInModel(), CacheInSetup()], ids=name_of)
def test_they_are_refused_again_in_the_same_process(task):
    for _ in range(2):
        with pytest.raises(StateError, match="keeps random numbers that it has drawn for one"):
            curves(task)


@pytest.mark.parametrize("task", [GlobalInLoss(), TableInAdapt()], ids=lambda t: type(t).__name__)
def test_those_in_a_variable_of_training_code_are_state_outside_of_the_checkpoint(task):
    with pytest.raises(StateError, match="keeps state outside of its checkpoint"):
        curves(task)


class Ramp(Plain):
    """A task that keeps what follows from its arguments."""

    def model(self, hp):
        if hp.width not in TABLE:
            TABLE[hp.width] = torch.ones(8)
        model = super().model(hp)
        model[0].weight.data *= TABLE[hp.width] * ramp(8)
        return model

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0] * ramp(8)), batch[1])


class OwnSeed(Plain):
    """A task that draws what it keeps with a seed of its own."""

    def loss(self, model, batch):
        if "own" not in TABLE:
            TABLE["own"] = torch.rand(8, generator=torch.Generator().manual_seed(1))
        return F.cross_entropy(model(batch[0] * TABLE["own"]), batch[1])


class RampLoop(Loop):
    def inputs(self, epoch):
        return X * ramp(8)


class SeededData(Plain):
    """A task that seeds the global stream in a cached loader."""

    def data(self, hp):
        x, y = shuffled()
        return th.ArrayData(train=(x, y), valid=(x, y))


class SeededTable(Plain):
    """One that keeps its rows in a global variable."""

    def data(self, hp):
        global ROWS
        if ROWS is None:
            random.seed(1)
            ROWS = random.sample(range(64), 64)
        return th.ArrayData(train=(X[ROWS], Y[ROWS]), valid=(X, Y))


class SeededAttribute(Plain):
    """One that keeps them in an attribute that it did not have before."""

    def data(self, hp):
        if not hasattr(self, "rows"):
            np.random.seed(1)  # noqa: NPY002
            self.rows = np.random.permutation(64)  # noqa: NPY002
        return th.ArrayData(train=(X[self.rows], Y[self.rows]), valid=(X, Y))


class PretrainedData(Plain):
    def data(self, hp):
        x = pretrained()(X)
        return th.ArrayData(train=(x, Y), valid=(x, Y))


class PretrainedModel(Plain):
    """A task whose cached layer is drawn and loaded after the others are drawn."""

    def model(self, hp):
        head = super().model(hp)
        return torch.nn.Sequential(pretrained(), head)


class SeededLoop(Loop):
    """A loop that seeds NumPy's stream in a cached loader, by the seed of the trial."""

    def setup(self, hp, *, seed, device):
        self.x, _ = shuffled(seed % 100)
        super().setup(hp, seed=seed, device=device)


class PretrainedLoop(Loop):
    def setup(self, hp, *, seed, device):
        super().setup(hp, seed=seed, device=device)
        self.back = pretrained()

    def inputs(self, epoch):
        return self.back(X)


def descended(model, optimizer, x):
    """Take a step, and return the metrics."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), Y)
    loss.backward()
    optimizer.step()
    return {"loss": loss.item()}


@th.trainable
def seeded_function(trial):
    width = trial.suggest_categorical("width", [8, 16])
    x, _ = shuffled()
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * width)
    for _ in trial.epochs({"model": model, "optimizer": optimizer}):
        yield descended(model, optimizer, x)


@th.trainable
def pretrained_function(trial):
    width = trial.suggest_categorical("width", [8, 16])
    model = torch.nn.Linear(8, 2)
    x = pretrained()(X)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * width)
    for _ in trial.epochs({"model": model, "optimizer": optimizer}):
        yield descended(model, optimizer, x)


NOT_DRAWN = [
    Ramp(),
    OwnSeed(),
    RampLoop(),
    SeededData(),
    SeededTable(),
    SeededAttribute(),
    PretrainedData(),
    PretrainedModel(),
    SeededLoop(),
    PretrainedLoop(),
    seeded_function,
    pretrained_function,
]


@pytest.mark.sample(6)
@pytest.mark.parametrize("task", NOT_DRAWN, ids=name_of)
def test_what_depends_on_no_trial_may_be_kept(task):
    together = curves(task, widths=(8, 16))
    assert curves(task, widths=(16, 8)) == together
    for width in (8, 16):
        forget()
        assert curves(task, widths=(width,))[width] == together[width]


class PretrainedFirst(Plain):
    """A task that draws its head after a cached layer was drawn and loaded."""

    def model(self, hp):
        return torch.nn.Sequential(pretrained(), torch.nn.Linear(8, 2))


class PretrainedFirstLoop(Loop):
    def setup(self, hp, *, seed, device):
        self.back = pretrained()
        self.began = time.time()
        super().setup(hp, seed=seed, device=device)


@th.trainable
def pretrained_first_function(trial):
    width = trial.suggest_categorical("width", [8, 16])
    x = pretrained()(X)
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * width)
    for _ in trial.epochs({"model": model, "optimizer": optimizer}):
        yield descended(model, optimizer, x)


@pytest.mark.parametrize(
    ("task", "what"),
    [
        (PretrainedFirst(), "'1.weight'"),
        (PretrainedFirstLoop(), "'self.model'"),
        (pretrained_first_function, "weight'"),
    ],
    ids=lambda each: each if isinstance(each, str) else name_of(each),
)
def test_what_is_drawn_after_a_cache_was_filled_must_not_depend_on_it(task, what):
    with pytest.raises(StateError, match=r"if 'pretrained\(...\)' was filled before") as found:
        curves(task)
    assert what in str(found.value)


class DrawnData(Plain):
    """A task that draws its data from the stream which thrifty seeds."""

    def data(self, hp):
        x = X + 0.5 * torch.randn(64, 8)
        return th.ArrayData(train=(x, Y), valid=(x, Y))


def study_of(task, **options):
    study = th.Study(
        task,
        th.Space(width=th.Choice([8])),
        name="seeds",
        algorithm=th.GridSearch(max_epochs=2),
        metric="loss",
        mode="min",
        storage=f"sqlite:///{tempfile.mkdtemp()}/seeds.db",
        **options,
    )
    return study.run(progress=False, executor=th.Local(threads=1))


@pytest.mark.parametrize("task", [Plain(), DrawnData()], ids=lambda t: type(t).__name__)
def test_each_seed_has_the_data_that_a_study_of_that_seed_has(task):
    alone = [study_of(task, seed=seed).trials[0].curve for seed in (0, replica_seed(0, 1))]
    assert [*study_of(task, seeds=2).trials[0].curves] == alone


class SeededThenDrawnData(Plain):
    """A task whose data are drawn from where a cached loader has left the stream."""

    def data(self, hp):
        x, y = shuffled()
        x = x + torch.from_numpy(np.random.rand(64, 8).astype(np.float32))  # noqa: NPY002
        return th.ArrayData(train=(x, y), valid=(x, y))


class CacheInData(DrawnData):
    def data(self, hp):
        x = X * noise(8)
        return th.ArrayData(train=(x, Y), valid=(x, Y))


@pytest.mark.parametrize("task", [CacheInData(), SeededThenDrawnData()], ids=name_of)
def test_data_that_only_the_first_load_draws_are_refused(task):
    for each in (task, type(task)()):
        with pytest.raises(StateError, match=r"Data\.data gives other training data each time"):
            study_of(each)


# -- values that code goes by later ---------------------------------------------------------------


class Patient(Loop):
    """A loop that ends early, with a counter that its state lacks."""

    def setup(self, hp, *, seed, device):
        super().setup(hp, seed=seed, device=device)
        self.num_bad = 0

    def train(self, epoch, hp):
        if self.num_bad < 40:
            super().train(epoch, hp)
        self.num_bad += 1


class Scheduled(Loop):
    """A loop whose rate falls late, with a schedule that its state lacks."""

    def setup(self, hp, *, seed, device):
        super().setup(hp, seed=seed, device=device)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=30)

    def train(self, epoch, hp):
        super().train(epoch, hp)
        self.schedule.step()


class EarlyStopping(Loop):
    """A loop that ends without progress; its counter is 0 as long as there is progress."""

    def setup(self, hp, *, seed, device):
        super().setup(hp, seed=seed, device=device)
        self.best, self.num_bad = 9.0, 0

    def train(self, epoch, hp):
        if self.num_bad < 2:
            super().train(epoch, hp)

    def evaluate(self):
        loss = super().evaluate()["loss"]
        self.num_bad = 0 if loss < self.best - 0.02 else self.num_bad + 1
        self.best = min(self.best, loss)
        return {"loss": loss}


class Scaled(Loop):
    """A loop with a scaler of gradients in its state."""

    def setup(self, hp, *, seed, device):
        super().setup(hp, seed=seed, device=device)
        self.scaler = torch.amp.GradScaler("cpu", growth_interval=3)

    def train(self, epoch, hp):
        self.optimizer.zero_grad()
        self.scaler.scale(F.cross_entropy(self.model(X), Y)).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def state(self):
        return {**super().state(), "scaler": self.scaler.state_dict()}

    def load_state(self, state):
        super().load_state(state)
        self.scaler.load_state_dict(state["scaler"])


class Logging(Loop):
    """A loop that logs its steps, and the seconds between them."""

    def setup(self, hp, *, seed, device):
        super().setup(hp, seed=seed, device=device)
        self.num_steps, self.began = 0, time.time()

    def train(self, epoch, hp):
        super().train(epoch, hp)
        self.num_steps += 1
        if self.num_steps % 2 == 0:
            seconds = time.time() - self.began
            logging.getLogger("mine").debug("%d steps, %.1f s", self.num_steps, seconds)
            self.began = time.time()


class Counting(Loop):
    """A loop that counts and notes, but goes by neither."""

    def setup(self, hp, *, seed, device):
        super().setup(hp, seed=seed, device=device)
        self.num_epochs, self.notes = 0, []

    def train(self, epoch, hp):
        super().train(epoch, hp)
        self.num_epochs += 1
        self.notes.append(epoch)


class Excused(Patient):
    not_state = ("num_bad",)


class WarmUp(torch.nn.Linear):
    """A layer that changes after many steps, by a count that is no buffer."""

    def __init__(self):
        super().__init__(8, 2)
        self.num_steps = 0

    def forward(self, x):
        self.num_steps += self.training
        return super().forward(x) * (2 if self.num_steps > 10_000 else 1)


class Warming(Plain):
    def model(self, hp):
        return WarmUp()


@pytest.mark.parametrize(
    ("task", "what"),
    [
        (Patient(), "'self.num_bad'"),
        (Scheduled(), "'self.schedule."),
        (Warming(), "'model.num_steps'"),
    ],
    ids=lambda t: type(t).__name__,
)
def test_values_whose_effect_comes_later_are_refused(task, what):
    with pytest.raises(StateError, match="keeps values outside of its checkpoint") as found:
        curves(task)
    assert what in str(found.value)


NOT_USED = {Counting: "num_epochs", Excused: "", Scaled: "", Logging: "num_steps"}


@pytest.mark.parametrize("task", NOT_USED, ids=lambda t: t.__name__)
def test_values_that_decide_nothing_may_be_outside(task, caplog):
    with caplog.at_level(logging.WARNING):
        assert len(curves(task())) == 2
    assert (NOT_USED[task] or "num_bad") in caplog.text or not NOT_USED[task]
    assert "num_bad" not in caplog.text


def test_a_counter_that_is_still_equal_is_compared_again_later():
    study = th.Study(
        EarlyStopping(),
        th.Space(width=th.Choice([8, 16, 32])),
        name="patience",
        algorithm=th.SuccessiveHalving(max_epochs=27, min_epochs=1, num_trials=3, eta=3),
        metric="loss",
        mode="min",
        storage=f"sqlite:///{tempfile.mkdtemp()}/kept.db",
    )
    with pytest.raises(StateError, match=r"'self\.num_bad'"):
        study.run(progress=False, executor=th.Local(threads=1))
