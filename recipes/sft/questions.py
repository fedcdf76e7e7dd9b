"""Questions with one right answer, as bytes: what a model is to complete, and where its answer begins.

They are made by rule, so nothing is fetched and everybody has the same; three kinds, of different lengths. It is no
benchmark: it stands where your own pairs of prompt and completion go.
"""

from collections.abc import Sequence
from random import Random
from typing import Literal, TypedDict

from evenstep.integrations.hf import Packing

Split = Literal["train", "valid"]

PAD, BEGIN, END = 0, 1, 2  # bytes that no text here has
WORDS = ("ash", "birch", "cedar", "elm", "fir", "hazel", "larch", "maple", "oak", "pine", "rowan", "willow", "yew")
SEEDS = {"train": 1, "valid": 2}


class Sample(TypedDict):
    """A question and its answer: `labels` are the tokens of the answer, and −100 on the question."""

    input_ids: list[int]
    labels: list[int]


def questions(*, split: Split, count: int = 4000) -> list[Sample]:
    """The samples of a split; those of `valid` may also be among those of `train`, as questions are."""
    random = Random(SEEDS[split])
    return [sample(*pair(random)) for _ in range(count)]


def pair(random: Random) -> tuple[str, str]:
    """A question, and its answer."""
    kind = random.randrange(3)
    if kind == 0:
        one, other = random.randrange(100), random.randrange(100)
        return f"{one}+{other}=", str(one + other)
    words = random.sample(WORDS, random.randint(2, 4))
    if kind == 1:
        return f"last of {' '.join(words)}? ", words[-1]
    return f"sort {' '.join(words)}: ", " ".join(sorted(words))


def sample(question: str, answer: str) -> Sample:
    """The tokens of both, of which those of the answer are learned."""
    prompt, completion = [BEGIN, *question.encode()], [*answer.encode(), END]
    return {"input_ids": prompt + completion, "labels": [-100] * len(prompt) + completion}


def rows(samples: Sequence[Sample]) -> object:
    """A batch: as few rows of 128 tokens as hold the samples."""
    return Packing(max_tokens=128, pad_token_id=PAD)(samples)
