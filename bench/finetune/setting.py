"""The LoRA sweep of ``bench_finetune``: base, configurations, and one run by peft and PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any

import peft
import torch
import torch.nn.functional as F
import transformers

import thrifty as th
from thrifty.core import derive_seed, require, step_seed
from thrifty.pack import epoch_order


SEED = 0
RANKS = (32, 16, 8, 2)
RATES = (1e-4, 3e-4, 1e-3, 3e-3)
TARGETS = (("q_proj", "v_proj"), ("q_proj", "k_proj", "v_proj", "o_proj"))


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A base, and the batches on which adapters over it are trained.

    Attributes:
        hidden: Width of the base.
        layers: Number of its blocks.
        vocabulary: Number of tokens.
        batch: Sequences in a batch.
        length: Tokens in a sequence.
        steps: Steps of an epoch.
        double: Whether to compute in double precision.
        bits: Format of the linear layers of the base: ``"nf4"`` or ``"int8"`` of bitsandbytes;
            "" for layers that are not quantised.
        device: Where to train.
    """

    hidden: int = 512
    layers: int = 8
    vocabulary: int = 4096
    batch: int = 1
    length: int = 32
    steps: int = 10
    double: bool = False
    bits: str = ""
    device: str = "cpu"

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, for the command line of another process."""
        return asdict(self)

    @property
    def config(self) -> transformers.LlamaConfig:
        return transformers.LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.hidden * 11 // 4,
            num_hidden_layers=self.layers,
            num_attention_heads=max(1, self.hidden // 64),
            num_key_value_heads=max(1, self.hidden // 64),
            max_position_embeddings=self.length,
        )

    def base(self, hp: Any = None) -> transformers.LlamaForCausalLM:
        """Return the base, the same for all trials."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            model = transformers.LlamaForCausalLM(self.config)
            if self.bits:
                quantize(model, self.bits)
        return model.double() if self.double else model

    @property
    def tokens(self) -> torch.Tensor:
        return _tokens(self.steps * self.batch, self.length, self.vocabulary)


def quantize(model: Any, bits: str) -> None:
    """Quantise all linear layers of a Llama but its output, as transformers does on loading."""
    bnb: Any = require("bitsandbytes", extra="quantized")
    for block in model.model.layers:
        for name, layer in list(block.named_modules()):
            if not isinstance(layer, torch.nn.Linear):
                continue
            parent, _, last = name.rpartition(".")
            sizes, weight = (layer.in_features, layer.out_features), layer.weight.detach()
            if bits == "int8":
                made = bnb.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False, threshold=6)
                made.weight = bnb.nn.Int8Params(weight, requires_grad=False)
            else:
                made = bnb.nn.Linear4bit(*sizes, bias=False, quant_type=bits)
                made.weight = bnb.nn.Params4bit(
                    weight, requires_grad=False, quant_type=bits, module=made
                )
            setattr(block.get_submodule(parent), last, made)
    model.is_loaded_in_8bit, model.is_loaded_in_4bit = bits == "int8", bits != "int8"
    model.requires_grad_(False)
    model.to("cpu")  # where the layers quantise


@cache
def _tokens(num: int, length: int, vocabulary: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(0, vocabulary, (num, length), generator=generator)


def configurations(num: int = 16) -> list[dict[str, Any]]:
    """Return LoRA configurations: each rank with each rate, the layers by turns.

    Each rank and each rate has both sets of layers. After 16, the next 16 have another alpha.

    >>> len({(each["rank"], each["lr"]) for each in configurations()})
    16
    >>> len({(each["rank"], each["lr"], each["alpha"]) for each in configurations(64)})
    64
    """
    return [
        {
            "rank": rank,
            "alpha": factor * rank,
            "lr": rate,
            "targets": TARGETS[(place + number) % len(TARGETS)],
        }
        for factor in (2, 1, 4, 8)
        for place, rank in enumerate(RANKS)
        for number, rate in enumerate(RATES)
    ][:num]


class Sweep(th.FineTune):
    """The sweep as a task. It evaluates nothing, as the plain loops do not."""

    def __init__(self, setting: Setting) -> None:
        plain = not (setting.double or setting.bits)
        super().__init__(
            setting.config if plain else setting.base,  # of the same weights
            base_seed=SEED,
            adapter=th.LoRA(r="rank", alpha="alpha", targets="targets", all_targets=TARGETS[1]),
            data=partial(_sequences, setting),
            optimizer=th.AdamW(lr="lr"),
            batch_size=setting.batch,
        )

    def metrics(self, model: torch.nn.Module, batch: Any) -> Mapping[str, Any]:
        return {}


def _sequences(setting: Setting, _: Any) -> th.ArrayData:
    return th.ArrayData(train=(setting.tokens,), valid=(setting.tokens[:1],))


def adapted(setting: Setting, config: Mapping[str, Any]) -> torch.nn.Module:
    """Return the base with one trial's adapters, made by peft."""
    base = setting.base()
    torch.manual_seed(derive_seed(SEED, "model"))
    wanted = peft.LoraConfig(
        r=config["rank"],
        lora_alpha=config["alpha"],
        target_modules=list(config["targets"]),
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        # peft 0.21 asks transformers 5 for an attribute by its old name
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        return peft.get_peft_model(base, wanted).to(setting.device)


def solo_steps(setting: Setting, model: torch.nn.Module, rate: float) -> Iterator[torch.Tensor]:
    """Train adapters by plain PyTorch, a step at a time, without end."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate)
    tokens, epoch = setting.tokens.to(setting.device), 0
    while True:
        model.train()
        order = epoch_order(len(tokens), seed=SEED, epoch=epoch).to(setting.device)
        for step, rows in enumerate(order.split(setting.batch)):
            torch.manual_seed(step_seed(derive_seed(SEED, "epoch", epoch), step))
            batch = tokens[rows]
            optimizer.zero_grad()
            logits = model(input_ids=batch, use_cache=False).logits[:, :-1]
            loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[:, 1:].reshape(-1))
            loss.backward()
            optimizer.step()
            yield loss.detach()
        epoch += 1


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of the trained weights."""
    return {
        name: parameter.detach().cpu().clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
