"""GPT-2's architecture, small: learned positions, pre-norm blocks without biases, one matrix that embeds and scores.

It is written to be read: no key-value cache, no options that this recipe does not use.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evenstep.errors import ArgumentError
from evenstep.pipeline import Layer

INITIAL_DEVIATION = 0.02


class Embedding(nn.Module):
    """The vector of each character plus that of its position."""

    def __init__(self, characters: int, width: int, context: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, width)
        self.positions = nn.Embedding(context, width)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.characters(inputs) + self.positions(torch.arange(inputs.shape[1], device=inputs.device))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); see Radford et al., "Language Models are Unsupervised Multitask
    Learners", 2019.

    Args:
        width: channels of the residual stream.
        heads: attention heads, which share `width` between them.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention_in = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.attention_in(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        read = F.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True
        )
        x = x + self.attention_out(read.transpose(1, 2).flatten(-2))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


class CharGPT(nn.Module):
    """Scores of the next character at every position.

    Args:
        characters: how many there are.
        layers: number of blocks.
        width: channels of the residual stream, a multiple of `heads`.
        heads: attention heads per block.
        context: longest sequence, in characters.
    """

    def __init__(self, *, characters: int, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        if width % heads:
            raise ArgumentError(f"`width` must be a multiple of the {heads} heads, but is {width}.")
        self.context = context
        self.embedding = Embedding(characters, width, context)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, characters, bias=False, device="meta")  # draws no weights of its own
        self.head.weight = self.embedding.characters.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                share = (2 * layers) ** 0.5 if name.endswith("_out.weight") else 1.0  # 2 branches per block add up
                nn.init.normal_(parameter, std=INITIAL_DEVIATION / share)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits `[batch, position, characters]` for numbers `[batch, position]`."""
        x = self.embedding(inputs)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def layers(self) -> list[Layer]:
        """Its layers in their order: what a pipeline cuts into stages."""
        blocks = [Layer(f"blocks.{number}", block) for number, block in enumerate(self.blocks)]
        return [Layer("embedding", self.embedding), *blocks, Layer("norm", self.norm), Layer("head", self.head)]

    @torch.no_grad()
    def generate(
        self, prompt: list[int], *, count: int, temperature: float, generator: torch.Generator | None = None
    ) -> Tensor:
        """`count` further characters as numbers, each drawn from softmax(logits / temperature).

        Args:
            prompt: at least one number.
            count: how many.
            temperature: above 0; below 1 the likelier ones become likelier still.
            generator: the randomness, on the CPU.
        """
        if not prompt or temperature <= 0:
            raise ArgumentError(f"`prompt` must not be empty and `temperature` above 0, but is {temperature}.")
        was_training = self.training
        self.eval()
        text = list(prompt)
        for _ in range(count):
            window = torch.tensor([text[-self.context :]], device=self.head.weight.device)
            scores = self(window)[0, -1].float().cpu() / temperature
            text.append(int(torch.multinomial(scores.softmax(-1), 1, generator=generator)))
        self.train(was_training)
        return torch.tensor(text[len(prompt) :])


def char_gpt(*, text: str | None = None, layers: int, width: int, heads: int, context: int) -> CharGPT:
    """A `CharGPT` for the characters of a text; see `corpus.read_text` for which."""
    from corpus import read_text

    return CharGPT(characters=len(set(read_text(text))), layers=layers, width=width, heads=heads, context=context)
