"""Predict the next byte of the translation; and, at the end, show some and score them all.

What is shown comes from the checkpoint that was just saved, so it is the same whether the model was trained whole or in
stages, of which no rank holds all.
"""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch.nn.functional as F
from corpus import PAD, Pairs, padded
from model import Translator, bytes_of
from torch import Tensor, nn

from evenstep import Hook, Loss, Task
from evenstep.checkpoint import read_checkpoint
from evenstep.errors import MissingExtraError
from evenstep.events import TrainEvent

Batch = dict[str, Tensor]
BATCH = 64


class Translate(Task):
    """Summed cross-entropy of the next byte, in nats."""

    unit = "tokens"  # a byte is one

    def inputs(self, batch: Batch) -> Batch:
        """The source, and the target without its last token."""
        return {"source": batch["source"], "tokens": batch["target"][:, :-1]}

    def weight(self, batch: Batch) -> Tensor:
        """The number of bytes that are predicted, ends included."""
        return (batch["target"][:, 1:] != PAD).sum()

    def loss(self, output: Tensor, batch: Batch) -> Loss:
        """−Σ log p(target), with the share of bytes whose likeliest guess is right."""
        target = batch["target"][:, 1:]
        nats = F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=PAD, reduction="sum")
        valid = target != PAD
        right = ((output.argmax(-1) == target) & valid).sum()
        return Loss(nats, metrics={"accuracy": (right, valid.sum())})


def bleu_of(counts: Mapping[str, float]) -> float:
    """Corpus BLEU from the counts of all sentences, as sacrebleu makes it of them."""
    matches, totals = ([int(counts[f"{kind}{n}"]) for n in range(1, 5)] for kind in ("match", "total"))
    lengths = {"sys_len": int(counts["written"]), "ref_len": int(counts["wanted"])}
    return import_module("sacrebleu").BLEU.compute_bleu(matches, totals, **lengths, smooth_method="exp").score


class ScoredTranslate(Translate):
    """The same, and in evaluations `valid/bleu`, of what the model translates greedily: for `model.py:Translator`.

    Args:
        max_bytes: of each translation.

    Reference: Papineni et al., "BLEU: a method for automatic evaluation of machine translation", ACL 2002, equations 1
    to 3, as sacrebleu counts.
    """

    derived = MappingProxyType({"bleu": bleu_of})

    def __init__(self, *, max_bytes: int = 48) -> None:
        if find_spec("sacrebleu") is None:
            raise MissingExtraError("sacrebleu", "translation")
        self.max_bytes = max_bytes

    def evaluate(self, model: nn.Module, batch: Batch) -> Loss:
        """The loss, and what BLEU counts in the translations of the batch."""
        loss = cast("Loss", super().evaluate(model, batch))
        mine = [text.decode(errors="replace") for text in translated(model, batch["source"], self.max_bytes)]
        references = [bytes_of(row).decode() for row in batch["target"][:, 1:].tolist()]
        score = import_module("sacrebleu").corpus_bleu(mine, [references])
        matches = {f"match{n}": count for n, count in enumerate(score.counts, 1)}
        totals = {f"total{n}": count for n, count in enumerate(score.totals, 1)}
        return replace(loss, counts={**matches, **totals, "written": score.sys_len, "wanted": score.ref_len})


def translated(model: nn.Module, source: Tensor, max_bytes: int) -> list[bytes]:
    """What a whole `Translator` makes of sources."""
    return cast("Translator", model).translate(source, max_bytes=max_bytes)


class Translations(Hook):
    """At the end, show some translations of the evaluation's messages, and the BLEU and chrF of all.

    Args:
        show: how many.
        limit: how many messages are translated for the score.
        language: of the pairs.
        max_bytes: of the pairs.

    Reference: Papineni et al., "BLEU: a method for automatic evaluation of machine translation", ACL 2002, and Popović,
    "chrF: character n-gram F-score for automatic MT evaluation", WMT 2015, as sacrebleu has them.
    """

    first_rank_only = True

    def __init__(self, *, show: int = 8, limit: int = 256, language: str = "de", max_bytes: int = 48) -> None:
        self.show, self.max_bytes = show, max_bytes
        self.pairs = Pairs(split="valid", language=language, max_bytes=max_bytes, limit=limit)

    def before_train(self, event: TrainEvent) -> None:
        if find_spec("sacrebleu") is None:
            raise MissingExtraError("sacrebleu", "translation")

    def after_train(self, event: TrainEvent) -> None:
        folder = self.trainer.folder
        if event.outcome == "failed" or folder is None:
            return
        found = list(self.translated(folder))
        scores, pairs = import_module("sacrebleu"), ([mine for _, _, mine in found], [[ref for _, ref, _ in found]])
        bleu, chrf = scores.corpus_bleu(*pairs).score, scores.corpus_chrf(*pairs).score
        print(f"\n{len(found)} valid messages, after update {event.update}: BLEU {bleu:.1f}, chrF {chrf:.1f}")
        for english, reference, mine in found[:: max(1, len(found) // self.show)][: self.show]:
            print(f"  {english}\n    reference  {reference}\n    model      {mine}")
        print(flush=True)

    def translated(self, folder: Path) -> Iterator[tuple[str, str, str]]:
        """English, reference and translation of each pair, by the newest checkpoint in the run's folder."""
        arguments: dict[str, Any] = tomllib.loads((folder / "config.toml").read_text())["model"]["args"]
        model = Translator(**arguments)
        model.load_state_dict(cast("dict[str, Tensor]", read_checkpoint(folder).state["model"]))
        for begin in range(0, len(self.pairs), BATCH):
            pairs = self.pairs.pairs[begin : begin + BATCH]
            batch = padded([self.pairs[number] for number in range(begin, begin + len(pairs))])
            translations = model.translate(batch["source"], max_bytes=self.max_bytes)
            for (english, reference), mine in zip(pairs, translations, strict=True):
                yield english.decode(), reference.decode(), mine.decode(errors="replace")
