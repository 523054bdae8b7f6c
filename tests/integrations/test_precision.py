"""Precision and accumulation are the trainers' own, and what they keep is part of the state."""

from __future__ import annotations

import os

import lightning.pytorch as pl
import pytest
import torch
import transformers
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.utils.data import DataLoader, TensorDataset

from tests.integrations._drive import assert_a_resumed_trial_is_the_same, train
from thrifty.integrations import HuggingFaceTrainable, LightningTrainable
from thrifty.integrations._adapters import from_plain
from thrifty.pack._state import unpack_state


pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")]


def points():
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(7))
    return DataLoader(TensorDataset(x, x[:, :1].tanh()), batch_size=4, shuffle=True)


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
        )

    def training_step(self, batch, batch_idx):
        y = self.body(batch[0].to(self.body[0].weight.dtype))
        self.log("bits", float(torch.finfo(y.dtype).bits), on_epoch=True, on_step=False)
        return (y - batch[1]).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


def net_task(**trainer):
    return LightningTrainable(lambda hp: Net(), lambda hp: points(), trainer=trainer)


def scaler():
    """A scaler on the CPU, whose scale changes within an epoch."""
    return torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=2)


def bert():
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
        num_labels=2,
    )
    return transformers.BertForSequenceClassification(config)


def rows():
    tokens = torch.randint(0, 20, (24, 6), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": t, "labels": int(t[0] < 10)} for t in tokens]


def text_task(trainer_class=None, **args):
    return HuggingFaceTrainable(
        lambda hp: bert(),
        train_dataset=rows(),
        eval_dataset=rows()[:4],
        args={"learning_rate": 0.01, "per_device_train_batch_size": 4, **args},
        trainer_class=trainer_class,
    )


class Scaled(transformers.Trainer):
    """A Trainer with a scaler on the CPU, where accelerate itself makes none."""

    def __init__(self, **options):
        super().__init__(**options)
        self.accelerator.scaler = scaler()


def fixed(epoch):
    return {"lr": 0.05}


@pytest.mark.sample(3)
@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_lightning_resumed_is_as_alone(precision, accumulated):
    options = {"precision": precision, "accumulate_grad_batches": accumulated}
    assert_a_resumed_trial_is_the_same(lambda: net_task(**options), fixed, epochs=3)
    metrics, _ = train(net_task(**options), fixed, epochs=1)
    assert metrics[0]["bits"] == (64 if precision == "64-true" else 16)


def test_lightning_continues_with_the_scale():
    def make():
        return net_task(plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler())])

    assert_a_resumed_trial_is_the_same(make, fixed, epochs=3)
    scales = [
        from_plain(unpack_state(train(make(), fixed, epochs=e)[1])["checkpoint"])["MixedPrecision"]
        for e in (1, 3)
    ]
    # Six steps an epoch, and the scale doubles after every second one.
    assert [each["scale"] for each in scales] == [2**3, 2**9]


ARGS = {
    "bf16": {"bf16": True},
    "accumulated": {"gradient_accumulation_steps": 4},
    "both": {"bf16": True, "gradient_accumulation_steps": 2},
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("args", ARGS.values(), ids=list(ARGS))
def test_hugging_face_resumed_is_as_alone(args):
    assert_a_resumed_trial_is_the_same(lambda: text_task(**args), fixed, epochs=3)


def test_hugging_face_continues_with_the_scale():
    assert_a_resumed_trial_is_the_same(lambda: text_task(Scaled), fixed, epochs=3)
    scales = [
        unpack_state(train(text_task(Scaled), fixed, epochs=e)[1])["scaler"]["scale"]
        for e in (1, 3)
    ]
    assert scales == [2**3, 2**9]


@pytest.mark.parametrize("make", [text_task, net_task], ids=["hugging face", "lightning"])
def test_a_trial_in_bf16_does_not_change_the_next_one(make):
    halved = {"bf16": True} if make is text_task else {"precision": "bf16-mixed"}
    alone, _ = train(make(), fixed, epochs=1)
    half, _ = train(make(**halved), fixed, epochs=1)
    assert half != alone
    assert train(make(), fixed, epochs=1)[0] == alone


def test_the_precision_may_follow_the_hyper_parameters():
    def make():
        return HuggingFaceTrainable(
            lambda hp: bert(),
            train_dataset=rows(),
            args=lambda hp: {"per_device_train_batch_size": 4, "bf16": hp.half},
        )

    def values(epoch):
        return {"half": epoch < 1}

    assert_a_resumed_trial_is_the_same(make, values, epochs=3)
    assert (
        train(make(), values, epochs=1)[0] != train(make(), lambda e: {"half": False}, epochs=1)[0]
    )


def test_a_precision_in_the_environment_ends_with_its_trial():
    class Leaving(transformers.Trainer):
        """Leaves its precision in the environment, as the arguments of transformers 4 do."""

        def __init__(self, **options):
            super().__init__(**options)
            os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"

    alone, _ = train(text_task(), fixed, epochs=1)
    train(text_task(Leaving), fixed, epochs=1)
    assert "ACCELERATE_MIXED_PRECISION" not in os.environ
    assert train(text_task(), fixed, epochs=1)[0] == alone
