"""Code of the user's that a fine-tuned base runs counts, also where only a text names it."""

from __future__ import annotations

import pytest
import transformers.models.llama.modeling_llama as modeling
from transformers.activations import ACT2FN
from transformers.modeling_utils import AttentionInterface
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from tests.pack.identity._projects import project
from thrifty.pack import task_identity


TASK = """
import torch
import transformers
import thrifty as th
import helpers

def sentences(hp):
    return th.ArrayData(train=(torch.zeros(4, 8).long(),), valid=(torch.zeros(4, 8).long(),))

SIZES = dict(
    vocab_size=30, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=1,
)

def task(base=None, adapter=th.LoRA):
    return th.FineTune(
        base or transformers.LlamaConfig(**SIZES),
        adapter=adapter(r=2, alpha=4, targets=("q_proj",)), data=sentences,
        optimizer=th.AdamW(lr="lr"),
    )

def made():
    return MADE
"""
ADAPTER = """
import thrifty as th

class Adapter(th.LoRA):
    __slots__ = ()

    def config(self, hp, *, kind, **options):
        return th.LoRA.config(self, hp, kind=kind, use_rslora_of=CHANGED, **options)
"""
ATTENTION = """
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

def mine(*args, **kwargs):
    out, weights = sdpa_attention_forward(*args, **kwargs)
    return out * CHANGED, weights

AttentionInterface.register("mine", mine)
"""
ACTIVATION = """
import torch
from transformers.activations import ACT2FN

class Mine(torch.nn.Module):
    def forward(self, x):
        return x.relu() * CHANGED

ACT2FN["mine"] = WRITTEN
"""
PATCH = """
import transformers.models.llama.modeling_llama as modeling

def rotate(x):
    return x * CHANGED

modeling.rotate_half = rotate
"""
MODEL = """
import transformers

class MineConfig(transformers.LlamaConfig):
    model_type = "mine"

class Mine(transformers.LlamaForCausalLM):
    config_class = MineConfig

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * CHANGED
        return out

transformers.AutoConfig.register("mine", MineConfig)
transformers.AutoModelForCausalLM.register(MineConfig, Mine)
"""
CASES = {
    "a class of adapters": (ADAPTER, "task(adapter=helpers.Adapter)"),
    "attention by its name": (
        ATTENTION,
        "task(transformers.LlamaConfig(**SIZES, attn_implementation='mine'))",
    ),
    "an activation by its name": (
        ACTIVATION.replace("WRITTEN", "Mine"),
        "task(transformers.LlamaConfig(**SIZES, hidden_act='mine'))",
    ),
    "an activation with options": (
        ACTIVATION.replace("WRITTEN", "(Mine, {})"),
        "task(transformers.LlamaConfig(**SIZES, hidden_act='mine'))",
    ),
    "a replaced function of transformers": (PATCH, "task()"),
    "a model by its configuration": (MODEL, "task(helpers.MineConfig(**SIZES))"),
}


@pytest.fixture
def identity(tmp_path, monkeypatch):
    def of(helpers, made):
        tables = [
            ACT2FN,
            AttentionInterface._global_mapping,
            CONFIG_MAPPING._extra_content,
            MODEL_FOR_CAUSAL_LM_MAPPING._extra_content,
        ]
        before, rotate_half = [[*dict.items(table)] for table in tables], modeling.rotate_half
        try:
            mine = TASK.replace("MADE", made)
            module = project(tmp_path, monkeypatch, mine=mine, helpers=helpers)
            return task_identity(module.made())
        finally:
            modeling.rotate_half = rotate_half
            for table, items in zip(tables, before, strict=True):
                table.clear()
                for key, value in items:
                    dict.__setitem__(table, key, value)

    return of


@pytest.mark.parametrize("name", CASES)
def test_an_edit_of_code_that_a_base_runs_makes_another_task(name, identity):
    helpers, made = CASES[name]
    first = identity(helpers.replace("CHANGED", "2.0"), made)
    assert identity(helpers.replace("CHANGED", "(2.0)"), made) == first
    assert identity(helpers.replace("CHANGED", "3.0"), made) != first


def test_code_in_tables_of_packages_does_not_count_if_it_is_a_package_s(identity):
    found = identity("", "task()").training
    assert [name for name in found if name.startswith("registered")] == []


def test_versions_of_the_libraries_count(identity):
    found = identity("", "task()").training
    assert {"package peft", "package torch", "package transformers"} <= found.keys()


ATTENTIONS = """
import transformers

def llama(name, sizes):
    config = transformers.LlamaConfig(**sizes)
    config._attn_implementation = name
    return config

def llava(name, sizes):
    config = transformers.LlavaConfig(text_config=transformers.LlamaConfig(**sizes))
    config.text_config._attn_implementation = name
    return config
"""


@pytest.mark.parametrize("kind", ["llama", "llava"])
def test_the_implementation_of_attention_counts(kind, identity):
    names = ("sdpa", "eager", "eager")
    sdpa, eager, again = [
        identity(ATTENTIONS, f"task(helpers.{kind}({name!r}, SIZES))") for name in names
    ]
    assert sdpa != eager == again
