"""Tokens in files as llm.c and the GPT-2 speedruns keep them, cut into windows; and how to come by such files.

A file begins with 256 numbers of 32 bits: 20240520, version 1, the number of tokens, zeros. Then follow the tokens with
16 bits each. Files are mapped into memory, so only what is read is loaded, and workers share it.

    python tokens.py fetch --shards 10      # FineWeb in GPT-2's tokens, 100 million per file (needs huggingface_hub)
    python tokens.py toy                    # Python's own manual, a token per byte: enough for toy.toml
"""

import argparse
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import cast, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from evenstep.errors import ArgumentError, DataError, MissingExtraError

HERE = Path(__file__).parent
MAGIC, VERSION, HEADER = 20240520, 1, 256
FINEWEB, NAMES = "kjj0/fineweb10B-gpt2", {"train": "fineweb_train_{:06d}.bin", "valid": "fineweb_val_{:06d}.bin"}


def write_tokens(path: Path, tokens: Sequence[int]) -> None:
    """Write one file; tokens are below 65,536."""
    header = np.zeros(HEADER, dtype="<i4")
    header[:3] = MAGIC, VERSION, len(tokens)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header.tobytes() + np.asarray(tokens, dtype="<u2").tobytes())


def read_tokens(path: Path) -> "np.memmap[tuple[int], np.dtype[np.uint16]]":
    """The tokens of one file, mapped.

    Raises:
        DataError: it is not such a file, or not all of it is there.
    """
    header = np.fromfile(path, dtype="<i4", count=HEADER)
    if len(header) < HEADER or header[0] != MAGIC or header[1] != VERSION:
        raise DataError(f"{path} is no file of tokens: it must begin with {MAGIC} and version {VERSION}.")
    tokens = np.memmap(path, dtype="<u2", mode="r", offset=4 * HEADER)
    if len(tokens) != header[2]:
        raise DataError(f"{path} must hold {header[2]} tokens, as it says, but holds {len(tokens)}; fetch it again.")
    return cast("np.memmap[tuple[int], np.dtype[np.uint16]]", tokens)


@final
class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of `context` tokens to read and, shifted by one, those to predict; no token is predicted twice.

    Args:
        files: a pattern relative to this recipe's folder, such as `data/fineweb_train_*.bin`; sorted by name.
        context: tokens per window; what is left at the end of a file is not used.
        limit: only so many windows, the first; None for all.

    Raises:
        DataError: no file fits the pattern, or one can't be read.
    """

    def __init__(self, files: str, *, context: int, limit: int | None = None) -> None:
        paths = sorted(HERE.glob(files))
        if not paths:
            raise DataError(
                f"no file fits {HERE / files}; write some with `python {HERE / 'tokens.py'} fetch`, or `toy` to try it."
            )
        self.files = [read_tokens(path) for path in paths]
        self.context = context
        self.ends = list(accumulate((len(tokens) - 1) // context for tokens in self.files))
        self.count = self.ends[-1] if limit is None else min(limit, self.ends[-1])
        if self.count < 1:
            raise ArgumentError(f"`context` must be less than the tokens of a file, but is {context}; lower it.")
        self.fingerprint = f"{[(path.name, len(one)) for path, one in zip(paths, self.files, strict=True)]}/{context}"

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, both int64 `[context]`."""
        number = bisect_right(self.ends, index)
        begin = (index - (self.ends[number - 1] if number else 0)) * self.context
        window = torch.from_numpy(self.files[number][begin : begin + self.context + 1].astype(np.int64))
        return window[:-1], window[1:]


def fetch(shards: int) -> None:
    """Download FineWeb's validation file and the first training files.

    Raises:
        MissingExtraError: huggingface_hub is not installed.
    """
    try:
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        raise MissingExtraError("huggingface_hub", "hf") from error
    for name in [NAMES["valid"].format(0), *(NAMES["train"].format(number + 1) for number in range(shards))]:
        print(hf_hub_download(FINEWEB, name, repo_type="dataset", local_dir=HERE / "data"), flush=True)


def toy() -> None:
    """Write Python's manual, a token per byte: nine tenths to train on, one to evaluate."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    border = len(text) * 9 // 10
    write_tokens(HERE / "data" / "toy_train.bin", list(text[:border]))
    write_tokens(HERE / "data" / "toy_valid.bin", list(text[border:]))
    print(f"wrote {len(text):,} tokens to {HERE / 'data'}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["fetch", "toy"])
    parser.add_argument("--shards", type=int, default=10, help="files of 100 million tokens to fetch; 103 are all")
    given = parser.parse_args()
    if given.what == "fetch":
        fetch(given.shards)
    else:
        toy()


if __name__ == "__main__":
    main()
