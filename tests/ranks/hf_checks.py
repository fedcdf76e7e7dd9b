"""What two real processes do with models of transformers; `test_hf.py` starts them and reads what they print.

Each check is a function of the group that returns what is to be compared; ranks run all of them in one process.
"""

import json
import math
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from evenstep import Logging, MapData, Task, Trainer
from evenstep.integrations.hf import CausalLM, Packing, SavePretrained, Seq2Seq
from evenstep.parallel import Ddp, Fsdp, Group, Processes, Single, Strategy

DOCUMENTS = [[(7 * n + 3 * k) % 48 + 1 for k in range(3 + n % 5)] for n in range(24)]
Made = tuple[nn.Module, Task, MapData]


def llama() -> Made:
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(1)
    model = LlamaForCausalLM(config).double()
    data = MapData(DOCUMENTS, global_batch_size=8, micro_batch_size=2, collate=Packing(max_tokens=12))
    return model, CausalLM(packed=True), data


def chunked_llama() -> Made:
    model, _, data = llama()
    return model, CausalLM(packed=True, chunked=True), data


def padded(samples: list[list[int]]) -> dict[str, Tensor]:
    rows = nn.utils.rnn.pad_sequence([torch.tensor(one) for one in samples], batch_first=True, padding_value=0)
    return {"input_ids": rows, "attention_mask": (rows > 0).long(), "labels": rows.masked_fill(rows == 0, -100)}


def t5() -> Made:
    config = T5Config(
        vocab_size=50,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(1)
    model = T5ForConditionalGeneration(config).double()
    return model, Seq2Seq(), MapData(DOCUMENTS, global_batch_size=8, micro_batch_size=2, collate=padded)


def lora() -> Made:
    from peft import LoraConfig, get_peft_model

    model, task, data = llama()
    torch.manual_seed(2)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    return adapted.double(), task, data


def trained(make: Callable[[], Made], strategy: Strategy) -> dict[str, Tensor]:
    """The whole parameters after some updates."""
    model, task, data = make()
    names = [name for name, one in model.named_parameters()]
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1, momentum=0.9)
    trainer = Trainer(
        model=model,
        task=task,
        optimizer=optimizer,
        data=data,
        updates=4,
        device="cpu",
        strategy=strategy,
        log=Logging(writers=()),
    )
    trainer.train()
    state = dict(model.named_parameters())
    assert list(state) == names
    whole = {name: one.full_tensor() if hasattr(one, "full_tensor") else one for name, one in state.items()}
    return {name: one.detach() for name, one in whole.items()}


def apart(make: Callable[[], Made], group: Group) -> dict[str, float]:
    """How far the parameters of two ranks are from those of one, which only the first compares."""
    alone = trained(make, Single()) if group.rank == 0 else {}
    found: dict[str, float] = {}
    for strategy in (Ddp(group), Fsdp(group)):
        together = trained(make, strategy)
        far = [float((together[name] - one).abs().max()) for name, one in alone.items()]
        found[type(strategy).__name__] = max(far, default=math.nan)
    return found


def a_packed_llama_is_that_of_one_process(group: Group) -> dict[str, float]:
    return apart(llama, group)


def a_llama_whose_scores_are_made_in_chunks_is_that_of_one_process(group: Group) -> dict[str, float]:
    return apart(chunked_llama, group)


def a_t5_is_that_of_one_process(group: Group) -> dict[str, float]:
    return apart(t5, group)


def adapters_are_those_of_one_process(group: Group) -> dict[str, float]:
    return apart(lora, group)


def what_a_run_leaves_as_the_hub_has_models_is_that_of_one_process(group: Group) -> dict[str, float]:
    from transformers import AutoModelForCausalLM

    folders = group.gather(mkdtemp())
    found: dict[str, float] = {}
    alone = trained(llama, Single())
    for strategy in (Ddp(group), Fsdp(group)):
        folder = Path(folders[0]) / type(strategy).__name__
        model, task, data = llama()
        trainer = Trainer(
            model=model,
            task=task,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            data=data,
            updates=4,
            device="cpu",
            strategy=strategy,
            folder=folder,
            hooks=SavePretrained(),
            log=Logging(writers=()),
        )
        trainer.train()
        read = dict(AutoModelForCausalLM.from_pretrained(folder / "pretrained", dtype=torch.float64).named_parameters())
        found[type(strategy).__name__] = max(float((read[name] - one).abs().max()) for name, one in alone.items())
    group.gather(None)  # all have read it
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def main() -> None:
    torch.set_num_threads(1)
    group = Processes(torch.device("cpu"), timeout_s=60)
    found: dict[str, Any] = {name: globals()[name](group) for name in sys.argv[2:]}
    if group.rank == 0:
        print(json.dumps(found))
    group.close()


if __name__ == "__main__":
    main()
