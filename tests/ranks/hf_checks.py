"""Models of transformers over two real processes, beside one; `test_hf.py` starts them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import Tensor, nn

from evenstep import MapData, Task
from evenstep.integrations.hf import CausalLM, Packing, SavePretrained, Seq2Seq, from_config
from evenstep.parallel import Ddp, Fsdp, Processes, Single, Strategy
from kit import trainer_of

DOCUMENTS = [[(7 * n + 3 * k) % 48 + 1 for k in range(3 + n % 5)] for n in range(24)]
LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA |= {"model_type": "llama", "vocab_size": 50, "num_hidden_layers": 2, "tie_word_embeddings": True}
T5 = {"model_type": "t5", "vocab_size": 50, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
T5 |= {"dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0}
LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}


def padded(samples: list[list[int]]) -> dict[str, Tensor]:
    rows = nn.utils.rnn.pad_sequence([torch.tensor(one) for one in samples], batch_first=True, padding_value=0)
    return {"input_ids": rows, "attention_mask": (rows > 0).long(), "labels": rows.masked_fill(rows == 0, -100)}


CASES: dict[str, tuple[dict[str, Any], Callable[[], Task], Any]] = {
    "a packed llama": (LLAMA, lambda: CausalLM(packed=True), Packing(max_tokens=12)),
    "scores in chunks": (LLAMA, lambda: CausalLM(packed=True, chunked=True), Packing(max_tokens=12)),
    "adapters": ({**LLAMA, "lora": LORA}, lambda: CausalLM(packed=True), Packing(max_tokens=12)),
    "an encoder and decoder": (T5, Seq2Seq, padded),
}


def trained(case: str, strategy: Strategy, folder: Path | None = None) -> dict[str, Tensor]:
    """The whole parameters after some updates; a folder gets the model as the hub has models."""
    settings, task, collate = CASES[case]
    torch.manual_seed(1)
    kind, lora = "CausalLM" if settings["model_type"] == "llama" else "Seq2SeqLM", settings.get("lora")
    settings = {name: value for name, value in settings.items() if name != "lora"}
    model = from_config(settings, kind=kind, dtype="float64", lora=lora)
    parameters = [one for one in model.parameters() if one.requires_grad]
    trainer_of(
        model,
        *([SavePretrained()] if folder else []),
        task=task(),
        optimizer=torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        data=MapData(DOCUMENTS, global_batch_size=8, micro_batch_size=2, collate=collate),
        updates=4,
        strategy=strategy,
        folder=folder,
    ).train()
    named = model.named_parameters()
    return {name: (one.full_tensor() if hasattr(one, "full_tensor") else one).detach() for name, one in named}  # pyright: ignore


def found(folder: str) -> dict[str, float]:
    """How far parameters of two ranks are from those of one, by case and strategy, as the first rank sees it."""
    torch.set_num_threads(1)
    group = Processes(torch.device("cpu"), timeout_s=60)
    far: dict[str, float] = {}
    for case in CASES:
        alone = trained(case, Single()) if group.rank == 0 else {}
        for strategy in (Ddp(group), Fsdp(group)):
            name = f"{case}, {type(strategy).__name__}"
            left = Path(folder, name) if case == "a packed llama" else None
            together = trained(case, strategy, left)
            assert not alone or together.keys() == alone.keys()
            far[name] = max((float((together[one] - value).abs().max()) for one, value in alone.items()), default=0.0)
            if left and alone:
                from transformers import AutoModelForCausalLM

                read = AutoModelForCausalLM.from_pretrained(left / "pretrained", dtype=torch.float64)
                held = dict(read.named_parameters())
                far[f"{name}, as it is left"] = max(float((held[one] - alone[one]).abs().max()) for one in held)
    group.gather(None)
    group.close()
    return far
