"""Epochs of a fixed number of optimizer steps continue in the data where the last one ended."""

from __future__ import annotations

import itertools
import random

import lightning.pytorch as pl
import pytest
import torch
import transformers
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset

import thrifty as th
from tests.integrations._drive import assert_a_resumed_trial_is_the_same, train
from thrifty.core import TaskError, derive_seed
from thrifty.integrations import HuggingFaceTrainable, LightningTrainable
from thrifty.integrations._trainer_runs import StepBatches
from thrifty.pack import borrowed_streams
from thrifty.pack._state import seed_everything


pytestmark = pytest.mark.slow


def numbers(num=10, *, size=2, **options):
    return DataLoader(torch.arange(num).float(), batch_size=size, **{"shuffle": True, **options})


def batches(loader, start, num, *, epoch_seed=0):
    made = StepBatches(loader, seed=1, epoch_seed=epoch_seed, start=start, num_batches=num)
    assert len(made) == num
    return [batch.tolist() for batch in made]


class Endless:
    """A batch sampler without a length, and without an end."""

    def __iter__(self):
        while True:
            yield torch.randint(0, 10, (2,)).tolist()


class Counting(IterableDataset):
    """A stream that draws from the global stream."""

    def __init__(self, num):
        self.num = num

    def __iter__(self):
        for number in itertools.islice(itertools.count(), self.num):
            yield number + torch.rand(())


class Passes(torch.utils.data.Sampler):
    """A sampler whose order follows from the number of the pass that it was told."""

    def __init__(self):
        self.number = 0

    def set_epoch(self, number):
        self.number = number

    def __iter__(self):
        return iter([(self.number + i) % 10 for i in range(10)])

    def __len__(self):
        return 10


LOADERS = {
    "shuffled": numbers,
    "partial last batch": lambda: numbers(11),
    "generator": lambda: numbers(generator=torch.Generator().manual_seed(3)),
    "sampler's generator": lambda: numbers(
        shuffle=False, sampler=RandomSampler(range(10), generator=torch.Generator())
    ),
    "batch sampler": lambda: DataLoader(
        torch.arange(10).float(),
        batch_sampler=BatchSampler(
            RandomSampler(range(10), generator=torch.Generator()), 3, drop_last=False
        ),
    ),
    "no batches": lambda: DataLoader(torch.arange(10).float(), batch_size=None, shuffle=True),
    "endless sampler": lambda: DataLoader(torch.arange(10).float(), batch_sampler=Endless()),
    "set_epoch": lambda: numbers(shuffle=False, sampler=Passes()),
    "stream": lambda: DataLoader(Counting(7), batch_size=2),
    "endless stream": lambda: DataLoader(Counting(None), batch_size=2),
    "list": lambda: [torch.ones(1) * i for i in range(5)],
}


@pytest.mark.parametrize("make", LOADERS.values(), ids=list(LOADERS))
def test_parts_are_what_one_read_gives(make):
    whole = batches(make(), 0, 24)
    assert [b for start in range(0, 24, 4) for b in batches(make(), start, 4)] == whole


def test_each_pass_has_all_rows_once_in_another_order():
    read = batches(numbers(), 0, 15)
    passes = [[row for batch in read[i : i + 5] for row in batch] for i in range(0, 15, 5)]
    assert [sorted(each) for each in passes] == [list(range(10))] * 3
    assert len({str(each) for each in passes}) == 3


def test_a_sampler_is_told_the_number_of_each_pass():
    read = batches(numbers(shuffle=False, sampler=Passes()), 0, 10)
    assert [first for first, _ in (read[0], read[5])] == [0, 1]


def test_skipped_rows_are_not_read():
    class Noting(torch.utils.data.Dataset):
        read = 0

        def __len__(self):
            return 1_000

        def __getitem__(self, index):
            self.read += 1
            return index

    data = Noting()
    batches(DataLoader(data, batch_size=1, shuffle=True), 990, 5)
    assert data.read == 5


def test_what_a_data_set_draws_follows_the_epoch_and_the_global_stream_stays():
    class Noisy(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return torch.rand(())

    loader = DataLoader(Noisy(), shuffle=True)
    with borrowed_streams():
        seed_everything(5)
        first = batches(loader, 1, 3)
        seed_everything(5)
        assert torch.rand(4)[1:].tolist() != first  # the loader itself draws a seed
        seed_everything(5)
        assert batches(loader, 1, 3) == first
        seed_everything(6)
        assert batches(loader, 1, 3) != first


def test_data_that_cannot_be_read_twice_or_are_empty_are_refused():
    with pytest.raises(th.TaskError, match=r"a generator, which can be read only once"):
        batches((i for i in range(3)), 0, 1)
    for empty in ([], DataLoader(Counting(0))):
        with pytest.raises(th.TaskError, match="have no batches"):
            batches(empty, 0, 1)


# -- Lightning ---------------------------------------------------------------------------


def points():
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(44, 4, generator=generator)
    return x, (x[:, :1] * 2 - x[:, 1:2]).tanh()


def loaders(*, shuffle=True):
    x, y = points()
    train_set, valid = TensorDataset(x[:32], y[:32]), TensorDataset(x[32:], y[32:])
    return DataLoader(train_set, batch_size=4, shuffle=shuffle), DataLoader(valid, batch_size=12)


class Net(pl.LightningModule):
    def __init__(self, lr=0.05, *, dropout=0.0, scheduler=True, manual=False):
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Dropout(dropout), torch.nn.Linear(8, 1)
        )
        self.lr, self.scheduler = lr, scheduler
        self.automatic_optimization = not manual

    def training_step(self, batch, batch_idx):
        x, y = batch["a"] if isinstance(batch, dict) else batch
        loss = (self.body(x) - y).square().mean()
        if not self.automatic_optimization:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", (self.body(batch[0]) - batch[1]).square().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        if not self.scheduler:
            return optimizer
        steps = int(self.trainer.estimated_stepping_batches)
        made = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps)
        return [optimizer], [{"scheduler": made, "interval": "step"}]


def task(*, steps=5, data=lambda hp: loaders(), trainer=None, **options):
    return LightningTrainable(
        lambda hp: Net(**options),
        data,
        steps_per_epoch=steps,
        trainer={"max_steps": 4 * steps, **(trainer or {})},
    )


def fixed(epoch):
    return {"lr": 0.05}


CASES = {
    "plain": {},
    "accumulated": {"trainer": {"accumulate_grad_batches": 3}},
    "bf16": {"trainer": {"precision": "bf16-mixed"}},
    "longer than the data": {"steps": 19},
    "one step": {"steps": 1},
    "manual": {"manual": True, "scheduler": False},
    "module's loaders": {"data": None},
    "dict": {"data": lambda hp: ({"a": loaders()[0]}, loaders()[1])},
    "list": {"data": lambda hp: [loaders()[0]]},
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("case", CASES)
def test_lightning_resumed_is_as_alone(case, monkeypatch):
    if case == "module's loaders":
        monkeypatch.setattr(Net, "train_dataloader", lambda self: loaders()[0])
    if case == "list":
        step = Net.training_step
        monkeypatch.setattr(Net, "training_step", lambda self, b, i: step(self, b[0], i))
    assert_a_resumed_trial_is_the_same(lambda: task(dropout=0.2, **CASES[case]), fixed)


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("accumulated", [1, 2])
def test_lightning_is_what_one_fit_with_max_steps_gives(accumulated):
    seed_everything(derive_seed(3, "model"))
    curve = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer, module, *_):
            steps, rest = divmod(trainer.fit_loop.total_batch_idx + 1, accumulated)
            if not rest and not steps % 5:
                curve.append({n: t.clone() for n, t in module.state_dict().items()})

    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=20,
        accumulate_grad_batches=accumulated,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[Watch()],
    )
    trainer.fit(Net(), *loaders(shuffle=False))
    one = task(
        data=lambda hp: loaders(shuffle=False), trainer={"accumulate_grad_batches": accumulated}
    )
    for epoch in range(4):
        _, state = train(one, fixed, epochs=epoch + 1)
        held = {n: t for n, t in state.tensors.items() if "state_dict." in n}
        for name, tensor in curve[epoch].items():
            assert torch.equal(held[f"checkpoint.state_dict.{name}"], tensor), (epoch, name)


def test_lightning_validates_each_epoch_and_a_branch_is_as_alone(tmp_path):
    space = th.Space(lr=th.Choice([0.1, th.Step(0.1, [2], gamma=0.1)]))

    def make():
        return LightningTrainable(
            lambda hp: Net(hp.lr, scheduler=False), lambda hp: loaders(), steps_per_epoch=3
        )

    study = th.Study(
        make(),
        space,
        algorithm=th.GridSearch(max_epochs=4),
        metric="val_loss",
        mode="min",
        storage=f"sqlite:///{tmp_path}/t.db",
        name="steps",
        seed=3,
    )
    study.run(progress=False, executor=th.Local(threads=1))
    assert (study.savings.trial_epochs, study.savings.unique_epochs) == (8, 6)
    for trial, rate in zip(study.trials, (0.1, 0.1 * 0.1), strict=True):
        metrics, _ = train(make(), lambda e, r=rate: {"lr": 0.1 if e < 2 else r}, epochs=4)
        assert list(trial.curve) == [m["val_loss"] for m in metrics]


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_lightning_says_what_is_wrong_with_steps():
    with pytest.raises(th.TaskError, match="max_steps=20 needs steps_per_epoch"):
        LightningTrainable(lambda hp: Net(), trainer={"max_steps": 20})
    for wrong in (0, 2.5):
        with pytest.raises(th.TaskError, match="steps_per_epoch must be a positive integer, got"):
            LightningTrainable(lambda hp: Net(), steps_per_epoch=wrong)
    with pytest.raises(th.TaskError, match=r"'limit_train_batches'.*how long an epoch is"):
        task(trainer={"limit_train_batches": 3})
    with pytest.raises(th.TaskError, match="ends after 20 steps, and epoch 5 of 5 steps ends aft"):
        train(task(), fixed, epochs=5)
    combined = pl.utilities.CombinedLoader([loaders()[0]])
    with pytest.raises(th.TaskError, match="are a CombinedLoader"):
        train(task(data=lambda hp: combined), fixed, epochs=1)


def test_lightning_refuses_an_epoch_of_another_number_of_steps():
    changing = pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 2})
    with pytest.raises(th.TaskError, match=r"after epoch 2 there are .* optimizer steps, not 10"):
        train(task(trainer={"callbacks": [changing]}), fixed, epochs=2)


def test_the_identity_follows_the_steps_and_is_as_before_without_them():
    def of(**options):
        return LightningTrainable(lambda hp: Net(), **options).__thrifty_identity__()

    assert of(steps_per_epoch=3) != of(steps_per_epoch=4)
    assert "steps_per_epoch" not in of()


# -- Hugging Face ------------------------------------------------------------------------


def rows(num, *, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 20, (num, 6), generator=generator)
    return [{"input_ids": t, "labels": int(t[0] < 10)} for t in tokens]


TRAIN, VALID = rows(22, seed=1), rows(8, seed=2)


class Stream(IterableDataset):
    """Rows without a length."""

    def __init__(self, num=None):
        self.num = num

    def __iter__(self):
        return itertools.islice(itertools.cycle(TRAIN), self.num)


def bert(*, dropout=0.0):
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
        num_labels=2,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return transformers.BertForSequenceClassification(config)


SEQUENTIAL = {"train_sampling_strategy": "sequential"}
LINEAR = {"lr_scheduler_type": "linear", "max_steps": 16, "warmup_steps": 2}


def text(args=None, *, steps=4, dropout=0.0, train_dataset=TRAIN, **options):
    given = {"per_device_train_batch_size": 4, "learning_rate": 0.01}
    return HuggingFaceTrainable(
        lambda hp: bert(dropout=dropout),
        train_dataset=train_dataset,
        eval_dataset=VALID,
        args={**given, **(args or {})},
        steps_per_epoch=steps,
        **options,
    )


TEXT_CASES = {
    "plain": {},
    "linear": {"args": LINEAR},
    "accumulated": {"args": {"gradient_accumulation_steps": 4}},
    "bf16": {"args": {"bf16": True}},
    "longer than the data": {"steps": 13},
    "one step": {"steps": 1},
    "by length": {"args": {"train_sampling_strategy": "group_by_length"}},
    "stream": {"train_dataset": Stream()},
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", TEXT_CASES)
def test_hugging_face_resumed_is_as_alone(case):
    assert_a_resumed_trial_is_the_same(lambda: text(dropout=0.2, **TEXT_CASES[case]), fixed)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "args",
    [{}, LINEAR, {"gradient_accumulation_steps": 4}],
    ids=["constant", "linear", "accumulated"],
)
@pytest.mark.parametrize("data", [TRAIN, Stream()], ids=["rows", "stream"])
def test_hugging_face_is_what_one_train_with_max_steps_gives(args, data, tmp_path):
    curve = []

    class Watch(transformers.TrainerCallback):
        def on_evaluate(self, args, state, control, metrics, **kwargs):
            curve.append((state.global_step, metrics["eval_loss"]))

    seed_everything(derive_seed(3, "model"))
    trainer = transformers.Trainer(
        bert(),
        transformers.TrainingArguments(
            str(tmp_path),
            use_cpu=True,
            eval_strategy="steps",
            eval_steps=4,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **{
                "per_device_train_batch_size": 4,
                "learning_rate": 0.01,
                "lr_scheduler_type": "constant",
                "max_steps": 16,
                **SEQUENTIAL,
                **args,
            },
        ),
        train_dataset=data,
        eval_dataset=VALID,
        callbacks=[Watch()],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    metrics, _ = train(text({**SEQUENTIAL, **args}, train_dataset=data), fixed, epochs=4)
    assert curve == [(4 * e, m["eval_loss"]) for e, m in enumerate(metrics, start=1)]


class Seen(transformers.Trainer):
    """A Trainer that notes the first token of each row, and the steps."""

    notes: list

    def training_step(self, model, inputs, *args, **kwargs):
        first = [tuple(row.tolist()) for row in inputs["input_ids"]]
        type(self).notes.append((self.state.global_step, first))
        return super().training_step(model, inputs, *args, **kwargs)


def test_hugging_face_goes_on_in_the_data_where_the_last_epoch_ended():
    Seen.notes = []
    train(text(trainer_class=Seen), fixed, epochs=6)
    assert [step for step, _ in Seen.notes] == list(range(24))
    # 22 rows in batches of 4: six batches a pass
    passes = [[row for _, b in Seen.notes[i : i + 6] for row in b] for i in range(0, 24, 6)]
    whole = sorted(tuple(row["input_ids"].tolist()) for row in TRAIN)
    assert [sorted(each) for each in passes] == [whole] * 4
    assert len({str(each) for each in passes}) == 4


class OwnOrder(torch.utils.data.Sampler):
    """A sampler that draws from a generator of its own."""

    def __init__(self, kind):
        self.rng = kind

    def __len__(self):
        return len(TRAIN)

    def __iter__(self):
        return iter(self.rng.sample(range(len(TRAIN)), len(TRAIN)))


class OwnBatches:
    """A batch sampler that shuffles batches by the global stream."""

    def __len__(self):
        return 6

    def __iter__(self):
        order = torch.randperm(len(TRAIN)).tolist()
        return iter([order[i : i + 4] for i in range(0, len(TRAIN), 4)])


SHARED = DataLoader(TRAIN, 4, shuffle=True, generator=torch.Generator())
"""A loader that all trials share."""


def of_accelerate(trainer):
    loader = DataLoader(TRAIN, 4, shuffle=True, generator=torch.Generator().manual_seed(3))
    return trainer.accelerator.prepare(loader)


OWN_LOADERS = {
    "generator": lambda trainer: DataLoader(
        TRAIN, 4, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "no generator": lambda trainer: DataLoader(TRAIN, 4, shuffle=True),
    "sampler": lambda trainer: DataLoader(TRAIN, 4, sampler=OwnOrder(random.Random(0))),
    "batch sampler": lambda trainer: DataLoader(TRAIN, batch_sampler=OwnBatches()),
    "prepared": of_accelerate,
    "shared": lambda trainer: SHARED,
    "processes": lambda trainer: DataLoader(
        TRAIN, 4, shuffle=True, generator=torch.Generator().manual_seed(3), num_workers=1
    ),
}


def with_own_loader(kind):
    class Own(Seen):
        def get_train_dataloader(self):
            return OWN_LOADERS[kind](self)

    Own.notes = []
    return Own


@pytest.mark.parametrize("kind", OWN_LOADERS)
def test_a_loader_of_a_trainers_own_has_all_rows_once_in_each_pass(kind):
    found = with_own_loader(kind)
    train(text(trainer_class=found), fixed, epochs=6)
    passes = [[row for _, b in found.notes[i : i + 6] for row in b] for i in range(0, 24, 6)]
    whole = sorted(tuple(row["input_ids"].tolist()) for row in TRAIN)
    assert [sorted(each) for each in passes] == [whole] * 4
    assert len({str(each) for each in passes}) == 4


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", OWN_LOADERS)
def test_a_loader_of_a_trainers_own_goes_on_where_a_trial_is_resumed(kind):
    assert_a_resumed_trial_is_the_same(lambda: text(trainer_class=with_own_loader(kind)), fixed)


def test_an_own_sampler_without_an_end_goes_on_where_the_last_epoch_ended():
    class Own(Seen):
        def get_train_dataloader(self):
            return DataLoader(TRAIN, batch_sampler=EndlessRows())

    class EndlessRows:
        def __init__(self):
            self.rng = random.Random(0)

        def __iter__(self):
            while True:
                yield self.rng.sample(range(len(TRAIN)), 4)

    found = []
    for steps in (4, 12):
        Own.notes = []
        args = {"max_steps": 12}
        train(text(args, trainer_class=Own, steps=steps), fixed, epochs=12 // steps)
        found.append(Own.notes)
    assert found[0] == found[1]


def test_hugging_face_says_what_is_wrong_with_steps():
    with pytest.raises(th.TaskError, match="max_steps=20 needs steps_per_epoch"):
        text({"max_steps": 20}, steps=None)
    with pytest.raises(th.TaskError, match="steps_per_epoch must be a positive integer, got 0"):
        text(steps=0)
    with pytest.raises(th.TaskError, match=r"'num_train_epochs'.*say max_steps"):
        text({"num_train_epochs": 3})
    with pytest.raises(th.TaskError, match=r"give it max_steps, steps_per_epoch times the max_ep"):
        train(text({"lr_scheduler_type": "linear"}), fixed, epochs=1)
    with pytest.raises(th.TaskError, match="ends after 8 steps, and epoch 3 of 4 steps ends after"):
        train(text({"max_steps": 8}), fixed, epochs=3)


def test_hugging_face_refuses_a_stream_that_ends():
    with pytest.raises(th.TaskError, match="ends after 5 optimizer steps, and the epoch after 8"):
        train(text(train_dataset=Stream(20)), fixed, epochs=2)


def test_hugging_face_identity_follows_the_steps_and_is_as_before_without_them():
    def of(steps):
        return text(steps=steps).__thrifty_identity__()

    assert of(3)["steps_per_epoch"] == 3
    assert "steps_per_epoch" not in of(None)


def test_steps_that_a_subclass_sets_without_effect_are_refused_and_its_version_counts():
    class Mine(HuggingFaceTrainable):
        version = "data of May"

    class OfClass(HuggingFaceTrainable):
        steps_per_epoch = 3

    class Logged(LightningTrainable):
        monitor = ("loss",)

    def make(hp):
        raise AssertionError("no model is made here")

    assert Mine(make, train_dataset=[]).version == "data of May"
    assert Mine(make, train_dataset=[], version="data of June").version == "data of June"
    message = (
        r"OfClass\.steps_per_epoch is set in the class, which has no effect; give it to Hugging"
    )
    with pytest.raises(TaskError, match=message):
        OfClass(make, train_dataset=[])
    assert OfClass(make, train_dataset=[], steps_per_epoch=2)._num_steps == 2
    with pytest.raises(TaskError, match=r"Logged\.monitor is set in the class"):
        Logged(make)
