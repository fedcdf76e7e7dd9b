"""A rank of a run in stages: `python staged.py FOLDER CASE PIPELINE SCHEDULE STAGES_PER_RANK UPDATES STRATEGY`.

RANK and WORLD_SIZE are as torchrun sets them; ranks beyond PIPELINE are further replicas. Dropout, unequal numbers of
tokens, a last global batch that is short, evaluation in between, an average, clipping. It goes on from the newest
checkpoint in FOLDER. Rank 0 prints the sha256 of what training changes.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

import evenstep
from evenstep.events import Evaluate
from evenstep.optim.schedules import Constant
from evenstep.parallel import Group, Mesh, Processes
from evenstep.pipeline import Layer, Layers, PipelineModel
from rows.cutting import IGNORED, WORDS, Words
from rows.killed import digest
from rows.ranked import STRATEGIES, sentences

WIDTH = 16


def chain(*, tied: bool = False) -> Layers:
    """An embedding, four times linear, dropout and tanh, and scores."""
    middle: list[nn.Module] = []
    for _ in range(4):
        middle += [nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Tanh()]
    layers = Layers.of([nn.Embedding(WORDS, WIDTH), *middle, nn.Linear(WIDTH, WORDS)])
    return Layers(layers.layers, ties=(("0.weight", "13.weight"),)) if tied else layers


class Encode(nn.Module):
    """Gives its memory, the mask of it, and nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, source: Tensor) -> dict[str, Tensor | None]:
        return {"memory": self.linear(self.embedding(source)).tanh(), "mask": source > 0, "bias": None}


class Decode(nn.Module):
    """Reads the memory wherever it is not masked."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor, encoded: dict[str, Any]) -> Tensor:
        assert encoded["bias"] is None
        scores = self.query(x) @ encoded["memory"].transpose(1, 2)
        read = scores.masked_fill(~encoded["mask"][:, None], -1e9).softmax(-1) @ encoded["memory"]
        return x + self.dropout(self.out(read).tanh())


def encoder_decoder(decoders: int) -> Layers:
    """An encoder whose output goes to every decoder layer; the decoder begins with inputs of its own."""
    return Layers(
        (
            Layer("encoder", Encode(), inputs=("source",)),
            Layer("embedding", nn.Embedding(WORDS, WIDTH), sources=(), inputs=("input",)),
            *(
                Layer(f"decoder.{n}", Decode(), sources=(f"decoder.{n - 1}" if n else "embedding", "encoder"))
                for n in range(decoders)
            ),
            Layer("scores", nn.Linear(WIDTH, WORDS)),
        )
    )


class Translate(Words):
    """The same words, read by the encoder and once more by the decoder."""

    def inputs(self, batch: Any) -> Any:
        return {"source": batch[0], "input": batch[0].flip(1)}


def trimmed(samples: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """A batch as long as its longest sentence, so that micro-batches differ in shape."""
    words, targets = (torch.stack([sample[part] for sample in samples]) for part in (0, 1))
    longest = int((targets != IGNORED).sum(1).max())
    return words[:, :longest].contiguous(), targets[:, :longest].contiguous()


def main(
    folder: Path, case: str, pipeline: int, schedule: str, stages_per_rank: int | None, updates: int, strategy: str
) -> None:
    torch.set_num_threads(1)
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    world = Processes(torch.device("cpu"), timeout_s=60) if several else Group()
    mesh = Mesh.of(world, pipeline=pipeline)
    torch.manual_seed(mesh.data.rank)  # replicas begin different; the strategy must make them equal
    decoders = 2 if case == "encoder-decoder" else None
    layers: Any = chain(tied=case == "tied") if decoders is None else encoder_decoder(decoders)
    if case == "plain":
        layers = nn.Sequential(*(cast("nn.Module", layer.build) for layer in layers.layers))
    model: nn.Module = layers
    if case != "plain" or pipeline > 1:  # else the model is whole, as a user has it who knows of no stages
        model = PipelineModel(layers, mesh=mesh, schedule=schedule, stages_per_rank=stages_per_rank)
    collate: Any = {"collate": trimmed} if case == "ragged" else {}
    trainer = evenstep.Trainer(
        model=model,
        task=Words() if decoders is None else Translate(),
        # torch's fused kernels round the ends of a tensor differently on the CPU, so shards would differ in bits.
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=True),
        data=evenstep.MapData(sentences(52), global_batch_size=16, micro_batch_size=1, **collate),
        updates=updates,
        device="cpu",
        strategy=STRATEGIES[strategy](mesh.data),
        lr_schedule=Constant(warmup_updates=5),
        train=evenstep.Training(clip_norm=0.5, ema=evenstep.Ema(decay=0.9, decay_warmup=False)),
        evaluations={"valid": evenstep.MapData(sentences(13), global_batch_size=8, micro_batch_size=2, shuffle=False)},
        hooks=[Evaluate(every_updates=7)],
        folder=folder,
        log=evenstep.Logging(writers=()),
    )
    trainer.resume("auto")
    trainer.train()
    state = trainer.state_dict()
    if world.rank == 0:
        print(digest([state[part] for part in ("model", "ema", "progress")] + [state["optimizer"]["state"]]))
    world.gather(None)
    world.close()


if __name__ == "__main__":
    where, what, ranks, order, count, end, sharing = sys.argv[1:]
    main(Path(where), what, int(ranks), order, int(count) or None, int(end), sharing)
