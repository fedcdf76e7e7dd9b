"""Models for shards: each shows one way to use modules."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 8


class Net(nn.Module):
    """Makes its output of the last features; the rest is the subclass's."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        features = self.features(torch.tanh(self.stem(x)), int(number[0]))
        return self.head(features).sum(-1)

    def features(self, x: Tensor, number: int) -> Tensor:
        raise NotImplementedError


def linears(count: int, **more: Any) -> nn.ModuleList:
    return nn.ModuleList([nn.Linear(WIDTH, WIDTH, **more) for _ in range(count)])


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return x + torch.tanh(self.k(memory)) * self.v(memory)


class Memory(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Decoder(), Decoder(), Decoder()])

    def features(self, x: Tensor, number: int) -> Tensor:
        memory = x * 1.5
        for block in self.blocks:
            x = block(x, memory)
        return x


class Skips(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = linears(4)

    def features(self, x: Tensor, number: int) -> Tensor:
        outputs = [x]
        for block in self.blocks:
            outputs.append(torch.tanh(block(sum(outputs[1:], outputs[0]))) + outputs[-1] * outputs[0])
        return sum(outputs[1:], outputs[0])


class TiedItems(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = linears(3)
        self.blocks[2].weight = self.blocks[0].weight

    def features(self, x: Tensor, number: int) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class Reentrant(Memory):
    def features(self, x: Tensor, number: int) -> Tensor:
        memory = x * 1.5
        for block in self.blocks:
            x = checkpoint(block, x, memory, use_reentrant=True)
        return x


class Albert(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = linears(2)

    def features(self, x: Tensor, number: int) -> Tensor:
        for block in self.blocks:
            for _ in range(3):
                x = x + torch.tanh(block(x))
        return x


class AlbertInARow(Net):
    """Each call takes what the call before gave, with nothing in between."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(*linears(1), nn.Tanh()) for _ in range(2))

    def features(self, x: Tensor, number: int) -> Tensor:
        for block in self.blocks:
            for _ in range(3):
                x = block(x)
        return x


class ListsAsItems(Net):
    """Has lists and dicts as items of its list, which nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        pair = nn.ModuleDict({"one": nn.Linear(WIDTH, WIDTH), "two": linears(1)})
        self.stages = nn.ModuleList([linears(2), pair, nn.ParameterList([torch.ones(WIDTH)])])

    def features(self, x: Tensor, number: int) -> Tensor:
        for block in (*self.stages[0], self.stages[1]["one"], self.stages[1]["two"][0]):
            x = x + torch.tanh(block(x)) * self.stages[2][0]
        return x


class Experts(Net):
    def __init__(self) -> None:
        super().__init__()
        self.experts = linears(3)
        self.last = linears(1)

    def features(self, x: Tensor, number: int) -> Tensor:
        return self.last[0](x + torch.tanh(self.experts[number // 2 % 3](x)))


class Transformer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Transformer(WIDTH, 2, 2, 2, 16, dropout=0.1, batch_first=True)

    def features(self, x: Tensor, number: int) -> Tensor:
        return self.body(torch.stack([x, x * x], 1), torch.stack([x, -x, x + 1], 1)).mean(1)


class ParameterLists(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.ones(WIDTH), torch.full((3, WIDTH), 0.5)])
        self.named = nn.ParameterDict({"shift": torch.zeros(WIDTH), "mix": torch.eye(WIDTH)})
        self.blocks = linears(2)

    def features(self, x: Tensor, number: int) -> Tensor:
        x = x * self.scales[0] + self.scales[1].sum(0) * self.named["shift"]
        for block in self.blocks:
            x = torch.tanh(block(x @ self.named["mix"]))
        return x


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, none: None) -> tuple[dict[str, Any], None, list[Tensor]]:
        return {"x": torch.tanh(self.one(x)), "nothing": None}, None, [self.two(x)]


class Structures(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Parts(), Parts()])

    def features(self, x: Tensor, number: int) -> Tensor:
        none = None
        for block in self.blocks:
            named, none, listed = block(x, none)
            x = named["x"] + x * torch.sigmoid(listed[0])
        return x


class Recurrent(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.GRU(WIDTH, WIDTH, batch_first=True)])

    def features(self, x: Tensor, number: int) -> Tensor:
        sequence = torch.stack([x, -x, x * x], 1)
        for block in self.blocks:
            sequence = block(sequence)[0]
        return sequence[:, -1]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * torch.tanh(self.linear(x * self.scale))


class Scalars(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Scaled(), Scaled()])

    def features(self, x: Tensor, number: int) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Teacher(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = linears(2)

    def features(self, x: Tensor, number: int) -> Tensor:
        with torch.no_grad():
            target = torch.tanh(self.blocks[1](torch.tanh(self.blocks[0](x))))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x * target


class Unneeded(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = linears(3)

    def features(self, x: Tensor, number: int) -> Tensor:
        first = x + torch.tanh(self.blocks[0](x))
        self.blocks[1](first)
        return torch.tanh(self.blocks[2](first))


class Skipped(nn.Linear):
    def forward(self, x: Tensor, skip: bool) -> Tensor:  # type: ignore[override]
        return x if skip else x + torch.tanh(super().forward(x))


class Skipping(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Skipped(WIDTH, WIDTH) for _ in range(3)])

    def features(self, x: Tensor, number: int) -> Tensor:
        for place, block in enumerate(self.blocks):
            x = block(x, place == number // 2 % 4)
        return x


class NeededLater(Net):
    def __init__(self) -> None:
        super().__init__()
        self.heads = linears(3)

    def features(self, x: Tensor, number: int) -> Tensor:
        outputs = [head(x) for head in self.heads]
        return outputs[0] + (outputs[1] if number >= 10 else 0) + (outputs[2] if number >= 20 else 0)


NETS: dict[str, type[nn.Module]] = {
    one.__name__: one
    for one in (
        Memory,
        Skips,
        TiedItems,
        Reentrant,
        Albert,
        AlbertInARow,
        ListsAsItems,
        Transformer,
        ParameterLists,
        Structures,
        Recurrent,
        Scalars,
        Teacher,
        Unneeded,
        Skipping,
        NeededLater,
    )
}
