"""Frozen parameters are not stored, and a trial restored without them has the same bits."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

import lightning.pytorch as pl
import pytest
import torch
import transformers
from torch.utils.data import DataLoader, TensorDataset

import thrifty as th
from tests.integrations._drive import assert_a_resumed_trial_is_the_same, stored, train
from thrifty.integrations import HuggingFaceTrainable, LightningTrainable
from thrifty.integrations._model_copies import fill_in, frozen_digests, leave_out
from thrifty.pack import borrowed_streams


pytestmark = pytest.mark.slow


class LowRank(torch.nn.Module):
    """A frozen linear layer with a trained update of low rank, as PEFT's LoRA."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(requires_grad=False)
        self.down = torch.nn.Linear(base.in_features, rank, bias=False)
        self.up = torch.nn.Linear(rank, base.out_features, bias=False)
        torch.nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def points():
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(24, 4, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :1].tanh()), batch_size=8, shuffle=True)


class Net(pl.LightningModule):
    def __init__(self, *, change=None, unseeded=None):
        super().__init__()
        base = torch.nn.Linear(4, 16)
        if unseeded is not None:
            torch.nn.init.normal_(base.weight, generator=unseeded)
        self.body = torch.nn.Sequential(
            LowRank(base), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1)
        )
        self.change = change

    def training_step(self, batch, batch_idx):
        if self.change is not None:
            self.change(self)
        return (self.body(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


def net_task(**options):
    return LightningTrainable(lambda hp: Net(**options), lambda hp: points())


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


def adapted(hp):
    model = bert()
    model.requires_grad_(requires_grad=False)
    model.classifier.requires_grad_(requires_grad=True)
    layer = model.bert.encoder.layer[0].attention.self
    layer.query = LowRank(layer.query)
    return model


def lora(hp):
    peft = importlib.import_module("peft")
    return peft.get_peft_model(
        bert(), peft.LoraConfig(r=2, target_modules=["query"], modules_to_save=["classifier"])
    )


def rows():
    tokens = torch.randint(0, 20, (16, 6), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": t, "labels": int(t[0] < 10)} for t in tokens]


def text_task(model=adapted, **options):
    return HuggingFaceTrainable(
        model,
        train_dataset=rows(),
        eval_dataset=rows()[:4],
        args={"learning_rate": 0.01, "per_device_train_batch_size": 4},
        **options,
    )


def fixed(epoch):
    return {"lr": 0.01}


def weights_of(state):
    names = ("checkpoint.state_dict.", "model.")
    return {n for n in state.tensors if n.startswith(names)}


TASKS = {"lightning": net_task, "transformers": text_task, "peft": lambda: text_task(lora)}
KINDS = [
    "lightning",
    "transformers",
    pytest.param(
        "peft", marks=pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
    ),
]
# PEFT reads an attribute of transformers that has another name since.
IGNORED = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


@IGNORED
@pytest.mark.parametrize("kind", KINDS)
def test_resumed_is_as_alone_and_frozen_weights_are_not_stored(kind):
    assert_a_resumed_trial_is_the_same(TASKS[kind], fixed, epochs=3)
    one = TASKS[kind]()
    _, state = train(one, fixed, epochs=2)
    one.setup(th.HyperParameters(fixed(0)), seed=3, device=torch.device("cpu"))
    with borrowed_streams():
        fresh = one.model
    trained = {n for n, p in fresh.named_parameters() if p.requires_grad}
    held = {
        n.removeprefix("checkpoint.state_dict.").removeprefix("model.") for n in weights_of(state)
    }
    frozen = {n for n, p in fresh.named_parameters() if not p.requires_grad}
    assert trained <= held
    assert frozen
    assert held.isdisjoint(frozen)


@IGNORED
@pytest.mark.parametrize("kind", KINDS)
def test_the_loaded_model_has_trained_and_frozen_weights(kind, tmp_path):
    study = th.Study(
        TASKS[kind](),
        th.Space(lr=th.Choice([0.01, th.Step(0.01, [1])])),
        algorithm=th.GridSearch(max_epochs=2),
        metric="train_loss",
        mode="min",
        storage=f"sqlite:///{tmp_path}/t.db",
        name="frozen",
    )
    study.run(progress=False, executor=th.Local(threads=1))
    metrics, state = train(TASKS[kind](), fixed, epochs=2, seed=study.seed)
    assert study.trials[0].value == metrics[-1]["train_loss"]
    loaded = study.trials[0].load_model().state_dict()
    prefix = "checkpoint.state_dict." if kind == "lightning" else "model."
    for name in weights_of(state):
        assert torch.equal(loaded[name.removeprefix(prefix)], state.tensors[name])
    with borrowed_streams():
        one = TASKS[kind]()
        one.setup(th.HyperParameters(fixed(0)), seed=study.seed, device=torch.device("cpu"))
        fresh = one.model
    for name, parameter in fresh.named_parameters():
        assert parameter.requires_grad or torch.equal(loaded[name], parameter), name


def test_lightning_with_frozen_weights_is_what_it_is_with_all_of_them_stored(monkeypatch):
    without, _ = train(net_task(), fixed, epochs=3)
    monkeypatch.setattr(
        "thrifty.integrations._lightning.frozen_digests", lambda model, **_: (model, {})
    )
    whole, state = train(net_task(), fixed, epochs=3)
    assert "checkpoint.state_dict.body.0.base.weight" in state.tensors
    assert whole == without


def test_a_frozen_parameter_that_is_changed_is_stored():
    def make():
        return net_task(change=lambda net: net.body[0].base.weight.data.mul_(0.9))

    _, state = train(make(), fixed, epochs=1)
    assert {"checkpoint.state_dict.body.0.base.weight"} < weights_of(state)
    assert "checkpoint.state_dict.body.0.base.bias" not in state.tensors
    assert_a_resumed_trial_is_the_same(make, fixed, epochs=3)


def test_a_parameter_may_be_frozen_or_not_from_epoch_to_epoch():
    def make():
        def net(hp):
            made = Net()
            made.body[0].base.requires_grad_(requires_grad=hp.free)
            return made

        return LightningTrainable(net, lambda hp: points())

    for order in ([False, True, True], [True, False, False], [False, True, False]):
        assert_a_resumed_trial_is_the_same(make, lambda e, o=order: {"free": o[e]}, epochs=3)


def test_frozen_parameters_that_are_not_the_same_each_time_are_stored():
    own = torch.Generator().manual_seed(0)
    _, state = train(net_task(unseeded=own), fixed, epochs=2)
    assert "checkpoint.state_dict.body.0.base.weight" in state.tensors


@pytest.mark.parametrize("kind", ["lightning", "transformers"])
def test_a_base_that_is_another_one_is_refused(kind, monkeypatch):
    _, state = train(TASKS[kind](), fixed, epochs=1)
    linear = torch.nn.Linear.reset_parameters

    def other(self):
        linear(self)
        self.weight.data.add_(1.0)

    monkeypatch.setattr(torch.nn.Linear, "reset_parameters", other)
    monkeypatch.setattr(transformers.PreTrainedModel, "_init_weights", lambda *_: None)
    with pytest.raises(th.StateError, match=r"frozen parameter '.*' is not what it was when the"):
        train(TASKS[kind](), fixed, epochs=2, start=1, state=stored(state))


def test_a_checkpoint_of_before_has_all_parameters_and_is_resumed(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(
            "thrifty.integrations._lightning.frozen_digests", lambda model, **_: (model, {})
        )
        _, state = train(net_task(), fixed, epochs=1)
    whole, _ = train(net_task(), fixed, epochs=2)
    tree = {"dict": [item for item in state.tree["dict"] if item[0] != "frozen"]}
    old = type(state)(tensors=state.tensors, tree=tree)
    resumed, _ = train(net_task(), fixed, epochs=2, start=1, state=old)
    assert resumed == whole[1:]


def test_what_is_left_out_is_filled_in_also_in_half_precision_and_keeps_versions():
    model = torch.nn.Sequential(
        torch.nn.Linear(2, 2).bfloat16().requires_grad_(requires_grad=False),
        torch.nn.BatchNorm1d(2),
        torch.nn.Linear(1, 2).requires_grad_(requires_grad=False),
    )
    whole = model.state_dict()
    _, digests = frozen_digests(model, kept={}, make=lambda: model)
    state, left_out = leave_out(whole, digests)
    assert set(left_out) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert not set(left_out) & set(state)
    filled = fill_in(state, left_out, model=model)
    assert filled._metadata == whole._metadata
    assert {n: t.tolist() for n, t in filled.items()} == {n: t.tolist() for n, t in whole.items()}
    with pytest.raises(th.StateError, match=r"'0\.weight' is not what it was"):
        fill_in(state, left_out, model=torch.nn.Linear(1, 1))


def test_a_model_without_frozen_parameters_is_made_once():
    made = []
    model = torch.nn.Linear(1, 1)
    assert frozen_digests(model, kept={}, make=lambda: made.append(1)) == (model, {})
    assert made == []
