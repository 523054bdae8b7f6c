"""Adapters over a base that bitsandbytes has quantised to 8 or 4 bits."""

from __future__ import annotations

import json

import lightning
import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import thrifty as th
from tests.integrations._drive import assert_a_resumed_trial_is_the_same
from tests.pack._drive import Trial, alone, assert_same, together
from thrifty.cli._export import _write_adapter
from thrifty.core import MissingExtraError, TaskError
from thrifty.integrations import HuggingFaceTrainable, LightningTrainable
from thrifty.integrations.fine_tuning import _fine_tune
from thrifty.pack import BlockOptions, FusedBackend, HyperParameters
from thrifty.pack._quantized import quantized_layers


pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

CPU = torch.device("cpu")
SMALL = LlamaConfig(
    vocab_size=40,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=32,
)
FORMATS = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "stored": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_quant_storage": torch.bfloat16,
    },
    "int8": {"load_in_8bit": True},
}
SINGLE = 2e-5


@pytest.fixture(scope="module", params=FORMATS)
def folder(request, tmp_path_factory):
    """A folder with a quantised base, as ``save_pretrained`` writes it."""
    whole, out = (tmp_path_factory.mktemp(name) for name in ("whole", request.param))
    torch.manual_seed(0)
    LlamaForCausalLM(SMALL).save_pretrained(whole)
    AutoModelForCausalLM.from_pretrained(
        whole,
        quantization_config=BitsAndBytesConfig(**FORMATS[request.param]),
        device_map="cpu",
        dtype=torch.float32,
    ).save_pretrained(out)
    return out


def sentences(hp):
    first = torch.arange(28)[:, None]
    ids = (3 * first + torch.arange(10)) % 39 + 1
    return th.ArrayData(train=(ids[:20],), valid=(ids[20:],))


def llama(folder, **changes):
    options = {
        "adapter": th.LoRA(r="rank", alpha=8, targets=("q_proj", "v_proj", "down_proj")),
        "data": sentences,
        "optimizer": th.AdamW(lr="lr"),
        "batch_size": 8,
    }
    return th.FineTune(folder, **{**options, **changes})


def study(task, tmp_path, name="adapters", **options):
    return th.Study(
        task,
        th.Space(rank=th.Choice([2, 4]), lr=th.Choice([0.01, 0.003])),
        algorithm=th.GridSearch(max_epochs=3),
        metric="loss",
        mode="min",
        storage=f"sqlite:///{tmp_path / 'studies.db'}",
        name=name,
        **options,
    )


def test_packed_adapters_equal_adapters_alone(folder):
    of = [
        Trial(config={"lr": 0.003 * (k + 1), "rank": rank}, epochs=2)
        for k, rank in enumerate([4, 2, 4])
    ]
    backend = FusedBackend(llama(folder), device=CPU, block=BlockOptions(size=8))
    found = together(backend, of)
    assert not backend.refused
    # in 8 bits, evaluations round inputs, so rounding decides between two neighbours
    tolerance = SINGLE if "int8" not in folder.name else 2e-3
    assert_same(found, alone(llama(folder), of), tolerance=tolerance)


def test_adapters_on_different_layers_are_in_one_pack(folder):
    adapter = th.LoRA(r="rank", alpha=8, targets="targets", all_targets=("q_proj", "v_proj"))
    task = llama(folder, adapter=adapter)
    every = [("q_proj", "v_proj"), ("v_proj",)]
    of = [Trial(config={"lr": 0.003, "rank": 2, "targets": targets}, epochs=1) for targets in every]
    backend = FusedBackend(task, device=CPU, block=BlockOptions(size=8))
    for slot, trial in enumerate(of):
        backend.put(slot, trial.member)
    assert len({id(home) for home in backend.blocks.home.values()}) == 1
    found = together(FusedBackend(task, device=CPU), of)
    assert_same(found, alone(task, of), tolerance=SINGLE if "int8" not in folder.name else 2e-3)


def test_a_study_its_model_and_its_adapter(folder, tmp_path):
    made = study(llama(folder), tmp_path)
    forecast = made.plan().memory.base_bytes
    assert forecast == (folder / "model.safetensors").stat().st_size
    made.run(progress=False, executor=th.Local(threads=1, pack="fused"))
    assert made.savings.packed_epochs == made.savings.unique_epochs == 12
    best = made.best_trial
    model = best.load_model()
    layers = quantized_layers(model)
    assert len(layers) == 14, "all linear layers but the output"
    task = llama(folder)
    data = sentences(None)
    with torch.no_grad():
        loss = float(task.metrics(model.eval(), data.valid)["loss"])
    assert loss == pytest.approx(best.value, rel=SINGLE if "int8" not in folder.name else 1e-3)
    _write_adapter(made, None, tmp_path / "adapter")
    assert len(load_file(tmp_path / "adapter" / "adapter_model.safetensors")) == 12
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folder)


def test_a_stopped_study_goes_on(folder, tmp_path):
    whole = study(llama(folder), tmp_path, "whole")
    whole.run(progress=False, executor=th.Local(threads=1, pack="solo"))
    stopped = study(llama(folder), tmp_path / "other", "stopped")
    (tmp_path / "other").mkdir()
    stopped.run(
        progress=False, executor=th.Local(threads=1, pack="solo"), stop=th.StopWhen(epochs=5)
    )
    stopped.run(progress=False, executor=th.Local(threads=1, pack="solo"))
    assert [t.value for t in stopped.trials] == [t.value for t in whole.trials]


def test_scales_belong_to_the_identity(folder, tmp_path):
    """The files of the folder hold the scales and their format."""
    before = llama(folder)._content()
    assert before == llama(folder)._content()
    task = llama(folder)
    task._content()
    other = tmp_path / "other"
    other.mkdir()
    for file in folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    task._base._source = str(other)
    (other / "model.safetensors").write_bytes(b"other")
    with pytest.raises(TaskError, match=r"files of the base .* have changed"):
        task.__thrifty_unchanged__()


def test_the_library_is_named_where_it_is_missing(folder, monkeypatch):
    def missing(module, *, extra, package=None):
        if module.startswith("bitsandbytes"):
            raise MissingExtraError("bitsandbytes", extra=extra)
        return require(module, extra=extra, package=package)

    require = _fine_tune.require
    monkeypatch.setattr(_fine_tune, "require", missing)
    with pytest.raises(MissingExtraError, match="quantized"):
        llama(folder).__thrifty_identity__()


# -- trainers of other libraries -------------------------------------------------------------------


def by_trainer(folder):
    def model(hp):
        base = AutoModelForCausalLM.from_pretrained(folder)
        return peft.get_peft_model(
            base, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
        )

    rows = [{"input_ids": row, "labels": row} for row in sentences(None).train[0]]
    return HuggingFaceTrainable(
        model,
        train_dataset=rows,
        eval_dataset=rows[:4],
        args=lambda hp: {"learning_rate": hp.lr, "per_device_train_batch_size": 10},
    )


def test_a_trainer_of_transformers(folder):
    assert_a_resumed_trial_is_the_same(
        lambda: by_trainer(folder), lambda epoch: {"lr": 0.01}, epochs=3
    )


class Module(lightning.LightningModule):
    def __init__(self, folder):
        super().__init__()
        self.base = AutoModelForCausalLM.from_pretrained(folder)
        self.head = torch.nn.Linear(40, 1)


def test_lightning_cannot_load_such_a_base(folder):
    made = LightningTrainable(lambda hp: Module(folder), lambda hp: None)
    made.setup(HyperParameters({"lr": 0.1}), seed=0, device=CPU)
    with pytest.raises(TaskError, match=r"the layer 'base\.model\..*' is quantised by"):
        made.train(0, HyperParameters({"lr": 0.1}))
