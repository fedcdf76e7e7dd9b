"""The examples of docs/models.md, against plain loops of PyTorch in float64 and over cuts."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pages import blocks, names_for, run
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

import evenstep


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    names = names_for("models")
    for block in blocks("models", "python"):
        run(block, names)
    return names


def close(one: nn.Module, other: nn.Module) -> None:
    others = dict(other.named_parameters())
    for name, parameter in one.named_parameters():
        torch.testing.assert_close(parameter, others[name], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("size", [6, 4, 1])
def test_hidden_states_that_go_on_give_the_plain_loop_for_every_cut(page: dict[str, Any], size: int) -> None:
    torch.manual_seed(0)
    model = page["Words"]().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state = tuple(torch.zeros(1, 6, 6, dtype=torch.float64) for _ in range(2))
    for update in range(4):
        text = torch.randint(0, 10, (6, 6), generator=torch.Generator().manual_seed(update))
        optimizer.zero_grad()
        scores, state = model(text[:-1], state)
        cross_entropy(scores.flatten(0, 1), text[1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        state = tuple(one.detach() for one in state)
    close(page["continued"](size=size).model, model)


def test_hidden_states_are_resumed_with_the_same_bits(page: dict[str, Any]) -> None:
    whole, half = page["continued"](size=3, updates=4), page["continued"](size=3, updates=2)
    again = page["continued"](size=3, updates=0)
    again.load_state_dict(half.state_dict())
    for update in (2, 3):
        text = torch.randint(0, 10, (6, 6), generator=torch.Generator().manual_seed(update))
        again.update(microbatches=zip(text.split(3, dim=1), torch.arange(6).split(3), strict=True))
    for one, other in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("size", [6, 4, 1])
def test_a_queue_and_a_slow_copy_give_the_plain_loop_for_every_cut(page: dict[str, Any], size: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 4).double()
    slow, queue = nn.Linear(6, 4).double(), torch.empty(0)
    torch.manual_seed(0)
    nn.Linear(6, 4)  # the draws of the model come before those of the queue
    slow.load_state_dict(model.state_dict())
    queue = normalize(torch.randn(24, 4, dtype=torch.float64), dim=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for update in range(4):
        first, second = torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(update), dtype=torch.float64)
        optimizer.zero_grad()
        queries, keys = normalize(model(first), dim=1), normalize(slow(second), dim=1).detach()
        scores = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ queue.T], dim=1) / 0.2
        cross_entropy(scores, torch.zeros(6, dtype=torch.long)).backward()
        optimizer.step()
        with torch.no_grad():
            queue = torch.cat([keys, queue])[:24]
            for own, other in zip(slow.parameters(), model.parameters(), strict=True):
                own.lerp_(other, 0.01)
    close(page["contrasted"](size=size).model, model)


@pytest.mark.parametrize("size", [12, 5, 1])
def test_negatives_of_the_whole_batch_give_the_plain_loop_for_every_cut(page: dict[str, Any], size: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for update in range(4):
        views = torch.randn(12, 6, generator=torch.Generator().manual_seed(update), dtype=torch.float64)
        optimizer.zero_grad()
        page["between_pairs"](model(views)).backward()
        optimizer.step()
    close(page["paired"](size=size).model, model)


@pytest.mark.parametrize("size", [12, 5])
def test_an_equation_gives_the_plain_loop_for_every_cut(page: dict[str, Any], size: int) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    plain, cut = model(), model()
    points = torch.rand(12, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    engine = evenstep.Engine(cut, page["Equation"](), torch.optim.SGD(cut.parameters(), lr=1e-2), device="cpu")
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        at = points.clone().requires_grad_()
        output = plain(at)
        (slope,) = torch.autograd.grad(output.sum(), at, create_graph=True)
        (curvature,) = torch.autograd.grad(slope.sum(), at, create_graph=True)
        (curvature + output).square().mean().backward()
        optimizer.step()
        engine.update(microbatches=points.split(size))
        engine.evaluate(microbatches=points.split(4))
    close(cut, plain)


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.duration, self.frame = nn.Embedding(9, 6), nn.Linear(6, 1), nn.Linear(6, 5)

    def forward(self, phonemes: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.embedding(phonemes)
        return self.duration(hidden).squeeze(-1), self.frame(hidden)


def spoken(update: int) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(update)
    lengths = torch.tensor([6, 3, 4, 2, 5, 1])
    known = (torch.arange(6) < lengths[:, None]).double()
    return {
        "phonemes": torch.randint(0, 9, (6, 6), generator=drawn),
        "phonemes_known": known,
        "durations": torch.rand(6, 6, generator=drawn, dtype=torch.float64),
        "frames": torch.randn(6, 6, 5, generator=drawn, dtype=torch.float64),
        "frames_known": known.flip(0)[..., None].expand(6, 6, 5).clone(),
    }


@pytest.mark.parametrize("size", [6, 4, 1])
def test_terms_with_counts_of_their_own_give_the_plain_loop_for_every_cut(page: dict[str, Any], size: int) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return Speech().double()

    plain, cut = model(), model()
    optimizer, batches = torch.optim.Adam(plain.parameters(), lr=1e-3), [spoken(update) for update in range(3)]
    for batch in batches:
        optimizer.zero_grad()
        duration, frame = plain(batch["phonemes"])
        known = batch["phonemes_known"]
        term = ((duration - batch["durations"]) ** 2 * known).sum() / known.sum()
        known = batch["frames_known"]
        (term + ((frame - batch["frames"]).abs() * known).sum() / known.sum()).backward()
        optimizer.step()
    parts = [[{name: one[n : n + size] for name, one in batch.items()} for n in range(0, 6, size)] for batch in batches]
    page["speaking"](cut, parts)
    close(cut, plain)


class Graphs(SimpleNamespace):
    """As torch_geometric's `Batch`, of graphs of unequal size."""

    @property
    def num_graphs(self) -> int:
        return len(self.y)

    def to_data_list(self) -> list[tuple[Tensor, Tensor]]:
        return [(self.x[self.of == number], self.y[number]) for number in range(len(self.y))]

    @classmethod
    def from_data_list(cls, graphs: list[tuple[Tensor, Tensor]]) -> "Graphs":
        of = torch.cat([torch.full((len(x),), number) for number, (x, _) in enumerate(graphs)])
        return cls(x=torch.cat([x for x, _ in graphs]), y=torch.stack([y for _, y in graphs]), of=of)

    def to(self, device: Any, non_blocking: bool = False) -> "Graphs":
        return self


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 1)

    def forward(self, batch: Graphs) -> Tensor:
        return torch.zeros(len(batch.y), dtype=torch.float64).index_add(0, batch.of, self.line(batch.x).squeeze(-1))


def test_graphs_give_the_plain_loop_for_every_cut_and_are_cut_for_memory(page: dict[str, Any]) -> None:
    drawn = torch.Generator().manual_seed(1)
    ones = [torch.randn(2 + n % 3, 3, generator=drawn, dtype=torch.float64) for n in range(6)]
    graphs = [(x, x.sum()) for x in ones]

    class Small(page["Molecules"]):
        def loss(self, output: Tensor, batch: Graphs) -> Tensor:
            if len(output) > 2 and self.now.is_training:
                raise torch.OutOfMemoryError("no memory for so many")
            return super().loss(output, batch)

    def trained(task: Any, *cuts: int) -> nn.Module:
        torch.manual_seed(0)
        model = Pooled().double()
        engine = evenstep.Engine(
            model,
            task,
            torch.optim.SGD(model.parameters(), lr=0.01),
            device="cpu",
            train=evenstep.Training(check_loss=type(task) is not Small),
        )
        ends = [0, *cuts, 6]
        for _ in range(3):
            engine.update(microbatches=(Graphs.from_data_list(graphs[first:end]) for first, end in pairwise(ends)))
        return model

    torch.manual_seed(0)
    plain = Pooled().double()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        batch = Graphs.from_data_list(graphs)
        (plain(batch) - batch.y).square().mean().backward()
        optimizer.step()
    for model in (trained(page["Molecules"]()), trained(page["Molecules"](), 1, 4), trained(Small())):
        close(model, plain)
