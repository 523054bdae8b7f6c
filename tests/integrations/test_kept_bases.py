"""A base is made once, and each model gets a copy over the same memory."""

from __future__ import annotations

import copy
import os
import pickle

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BertConfig, LlamaConfig

import thrifty as th
from thrifty.integrations.fine_tuning import _bases
from thrifty.integrations.fine_tuning._bases import KeptBase, stamps, unlend_trained
from thrifty.pack import HyperParameters
from thrifty.pack._frozen import CAN_SHARE, FrozenTensors, is_shared


pytestmark = [
    pytest.mark.skipif(not CAN_SHARE, reason="this version of PyTorch cannot share memory"),
    # peft 0.21 asks transformers 5 for an attribute by its old name
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

SIZES = {
    "vocab_size": 30,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
HP = HyperParameters({"rank": 2})


def tuned(base, *, targets=("q_proj", "v_proj"), **options):
    return th.FineTune(
        base,
        adapter=th.LoRA(r="rank", alpha=4, targets=targets),
        data=None,
        optimizer=None,
        **options,
    )


def frozen(model):
    return {n: p.detach() for n, p in model.named_parameters() if not p.requires_grad}


@pytest.fixture
def made(monkeypatch):
    """The bases that were made, not copied."""
    found = []
    make = _bases.Base._made

    def noted(*given):
        found.append(make(*given))
        return found[-1]

    monkeypatch.setattr(_bases.Base, "_made", noted)
    return found


@pytest.fixture
def folder(tmp_path):
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", ["configuration", "folder"])
def test_a_base_is_made_once_for_all_models(kind, made, folder):
    task = tuned(LlamaConfig(**SIZES) if kind == "configuration" else folder)
    models = [t.model(HP) for t in (task, task, copy.copy(task), copy.deepcopy(task))]
    assert len(made) == 1
    ((base, _),) = made
    wanted = {n: p.detach() for n, p in base.named_parameters()}
    ids = torch.arange(12).reshape(2, 6)
    for model in models:
        own = frozen(model)
        assert len(own) == len(wanted)
        assert all(map(torch.equal, own.values(), wanted.values()))
        assert all(map(is_shared, own.values()))
        assert torch.equal(model(ids).logits, base(ids).logits)  # new adapters add nothing
    assert pickle.loads(pickle.dumps(task._base._kept)) is not task._base._kept


def test_models_are_independent(made):
    task = tuned(LlamaConfig(**SIZES))
    one, other = task.model(HP), task.model(HP)
    before = {n: p.clone() for n, p in frozen(other).items()}
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.add_(1.0)
    one.config.vocab_size = 7
    third = task.model(HP)
    for model in (other, third):
        assert model.config.vocab_size == SIZES["vocab_size"]
        assert all(torch.equal(p, before[n]) for n, p in frozen(model).items())
    assert len(made) == 1


def test_what_is_trained_has_its_own_memory(made):
    task = tuned(BertConfig(**SIZES, pad_token_id=0), targets=("query",), kind="classification")
    task.model(HP)
    trained = [p for p in task.model(HP).parameters() if p.requires_grad]
    assert len(made) == 1
    assert not any(map(is_shared, trained))


def test_parameters_that_are_trained_in_place_get_memory_of_their_own():
    kept = KeptBase()
    (model, _), (other, _) = (kept.copy(0, make=lambda: (nn.Linear(2, 1), ())) for _ in range(2))
    assert is_shared(model.weight)
    unlend_trained(model)
    assert not is_shared(model.weight)
    assert torch.equal(model.weight, other.weight)


def test_a_file_that_has_changed_is_read_again(made, folder):
    task = tuned(folder)
    before = frozen(task.model(HP))
    times = (folder / "model.safetensors").stat()
    changed = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    changed.save_pretrained(folder)
    # also where a program has set back the time
    os.utime(folder / "model.safetensors", ns=(times.st_atime_ns, times.st_mtime_ns))
    after = frozen(task.model(HP))
    assert len(made) == 2
    assert not all(map(torch.equal, before.values(), after.values()))
    assert stamps(folder) == stamps(folder)


@pytest.mark.parametrize("what", ["configuration", "precision", "seed"])
def test_another_configuration_is_another_base(what, made, monkeypatch):
    config = LlamaConfig(**SIZES)
    task = tuned(config)
    task.model(HP)
    if what == "configuration":
        config.rms_norm_eps = 0.5
    elif what == "seed":
        task.base_seed = 3
    else:
        monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.float64)
    task.model(HP)
    assert len(made) == 2


def test_a_base_with_code_of_the_user_is_made_for_each_model(made, monkeypatch):
    monkeypatch.setattr(_bases, "is_copyable", lambda base: False)
    task = tuned(LlamaConfig(**SIZES))
    assert not any(is_shared(p) for _ in range(2) for p in task.model(HP).parameters())
    assert len(made) == 2


def test_a_base_that_takes_much_of_the_memory_is_not_kept(made, monkeypatch):
    monkeypatch.setattr(_bases, "free_memory", lambda device: 1000.0)
    task = tuned(LlamaConfig(**SIZES))
    task.model(HP)
    task.model(HP)
    assert len(made) == 2


def test_a_base_with_views_is_not_kept():
    kept, number = KeptBase(), []

    def make():
        number.append(1)
        model = nn.Linear(4, 4)
        model.register_buffer("part", model.weight.detach()[0])
        return model, ()

    models = [kept.copy(0, make=make)[0] for _ in range(2)]
    assert len(number) == 2
    assert not any(is_shared(model.weight) for model in models)


def test_a_base_is_kept_as_long_as_its_task(made):
    task = tuned(LlamaConfig(**SIZES))
    task.model(HP)
    kept = len(_bases._MADE)
    del task
    assert len(_bases._MADE) == kept - 1
    assert len(made) == 1


def test_the_digest_of_a_base_is_computed_once_for_trials_in_turn():
    task, known = tuned(LlamaConfig(**SIZES)), FrozenTensors()
    first = known.adopt(task.model(HP))
    digests = {name: each.digest for name, each in first.items()}
    numbers = {name: each.number for name, each in first.items()}
    del first
    again = known.adopt(task.model(HP))
    assert {name: each.number for name, each in again.items()} == numbers
    assert {name: vars(each).get("digest") for name, each in again.items()} == digests
