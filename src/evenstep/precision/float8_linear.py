"""Class of the linear layers of `Float8Mixed`; importing it imports torchao."""

from typing import Any

import torch
import torchao.float8.float8_linear as torchaos  # pyright: ignore[reportMissingImports] - an extra
from torch import Tensor

_Base: Any = torchaos.Float8Linear


class Float8Linear(_Base):
    """An `nn.Linear` in float8. Under autocast its input is cast on every device, and its products are not."""

    def forward(self, input: Tensor) -> Tensor:
        kind = input.device.type
        if not torch.is_autocast_enabled(kind):
            return super().forward(input)
        with torch.autocast(kind, enabled=False):
            return super().forward(input.to(torch.get_autocast_dtype(kind)))
