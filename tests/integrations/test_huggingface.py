"""Models of transformers are trained unchanged by their own Trainer, and share stages."""

from __future__ import annotations

import importlib
import sys

import cloudpickle
import numpy as np
import pytest
import torch
import transformers

import thrifty as th
from tests.integrations._drive import assert_a_resumed_trial_is_the_same, train
from thrifty.core import MissingExtraError, derive_seed
from thrifty.integrations import HuggingFaceTrainable
from thrifty.pack._state import seed_everything


pytestmark = pytest.mark.slow


EPOCHS = 3


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


def rows(num, *, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 20, (num, 6), generator=generator)
    return [{"input_ids": t, "labels": int(t[0] < 10)} for t in tokens]


TRAIN, VALID = rows(24, seed=1), rows(8, seed=2)


def accuracy(prediction):
    return {"accuracy": np.mean(prediction.predictions.argmax(1) == prediction.label_ids)}


def task(args=None, *, dropout=0.0, train_dataset=TRAIN, **options):
    given = {"per_device_train_batch_size": 8}

    def arguments(hp):
        more = {"learning_rate": hp.lr} if args is None else args
        return {**given, "learning_rate": hp.lr, **more}

    return HuggingFaceTrainable(
        lambda hp: bert(dropout=hp.get("dropout", dropout)),
        train_dataset=train_dataset,
        eval_dataset=VALID,
        args=arguments,
        compute_metrics=accuracy,
        **options,
    )


def fixed(epoch):
    return {"lr": 0.01}


def falling(epoch):
    return {"lr": 0.01 if epoch < 2 else 0.001}


LINEAR = {"lr_scheduler_type": "linear", "num_train_epochs": EPOCHS, "warmup_steps": 2}


@pytest.mark.parametrize("args", [{}, LINEAR], ids=["constant", "linear"])
def test_resumed_is_as_alone(args):
    assert_a_resumed_trial_is_the_same(lambda: task(args, dropout=0.2), falling, epochs=EPOCHS)


class Rate(transformers.TrainerCallback):
    """Callback that records learning rate, epoch and step at each step."""

    seen: list

    def on_step_end(self, args, state, control, **kwargs):
        rate = round(kwargs["optimizer"].param_groups[0]["lr"], 12)
        type(self).seen.append((rate, args.learning_rate, state.epoch, state.global_step))


@pytest.fixture
def seen():
    Rate.seen = []
    return Rate.seen


@pytest.mark.parametrize("args", [{}, LINEAR], ids=["constant", "linear"])
def test_a_trial_is_what_one_run_of_a_trainer_gives(args, tmp_path):
    options = {
        "lr_scheduler_type": "constant",
        "num_train_epochs": EPOCHS,
        "learning_rate": 0.01,
        "per_device_train_batch_size": 8,
        "train_sampling_strategy": "sequential",
        **args,
    }
    curve = []

    class Watch(transformers.TrainerCallback):
        def on_evaluate(self, args, state, control, metrics, **kwargs):
            curve.append((metrics["eval_loss"], metrics["eval_accuracy"]))

    seed_everything(derive_seed(3, "model"))
    trainer = transformers.Trainer(
        bert(),
        transformers.TrainingArguments(
            str(tmp_path),
            use_cpu=True,
            eval_strategy="epoch",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **options,
        ),
        train_dataset=TRAIN,
        eval_dataset=VALID,
        compute_metrics=accuracy,
        callbacks=[Watch()],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    metrics, _ = train(task(options), fixed, epochs=EPOCHS)
    assert [(m["eval_loss"], m["eval_accuracy"]) for m in metrics] == curve


def test_a_schedule_is_followed_and_epochs_are_counted(seen):
    one = task(trainer={"callbacks": [Rate()]})
    train(one, falling, epochs=EPOCHS)
    assert [rate for rate, *_ in seen] == [0.01] * 6 + [0.001] * 3
    assert [epoch for *_, epoch, _ in seen] == pytest.approx([k / 3 for k in range(1, 10)])
    assert [step for *_, step in seen] == list(range(1, 10))


def test_a_scheduler_multiplies_a_schedule(seen):
    args = {"lr_scheduler_type": "linear", "num_train_epochs": EPOCHS}
    one = task(args, trainer={"callbacks": [Rate()]})
    train(one, falling, epochs=EPOCHS)
    wanted = [(0.01 if k < 6 else 0.001) * (1 - k / 9) for k in range(9)]
    # A callback sees the rate of the next step, because the scheduler has already stepped.
    assert [rate for rate, *_ in seen][:5] == pytest.approx(wanted[1:6])
    assert [rate for rate, *_ in seen][6:8] == pytest.approx(wanted[7:])


def test_a_batch_size_may_change(seen):
    def make():
        return HuggingFaceTrainable(
            lambda hp: bert(),
            train_dataset=TRAIN,
            eval_dataset=VALID,
            args=lambda hp: {"per_device_train_batch_size": hp.rows},
            trainer={"callbacks": [Rate()]},
        )

    def values(epoch):
        return {"rows": 4 if epoch < 1 else 12}

    assert_a_resumed_trial_is_the_same(make, values, epochs=EPOCHS)
    seen.clear()
    train(make(), values, epochs=EPOCHS)
    assert [epoch for *_, epoch, _ in seen][6:] == pytest.approx([1.5, 2.0, 2.5, 3.0])


def test_metrics_are_those_of_the_trial_not_of_the_machine():
    metrics, _ = train(task(), fixed, epochs=1)
    assert set(metrics[0]) == {"train_loss", "eval_loss", "eval_accuracy"}


def test_without_evaluation_there_is_the_training_loss():
    one = HuggingFaceTrainable(lambda hp: bert(), train_dataset=TRAIN)
    metrics, _ = train(one, fixed, epochs=1)
    assert set(metrics[0]) == {"train_loss"}


def test_train_loss_is_the_mean_over_the_epoch():
    one = task({"learning_rate": 0.0, "per_device_train_batch_size": 24})
    metrics, _ = train(one, fixed, epochs=2)
    seed_everything(derive_seed(3, "model"))
    model = bert()
    tokens = torch.stack([row["input_ids"] for row in TRAIN])
    labels = torch.tensor([row["labels"] for row in TRAIN])
    loss = model(input_ids=tokens, labels=labels).loss.item()
    assert [m["train_loss"] for m in metrics] == pytest.approx([loss, loss])


def test_train_loss_of_accumulated_batches_is_the_trainers_own():
    said = []

    class Saying(transformers.Trainer):
        def train(self, **kwargs):
            said.append(super().train(**kwargs).training_loss)

    args = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
    metrics, _ = train(task(args, trainer_class=Saying), fixed, epochs=1)
    assert [m["train_loss"] for m in metrics] == pytest.approx(said)


def test_datasets_may_be_made_from_hyper_parameters_once_for_each_trial():
    calls = []

    def some(hp):
        calls.append(hp.num)
        return TRAIN[: hp.num]

    one = task(train_dataset=some)
    for lr in (0.01, 0.02):
        train(one, lambda epoch, lr=lr: {"lr": lr, "num": 8}, epochs=2)
    assert calls == [8, 8]


class Growing(torch.utils.data.Dataset):
    """A data set whose samples depend on how often it was read."""

    def __init__(self):
        self.count = 0

    def __len__(self):
        return len(TRAIN)

    def __getitem__(self, index):
        self.count += 1
        return TRAIN[index if self.count <= 6 * len(TRAIN) else 0]


def test_no_trial_sees_how_often_another_one_has_read_its_data():
    one = task(train_dataset=lambda hp: Growing())
    first, second = (train(one, fixed, epochs=4)[0] for _ in range(2))
    assert first == second


@pytest.mark.parametrize("short_s", [0.0, 60.0])  # without and with an epoch for the comparison
def test_a_given_data_set_that_changes_is_refused(tmp_path, monkeypatch, short_s):
    monkeypatch.setattr("thrifty.pack.trial._state_check.SHORT_S", short_s)
    study = th.Study(
        task(train_dataset=Growing()),
        th.Space(lr=0.01),
        algorithm=th.GridSearch(max_epochs=1),
        metric="eval_loss",
        mode="min",
        storage=f"sqlite:///{tmp_path}/t.db",
        name="bert",
    )
    with pytest.raises(th.StateError, match=r"uses later: 'task\._datasets\[0\]\.count'"):
        study.run(progress=False, executor=th.Local(threads=1))


def test_a_task_may_go_to_another_process():
    one = task(train_dataset=lambda hp: TRAIN)
    alone, _ = train(one, fixed, epochs=2)
    sent = cloudpickle.loads(cloudpickle.dumps(one))
    assert train(sent, fixed, epochs=2)[0] == alone


def test_a_trainer_of_ones_own():
    class Double(transformers.Trainer):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            return (2 * loss[0], *loss[1:]) if isinstance(loss, tuple) else 2 * loss

    plain, _ = train(task({"learning_rate": 0.0}), fixed, epochs=1)
    double, _ = train(task({"learning_rate": 0.0}, trainer_class=Double), fixed, epochs=1)
    assert double[0]["train_loss"] == pytest.approx(2 * plain[0]["train_loss"])


def test_callbacks_keep_what_they_export():
    class Count(transformers.TrainerCallback, transformers.trainer_callback.ExportableState):
        def __init__(self, num=0):
            self.num = num

        def on_epoch_end(self, args, state, control, **kwargs):
            self.num += 1

        def on_evaluate(self, args, state, control, metrics, **kwargs):
            metrics["eval_count"] = self.num

        def state(self):
            return {"args": {"num": self.num}, "attributes": {}}

    mine = Count()
    metrics, _ = train(task(trainer={"callbacks": [mine]}), fixed, epochs=EPOCHS)
    assert [m["eval_count"] for m in metrics] == [1, 2, 3]
    assert mine.num == 0


def test_a_causal_language_model():
    def gpt(hp):
        config = transformers.GPT2Config(
            vocab_size=20,
            n_positions=8,
            n_embd=8,
            n_layer=1,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
        )
        return transformers.GPT2LMHeadModel(config)

    texts = [{"input_ids": r["input_ids"], "labels": r["input_ids"]} for r in TRAIN]

    def make():
        return HuggingFaceTrainable(
            gpt, train_dataset=texts, eval_dataset=texts[:4], args={"learning_rate": 0.01}
        )

    # The model's head is its embedding: one tensor under two names.
    assert_a_resumed_trial_is_the_same(make, fixed, epochs=2)


def test_a_study_shares_stages_and_every_trial_is_as_alone(tmp_path):
    space = th.Space(lr=th.Choice([0.01, th.Step(0.01, [2], gamma=0.1)]))
    study = th.Study(
        task(),
        space,
        algorithm=th.GridSearch(max_epochs=3),
        metric="eval_loss",
        mode="min",
        storage=f"sqlite:///{tmp_path}/t.db",
        name="text",
        seed=3,
    )
    study.run(progress=False, executor=th.Local(threads=1))
    assert (study.savings.trial_epochs, study.savings.unique_epochs) == (6, 4)
    for trial, rate in zip(study.trials, (0.01, 0.01 * 0.1), strict=True):
        metrics, _ = train(task(), lambda e, r=rate: {"lr": 0.01 if e < 2 else r}, epochs=3)
        assert list(trial.curve) == [m["eval_loss"] for m in metrics]


def test_nothing_is_printed_and_nothing_left(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    train(task(), fixed, epochs=2)
    said = capfd.readouterr()
    assert said.out + said.err == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("small_bytes", "num"), [(2**22, 0), (0, 2)])
def test_memory_is_collected_before_each_epoch_of_a_model_that_is_not_small(
    monkeypatch, small_bytes, num
):
    calls = []
    monkeypatch.setattr("thrifty.integrations._huggingface.SMALL_BYTES", small_bytes)
    monkeypatch.setattr("gc.collect", lambda *args: calls.append(args))
    train(task(), fixed, epochs=2)
    assert len(calls) == num


def test_the_model_has_the_trials_weights():
    one = task()
    with pytest.raises(th.TaskError, match="nothing has been trained"):
        one.evaluate()
    one.setup(th.HyperParameters(fixed(0)), seed=3, device=torch.device("cpu"))
    one.train(0, th.HyperParameters(fixed(0)))
    stream = torch.get_rng_state()
    model = one.model.eval()
    assert torch.equal(torch.get_rng_state(), stream)
    tokens = torch.stack([row["input_ids"] for row in VALID])
    labels = torch.tensor([row["labels"] for row in VALID])
    loss = model(input_ids=tokens, labels=labels).loss.item()
    assert loss == pytest.approx(one.evaluate()["eval_loss"])


def test_a_loss_that_is_no_number():
    with pytest.raises(th.DivergedError, match="training loss of epoch 1 is"):
        train(task({"learning_rate": 1e30, "max_grad_norm": 0.0}), fixed, epochs=1)


def test_what_is_wrong_is_said():
    with pytest.raises(th.TaskError, match=r"'report_to'.*observers"):
        HuggingFaceTrainable(lambda hp: bert(), train_dataset=TRAIN, args={"report_to": "all"})
    with pytest.raises(th.TaskError, match="'seed'"):
        train(task({"seed": 1}), fixed, epochs=1)
    with pytest.raises(th.TaskError, match="needs to know when training ends"):
        train(task({"lr_scheduler_type": "linear"}), fixed, epochs=1)
    with pytest.raises(th.TaskError, match="is asked for epoch 2"):
        train(task({"num_train_epochs": 1}), fixed, epochs=2)


def test_the_identity_follows_the_code_and_the_options():
    def of(width=1, **options):
        options = {"args": {"learning_rate": 0.1}, "train_dataset": TRAIN, **options}
        return HuggingFaceTrainable(lambda hp: bert(dropout=0.1 * width), **options).identity()

    assert of() == of()
    for other in (
        {"width": 2},
        {"version": "2"},
        {"args": {"learning_rate": 0.2}},
        {"train_dataset": TRAIN[:3]},
        {"eval_dataset": VALID},
        {"trainer": {"data_collator": accuracy}},
    ):
        assert of(**other) != of()


@pytest.mark.parametrize("package", ["transformers", "accelerate"])
def test_a_package_that_is_absent(monkeypatch, package):
    name = "thrifty.integrations._huggingface"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"{package} is not installed.*huggingface"):
        importlib.import_module(name)
