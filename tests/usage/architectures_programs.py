"""Every architecture of transformers of which a tiny model can be made by the names that settings usually have."""

import gc
import os
import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from launched import digest, group_of_ranks, strategy_named
from torch import Tensor, nn
from torch.utils.data import default_collate

from evenstep import Logging, MapData, Memory, Task, Trainer, Training
from evenstep.errors import EvenstepError
from evenstep.integrations.hf import CausalLM, Classification, Seq2Seq

os.environ["HF_HUB_OFFLINE"] = "1"

KINDS = ("CausalLM", "Seq2SeqLM", "SequenceClassification", "ImageClassification")
UPDATES, LARGEST = 3, 6_000_000
_TABLES = {
    "CausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "Seq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "SequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "ImageClassification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}
# minutes in each backward, by kernels that are written in Python where there is no accelerator
_TOO_SLOW = ("bailing_hybrid", "kimi_linear", "longformer")
_SIZES = {
    16: "moe_intermediate_size shared_expert_intermediate_size q_lora_rank kv_lora_rank expert_ffn_hidden_size "
    "mamba_head_dim mamba_d_head",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers n_groups "
    "num_key_value_heads num_experts_per_tok expand eos_token_id",
    32: "hidden_size d_model n_embd dim embedding_size d_embed emb_dim d_attn word_embed_proj_dim lru_width image_size",
    48: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff d_inner ffn_hidden_size hidden_dim",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_experts "
    "n_routed_experts num_local_experts mamba_num_heads mamba_n_heads",
    8: "head_dim d_kv qk_rope_head_dim qk_nope_head_dim v_head_dim rotary_dim dim_head d_head state_size "
    "global_head_dim patch_size hidden_size_per_layer_input",
    64: "vocab_size decoder_vocab_size max_position_embeddings n_positions n_ctx max_source_positions "
    "max_target_positions vocab_size_per_layer_input",
    1: "bos_token_id decoder_start_token_id n_group topk_group mamba_n_groups",
}
_SMALL = {name: value for value, names in _SIZES.items() for name in names.split()}
_OF_LAYERS = ("layer_types", "layers_block_type", "mlp_layer_types", "block_types", "attention_types")


def architectures(kind: str) -> list[str]:
    """The names of all of a kind."""
    from transformers.models.auto import modeling_auto

    return [name for name in getattr(modeling_auto, _TABLES[kind]) if name not in _TOO_SLOW]


def _shrink(config: Any, depth: int = 0) -> None:
    """Make a configuration, and those within, tiny and without dropout."""
    for name, value in list(vars(config).items()):
        if name in _SMALL and type(value) is int:
            setattr(config, name, _SMALL[name])
        elif isinstance(value, float) and ("drop" in name or "jitter" in name):
            setattr(config, name, 0.0)
        elif name in _OF_LAYERS and isinstance(value, list):
            setattr(config, name, value[:2])
        elif depth < 2 and hasattr(value, "model_type"):
            _shrink(value, depth + 1)
    config.pad_token_id = 0
    if depth == 0:
        config.num_labels = 3


def built(kind: str, name: str) -> Any:
    """A tiny model; None where these settings make none, or where torch alone can't train it."""
    import transformers

    auto: Any = getattr(transformers, f"AutoModelFor{kind}")
    try:
        config: Any = transformers.AutoConfig.for_model(name)
        _shrink(config)
        if kind == "CausalLM" and not getattr(config, "is_encoder_decoder", False):
            config.is_decoder = True
        with torch.device("meta"):
            size = sum(one.numel() for one in auto.from_config(config).parameters())
        if size > LARGEST:
            return None
        torch.manual_seed(0)
        model = auto.from_config(config)
        batch = default_collate(rows(kind)[:4])
        labels = batch.pop("labels")
        more = {"Seq2SeqLM": {"labels": labels}, "CausalLM": {"use_cache": False}}.get(kind, {})
        deepcopy(model).train()(**batch, **more).logits.float().square().mean().backward()
    except Exception:  # noqa: BLE001 - whatever a library raises of settings that it was not made for
        return None
    return model


def rows(kind: str) -> list[dict[str, Tensor]]:
    draw, found = torch.Generator().manual_seed(5), []
    for number in range(16):
        if kind == "ImageClassification":
            image = torch.randn(3, 32, 32, generator=draw)
            found.append({"pixel_values": image, "labels": torch.tensor(number % 3)})
            continue
        tokens = torch.randint(3, 60, (12,), generator=draw)
        labels = tokens.clone()
        if kind == "SequenceClassification":
            tokens[-1], labels = 2, torch.tensor(number % 3)
        elif kind == "Seq2SeqLM":
            labels = torch.randint(3, 60, (8,), generator=draw)
        else:
            labels[: number % 5] = -100
        masks = {} if kind == "CausalLM" else {"attention_mask": torch.ones(12, dtype=torch.long)}
        found.append({"input_ids": tokens, **masks, "labels": labels})
    return found


def trained(kind: str, model: nn.Module, *, strategy: Any = None, size: int = 2, checkpoint: str = "none") -> Any:
    """The model's part of the state after some updates in micro-batches of `size`; all ranks together."""
    task: Task = {"CausalLM": CausalLM, "Seq2SeqLM": Seq2Seq}.get(kind, Classification)()
    trainer = Trainer(
        model=model,
        task=task,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        data=MapData(rows(kind), global_batch_size=8, micro_batch_size=size),
        updates=UPDATES,
        device="cpu",
        strategy=strategy,
        train=Training(clip_norm=1.0, memory=Memory(checkpoint=checkpoint)),
        log=Logging(writers=()),
    )
    trainer.train()
    return trainer.state_dict()["model"]


def on_strategies(kind: str, names: Sequence[str], strategies: Sequence[tuple[str, str]]) -> dict[str, dict[str, str]]:
    """By architecture and way, "strategy, what is computed again": a digest, or what was raised, and then no more."""
    warnings.filterwarnings("ignore")
    group, found = group_of_ranks(), dict[str, dict[str, str]]()
    for name in names:
        model = built(kind, name)
        if model is None:
            continue
        ways = found[name] = {}
        for strategy, checkpoint in strategies:
            try:
                state = trained(kind, deepcopy(model), strategy=strategy_named(strategy, group), checkpoint=checkpoint)
            except (EvenstepError, RuntimeError) as error:
                ways[f"{strategy}, {checkpoint}"] = f"{type(error).__name__}: {error}"
                if "has none: no" not in str(error):  # blocks: that is refused before ranks begin anything together
                    return found
            else:
                ways[f"{strategy}, {checkpoint}"] = digest(state)
        gc.collect()
    return found


def apart(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """How far two states are apart, beside the largest number of each tensor."""
    pairs = [(one[name].double(), other[name].double()) for name in one if one[name].numel()]
    return max(float((a - b).abs().max() / a.abs().max().clamp(min=1e-3)) for a, b in pairs)
