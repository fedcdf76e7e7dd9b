import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

import pytest
import torch

from evenstep import Logging, MapData, Trainer
from evenstep.pipeline import PipelineModel


@pytest.fixture(scope="module")
def corpus(recipe_file: Callable[[str], ModuleType]) -> ModuleType:
    return recipe_file("translation/corpus.py")


@pytest.fixture(scope="module")
def model_file(recipe_file: Callable[[str], ModuleType]) -> ModuleType:
    return recipe_file("translation/model.py")


@pytest.fixture
def task_file(
    recipe_file: Callable[[str], ModuleType],
    corpus: ModuleType,
    model_file: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[ModuleType]:
    monkeypatch.setitem(sys.modules, "corpus", corpus)  # as a run finds them, by name
    monkeypatch.setitem(sys.modules, "model", model_file)
    yield recipe_file("translation/task.py")


def write_catalogue(path: Path, pairs: Mapping[str, str], charset: str = "UTF-8") -> None:
    """A .mo file, as GNU gettext documents its format."""
    entries = sorted({"": f"Content-Type: text/plain; charset={charset}\n", **pairs}.items())
    texts = [text.encode() for english, translated in entries for text in (english, translated)]
    begin = 28 + 16 * len(entries)
    places: list[tuple[int, int]] = []
    for text in texts:
        places.append((len(text), begin))
        begin += len(text) + 1
    tables = [number for side in (0, 1) for place in places[side::2] for number in place]
    header = [0x950412DE, 0, len(entries), 28, 28 + 8 * len(entries), 0, 0]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack(f"<{7 + len(tables)}I", *header, *tables) + b"".join(text + b"\0" for text in texts))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "de/LC_MESSAGES"
    write_catalogue(
        folder / "b.mo", {"yes": "jawohl", "two\nlines": "zwei\nZeilen", **{f"n{n}": f"Nr {n}" for n in range(60)}}
    )
    write_catalogue(folder / "a.mo", {"yes": "ja", "same": "same", "menu\x04no": "nein", "long" * 20: "lang"})
    return tmp_path


def test_pairs_are_short_lines_that_differ_and_each_is_in_one_split(corpus: ModuleType, root: Path) -> None:
    train, valid = (corpus.Pairs(split=split, root=root) for split in ("train", "valid"))
    english = [pair[0].decode() for data in (train, valid) for pair in data.pairs]
    assert sorted(english) == sorted(["yes", "no", *(f"n{n}" for n in range(60))])
    assert valid.pairs
    assert train.fingerprint != valid.fingerprint
    assert len(corpus.Pairs(split="train", root=root, limit=5)) == 5


def test_a_batch_is_as_long_as_its_longest_message(corpus: ModuleType, root: Path) -> None:
    data = corpus.Pairs(split="train", root=root)
    places = [next(place for place, pair in enumerate(data.pairs) if pair[0] == word) for word in (b"yes", b"n7")]
    batch = corpus.padded([data[place] for place in places])
    assert bytes(batch["source"][0].tolist()) == b"yes"
    assert batch["source"][1].tolist() == [*b"n7", corpus.PAD]
    assert batch["target"][0].tolist() == [corpus.BEGIN, *b"ja", corpus.END, corpus.PAD, corpus.PAD]


def made(model_file: ModuleType, blocks: int = 2) -> torch.nn.Module:
    torch.manual_seed(0)
    return model_file.Translator(blocks=blocks, width=16, heads=2, context=12)


def test_the_tokens_of_model_and_corpus_are_the_same(model_file: ModuleType, corpus: ModuleType) -> None:
    names = ("NUM_TOKENS", "PAD", "BEGIN", "END")
    assert [vars(model_file)[name] for name in names] == [vars(corpus)[name] for name in names]


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_stages_compute_what_the_whole_model_does(model_file: ModuleType, stages: int) -> None:
    whole = made(model_file)
    source, tokens = torch.randint(256, (3, 7)), torch.randint(256, (3, 5))
    source[0, 4:] = 256
    wanted = whole(source, tokens)
    staged = PipelineModel(whole, stages_per_rank=stages)
    assert torch.equal(staged(source=source, tokens=tokens), wanted)
    assert list(staged.state_dict()) != []
    assert set(staged.state_dict()) == set(whole.state_dict())


def test_no_output_depends_on_what_comes_after_it(model_file: ModuleType) -> None:
    whole, source, tokens = made(model_file), torch.randint(256, (1, 5)), torch.randint(256, (1, 6))
    other = tokens.clone()
    other[0, 3] = (other[0, 3] + 1) % 256
    before, after = whole(source, tokens), whole(source, other)
    torch.testing.assert_close(before[:, :3], after[:, :3])
    assert not torch.allclose(before[:, 3], after[:, 3])


@pytest.mark.parametrize("sizes", [(5, 5), (3, 1), (2, 2)])
def test_the_bleu_of_an_evaluation_is_that_of_the_corpus(
    model_file: ModuleType, corpus: ModuleType, task_file: ModuleType, sizes: tuple[int, int]
) -> None:
    sacrebleu = pytest.importorskip("sacrebleu")  # the extra `translation`, which `dev` has not
    texts = ["one two three four five", "to be or not to be", "yes", "a b c d", "the file is there"]
    pairs = [(torch.tensor(list(text.encode())), torch.tensor([257, *text.encode(), 258])) for text in texts]
    size, micro = sizes
    data = MapData(pairs, global_batch_size=size, micro_batch_size=micro, collate=corpus.padded, shuffle=False)
    wanted_of = {text.encode(): text.replace("be", "bee").replace("d", "") for text in texts}

    class Copies(model_file.Translator):
        """Translates by a rule, well enough that there are n-grams to count."""

        def translate(self, source: torch.Tensor, *, max_bytes: int) -> list[bytes]:
            return [wanted_of[bytes(byte for byte in row if byte < 256)].encode() for row in source.tolist()]

    model = Copies(blocks=1, width=16, heads=2, context=32)
    trainer = Trainer(
        model=model,
        task=task_file.ScoredTranslate(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data=data,
        evaluations=data,
        updates=1,
        device="cpu",
        log=Logging(writers=()),
    )
    found = trainer.evaluate()["valid"]
    reference = sacrebleu.corpus_bleu([wanted_of[text.encode()] for text in texts], [texts])
    assert found["bleu"] == reference.score
    assert 20 < found["bleu"] < 100 and "loss" in found and "accuracy" in found
