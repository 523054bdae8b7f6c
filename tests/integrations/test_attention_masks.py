"""Masks for transformers models: what a task computes is what transformers computes itself."""

from __future__ import annotations

import math
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BartConfig,
    BertConfig,
    JambaConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MistralConfig,
    MixtralConfig,
    ModernBertConfig,
    MptConfig,
    OPTConfig,
    T5Config,
)

import thrifty as th
from tests.devices import here
from tests.pack._drive import Trial, alone, assert_same, together
from thrifty.integrations.fine_tuning import _attention_masks as masks
from thrifty.pack import BlockOptions, FusedBackend, HyperParameters


pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "max_position_embeddings": 64,
}
BART = {
    "vocab_size": 40,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "num_labels": 3,
}
HYBRID = {
    "num_experts": 2,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "mamba_d_state": 4,
    "mamba_dt_rank": 2,
    "use_mamba_kernels": False,
}
CLASSIFIERS = {
    "llama": LlamaConfig(**SIZES),
    "bert": BertConfig(**SIZES),
    "window": MistralConfig(**SIZES, sliding_window=4),
    "window_around": ModernBertConfig(**SIZES, local_attention=4),
    "encoder_decoder": BartConfig(**BART),
    "relative": T5Config(
        vocab_size=40, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
        pad_token_id=0, eos_token_id=2,
    ),
    "alibi": MptConfig(
        vocab_size=40, d_model=16, n_heads=2, n_layers=2, max_seq_len=64, pad_token_id=0
    ),
    "positions_from_masks": OPTConfig(
        vocab_size=40, hidden_size=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, word_embed_proj_dim=16, pad_token_id=0,
    ),
    "recurrent": JambaConfig(**SIZES, **HYBRID),
}  # fmt: skip
LLAMA = CLASSIFIERS["llama"]
AROUND = ModernBertConfig(**{**SIZES, "max_position_embeddings": 512}, local_attention=64)


def task_of(base, **options):
    return th.FineTune(base, adapter=th.LoRA(r=2), data=None, optimizer=None, **options)


def enlarged(model):
    """Give a model weights of a size at which each token that it sees matters."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def padded(*, side):
    """Return rows of several lengths, each of which ends with the token 2, and their mask."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 40, (4, 12), generator=generator)
    mask = (torch.arange(12) < torch.tensor([12, 7, 3, 5])[:, None]).long()
    ids[torch.arange(4), mask.sum(1) - 1] = 2
    if side == "left":
        mask = mask.flip(1)
        ids[:, -1] = 2
        ids[:, :-1][ids[:, :-1] == 2] = 3
    return ids * mask, mask


def classifier(config):
    config = deepcopy(config)
    config.num_labels = 3
    if config.model_type == "t5":
        config.decoder_start_token_id = 0
    return AutoModelForSequenceClassification.from_config(config)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classifiers_see_what_transformers_lets_them_see(name, side):
    model = enlarged(classifier(CLASSIFIERS[name]))
    ids, mask = padded(side=side)
    with torch.no_grad():
        wanted = model(input_ids=ids, attention_mask=mask).logits
        found = task_of(CLASSIFIERS[name], kind="classification")._logits(model, ids, mask)
    assert torch.allclose(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "form", "longest"),
    [
        ("llama", "left", float("inf")),
        ("bert", "all", float("inf")),
        ("window", "left", 4),
        ("encoder_decoder", "all", float("inf")),
        ("recurrent", "plain", float("inf")),
    ],
)
def test_masks_are_measured_with_fresh_weights(name, form, longest):
    """Fresh weights are so small that rounding would hide what a token sees."""
    masks._measured.clear()
    found = masks.masks_of(classifier(CLASSIFIERS[name]), kind="classification", is_packed=False)
    assert found == masks.Masks(form, longest)


def test_a_new_head_of_zeros_hides_nothing():
    model = classifier(CLASSIFIERS["recurrent"])
    torch.nn.init.zeros_(model.score.weight)
    masks._measured.clear()
    assert masks.masks_of(model, kind="classification", is_packed=False).form == "plain"


@pytest.mark.parametrize("small", [20_000_000, 0], ids=["other weights", "own weights"])
@pytest.mark.parametrize("window", [4, 4096], ids=["short", "long"])
def test_windows_longer_than_rows_change_nothing(monkeypatch, small, window):
    monkeypatch.setattr(masks, "_SMALL", small)
    masks._measured.clear()
    sizes = {**SIZES, "max_position_embeddings": 8192}
    model = enlarged(
        AutoModelForCausalLM.from_config(MistralConfig(**sizes, sliding_window=window))
    )
    assert masks.masks_of(model, kind="causal", is_packed=True) == masks.Masks("left", window)


@pytest.mark.parametrize(("most", "longest"), [(600, 32), (12, 16)], ids=["short", "long"])
def test_windows_around_a_token(monkeypatch, most, longest):
    """A window that is too long to be measured may count both sides of a token."""
    monkeypatch.setattr(masks, "_LONGEST", most)
    masks._measured.clear()
    found = masks.masks_of(classifier(AROUND), kind="classification", is_packed=False)
    assert found == masks.Masks("all", longest)


def test_measuring_changes_nothing():
    model = classifier(CLASSIFIERS["window_around"]).train()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    config, stream = model.config.to_json_string(), torch.get_rng_state()
    masks._measured.clear()
    masks.masks_of(model, kind="classification", is_packed=False)
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(torch.equal(model.state_dict()[name], t) for name, t in before.items())
    assert all(module.training for module in model.modules())
    assert model.config.to_json_string() == config
    assert all(p.grad is None for p in model.parameters())


def test_a_model_is_measured_once(monkeypatch):
    made = []

    class Counted(masks._Probe):
        def __init__(self, base):
            made.append(base)
            super().__init__(base)

    monkeypatch.setattr(masks, "_Probe", Counted)
    masks._measured.clear()
    for rank in (2, 4):
        task = th.FineTune(LLAMA, adapter=th.LoRA(r=rank), data=None, optimizer=None)
        model = task.model(HyperParameters({}))
        task.loss(model, (torch.ones(2, 4, dtype=torch.long),))
    assert len(made) == 1
    assert not hasattr(task.__thrifty_finished__(model), masks.HELD_AS)


def test_sequences_of_a_row_need_a_model_that_keeps_them_apart():
    config = JambaConfig(**SIZES, **HYBRID)
    with pytest.raises(
        th.TaskError, match=r"JambaForCausalLM has other results .* leave packed out"
    ):
        task_of(config, packed=True).model(HyperParameters({}))


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_large_models_are_measured_with_their_own_weights(monkeypatch, precision):
    monkeypatch.setattr(masks, "_SMALL", 0)
    masks._measured.clear()
    for config in (LLAMA, CLASSIFIERS["recurrent"]):
        model = enlarged(AutoModelForCausalLM.from_config(config)).to(precision)
        task = task_of(lambda hp, model=model: model, packed=True)
        if config is LLAMA:
            assert getattr(task.model(HyperParameters({})), masks.HELD_AS)[-1] == masks.Masks(
                "left"
            )
        else:
            with pytest.raises(th.TaskError, match="JambaForCausalLM has other results"):
                task.model(HyperParameters({}))


class Plain(torch.nn.Module):
    """A model that is not one of transformers."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(40, 8)
        self.q_proj = torch.nn.Linear(8, 40)

    def forward(self, input_ids, attention_mask=None, use_cache=False):
        hidden = self.embed(input_ids)
        if attention_mask is not None:
            hidden = (hidden * attention_mask[..., None]).sum(1)
        return SimpleNamespace(logits=self.q_proj(hidden))


def test_models_of_others_are_taken_as_they_are():
    ids, mask = padded(side="right")
    model, other = Plain(), Plain()
    other.load_state_dict(model.state_dict())
    assert torch.equal(task_of(LLAMA)._logits(model, ids, None), model(ids).logits)
    task = task_of(LLAMA, kind="classification")
    assert torch.equal(task._logits(other, ids, mask), model(ids, mask).logits)


def test_packed_rows_are_no_longer_than_a_window():
    task = task_of(MistralConfig(**SIZES, sliding_window=8), packed=True)
    model = task.model(HyperParameters({}))
    sequences = [[5, 6, 7, 8, 9], [3, 4, 5, 6], [7, 8, 9, 3]]
    assert task.loss(model, th.pack_tokens(sequences, length=8)).isfinite()
    with pytest.raises(th.TaskError, match=r"rows have 13 tokens.*give pack_tokens\(length=8\)"):
        task.loss(model, th.pack_tokens(sequences, length=13))


def test_models_that_see_later_tokens_are_not_trained_to_predict_them():
    with pytest.raises(th.TaskError, match="BertLMHeadModel sees later tokens"):
        task_of(BertConfig(**SIZES)).model(HyperParameters({}))
    task = task_of(BertConfig(**SIZES, is_decoder=True))
    ids = torch.arange(3, 11)[None]
    assert task.loss(task.model(HyperParameters({})), (ids,)).isfinite()


EXPERTS = MixtralConfig(
    vocab_size=60, hidden_size=64, intermediate_size=96, num_hidden_layers=24,
    num_attention_heads=4, num_key_value_heads=2, pad_token_id=0,
    num_local_experts=8, num_experts_per_tok=2,
)  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
def test_experts_that_round_differently_beside_another_token_see_no_later_ones(packed):
    found = masks.masks_of(
        AutoModelForCausalLM.from_config(EXPERTS), kind="causal", is_packed=packed
    )
    assert found == masks.Masks("left")


def test_rounding_hides_no_later_token(monkeypatch):
    """What a token adds may be as small as rounding: then gradients tell."""
    monkeypatch.setattr(masks, "_TOLERANCE", math.inf)
    with pytest.raises(th.TaskError, match="BertLMHeadModel sees later tokens"):
        task_of(BertConfig(**SIZES, num_labels=2)).model(HyperParameters({}))
    unknown = WithoutTable(LLAMA)
    monkeypatch.setattr(masks, "_ULPS", -1)
    with pytest.raises(th.TaskError, match="WithoutTable sees later tokens"):
        masks.masks_of(unknown, kind="causal", is_packed=False)


class WithoutTable(LlamaForCausalLM):
    """A model that does not say where its embeddings are."""

    def get_input_embeddings(self):
        raise NotImplementedError


class WithoutLogits(LlamaForCausalLM):
    """A model whose rows fail when they are measured."""

    def forward(self, *args, **kwargs):
        raise RuntimeError("too short")


def test_a_model_that_cannot_be_measured_fails_when_it_is_trained():
    task = task_of(lambda hp: WithoutLogits(LLAMA))
    model = task.model(HyperParameters({}))
    with pytest.raises(RuntimeError, match="too short"):
        task.loss(model, (torch.ones(1, 4, dtype=torch.long),))


class OutOfMemory(LlamaForCausalLM):
    """A model for which there is no memory."""

    def forward(self, *args, **kwargs):
        raise torch.OutOfMemoryError("no memory")


def test_memory_that_runs_out_is_no_finding():
    with pytest.raises(torch.OutOfMemoryError):
        task_of(lambda hp: OutOfMemory(LLAMA)).model(HyperParameters({}))


class Refusing(LlamaForSequenceClassification):
    """A model that wants masks of two dimensions."""

    def forward(self, *args, attention_mask=None, **kwargs):
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ValueError("expected two dimensions")
        return super().forward(*args, attention_mask=attention_mask, **kwargs)


def test_a_model_of_the_users_own_task_is_measured_when_it_is_used():
    class Own(th.FineTune):
        def model(self, hp):
            return Refusing(LLAMA)

    task = Own(LLAMA, adapter=th.LoRA(), data=None, optimizer=None, kind="classification")
    model = task.model(HyperParameters({}))
    ids, mask = padded(side="right")
    assert torch.equal(task._logits(model, ids, mask), model(ids, attention_mask=mask).logits)


def test_causal_rows_are_padded_on_the_right():
    task = task_of(LLAMA)
    model = task.model(HyperParameters({}))
    ids, mask = padded(side="right")
    assert task.loss(model, (ids, mask, ids.masked_fill(mask == 0, -100))).isfinite()
    ids, mask = padded(side="left")
    with pytest.raises(th.TaskError, match="row 1 has padding before tokens"):
        task.loss(model, (ids, mask, ids))
    data = th.ArrayData(train=(ids[:1], mask[:1], ids[:1]), valid=(ids, mask, ids))
    task = th.FineTune(LLAMA, adapter=th.LoRA(), data=data, optimizer=None)
    with pytest.raises(th.TaskError, match="row 1 has padding before tokens"):
        task.data(HyperParameters({}))


def test_padding_on_the_right_is_as_good_as_a_mask():
    model = enlarged(LlamaForCausalLM(LLAMA))
    ids, mask = padded(side="right")
    with torch.no_grad():
        wanted = model(input_ids=ids, attention_mask=mask).logits[mask.bool()]
        found = task_of(LLAMA)._logits(model, ids, mask)[mask.bool()]
    assert torch.allclose(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("config", "kind", "target"),
    [
        (CLASSIFIERS["window"], "classification", "q_proj"),
        (AROUND, "classification", "Wqkv"),
        (LLAMA, "causal", "q_proj"),
    ],
    ids=["window", "window_around", "causal"],
)
def test_packs_of_models_with_masks(config, kind, target):
    """Trials have the same results in a pack and alone, whatever masks the model takes."""
    ids, mask = padded(side="right")
    labels = ids.masked_fill(mask == 0, -100) if kind == "causal" else ids[:, 0] % 3
    parts = (ids, mask, labels)

    class InDouble(th.FineTune):
        def model(self, hp):
            return super().model(hp).double()

    task = InDouble(
        config,
        adapter=th.LoRA(r=2, alpha="alpha", targets=(target,)),
        data=th.ArrayData(train=parts, valid=parts),
        optimizer=th.AdamW(lr=0.01),
        kind=kind,
        num_labels=3,
        batch_size=4,
    )
    of = [Trial(config={"alpha": alpha}, epochs=2) for alpha in (8, 2)]
    backend = FusedBackend(task, device=here(), block=BlockOptions(size=2))
    found, wanted = together(backend, of), alone(task, of)
    for result in (*found, *wanted):
        assert result.error is None
        for metrics in result.metrics:
            metrics.pop("train_loss")  # it is summed in the precision of the block
    assert_same(found, wanted, tolerance=1e-10)
