"""A sound run that is keyed, cast, frozen and cached."""

import functools
from typing import Any

import torch
from prove_mutants import Net, Run, Words, padded
from torch import Tensor, nn
from torch.nn import functional

from evenstep.events import Hook


class Few(Words):
    """So few that an epoch is two updates, the second a short one."""

    def __len__(self) -> int:
        return 20


class Unusual(nn.Module):
    """Whatever is keyed, cast, frozen or cached, and as harmless as it looks."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Dropout(0.3), nn.AlphaDropout(0.2), nn.LayerNorm(8), nn.GroupNorm(2, 8))
        self.frozen = nn.BatchNorm1d(8).eval()
        self.mean, self.width, self.gate = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.calls, self.table, self.last = 0, None, None

    def forward(self, x: Tensor) -> Tensor:
        self.calls, self.last = self.calls + 1, x.detach()
        self.table = torch.cos(torch.arange(8.0)) if self.table is None else self.table
        x = self.frozen(self.parts(x)) * self.table
        x = torch.distributions.Normal(self.mean(x), self.width(x).exp()).rsample()
        x = x * torch.distributions.Beta(2.0, 2.0).sample(x.shape).to(x)
        x = x * functional.gumbel_softmax(self.gate(x), hard=True)
        halved = functional.linear(x.bfloat16(), self.mean.weight.bfloat16())
        with torch.autocast("cpu", torch.bfloat16):
            return x + halved.to(x) + self.gate(x).to(x)


class Notes(Hook):
    """Counts and keeps what it sees, and does nothing with it."""

    def __init__(self) -> None:
        self.seen, self.losses = 0, list[float]()

    def after_microbatch(self, event: Any) -> None:
        self.seen += 1
        self.losses.append(float(event.loss))


class Cached(Few):
    """Keeps samples as they are."""

    @functools.lru_cache(maxsize=8)  # noqa: B019
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return super().__getitem__(index)


def longest_first(samples: list[Any]) -> Any:
    return padded(sorted(samples, key=lambda one: -len(one[0])))


UNUSUAL = Run(model=lambda: Net(Unusual), dataset=Cached, hooks=lambda: [Notes()], collate=lambda: longest_first)
