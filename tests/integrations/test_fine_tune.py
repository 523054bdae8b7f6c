"""Fine-tuning: adapters in a pack equal adapters that peft trains alone over the same base."""

from __future__ import annotations

import json
import math
from copy import deepcopy
from dataclasses import replace

import peft
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import (
    BartConfig,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BloomConfig,
    DistilBertConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    XLNetConfig,
    XLNetForSequenceClassification,
)

import thrifty as th
from tests.devices import here
from tests.pack._drive import Trial, alone, assert_same, together
from thrifty.cli._export import _write_adapter
from thrifty.core import TaskError, derive_seed, step_seed
from thrifty.integrations.fine_tuning._lora import trained_whole
from thrifty.integrations.fine_tuning._token_losses import accuracy_of_tokens, loss_of_tokens
from thrifty.pack import BlockOptions, FusedBackend, HyperParameters, TrialInputs, UnfusableError
from thrifty.pack._state import unpack_state
from thrifty.pack.fused._dry_run import dry_run
from thrifty.pack.task._data import epoch_order
from thrifty.study import _forecast
from thrifty.testing import LineTask


pytestmark = [
    pytest.mark.slow,
    # peft 0.21 asks transformers 5.23 for an attribute by its old name
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.usefixtures("device"),
]

VOCABULARY = 30
SMALL = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=32,
)
SMALL_BERT = BertConfig(
    vocab_size=VOCABULARY,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=32,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
LORA = th.LoRA(r="rank", alpha="alpha", targets=("q_proj", "v_proj"), layers=(1,))


def tokens(num, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (num, 8), generator=generator)


def sentences(hp):
    return th.ArrayData(train=(tokens(20, 0),), valid=(tokens(6, 1),))


class InDouble(th.FineTune):
    def model(self, hp):
        return super().model(hp).double()


def llama(*, base=SMALL, **changes):
    options = {"adapter": LORA, "data": sentences, "optimizer": th.AdamW(lr="lr"), "batch_size": 8}
    return InDouble(base, **{**options, **changes})


def trials(*configs, epochs=2):
    return [
        Trial(config={"lr": 0.02 / (k + 1), "rank": 2, "alpha": 8, **config}, epochs=epochs)
        for k, config in enumerate(configs)
    ]


def packed(task, of):
    backend = FusedBackend(task, device=here(), block=BlockOptions(size=8))
    found = together(backend, of)
    assert all(result.error is None for result in found)
    return found


def check_packed(task, of):
    """Check that adapters in a pack equal those that are trained alone."""
    found, wanted = packed(task, of), alone(task, of)
    for result in (*found, *wanted):
        for metrics in result.metrics:
            metrics.pop("train_loss")  # it is summed in the precision of the block
    assert_same(found, wanted, tolerance=1e-10)


def by_peft(config, *, epochs, seed=0):
    """Train an adapter by peft and plain PyTorch; return its weights after each epoch."""
    torch.manual_seed(0)
    base = LlamaForCausalLM(SMALL)
    torch.manual_seed(derive_seed(seed, "model"))
    model = (
        peft
        .get_peft_model(
            base,
            peft.LoraConfig(
                r=config["rank"],
                lora_alpha=config["alpha"],
                target_modules=["q_proj", "v_proj"],
                layers_to_transform=[1],
                lora_dropout=config.get("drop", 0.0),
                task_type="CAUSAL_LM",
            ),
        )
        .double()
        .to(here())
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    ids = tokens(20, 0).to(here())
    for epoch in range(epochs):
        model.train()
        order = epoch_order(20, seed=seed, epoch=epoch)
        for step, rows in enumerate(order.split(8)):
            torch.manual_seed(step_seed(derive_seed(seed, "epoch", epoch), step))
            batch = ids[rows]
            optimizer.zero_grad()
            logits = model(input_ids=batch, use_cache=False).logits[:, :-1]
            F.cross_entropy(logits.reshape(-1, VOCABULARY), batch[:, 1:].reshape(-1)).backward()
            optimizer.step()
    return {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("rank", [0, -1, 2.0, True])
def test_a_rank_below_1_is_refused(rank):
    with pytest.raises(TaskError, match="LoRA: r must be a whole number of at least 1, got "):
        th.LoRA(r=rank)
    with pytest.raises(TaskError, match="LoRA: r must be a whole number of at least 1, got "):
        th.LoRA(r="rank").config({"rank": rank}, kind="causal")


def test_packed_adapters_equal_those_of_peft():
    of = trials({}, {"alpha": 2}, {"rank": 4, "alpha": 4})
    for trial, result in zip(of, packed(llama(), of), strict=True):
        wanted = by_peft(trial.config, epochs=2)
        held = unpack_state(result.state)["model"]
        assert wanted.keys() <= held.keys()
        for name, tensor in wanted.items():
            assert torch.allclose(held[name], tensor, rtol=0, atol=1e-10), name


def test_factors_of_adapters_are_packed_together():
    task = llama()
    backend = FusedBackend(task, device=here(), block=BlockOptions(size=8))
    of = trials({}, {"alpha": 2}, {"rank": 2, "alpha": 32})
    for slot, trial in enumerate(of):
        backend.put(slot, trial.member)
    (block,) = {id(each): each for each in backend.blocks.home.values()}.values()
    assert len(block.structure.numbers) == 2, "one for each adapter of a trial"
    assert not {name for name in block.structure.frozen if name not in block.structure.held}


def test_ranks_come_in_any_order():
    ranks = (2, 4, 1)
    of = trials(*({"rank": rank, "alpha": 2 * rank} for rank in ranks))
    backend = FusedBackend(llama(), device=here(), block=BlockOptions(size=8))
    for slot, trial in enumerate(of):
        backend.put(slot, trial.member)
    assert len({id(block) for block in backend.blocks.home.values()}) == 1
    check_packed(llama(), of)


def test_one_dry_run_for_adapters_that_fit_into_wider_ones(monkeypatch):
    """Neither ranks below a tested one nor factors take another dry run."""
    tested = []

    def counted(*args, **kwargs):
        tested.append(args)
        return dry_run(*args, **kwargs)

    monkeypatch.setattr("thrifty.pack.backends._dry_runs.dry_run", counted)
    backend = FusedBackend(llama(), device=here(), block=BlockOptions(size=8))
    of = trials({"rank": 4}, {"rank": 2, "alpha": 3}, {"rank": 4, "alpha": 1}, {"rank": 3})
    for slot, trial in enumerate(of):
        backend.put(slot, trial.member)
    assert len(tested) == 1
    assert len({id(block) for block in backend.blocks.home.values()}) == 1
    backend.put(len(of), trials({"rank": 5})[0].member)
    assert len(tested) == 2
    check_packed(llama(), of)
    backend.dry_runs.clear()  # a value that code reads has changed, so no finding counts any more
    tested.clear()
    member = trials({"rank": 3})[0].member
    backend.dry_runs.structure(backend.prepare(member), member.values)
    assert len(tested) == 1


def test_adapters_over_a_base_in_single_precision_are_in_one_pack():
    """The base stays in single precision while the rest is compared in double."""
    task = th.FineTune(
        SMALL, adapter=LORA, data=sentences, optimizer=th.AdamW(lr="lr"), batch_size=8
    )
    of = trials({"rank": 2}, {"rank": 4, "alpha": 2}, {"rank": 1})
    assert num_blocks(task, of) == 1
    found, wanted = packed(task, of), alone(task, of)
    assert_same(found, wanted, tolerance=1e-4)


class Insisting(LlamaForCausalLM):
    """A base whose code refuses another precision than that of the adapters."""

    def forward(self, *args, **kwargs):
        adapter = self.model.layers[1].self_attn.q_proj.lora_A.default.weight
        if adapter.dtype != self.lm_head.weight.dtype:
            raise RuntimeError("the base and its adapters differ in precision")
        return super().forward(*args, **kwargs)


def insisting(hp):
    torch.manual_seed(0)
    return Insisting(SMALL)


def test_code_that_insists_on_equal_precisions_is_in_one_pack():
    task = th.FineTune(
        insisting, adapter=LORA, data=sentences, optimizer=th.AdamW(lr="lr"), batch_size=8
    )
    assert num_blocks(task, trials({"rank": 2}, {"rank": 4, "alpha": 2}, {"rank": 1})) == 1


def tied(hp):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SMALL.to_dict(), "tie_word_embeddings": True}))


def checkpointed(hp):
    torch.manual_seed(0)
    model = LlamaForCausalLM(SMALL)
    # transformers 5 has renamed it
    named = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    next(getattr(model, name) for name in named if hasattr(model, name))()
    return model


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize("targets", [("q_proj", "lm_head"), ("q_proj", "embed_tokens")])
def test_adapters_on_tied_weights(targets):
    adapter = th.LoRA(r="rank", alpha="alpha", targets=targets)
    check_packed(llama(base=tied, adapter=adapter), trials({}, {"alpha": 2}))


EVERY = ("q_proj", "k_proj", "v_proj", "o_proj")
CHOSEN = th.LoRA(r="rank", alpha="alpha", targets="targets", dropout="drop", all_targets=EVERY)
IN_ALL = {"targets": EVERY, "drop": 0.0}
IN_TWO = {"targets": ("q_proj", "v_proj"), "drop": 0.0}


def num_blocks(task, of):
    backend = FusedBackend(task, device=here(), block=BlockOptions(size=8))
    for slot, trial in enumerate(of):
        backend.put(slot, trial.member)
    return len({id(home) for home in backend.blocks.home.values()})


@pytest.mark.sample(1)
@pytest.mark.parametrize("order", [[IN_ALL, IN_TWO, IN_TWO], [IN_TWO, IN_ALL, IN_TWO]])
def test_adapters_on_different_layers_are_in_one_pack(order):
    of = trials(*({**each, "rank": 4 if each is IN_ALL else 2} for each in order))
    task = llama(adapter=CHOSEN)
    assert num_blocks(task, of) == 1
    check_packed(task, of)


def test_adapters_that_drop_differently_on_different_layers():
    of = trials({**IN_ALL, "drop": 0.3}, {**IN_TWO, "drop": 0.1}, {**IN_TWO, "drop": 0.3})
    check_packed(llama(adapter=CHOSEN), of)


def test_blocks_of_layers_may_differ_in_a_pack():
    lora = th.LoRA(r=2, targets=("q_proj",), layers="layers", all_layers=(0, 1))
    of = trials({"layers": (0, 1)}, {"layers": (1,)})
    task = llama(adapter=lora)
    assert num_blocks(task, of) == 1
    check_packed(task, of)


@pytest.mark.parametrize("drop", [0.0, 0.3])
def test_adapters_of_rank_0_change_nothing(drop):
    config = {**IN_TWO, "drop": drop}
    plain = th.LoRA(r="rank", alpha="alpha", targets="targets", dropout="drop")
    (found,), (wanted,) = (
        alone(llama(adapter=adapter), trials(config)) for adapter in (CHOSEN, plain)
    )
    assert found.metrics == wanted.metrics
    held, own = (unpack_state(each.state)["model"] for each in (found, wanted))
    held = {n.replace(".base_layer", ""): t for n, t in held.items() if t.numel()}
    own = {n.replace(".base_layer", ""): t for n, t in own.items()}
    assert held.keys() == own.keys()
    assert all(torch.equal(held[name], tensor) for name, tensor in own.items())


def test_a_trained_model_has_no_adapters_of_rank_0():
    hp = th.HyperParameters({"rank": 2, "alpha": 8, **IN_TWO})
    torch.manual_seed(0)
    plain = th.LoRA(r="rank", alpha="alpha", targets="targets", dropout="drop")
    wanted = llama(adapter=plain).model(hp)
    torch.manual_seed(0)
    task = llama(adapter=CHOSEN)
    model = task.model(hp)
    assert any("k_proj.lora_A" in name for name in model.state_dict())
    found = task.__thrifty_finished__(model)
    assert found.state_dict().keys() == wanted.state_dict().keys()
    ids = tokens(2, 0)
    assert torch.equal(found(input_ids=ids).logits, wanted(input_ids=ids).logits)


def test_the_forecast_of_memory_knows_adapters_of_rank_0():
    hp = th.HyperParameters({"rank": 2, "alpha": 8, **IN_TWO})
    made, real = (getattr(llama(adapter=CHOSEN), name)(hp) for name in ("meta_model", "model"))
    shapes = [{n: tuple(p.shape) for n, p in each.named_parameters()} for each in (made, real)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (th.LoRA(targets="targets", all_layers=(0, 1)), "so give all_targets, too"),
        (
            th.LoRA(targets=("q_proj",), layers="layers", all_targets=("q_proj",)),
            "so give all_layers, too",
        ),
        (
            th.LoRA(targets=("q_proj", "k_proj"), all_targets=("q_proj",)),
            "k_proj gets an adapter, but all_targets and all_layers do not name it",
        ),
    ],
)
def test_lists_that_lack_something(adapter, message):
    hp = th.HyperParameters({"targets": ("q_proj",), "layers": (0,)})
    with pytest.raises(TaskError, match=message):
        llama(adapter=adapter).model(hp)


class Smoothed(th.FineTune):
    def __init__(self, base, *, smoothing, **options):
        super().__init__(base, **options)
        self.smoothing = smoothing

    def loss(self, model, batch):
        return super().loss(model, batch) * (1 - self.smoothing)


def test_attributes_of_a_subclass_and_options_set_on_a_task_are_part_of_its_identity():
    def of(smoothing, **options):
        given = {"adapter": LORA, "data": sentences, "optimizer": th.AdamW(lr="lr")}
        task = Smoothed(SMALL, smoothing=smoothing, **given)
        for name, value in options.items():
            setattr(task, name, value)
        return task.identity()

    def names(one, other):
        return {key for key in one.keys() | other.keys() if one.get(key) != other.get(key)}

    assert names(of(0.1), of(0.1)) == set()
    assert names(of(0.1), of(0.2)) == {"attribute smoothing of Smoothed"}
    changed = of(0.1, compile=True, accumulate=2)
    assert names(of(0.1), changed) == {
        "attribute compile of Smoothed",
        "attribute accumulate of Smoothed",
    }


def test_a_task_without_a_subclass_has_the_identity_of_before():
    task = th.FineTune(SMALL, adapter=LORA, data=sentences, optimizer=th.AdamW(lr="lr"))
    assert not [
        name for name in task.identity() if name.startswith("attribute ") and " of " in name
    ]


def test_databases_of_before_find_their_trials_again():
    before = llama(adapter=LORA).__thrifty_identity__()["adapter"]
    assert before.keys() == {"r", "alpha", "targets", "dropout", "layers", "rslora"}
    assert llama(adapter=CHOSEN).__thrifty_identity__()["adapter"]["all_targets"] == EVERY


def test_gradient_checkpointing_is_trained_alone():
    backend = FusedBackend(llama(base=checkpointed), device=here())
    # peft puts a hook on the inputs, so that gradients get through the frozen embedding
    with pytest.raises(UnfusableError, match="has hooks"):
        backend.put(0, trials({})[0].member)


def test_dropout_before_an_adapter():
    lora = th.LoRA(r=2, alpha="alpha", targets=("q_proj", "v_proj"), layers=(1,), dropout="drop")
    task = llama(adapter=lora)
    check_packed(task, trials({"drop": 0.1}, {"drop": 0.3, "alpha": 1}))


def test_classification_of_padded_sequences():
    def padded(hp):
        ids = tokens(20, 0)
        mask = (torch.arange(8) < 3 + ids[:, :1] % 6).long()
        return th.ArrayData(
            train=(ids, mask, ids[:, 0] % 3), valid=(ids[:6], mask[:6], ids[:6, 0] % 3)
        )

    task = InDouble(
        SMALL_BERT,
        adapter=th.LoRA(r=2, alpha="alpha", targets=("query", "value")),
        data=padded,
        optimizer=th.AdamW(lr="lr"),
        kind="classification",
        num_labels=3,
    )
    check_packed(task, trials({}, {"alpha": 2}))


GPT2 = GPT2Config(
    vocab_size=VOCABULARY,
    n_embd=16,
    n_layer=2,
    n_head=2,
    n_positions=32,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
)


def texts(num, seed):
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 9, (num,), generator=generator)
    return [torch.randint(0, VOCABULARY, (int(n),), generator=generator) for n in sizes]


def one_a_row(sequences, *, length):
    """Pack each sequence into a row of its own, the slow twin of ``pack_tokens``."""
    rows = [th.pack_tokens([each], length=length) for each in sequences]
    return tuple(torch.cat(parts) for parts in zip(*rows, strict=True))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("config", "targets"),
    [(SMALL, ("q_proj", "v_proj")), (GPT2, ("c_attn",))],
    ids=["llama", "gpt2"],
)
def test_sequences_in_one_row_equal_sequences_in_rows_of_their_own(config, targets, attention):
    config = deepcopy(config)
    config._attn_implementation = attention
    lora = th.LoRA(r=2, alpha=8, targets=targets)
    packed, padded = (
        InDouble(config, adapter=lora, data=None, optimizer=None, packed=is_packed)
        for is_packed in (True, False)
    )
    model = packed.model(HyperParameters({}))
    with torch.no_grad():  # adapters begin with zeros
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    sequences = texts(12, 3)
    found, wanted = [], []
    for task, batch in (
        (packed, th.pack_tokens(sequences, length=16)),
        (padded, one_a_row(sequences, length=8)),
    ):
        model.zero_grad()
        metrics = task.metrics(model, batch)
        task.loss(model, batch).backward()
        out = found if task is packed else wanted
        out += [metrics["loss"], metrics["accuracy"]]
        out += [p.grad.clone() for p in model.parameters() if p.requires_grad]
    assert len(found) > 4
    # transformers' eager attention of Llama computes the softmax in single precision
    tolerance = 1e-6 if (attention, config.model_type) == ("eager", "llama") else 1e-10
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=tolerance)


def test_packed_trials_of_packed_sequences():
    def rows(hp):
        return th.ArrayData(
            train=th.pack_tokens(texts(60, 0), length=16),
            valid=th.pack_tokens(texts(20, 1), length=16),
        )

    check_packed(llama(packed=True, data=rows), trials({}, {"alpha": 2}))


def test_packing_keeps_each_sequence_whole():
    sequences = texts(30, 5)
    ids, numbers, labels = th.pack_tokens(sequences, length=12)
    found = [
        row[number == k].tolist()
        for row, number in zip(ids, numbers, strict=True)
        for k in range(1, int(number.max()) + 1)
    ]
    assert sorted(found) == sorted(each.tolist() for each in sequences)
    assert ((labels == -100) == (numbers == 0)).all()
    assert len(ids) <= 1.3 * sum(map(len, sequences)) / 12
    aims = [torch.full_like(each, -100) for each in sequences]
    assert (th.pack_tokens(sequences, length=12, labels=aims)[2] == -100).all()


@pytest.mark.parametrize(
    ("sequences", "options", "said"),
    [
        ([[1, 2, 3]], {"length": 2}, "sequence 0 has 3 tokens; cut it"),
        ([[1], []], {"length": 2}, "sequence 1 has 0 tokens"),
        ([[1, 2]], {"length": 2, "labels": [[1]]}, "labels must have the lengths"),
    ],
)
def test_sequences_that_cannot_be_packed(sequences, options, said):
    with pytest.raises(th.TaskError, match=said):
        th.pack_tokens(sequences, **options)


def test_packed_sequences_need_their_numbers_and_positions():
    task = llama(packed=True)
    with pytest.raises(
        th.TaskError, match="a batch is a tuple of 2 parts; give \\(ids, numbers, labels"
    ):
        task.loss(None, (1, 2))
    with pytest.raises(th.TaskError, match="only tokens that predict the next one"):
        llama(packed=True, kind="classification")
    bloom = BloomConfig(vocab_size=30, hidden_size=16, n_layer=1, n_head=2)
    with pytest.raises(th.TaskError, match="BloomForCausalLM takes no position_ids"):
        InDouble(bloom, adapter=th.LoRA(), data=None, optimizer=None, packed=True).model(
            HyperParameters({})
        )


def test_packing_is_part_of_the_identity_only_if_it_is_asked_for():
    assert "packed" not in llama().__thrifty_identity__()
    assert llama(packed=True).identity() != llama().identity()


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("config", "targets"),
    [(SMALL, ("q_proj", "v_proj")), (GPT2, ("c_attn",)), (SMALL_BERT, ("query", "value"))],
    ids=["llama", "gpt2", "bert"],
)
def test_packed_classification(config, targets):
    def padded(hp):
        ids = tokens(20, 0) % (VOCABULARY - 1)
        mask = (torch.arange(8) < 3 + ids[:, :1] % 6).long()
        ids = torch.where(mask.bool(), ids, VOCABULARY - 1)
        labels = ids[:, 0] % 3
        return th.ArrayData(train=(ids, mask, labels), valid=(ids[:6], mask[:6], labels[:6]))

    config = deepcopy(config)
    config.pad_token_id = VOCABULARY - 1
    task = InDouble(
        config,
        adapter=th.LoRA(r=2, alpha="alpha", targets=targets),
        data=padded,
        optimizer=th.AdamW(lr="lr"),
        kind="classification",
        num_labels=3,
    )
    check_packed(task, trials({}, {"alpha": 2}))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("config", [SMALL, SMALL_BERT], ids=["llama", "bert"])
def test_a_classifier_sees_what_transformers_lets_it_see(config, attention):
    config = deepcopy(config)
    config.pad_token_id, config._attn_implementation = VOCABULARY - 1, attention
    task = InDouble(config, adapter=th.LoRA(), data=None, optimizer=None, kind="classification")
    model = task.model(HyperParameters({})).eval()
    ids = tokens(4, 0) % (VOCABULARY - 1)
    mask = (torch.arange(8) < torch.tensor([8, 5, 3, 1])[:, None]).long()
    ids = torch.where(mask.bool(), ids, VOCABULARY - 1)
    with torch.no_grad():
        wanted = model(input_ids=ids, attention_mask=mask).logits
        found = task._logits(model, ids, mask)
    assert torch.allclose(found, wanted, rtol=0, atol=1e-10)


class Labelled(InDouble):
    """Lets the model compute the loss, from which it finds out which loss that is."""

    def loss(self, model, batch):
        ids, labels = batch
        return model(input_ids=ids, labels=labels).loss


def test_a_model_that_finds_out_its_loss_is_packed():
    def labelled(hp):
        ids = tokens(20, 0)
        return th.ArrayData(train=(ids, ids[:, 0] % 3), valid=(ids[:6], ids[:6, 0] % 3))

    task = Labelled(
        SMALL_BERT,
        adapter=th.LoRA(r=2, alpha="alpha", targets=("query", "value")),
        data=labelled,
        optimizer=th.AdamW(lr="lr"),
        kind="classification",
        num_labels=3,
    )
    assert SMALL_BERT.problem_type is None
    check_packed(task, trials({}, {"alpha": 2}))
    backend = FusedBackend(task, device=here(), block=BlockOptions(size=8))
    for slot, trial in enumerate(trials({}, {"alpha": 2})):
        backend.put(slot, trial.member)
    assert len({id(each) for each in backend.blocks.home.values()}) == 1


def test_parts_of_a_batch_count_by_their_tokens():
    ids = tokens(4, 0)
    labels = ids.clone()
    labels[:2, 3:] = -100

    class InParts(InDouble):
        accumulate = 2

    options = {"adapter": LORA, "data": None, "optimizer": None}
    task = InParts(SMALL, **options)
    assert [task.loss_weight((ids[k : k + 2], labels[k : k + 2])) for k in (0, 2)] == [4.0, 14.0]
    model = task.model(HyperParameters({"rank": 2, "alpha": 8}))
    parts = [task.loss(model, (ids[k : k + 2], labels[k : k + 2])) for k in (0, 2)]
    whole = task.loss(model, (ids, labels))
    assert torch.allclose(whole, (4 * parts[0] + 14 * parts[1]) / 18, rtol=0, atol=1e-10)


def test_padding_does_not_count():
    ids = tokens(4, 0)
    labels = ids.clone()
    labels[:, 5:] = -100
    task = llama()
    model = task.model(HyperParameters({"rank": 2, "alpha": 8}))
    other = ids.clone()
    other[:, 5:] = 0
    found = [task.metrics(model, (each, labels)) for each in (ids, other)]
    assert torch.allclose(found[0]["loss"], found[1]["loss"])
    assert found[0]["accuracy"] == found[1]["accuracy"]


def test_the_base_is_the_same_for_all_seeds():
    task = llama()
    models = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        models.append(task.model(HyperParameters({"rank": 2, "alpha": 8})))
    one, other = (dict(m.named_parameters()) for m in models)
    same = {name for name in one if torch.equal(one[name], other[name])}
    assert {name for name in one if not one[name].requires_grad} <= same
    assert {name for name in one if "lora_A" in name}.isdisjoint(same)


@pytest.mark.parametrize("adapter", [LORA, replace(LORA, all_targets=EVERY, all_layers=(0, 1))])
def test_a_study_and_its_adapter(tmp_path, adapter):
    folder = tmp_path / "base"
    LlamaForCausalLM(SMALL).save_pretrained(folder)
    task = th.FineTune(folder, adapter=adapter, data=sentences, optimizer=th.AdamW(lr="lr"))
    study = th.Study(
        task,
        th.Space(
            lr=th.Choice([th.Step(0.02, [1]), th.Constant(0.02)]), rank=2, alpha=th.Choice([2, 8])
        ),
        algorithm=th.GridSearch(max_epochs=2),
        metric="loss",
        mode="min",
        storage=f"sqlite:///{tmp_path / 'studies.db'}",
        name="adapters",
    )
    study.run(progress=False, executor=th.Local(threads=1))
    assert study.savings.unique_epochs == 6
    model = study.best_trial.load_model()
    assert isinstance(model, peft.PeftModel)
    model.save_pretrained(tmp_path / "adapter")
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(written) == 4, "two factors of two layers"
    again = peft.PeftModel.from_pretrained(
        LlamaForCausalLM.from_pretrained(folder), tmp_path / "adapter"
    )
    ids = tokens(2, 5)
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)


class Averaged(th.FineTune):
    average = th.EMA(0.5)


@pytest.mark.parametrize(("metric", "chosen"), [("ema_loss", "ema"), ("loss", None)])
def test_an_exported_adapter_has_the_weights_that_the_metric_is_measured_with(
    tmp_path, metric, chosen, capsys
):
    study = th.Study(
        Averaged(SMALL, adapter=LORA, data=sentences, optimizer=th.AdamW(lr="lr")),
        th.Space(lr=0.05, rank=2, alpha=8),
        algorithm=th.GridSearch(max_epochs=2),
        metric=metric,
        mode="min",
        storage=f"sqlite:///{tmp_path / 'studies.db'}",
        name="adapters",
    )
    study.run(progress=False, executor=th.Local(threads=1))
    folders = {given: tmp_path / str(given) for given in (None, "ema", "none")}
    for given, folder in folders.items():
        _write_adapter(study, None, folder, average=given)
    said = capsys.readouterr().out.splitlines()
    assert said[0].endswith(", with the weights of ema, which ema_loss is measured with") == (
        chosen is not None
    )
    assert said[1].endswith("ema, with the weights of ema")
    assert said[2].endswith("none")
    written = {
        given: load_file(folder / "adapter_model.safetensors") for given, folder in folders.items()
    }
    for given in (None, "ema", "none"):
        average = chosen if given is None else {"ema": "ema", "none": None}[given]
        model = study.best_trial.load_model(average=average)
        own = peft.get_peft_model_state_dict(model)
        assert own.keys() == written[given].keys()
        assert all(torch.equal(own[name], written[given][name]) for name in own)
    name = next(name for name in own if "lora_B" in name)
    assert not torch.equal(written["ema"][name], written["none"][name])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": ("all-linear", "lm_head")}, r'"all-linear" is for all layers.*other targets'),
        ({"layers": (1,)}, r'"all-linear" is for all.*beside layers=\(1,\); name the layers'),
        ({"targets": ("q_proj",), "layers": ()}, r"layers must be the numbers.*or None for all"),
        ({"targets": ("q_proj",), "layers": 1}, r"layers must be the numbers.*got 1"),
        ({"targets": ("q_proj",), "layers": (-1,)}, "must be numbers of blocks from 0, got -1"),
        ({"targets": ("q_proj",), "layers": (0, 9)}, r"block 9.*has 2 blocks.*0 to 1"),
        ({"targets": ("q_proj",), "layers": "which"}, r"layers must be the numbers.*got \(\)"),
        ({"targets": ("q_proj",), "all_layers": ("1",)}, "all_layers must be numbers of blocks"),
    ],
)
def test_blocks_that_get_no_adapters_are_no_surprise(options, message):
    with pytest.raises(TaskError, match=message):
        llama(adapter=th.LoRA(r=2, **options)).model(HyperParameters({"which": ()}))


def test_all_epochs_of_a_sweep_are_packed(tmp_path):
    adapter = th.LoRA(r="rank", alpha=8, targets=("q_proj", "v_proj"), dropout="dropout")
    study = th.Study(
        th.FineTune(SMALL, adapter=adapter, data=sentences, optimizer=th.AdamW(lr="lr")),
        th.Space(rank=th.Choice([2, 4]), dropout=th.Choice([0.0, 0.1]), lr=0.01),
        algorithm=th.GridSearch(max_epochs=2),
        metric="loss",
        mode="min",
        storage=f"sqlite:///{tmp_path / 'studies.db'}",
        name="adapters",
    )
    savings = study.run(progress=False, executor=th.Local(threads=1, pack="fused")).savings
    assert savings.packed_epochs == savings.unique_epochs == 8


@pytest.mark.parametrize("is_folder", [False, True], ids=["config", "folder"])
def test_the_plan_forecasts_memory(tmp_path, is_folder, monkeypatch):
    base = SMALL
    if is_folder:
        base = tmp_path / "base"
        LlamaForCausalLM(SMALL).save_pretrained(base)
    task = th.FineTune(base, adapter=LORA, data=sentences, optimizer=th.AdamW(lr="lr"))
    study = th.Study(
        task,
        th.Space(lr=0.1, rank=th.Choice([2, 4]), alpha=8),
        algorithm=th.GridSearch(max_epochs=1),
        metric="loss",
        mode="min",
        storage="sqlite://",
        name="adapters",
    )
    memory = study.plan().memory
    real = task.model(HyperParameters({"rank": 2, "alpha": 8}))
    frozen = [p for p in real.parameters() if not p.requires_grad]
    assert memory.base_bytes == sum(t.nbytes for t in (*frozen, *real.buffers()))
    for each in memory.trials:
        adapters = sum(p.nbytes for p in real.parameters() if p.requires_grad)
        assert each.trained_bytes in (pytest.approx(4 * adapters * n, rel=0.02) for n in (1, 2)), (
            "weights, gradients and two moments"
        )
        assert each.activation_bytes
        assert 0.1 < each.shared_work < 0.7, "one of two blocks has no adapter"
    said = str(study.plan())
    assert "memory: a base of" in said
    assert "time: at least" not in said, "milliseconds say nothing"
    monkeypatch.setattr(_forecast, "flops_per_s", lambda: 1e5)
    said = str(study.plan())
    assert "time: at least" in said
    assert "GFLOP/s, measured now" in said
    assert study.plan(memory=False).memory is None


def test_a_base_that_changes_on_disk_is_another_task(tmp_path):
    folder = tmp_path / "base"
    LlamaForCausalLM(SMALL).save_pretrained(folder)
    task = th.FineTune(folder, adapter=LORA, data=sentences, optimizer=th.AdamW(lr="lr"))
    before = task.identity()
    torch.manual_seed(1)
    LlamaForCausalLM(SMALL).save_pretrained(folder)
    assert task.identity() != before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "seq2seq"}, 'kind must be "causal" or "classification", got \'seq2seq\''),
        ({"adapter": {"r": 8}}, r"adapter must be a thrifty\.LoRA\(\.\.\.\), got dict"),
    ],
)
def test_invalid_arguments(change, said):
    with pytest.raises(th.TaskError, match=said):
        llama(**change)


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        (th.LoRA(dropout=1.0), r"dropout must be in \[0, 1\), got 1.0"),
        (th.LoRA(targets=()), "targets is empty"),
        (th.LoRA(targets=("c_attn",)), "the adapters do not fit the model"),
    ],
)
def test_invalid_adapters(lora, said):
    with pytest.raises(th.TaskError, match=said):
        llama(adapter=lora).model(HyperParameters({}))


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(th.TaskError, match=r"there is no model in .* \(no config.json\)"):
        th.FineTune(tmp_path, adapter=LORA, data=sentences, optimizer=None)


def test_a_batch_of_four_parts():
    task = llama()
    with pytest.raises(th.TaskError, match="a batch is a tuple of 4 parts"):
        task.loss(None, (1, 2, 3, 4))


def test_writing_an_adapter(tmp_path):
    study = th.Study(
        th.FineTune(SMALL, adapter=LORA, data=sentences, optimizer=th.AdamW(lr="lr")),
        th.Space(lr=th.Choice([0.01, 0.02]), rank=2, alpha=8),
        algorithm=th.GridSearch(max_epochs=1),
        metric="loss",
        mode="min",
        storage=f"sqlite:///{tmp_path / 'studies.db'}",
        name="adapters",
    ).run(progress=False, executor=th.Local(threads=1))
    _write_adapter(study, 1, tmp_path / "adapter")
    names = {file.name for file in (tmp_path / "adapter").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= names
    with pytest.raises(th.UsageError, match="exists already; name a new folder"):
        _write_adapter(study, None, tmp_path / "adapter")
    with pytest.raises(th.UsageError, match="has no trial 7; it has 2"):
        _write_adapter(study, 7, tmp_path / "other")


def test_a_model_without_an_adapter(tmp_path):
    study = th.Study(
        LineTask(),
        th.Space(lr=0.1),
        algorithm=th.GridSearch(max_epochs=1),
        metric="mse",
        mode="min",
        storage="sqlite://",
        name="line",
    ).run(progress=False)
    with pytest.raises(th.UsageError, match="is a Linear, not a PeftModel, so it has no adapter"):
        _write_adapter(study, None, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


# -- what the metrics are means of -----------------------------------------------------------------


def ragged(hp=None):
    """Return rows of which one token, some, or all but one count, and one in which none does."""

    def part(num, seed):
        ids = tokens(num, seed)
        first = torch.arange(num)[:, None] % 8
        return ids, ids.masked_fill(torch.arange(8) <= first, -100)

    return th.ArrayData(train=part(16, 0), valid=part(9, 1))


@pytest.mark.parametrize("run", [alone, packed], ids=["alone", "packed"])
def test_metrics_do_not_depend_on_the_size_of_validation_batches(run):
    of = trials({}, {"alpha": 2}, epochs=1)
    found = [run(llama(data=ragged, eval_batch_size=size), of) for size in (64, 1, 4)]
    for results in found:
        for result, wanted in zip(results, found[0], strict=True):
            for name in ("loss", "accuracy"):
                (value,), (other,) = ([m[name] for m in r.metrics] for r in (result, wanted))
                assert value == pytest.approx(other, rel=1e-10)


def test_a_loss_without_a_token_that_counts():
    def nothing(hp):
        return th.ArrayData(train=ragged().train, valid=(tokens(2, 0), torch.full((2, 8), -100)))

    (result,) = alone(llama(data=nothing), trials({}, epochs=1))
    assert "nothing counts in the validation data" in str(result.error)


def classifier(config=SMALL_BERT, **changes):
    options = {
        "adapter": th.LoRA(r=2),
        "data": None,
        "optimizer": th.AdamW(lr="lr"),
        "kind": "classification",
        "num_labels": 3,
    }
    return th.FineTune(config, **{**options, **changes})


def test_the_size_of_validation_batches_belongs_to_evaluation():
    def content(**changes):
        return llama(**changes)._content()

    rows = sentences(None)
    assert content(data=rows).evaluation == {}, "as before it was written"
    assert content(data=ragged()).evaluation == {}, "one batch"
    for data in (ragged(), ragged):
        found = content(data=data, eval_batch_size=4)
        assert found.evaluation == {
            "attribute eval_batch_size": "4",
            "mean of metrics": "over tokens",
        }
        assert found.training == content(data=data).training
    assert classifier()._content().evaluation == {}
    assert classifier(eval_batch_size=4)._content().evaluation.keys() == {
        "attribute eval_batch_size"
    }


def test_what_is_trained_is_evaluated_again_with_other_batches(tmp_path):
    def study(name, **changes):
        task = llama(data=ragged(), **changes)
        space = th.Space(lr=0.01, rank=2, alpha=th.Choice([2, 8]))
        return th.Study(
            task,
            space,
            algorithm=th.GridSearch(max_epochs=1),
            metric="loss",
            mode="min",
            storage=f"sqlite:///{tmp_path / 'studies.db'}",
            name=name,
        )

    executor = th.Local(threads=1)
    first = study("first").run(progress=False, executor=executor)
    with pytest.raises(th.StudyMismatchError, match=r"its metrics have changed.*eval_batch"):
        study("first", eval_batch_size=4).run(progress=False, executor=executor)
    second = study("second", eval_batch_size=4).run(progress=False, executor=executor)
    assert second.savings.evaluated_epochs == 2
    for one, other in zip(first.trials, second.trials, strict=True):
        assert one.values["loss"] == pytest.approx(other.values["loss"], rel=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_of_a_base_in_half_precision_are_those_of_transformers(dtype):
    def half(hp):
        torch.manual_seed(0)
        return LlamaForCausalLM(SMALL).to(dtype)

    task = th.FineTune(half, adapter=th.LoRA(r=2), data=None, optimizer=None)
    model = task.model(HyperParameters({})).eval()
    ids = tokens(4, 0)
    with torch.no_grad():
        found, wanted = task.metrics(model, (ids,)), model(input_ids=ids, labels=ids)
    assert found["loss"].dtype == torch.float32
    assert torch.allclose(found["loss"], wanted.loss, rtol=1e-6)
    logits = torch.zeros(1, 70_001, 2, dtype=dtype)
    zeros = torch.zeros(1, 70_001, dtype=torch.long)
    assert accuracy_of_tokens(logits, zeros) == 1.0
    assert loss_of_tokens(logits, zeros) == pytest.approx(0.6931472)


def test_a_base_in_half_precision_is_packed(tmp_path):
    torch.manual_seed(0)
    # saving notes the precision in the configuration
    LlamaForCausalLM(deepcopy(SMALL)).to(torch.bfloat16).save_pretrained(tmp_path / "half")
    task = th.FineTune(
        tmp_path / "half", adapter=LORA, data=ragged, optimizer=th.AdamW(lr="lr"), batch_size=8
    )
    of = trials({}, {"alpha": 2}, {"alpha": 32})
    assert num_blocks(task, of) == 1
    found, wanted = packed(task, of), alone(task, of)
    assert_same(found, wanted, tolerance=1e-4)
    assert len({result.metrics[-1]["loss"] for result in found}) == 3


class Mixed(InDouble):
    precision = "bf16-mixed"


def test_only_what_is_in_half_precision_is_trained_anew():
    half = deepcopy(SMALL)
    half.torch_dtype = torch.float16
    options = {"adapter": LORA, "data": sentences, "optimizer": None}
    for task in (Mixed(SMALL, **options), InDouble(half, **options)):
        assert "rules" in task._content().training
    assert "rules" in InDouble(lambda hp: LlamaForCausalLM(half), **options)._content().training
    assert "rules" not in InDouble(SMALL, **options)._content().training


def test_masks_and_heads_of_earlier_versions_are_not_taken_for_those_of_today():
    assert "rules" in classifier()._content().training
    assert "rules" in llama(packed=True)._content().training
    assert "rules" in llama(adapter=th.LoRA(r=2, rslora="named"))._content().training
    assert "rules" not in llama()._content().training


# -- labels and heads ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (torch.zeros(2, 3), r"got float32 of shape \(2, 3\)"),
        (torch.zeros(2), r"got float32 of shape \(2,\)"),
        (torch.zeros(2, 1, dtype=torch.long), r"got int64 of shape \(2, 1\)"),
        (torch.zeros(2, dtype=torch.bool), r"got bool of shape \(2,\)"),
    ],
)
def test_labels_that_are_no_classes(labels, said):
    task = classifier()
    model = task.model(HyperParameters({}))
    for method in (task.loss, task.metrics):
        with pytest.raises(TaskError, match=said + ".*subclass thrifty.FineTune"):
            method(model, (tokens(2, 0), labels))


class Regression(th.FineTune):
    def loss(self, model, batch):
        ids, wanted = batch
        return (model(input_ids=ids).logits[:, 0] - wanted).square().mean()


def test_one_class_is_refused_unless_the_loss_is_another():
    with pytest.raises(TaskError, match="num_labels must be a whole number of at least 2, got 1"):
        classifier(num_labels=1)
    task = Regression(
        SMALL_BERT,
        adapter=th.LoRA(r=2),
        data=None,
        optimizer=None,
        kind="classification",
        num_labels=1,
    )
    model = task.model(HyperParameters({}))
    assert task.loss(model, (tokens(2, 0), torch.zeros(2))).isfinite()
    with pytest.raises(TaskError, match="num_labels must be a whole number of at least 2, got 1"):
        task.metrics(model, (tokens(2, 0), torch.zeros(2, dtype=torch.long)))


BART = BartConfig(
    vocab_size=VOCABULARY,
    d_model=16,
    encoder_layers=1,
    decoder_layers=1,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    encoder_ffn_dim=24,
    decoder_ffn_dim=24,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
XLNET = XLNetConfig(
    vocab_size=VOCABULARY, d_model=16, n_layer=2, n_head=2, d_inner=24, pad_token_id=0
)
DISTILBERT = DistilBertConfig(vocab_size=VOCABULARY, dim=16, hidden_dim=24, n_layers=2, n_heads=2)


def trained(model):
    """Return the modules that a trial trains whole, and those that have an adapter."""
    names = [n.removeprefix("base_model.model.") for n, p in model.named_parameters()]
    whole = {n.partition(".modules_to_save")[0] for n in names if ".modules_to_save" in n}
    return whole, {n.partition(".lora_A")[0] for n in names if ".lora_A" in n}


@pytest.mark.parametrize(
    ("config", "heads"),
    [
        (BART, {"classification_head"}),
        (XLNET, {"sequence_summary", "logits_proj"}),
        (SMALL_BERT, {"classifier"}),
    ],
    ids=["bart", "xlnet", "bert"],
)
def test_heads_of_any_name_are_trained(config, heads):
    task = classifier(config)
    for model in (task.model(HyperParameters({})), task.meta_model(HyperParameters({}))):
        whole, layers = trained(model)
        assert whole == heads
        assert layers
        assert not any(layer.startswith(tuple(heads)) for layer in layers)


@pytest.mark.skipif(
    "exclude_modules" not in peft.LoraConfig.__dataclass_fields__, reason="an older peft"
)
@pytest.mark.parametrize("targets", ["all-linear", ("all-linear",)])
def test_all_layers_but_those_that_are_trained_whole(targets):
    task = classifier(DISTILBERT, adapter=th.LoRA(r=2, targets=targets))
    whole, layers = trained(task.model(HyperParameters({})))
    assert whole == {"pre_classifier", "classifier"}
    assert len(layers) == 12
    assert not layers & whole


def test_what_a_folder_lacks_is_trained_and_exported(tmp_path):
    folder = tmp_path / "base"
    BertForMaskedLM(SMALL_BERT).save_pretrained(folder)

    def labelled(hp):
        ids = tokens(20, 0)
        return th.ArrayData(train=(ids, ids[:, 0] % 3), valid=(ids[:6], ids[:6, 0] % 3))

    task = classifier(folder, data=labelled, adapter=th.LoRA(r=2, targets=("query",)))
    assert trained(task.meta_model(HyperParameters({})))[0] == {"bert.pooler.dense", "classifier"}
    study = th.Study(
        task,
        th.Space(lr=0.01),
        algorithm=th.GridSearch(max_epochs=1),
        metric="loss",
        mode="min",
        storage=f"sqlite:///{tmp_path / 'studies.db'}",
        name="heads",
    ).run(progress=False, executor=th.Local(threads=1))
    _write_adapter(study, None, tmp_path / "adapter")
    torch.manual_seed(7)  # another pooler, until the adapter brings its own
    base = BertForSequenceClassification.from_pretrained(folder, num_labels=3)
    again = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    ids = tokens(4, 5)
    with torch.no_grad():
        wanted = study.best_trial.load_model()(input_ids=ids).logits
        assert torch.equal(again(input_ids=ids).logits, wanted)


def test_a_parameter_that_cannot_be_trained_is_said():
    base = XLNetForSequenceClassification(XLNET)
    with pytest.warns(UserWarning, match=r"stays random .* lacks it: transformer\.mask_emb"):
        found = trained_whole(base, classifies=True, missing=["transformer.mask_emb"])
    assert found == ["logits_proj", "sequence_summary"]


def test_a_classifier_that_needs_padding():
    config = deepcopy(SMALL)
    with pytest.raises(TaskError, match="names no pad_token_id; set it there"):
        classifier(config).model(HyperParameters({}))
    config.pad_token_id = 0
    assert trained(classifier(config).model(HyperParameters({})))[0] == {"score"}


# -- what is given wrongly -------------------------------------------------------------------------


def test_a_model_is_not_a_base():
    with pytest.raises(TaskError, match=r"model is a LlamaForCausalLM.*copy\.deepcopy"):
        llama(base=LlamaForCausalLM(SMALL))


@pytest.mark.parametrize("rs", [True, False])
def test_rslora_may_be_a_hyperparameter(rs):
    lora = th.LoRA(r=4, rslora="rs")
    assert lora.config({"rs": rs}, kind="causal").use_rslora is rs


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        (th.LoRA(rslora="rs"), "rslora must be True or False, got 'yes'"),
        (
            th.LoRA(targets=".*q_proj"),
            r"targets='\.\*q_proj' is taken for the name of a .*\(there are: rs\); .* give a tuple",
        ),
        (th.LoRA(r="rank"), "r='rank' is taken for the name .* or give a value"),
        (th.LoRA(rslora="scaled"), "or give True or False"),
    ],
)
def test_texts_that_name_no_hyperparameter(lora, said):
    with pytest.raises(TaskError, match=said):
        lora.config({"rs": "yes"}, kind="causal")


def test_exporting_over_another_base_is_said(tmp_path, capsys):
    folder = tmp_path / "base"
    LlamaForCausalLM(SMALL).save_pretrained(folder)
    study = th.Study(
        th.FineTune(folder, adapter=LORA, data=sentences, optimizer=th.AdamW(lr="lr")),
        th.Space(lr=0.01, rank=2, alpha=8),
        algorithm=th.GridSearch(max_epochs=1),
        metric="loss",
        mode="min",
        storage=f"sqlite:///{tmp_path / 'studies.db'}",
        name="adapters",
    ).run(progress=False, executor=th.Local(threads=1))
    _write_adapter(study, None, tmp_path / "one")
    assert "warning" not in capsys.readouterr().err
    torch.manual_seed(1)
    LlamaForCausalLM(SMALL).save_pretrained(folder)
    _write_adapter(study, None, tmp_path / "other")
    assert "files of the base model have changed" in capsys.readouterr().err


class OfClass(th.FineTune):
    batch_size = 20
    num_labels = 3
    kind = "classification"
    version = "data of May"

    def optimizer(self, hp):
        return th.SGD(lr="lr")


def test_a_subclass_may_set_options_as_attributes_and_those_that_are_given_come_first():
    task = OfClass(SMALL, adapter=LORA, data=sentences)
    assert (task.batch_size, task.num_labels, task.kind) == (20, 3, "classification")
    assert task.version == "data of May"
    assert task.optimizer.__func__ is OfClass.optimizer
    assert task.eval_batch_size == 64
    # 8 is the default of FineTune, but not what the class says
    other = OfClass(SMALL, adapter=LORA, data=sentences, batch_size=8, version="data of June")
    assert (other.batch_size, other.num_labels, other.version) == (8, 3, "data of June")
    assert task.identity() != other.identity()


def test_what_a_subclass_sets_without_effect_or_twice_is_refused():
    with pytest.raises(TaskError, match="OfClass defines an optimizer, and one is given"):
        OfClass(SMALL, adapter=LORA, data=sentences, optimizer=th.SGD(lr="lr"))

    class Packed(th.FineTune):
        packed = True

    with pytest.raises(TaskError, match=r"Packed\.packed is set in the class, which has no effect"):
        Packed(SMALL, adapter=LORA, data=sentences)


def test_a_number_of_labels_that_a_subclass_sets_is_checked():
    class TooFew(OfClass):
        num_labels = 1

    with pytest.raises(TaskError, match="num_labels"):
        TooFew(SMALL, adapter=LORA, data=sentences)


# -- batches that are taken for something else ---------------------------------------------------


def test_labels_that_count_at_padding_are_refused():
    ids, mask = tokens(4, 0), torch.ones(4, 8, dtype=torch.long)
    mask[1, 6:] = 0
    labels = ids.clone()
    given = th.ArrayData(train=(ids, mask, labels), valid=(ids, mask, labels))
    message = r"row 1 has labels that count at its padding.*labels\[mask == 0\] = -100"
    task = llama(data=given)
    with pytest.raises(TaskError, match=message):
        task.data(HyperParameters({}))
    model = task.model(HyperParameters({"rank": 2, "alpha": 4}))
    with pytest.raises(TaskError, match=message):
        task.loss(model, (ids, mask, labels))
    labels[mask == 0] = -100
    task.data(HyperParameters({}))
    assert task.loss(model, (ids, mask, labels)).isfinite()


def test_a_mask_in_the_place_of_labels_and_labels_that_are_shifted_already_are_refused(tmp_path):
    mask = torch.ones(4, 8, dtype=torch.long)
    pairs = th.ArrayData(train=(tokens(4, 0), mask), valid=(tokens(4, 0), mask))
    with pytest.raises(TaskError, match=r"is 0 and 1 only.*give \(ids, mask, labels\)"):
        llama(data=pairs).data(HyperParameters({}))
    bits = th.ArrayData(train=(mask, mask), valid=(mask, mask))
    assert llama(data=bits).data(HyperParameters({})) is bits
    task = llama()
    model = task.model(HyperParameters({"rank": 2, "alpha": 4}))
    with pytest.raises(TaskError, match=r"is 0 and 1 only.*give \(ids, mask, labels\)"):
        task.loss(model, (tokens(4, 0), mask))
    assert task.loss(model, (tokens(4, 0), torch.where(mask == 1, -100, mask))) == 0
    tokens(8, 0).flatten().to(torch.uint16).numpy().tofile(tmp_path / "tokens.bin")
    file = th.TokenFile(tmp_path / "tokens.bin", block_size=8, num_valid=2)
    with pytest.raises(TaskError, match="labels of a TokenFile are shifted by one token"):
        llama(data=file).data(HyperParameters({}))


class OfDicts(th.FineTune):
    """A loss of the user's own over batches that are dicts, as transformers' models take them."""

    def loss(self, model, batch):
        return model(**batch).loss

    def metrics(self, model, batch):
        return {"loss": model(**batch).loss}


class OfPairs(th.FineTune):
    """A loss of the user's own over pairs of answers."""

    def loss(self, model, batch):
        better, worse, *_ = batch
        return F.softplus(model(worse).logits.mean() - model(better).logits.mean())

    def metrics(self, model, batch):
        return {"loss": self.loss(model, batch)}


class Named(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        row = tokens(8, 3)[index]
        return {"input_ids": row, "labels": row}


FOUR = tuple(tokens(8, seed) for seed in range(4))
OWN_BATCHES = {
    "dicts": (OfDicts, th.DatasetPair(train=Named(), valid=Named())),
    "pairs": (OfPairs, th.ArrayData(train=FOUR, valid=FOUR)),
}


@pytest.mark.parametrize("name", OWN_BATCHES)
def test_a_loss_of_ones_own_may_have_batches_of_any_kind(name, tmp_path):
    kind, data = OWN_BATCHES[name]
    options = {"adapter": LORA, "data": data, "optimizer": th.AdamW(lr="lr"), "batch_size": 4}
    study = th.Study(
        kind(SMALL, **options),
        th.Space(lr=th.Choice([0.01, 0.02]), rank=2, alpha=4),
        algorithm=th.GridSearch(max_epochs=1),
        metric="loss",
        mode="min",
        name=name,
        storage=f"sqlite:///{tmp_path}/own.db",
    )
    study.run(progress=False)
    assert [trial.state for trial in study.trials] == ["done"] * 2


def test_batches_of_another_kind_without_a_loss_of_ones_own_are_refused():
    task = llama()
    model = task.model(HyperParameters({"rank": 2, "alpha": 4}))
    message = "a batch is a dict with 'input_ids', 'labels'; give .*write loss and metrics"
    with pytest.raises(TaskError, match=message):
        task.loss(model, {"input_ids": tokens(2, 0), "labels": tokens(2, 0)})
    with pytest.raises(TaskError, match="a batch is a Tensor; give"):
        task.metrics(model, tokens(2, 0))


class OneNumber(th.FineTune):
    """A loss of the user's own over one number for each sequence."""

    def loss(self, model, batch):
        ids, wanted = batch
        return (model(ids).logits.mean((1, 2)) - wanted).square().mean()

    def metrics(self, model, batch):
        return {"loss": self.loss(model, batch)}


class InRows(torch.utils.data.Dataset):
    def __len__(self):
        return 7

    def __getitem__(self, index):
        return tokens(7, 3)[index]


def test_what_data_mean_is_up_to_a_loss_of_ones_own():
    yes_or_no = (tokens(4, 0), torch.tensor([0.0, 1.0, 1.0, 0.0]))
    padded = torch.ones(4, 8, dtype=torch.long)
    padded[:, 6:] = 0
    for arrays in (yes_or_no, (tokens(4, 0), padded, tokens(4, 1))):
        data = th.ArrayData(train=arrays, valid=arrays)
        for kind in ("causal", "classification"):
            task = OneNumber(SMALL, adapter=LORA, data=data, optimizer=None, kind=kind)
            assert task.data(HyperParameters({})) is data


OWN_LISTS = th.DatasetPair(train=InRows(), valid=InRows(), collate_fn=list)
NUMBERS = (tokens(7, 0), torch.arange(7.0))


class OfLists(OneNumber):
    def loss(self, model, batch):
        return super().loss(model, (torch.stack(list(batch)), 1.0))


@pytest.mark.parametrize(
    ("kind", "data"),
    [(OneNumber, th.ArrayData(train=NUMBERS, valid=NUMBERS)), (OfLists, OWN_LISTS)],
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_means_over_batches_of_ones_own_do_not_depend_on_their_size(
    kind, data, accumulate, tmp_path
):
    def value(size):
        task = kind(
            SMALL,
            adapter=th.LoRA(r=2, targets=("q_proj",)),
            data=data,
            optimizer=th.SGD(lr="lr"),
            batch_size=4,
            eval_batch_size=size,
        )
        task.accumulate = accumulate if data is not OWN_LISTS else 1
        study = th.Study(
            task,
            th.Space(lr=th.Choice([0.01])),
            algorithm=th.GridSearch(max_epochs=1),
            metric="loss",
            mode="min",
            name="own",
            storage=f"sqlite:///{tmp_path}/{size}.db",
        )
        study.run(progress=False)
        return study.best_trial.value

    assert value(3) == pytest.approx(value(64), rel=1e-5)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_batch_without_labels_changes_what_zero_gradients_change(accumulate):
    """As with plain PyTorch, whose loss is 0 / 0 there."""
    ids = tokens(8, 0)
    labels = ids.clone()
    labels[2:6] = -100

    class Accumulating(InDouble):
        pass

    Accumulating.accumulate = accumulate
    task = Accumulating(
        SMALL,
        adapter=LORA,
        data=lambda hp: th.ArrayData(train=(ids, labels), valid=(ids, ids)),
        optimizer=th.AdamW(lr="lr"),
        batch_size=2,
    )
    (found,) = alone(task, trials({"rank": 2}, epochs=2))
    model = TrialInputs(task, {"lr": 0.02, "rank": 2, "alpha": 8}, seed=0).model()
    assert found.error is None
    assert all(math.isfinite(each["loss"]) for each in found.metrics)
    model.zero_grad()
    task.loss(model, (ids[2:4], labels[2:4])).backward()
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    assert all((grad == 0).all() for grad in gradients)


def test_trials_with_batches_without_labels_are_packed():
    ids = tokens(8, 0)
    labels = ids.clone()
    labels[2:6] = -100
    task = llama(data=lambda hp: th.ArrayData(train=(ids, labels), valid=(ids, ids)), batch_size=1)
    of = trials({"rank": 2}, {"rank": 4})
    found = together(FusedBackend(task, device=here(), block=BlockOptions(size=8)), of)
    assert_same(found, alone(task, of), tolerance=1e-10)


def test_labels_that_are_no_classes_are_refused_with_their_row():
    labels = torch.tensor([0, 1, -100, 1])
    data = th.ArrayData(train=(tokens(4, 0), labels), valid=(tokens(4, 0), labels))
    task = classifier(data=data)
    message = r"the label of row 2 is -100, and num_labels=3 means 0 to 2; leave such rows out"
    with pytest.raises(TaskError, match=message):
        task.data(HyperParameters({}))
    model = task.model(HyperParameters({}))
    with pytest.raises(TaskError, match=message):
        task.loss(model, (tokens(4, 0), labels))
    with pytest.raises(TaskError, match="row 1 is 5"):
        task.metrics(model, (tokens(2, 0), torch.tensor([0, 5])))


def test_tokens_and_labels_may_be_32_bit_numbers():
    task = llama()
    model = task.model(HyperParameters({"rank": 2, "alpha": 4}))
    ids = tokens(2, 0)
    assert torch.equal(task.loss(model, (ids.int(),)), task.loss(model, (ids,)))


def test_a_base_whose_files_change_while_a_study_runs_is_refused(tmp_path):
    folder = tmp_path / "base"
    for seed, name in ((0, "base"), (1, "other")):
        torch.manual_seed(seed)
        LlamaForCausalLM(SMALL).save_pretrained(tmp_path / name)
    other = (tmp_path / "other" / "model.safetensors").read_bytes()
    earlier = (folder / "model.safetensors").read_bytes()

    def study(name):
        return th.Study(
            th.FineTune(
                folder,
                adapter=th.LoRA(r=2, targets=("q_proj",)),
                data=sentences,
                optimizer=th.AdamW(lr="lr"),
            ),
            th.Space(lr=th.Choice([0.01, 0.02, 0.04])),
            algorithm=th.GridSearch(max_epochs=2),
            metric="loss",
            mode="min",
            name=name,
            storage=f"sqlite:///{tmp_path}/{name.partition('-')[0]}.db",
        )

    class Swap:
        def on_event(self, event):
            (folder / "model.safetensors").write_bytes(other)

    first = study("swapped")
    first.run(progress=False, observers=[Swap()], executor=th.Local(pack="solo"))
    states = {trial.state for trial in first.trials}
    assert "failed" in states
    errors = [trial.error for trial in first.trials if trial.state == "failed"]
    assert all("have changed since the study began (model.safetensors)" in each for each in errors)
    (folder / "model.safetensors").write_bytes(earlier)
    again, alone_ = study("swapped-again"), study("alone")
    again.run(progress=False)
    alone_.run(progress=False)
    assert [t.value for t in again.trials] == pytest.approx([t.value for t in alone_.trials])


# -- bases and data that do not fit ----------------------------------------------------------------


class Evil:
    """What runs code when it is read from a pickle."""

    def __reduce__(self):
        return print, ("evil ran",)


def damaged(folder, how):
    match how:
        case "configuration":
            (folder / "config.json").write_text("{ no json")
        case "truncated":
            weights = folder / "model.safetensors"
            weights.write_bytes(weights.read_bytes()[:200])
        case "no weights":
            (folder / "model.safetensors").unlink()
        case "sizes":
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 32}))
        case "code":
            (folder / "model.safetensors").unlink()
            torch.save({"model.embed_tokens.weight": Evil()}, folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("configuration", "OSError"),
        ("truncated", "SafetensorError"),
        ("no weights", "OSError"),
        ("sizes", "RuntimeError"),
        ("code", "holds more than weights, and may run code"),
    ],
)
def test_a_folder_that_cannot_be_read_is_named(how, said, tmp_path, capfd):
    LlamaForCausalLM(SMALL).save_pretrained(tmp_path)
    task = th.FineTune(str(tmp_path), adapter=LORA, data=sentences, optimizer=th.AdamW(lr="lr"))
    damaged(tmp_path, how)
    with pytest.raises(TaskError, match=rf"{tmp_path}.* cannot be read \(.*{said}"):
        task.model(HyperParameters({"rank": 2, "alpha": 4}))
    assert "evil ran" not in capfd.readouterr().out


def test_tokens_and_rows_beyond_the_model_are_named():
    task = llama()
    model = task.model(HyperParameters({"rank": 2, "alpha": 4}))
    ids = tokens(2, 0)
    ids[1, 3] = VOCABULARY + 4
    said = rf"to {VOCABULARY + 4} \(the model has {VOCABULARY} tokens\) or rows of 8 tokens"
    with pytest.raises(TaskError, match=said):
        task.loss(model, (ids,))


# -- models that look for padding ------------------------------------------------------------------


def test_a_padding_token_in_a_configuration_does_not_keep_trials_apart():
    """GPT-2 looks for it in each batch, and reads values for that."""
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=32, pad_token_id=0
    )
    adapter = th.LoRA(r="rank", alpha="alpha", targets=("c_attn",))
    task = llama(base=config, adapter=adapter)
    of = trials({"rank": 2}, {"rank": 2})
    backend = FusedBackend(task, device=here(), block=BlockOptions(size=8))
    for slot, trial in enumerate(of):
        backend.put(slot, trial.member)
    assert len(set(backend.blocks.home.values())) == 1
    found = together(FusedBackend(task, device=here(), block=BlockOptions(size=8)), of)
    assert_same(found, alone(task, of), tolerance=1e-10)
    model = task.model(HyperParameters({"rank": 2, "alpha": 4}))
    task.__thrifty_finished__(model)
    assert not [m for m in model.modules() if any("warn_if" in key for key in vars(m))]
