"""What an update costs on one CUDA device: a GPT of 124M parameters beside the same in a loop tuned by hand.

Contenders take turns, a few updates each, on one device, so that its clock and heat are the same for all. Times are by
the clock on the wall, from an idle device to an idle device. `ratio` is a contender's time by that of the tuned loop in
the same round, the median over rounds; there are two copies of that loop, and others are divided by their mean. All
begin with the same parameters and the same tokens, and must come to the same loss. Beside it: what EMA and reading each
update's loss add, for how long a save keeps training waiting, beside a plain copy, what compiling brings a small GPT,
whose kernels take less time than their launches, and four blocks of the large one, and two wide blocks in float8 beside
bfloat16, both compiled.
"""

import argparse
import gc
import importlib
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import torch  # noqa: E402 - the folder of this script must be on the path first
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.nn.utils import clip_grad_norm_  # noqa: E402

from evenstep import Ema, Engine, Task, Training  # noqa: E402
from evenstep.checkpoint.background import Staging  # noqa: E402
from evenstep.precision import Float8Mixed, Precision  # noqa: E402
from evenstep.precision.float8 import CAPABILITY  # noqa: E402
from evenstep.train.engine import global_batch  # noqa: E402
from harness.row import Row, Times, compared, mean_of, table, write_rows  # noqa: E402
from harness.work import Block  # noqa: E402

TUNED, AGAIN, EVENSTEP = "tuned by hand", "tuned by hand, again", "evenstep"
TUNED_COMPILED = "tuned by hand, compiled"
SLOWEST = 1 / 0.98  # of the time of the tuned loop: at least 0.98 of its throughput
CLIP_NORM, LEARNING_RATE = 1.0, 3e-4
SETTLE_EVERY_UPDATES = 10
CHECKED_UPDATES, CHECKED_WITHIN = 4, 2e-2  # of the loss: bfloat16 has 8 bits
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L4": 121e12, "RTX 4090": 165e12}
"""Dense bfloat16 products per second that makers state, by a part of the device's name."""


def _memory_of(device: torch.device) -> int | None:
    """Bytes of memory of a CUDA device; None for other devices."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large the work is.

    Args:
        layers, width, heads, vocabulary, context: of the GPT.
        batch: sequences of a micro-batch.
        num_microbatches: of an update.
        updates: of a chunk, between two readings of the clock.
        rounds: chunks of each contender.
        mebibytes: of what is saved.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int
    batch: int
    num_microbatches: int
    updates: int
    rounds: int
    mebibytes: int


GPT_124M = Size(
    layers=12,
    width=768,
    heads=12,
    vocabulary=50304,
    context=1024,
    batch=16,
    num_microbatches=2,
    updates=10,
    rounds=6,
    mebibytes=1024,
)
TOY = Size(
    layers=1, width=16, heads=2, vocabulary=64, context=8, batch=2, num_microbatches=2, updates=2, rounds=2, mebibytes=1
)


FOUR_BLOCKS = replace(GPT_124M, layers=4, vocabulary=8192, rounds=4)
SMALL = replace(FOUR_BLOCKS, layers=2, width=128, heads=4, vocabulary=512, context=64, batch=8, updates=40)
WIDE = replace(GPT_124M, layers=2, width=4096, heads=32, vocabulary=8192, context=2048, batch=4, updates=5, rounds=4)


def fitted(size: Size, device: torch.device) -> Size:
    """The same with smaller micro-batches on a device with less than 40 GB of memory."""
    memory = _memory_of(device)
    return size if memory is None or memory >= 40e9 else replace(size, batch=2, num_microbatches=16)


class Gpt(nn.Module):
    """A decoder whose last layer shares its weights with the embedding, as GPT-2's: 124M parameters at its size."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*[Block(size.width, size.heads) for _ in range(size.layers)])
        self.last = nn.LayerNorm(size.width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.last(self.blocks(self.tokens(tokens) + self.places(places)))
        return functional.linear(hidden, self.tokens.weight)


def flops_per_token(size: Size) -> float:
    """Forward and backward: 6 per weight of a product, and 12 · layers · width · context for attention.

    Reference: Chowdhery et al., "PaLM", 2022, appendix B; half of the attention's is masked and counts as well.

    >>> round(flops_per_token(GPT_124M) / 1e6)
    855
    """
    weights = size.layers * 12 * size.width**2 + size.vocabulary * size.width
    return 6.0 * weights + 12.0 * size.layers * size.width * size.context


class NextToken(Task):
    """The cross-entropy of the next token, summed over tokens."""

    def weight(self, batch: Any) -> int:
        return batch[1].numel()

    def inputs(self, batch: Any) -> Any:
        return batch[0]

    def loss(self, output: Any, batch: Any) -> Tensor:
        return functional.cross_entropy(output.flatten(0, 1), batch[1].flatten(), reduction="sum")


class Contender:
    """Trains a model of its own, some updates at a time.

    Args:
        name: for the table.
        step: makes one update of its micro-batches; gives the loss's mean, on the device.
        settle: makes known what is not yet, at the end of a chunk.
    """

    def __init__(self, name: str, step: Callable[[Sequence[Any]], Tensor], settle: Callable[[], None]) -> None:
        self.name, self.step, self.settle = name, step, settle


Make = Callable[[str, nn.Module, torch.device], Contender]
_How = Literal["off", "model", "update"]


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)


def tuned(name: str, model: nn.Module, device: torch.device, *, compile: bool = False) -> Contender:
    """Fused AdamW, `clip_grad_norm_` over a list made once, and a loss that stays on the device."""
    model = model.to(device)
    if compile:
        model.compile()
    optimizer, parameters = _adamw(model), list(model.parameters())

    def step(microbatches: Sequence[Any]) -> Tensor:
        total: Any = 0.0
        for inputs, targets in microbatches:
            inputs, targets = inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
            with torch.autocast(device.type, torch.bfloat16):
                logits = model(inputs)
                loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) / len(microbatches)
            loss.backward()
            total = total + loss.detach()
        clip_grad_norm_(parameters, CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return Contender(name, step, _nothing)


def evenstep(
    name: str,
    model: nn.Module,
    device: torch.device,
    *,
    ema: bool = False,
    reads: bool = False,
    precision: Precision | str = "bf16-mixed",
    compile: _How = "off",
) -> Contender:
    """An engine whose verdicts are read once in some updates.

    Args:
        ema: with an average of the parameters.
        reads: whether the loss of each update is read, for which the host waits.
        precision, compile: as for `Engine` and `Training`.
    """
    train = Training(clip_norm=CLIP_NORM, check_loss=False, ema=Ema(decay=0.999) if ema else None, compile=compile)
    engine = Engine(model, NextToken(), _adamw(model), precision=precision, device=device, train=train)

    def settle() -> None:
        if engine.ledger.settle() is not None:
            raise RuntimeError(f"{name}: an update was aborted")
        engine.storage.settle()

    def step(microbatches: Sequence[Any]) -> Tensor:
        number = engine.progress.update + 1
        batch = global_batch(microbatches, engine.progress.position, engine.reducers.group)
        engine.ledger.add(engine.parts.compute(batch, engine.progress))
        pair = engine.storage.pending("train/loss", update=number)
        if reads or engine.ledger.num_pending >= SETTLE_EVERY_UPDATES:
            settle()
        return torch.as_tensor(sum(pair[::2]) / sum(pair[1::2]))

    return Contender(name, step, settle)


def lightning(name: str, model: nn.Module, device: torch.device) -> Contender:
    """Lightning's Fabric, whose loop is one's own: no logger and no callbacks."""
    module: Any = importlib.import_module("lightning" if find_spec("lightning") else "lightning_fabric")
    fabric: Any = module.Fabric(
        accelerator="cuda" if device.type == "cuda" else "cpu", devices=1, precision="bf16-mixed"
    )
    wrapped, optimizer = fabric.setup(model, _adamw(model))

    def step(microbatches: Sequence[Any]) -> Tensor:
        total: Any = 0.0
        for number, one in enumerate(microbatches, start=1):
            inputs, targets = fabric.to_device(tuple(one))
            with fabric.no_backward_sync(wrapped, enabled=number < len(microbatches)):
                logits = wrapped(inputs)
                loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) / len(microbatches)
                fabric.backward(loss)
            total = total + loss.detach()
        fabric.clip_gradients(wrapped, optimizer, max_norm=CLIP_NORM, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return Contender(name, step, _nothing)


def accelerate(name: str, model: nn.Module, device: torch.device) -> Contender:
    """accelerate's documented loop, without trackers."""
    module: Any = importlib.import_module("accelerate")
    accelerator: Any = module.Accelerator(mixed_precision="bf16", cpu=device.type == "cpu")
    wrapped, optimizer = accelerator.prepare(model.to(device), _adamw(model))

    def step(microbatches: Sequence[Any]) -> Tensor:
        total: Any = 0.0
        for inputs, targets in microbatches:
            inputs, targets = inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
            with accelerator.autocast():
                logits = wrapped(inputs)
                loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) / len(microbatches)
            accelerator.backward(loss)
            total = total + loss.detach()
        accelerator.clip_grad_norm_(wrapped.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return Contender(name, step, _nothing)


def gpt_step(size: Size, device: torch.device, *, peers: bool = True) -> list[Row]:
    """The rows of the GPT: time, tokens per second and the share of the device's peak of each contender."""
    makes: dict[str, Make] = {TUNED: tuned, AGAIN: tuned, EVENSTEP: evenstep}
    makes["evenstep, with an average"] = lambda name, model, on: evenstep(name, model, on, ema=True)
    makes["evenstep, each loss read"] = lambda name, model, on: evenstep(name, model, on, reads=True)
    if peers:
        makes |= _peers()
    times = _in_turns(makes, size, device)
    tokens = size.updates * size.num_microbatches * size.batch * size.context
    reference = mean_of(times[TUNED], times[AGAIN])
    case = f"gpt {sum(one.numel() for one in Gpt(size).parameters()) / 1e6:.0f}M bf16-mixed"
    rows: list[Row] = []
    for name, one in times.items():
        bound = SLOWEST if name == EVENSTEP else None
        per_update = 1e3 / size.updates
        rows.append(compared(case, name, one, reference, unit="ms/update", per_s=per_update, bound=bound))
    return rows + [row for row in (_speed(one, size, device, tokens) for one in rows) if row is not None]


def _speed(row: Row, size: Size, device: torch.device, tokens: int) -> Row | None:
    """A contender's tokens per second as its share of the device's stated peak; None where none is stated."""
    per_s = tokens / size.updates / (row.median / 1e3)
    share = _of_peak(per_s * flops_per_token(size), device)
    of_peak = "" if share is None else f", {share:.1%} of the stated peak"
    print(f"{row.case}: {row.contender}: {per_s:,.0f} tokens/s{of_peak}", flush=True)
    if share is None:
        return None
    case = f"{row.case}, {per_s:,.0f} tokens/s: share of the device's stated peak"
    return replace(row, case=case, median=100 * share, unit="%", bound=None)


def _peers() -> dict[str, Make]:
    found: dict[str, Make] = {}
    if find_spec("lightning") or find_spec("lightning_fabric"):
        found["lightning (Fabric)"] = lightning
    if find_spec("accelerate"):
        found["accelerate"] = accelerate
    for name in {"lightning (Fabric)", "accelerate"} - found.keys():
        print(f"{name} is not installed: skipped", flush=True)
    return found


def _of_peak(flops: float, device: torch.device) -> float | None:
    """What share of the device's stated peak that is, where that is known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    peak = next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)
    return None if peak is None else flops / peak


def _tokens(size: Size, device: torch.device) -> list[list[tuple[Tensor, Tensor]]]:
    """Global batches on the host, in pinned memory where they go to a CUDA device."""
    generator = torch.Generator().manual_seed(1)
    shape = (4, size.num_microbatches, size.batch, size.context + 1)
    drawn = torch.randint(0, size.vocabulary, shape, generator=generator)

    def pinned(tensor: Tensor) -> Tensor:
        return tensor.contiguous().pin_memory() if device.type == "cuda" else tensor.contiguous()

    return [[(pinned(one[:, :-1]), pinned(one[:, 1:])) for one in several] for several in drawn]


def _in_turns(makes: Mapping[str, Make], size: Size, device: torch.device, reference: str = TUNED) -> dict[str, Times]:
    """The seconds of contenders that take turns, each with the losses of the reference in its first updates."""
    data = _tokens(size, device)
    contenders, losses = _made(makes, size, device, data)
    _check_same(losses, reference)
    return _interleaved(contenders, size, device, data)


def _made(
    makes: Mapping[str, Make], size: Size, device: torch.device, data: Sequence[Any]
) -> tuple[list[Contender], dict[str, list[float]]]:
    """The contenders after their first updates, and the losses of those."""
    contenders: list[Contender] = []
    losses: dict[str, list[float]] = {}
    for name, make in makes.items():
        torch.manual_seed(0)
        try:
            one = make(name, Gpt(size), device)
            first = [one.step(data[number % len(data)]) for number in range(CHECKED_UPDATES)]
        except Exception as error:  # a peer that can't is left out; ours and the loop must not fail
            if name in (TUNED, AGAIN) or name.startswith(EVENSTEP):
                raise
            print(f"{name} is left out: {type(error).__name__}: {error}", flush=True)
            continue
        losses[name] = torch.stack(first).tolist()
        one.settle()
        contenders.append(one)
    return contenders, losses


def _check_same(losses: Mapping[str, list[float]], reference: str = TUNED) -> None:
    """Raise RuntimeError where a contender came to other losses than the reference."""
    expected = losses[reference]
    for name, theirs in losses.items():
        for one, other in zip(theirs, expected, strict=True):
            if not abs(one - other) <= CHECKED_WITHIN * abs(other):
                raise RuntimeError(f"{name} did other work: its losses are {theirs}, those of {reference} {expected}")


def _interleaved(
    contenders: Sequence[Contender], size: Size, device: torch.device, data: Sequence[Any]
) -> dict[str, Times]:
    """The seconds of each contender's chunks, round by round; the first round is not counted."""
    seconds: dict[str, list[float]] = {one.name: [] for one in contenders}
    gc.collect()
    gc.disable()
    try:
        for number in range(size.rounds + 1):
            first = number % len(contenders)
            for one in [*contenders[first:], *contenders[:first]]:
                with _measured(device) as took:
                    for update in range(size.updates):
                        one.step(data[update % len(data)])
                    one.settle()
                seconds[one.name].append(took[0])
            gc.collect()
    finally:
        gc.enable()
    return {name: Times(took[1:], took[1:]) for name, took in seconds.items()}


@contextmanager
def _measured(device: torch.device) -> Generator[list[float]]:
    """Yields a list that holds, afterwards, the seconds from an idle device to an idle device."""
    took: list[float] = []
    _idle(device)
    began = time.perf_counter()
    yield took
    _idle(device)
    took.append(time.perf_counter() - began)


def _idle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def saves(size: Size, device: torch.device) -> list[Row]:
    """For how long training waits for a save, beside a copy into pinned memory that is waited for."""
    count = 64
    tensors = {str(number): torch.ones((size.mebibytes << 18) // count, device=device) for number in range(count)}
    staging, copies = Staging(), [torch.empty_like(one, device="cpu") for one in tensors.values()]
    if device.type == "cuda":
        copies = [one.pin_memory() for one in copies]
    blocked, whole, plain = list[float](), list[float](), list[float]()
    for _ in range(size.rounds + 1):
        _idle(device)
        began = time.perf_counter()
        _, wait = staging.copy(tensors)
        blocked.append(time.perf_counter() - began)
        wait()
        whole.append(time.perf_counter() - began)
        began = time.perf_counter()
        for copy, tensor in zip(copies, tensors.values(), strict=True):
            copy.copy_(tensor, non_blocking=True)
        _idle(device)
        plain.append(time.perf_counter() - began)
    case, reference = f"save of {size.mebibytes} MiB", Times(plain[1:], plain[1:])
    rows: list[Row] = []
    # on a CPU the copy is made at once, so nothing is bound there
    bounds = {"training waits": 0.25 if device.type == "cuda" else None, "the copy is there": None, "plain copy": None}
    for (name, bound), took in zip(bounds.items(), (blocked, whole, plain), strict=True):
        one = Times(took[1:], took[1:])
        rows.append(compared(case, name, one, reference, unit="ms", per_s=1e3, bound=bound))
    return rows


def in_float8(size: Size, device: torch.device) -> list[Row]:
    """Wide blocks in float8 beside bfloat16, both compiled; at toy size emulated, and not compiled."""
    is_toy = size == TOY
    can = is_toy or (torch.cuda.get_device_capability(device) >= CAPABILITY and (_memory_of(device) or 0) >= 40e9)
    if find_spec("torchao") is None or not can:
        print("no float8: torchao is not installed, or the device has no such products or less than 40 GB", flush=True)
        return []
    wide, compile = (TOY, "off") if is_toy else (WIDE, "model")
    reference = f"{EVENSTEP}, bf16-mixed"
    makes: dict[str, Make] = {reference: partial(evenstep, compile=compile)}
    for recipe in ("tensorwise", "rowwise"):  # the third multiplies less in float8
        mode = Float8Mixed(recipe=recipe, layers="blocks.*", emulate=is_toy)
        makes[f"{EVENSTEP}, float8-mixed {recipe}"] = partial(evenstep, precision=mode, compile=compile)
    times = _in_turns(makes, wide, device, reference)
    case, per_s = f"{wide.layers} blocks of width {wide.width}, compile {compile}", 1e3 / wide.updates
    return [compared(case, name, one, times[reference], unit="ms/update", per_s=per_s) for name, one in times.items()]


def compiled(of: Size, size: Size, device: torch.device) -> list[Row]:
    """What compiling brings a model `of` this size; a captured update is launched at once. The toy is not compiled."""
    is_toy = size == TOY
    one = TOY if is_toy else of
    makes: dict[str, Make] = {TUNED: tuned, AGAIN: tuned, TUNED_COMPILED: partial(tuned, compile=not is_toy)}
    for how in get_args(_How):
        makes[f"{EVENSTEP}, compile {how}"] = partial(evenstep, compile="off" if is_toy else how)
    times = _in_turns(makes, one, device)
    case, per_s = f"{one.layers} blocks of width {one.width}, bf16-mixed", 1e3 / one.updates
    reference = mean_of(times[TUNED], times[AGAIN])
    return [compared(case, name, took, reference, unit="ms/update", per_s=per_s) for name, took in times.items()]


CASES: dict[str, Callable[[Size, torch.device], list[Row]]] = {
    "gpt": gpt_step,
    "save": saves,
    "small": partial(compiled, SMALL),
    "float8": in_float8,
    "blocks": partial(compiled, FOUR_BLOCKS),
}


def _nothing() -> None: ...


def main() -> list[Row]:
    """Measure on the first CUDA device; without one, say so and measure nothing."""
    if not torch.cuda.is_available():
        print("gpu: no CUDA device here, so nothing is measured; see `make gpu` in docs/gpu.md")
        return []
    device = torch.device("cuda", 0)
    rows = [row for case in CASES.values() for row in case(fitted(GPT_124M, device), device)]
    print(f"\n{table(rows)}")
    return rows


def _command() -> int:
    parser = argparse.ArgumentParser(description="Measure updates on a device; `make gpu` runs this after the tests.")
    parser.add_argument("--out", type=Path, required=True, help="the JSON of rows to write")
    parser.add_argument("--rows", default="", help="only cases whose names hold this: " + ", ".join(CASES))
    parser.add_argument("--toy", action="store_true", help="at toy size, on the CPU where there is no CUDA device")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() and not arguments.toy:
        print("no CUDA device here: nothing is measured", file=sys.stderr)
        return 2
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    rows: list[Row] = []
    for name, case in CASES.items():
        if arguments.rows in name:
            rows += case(TOY if arguments.toy else fitted(GPT_124M, device), device)
            write_rows(arguments.out, rows)  # also where a later one is ended
    print(f"\n{table(rows)}")
    return 1 if any(row.ok is False for row in rows) and not arguments.toy else 0


if __name__ == "__main__":
    sys.exit(_command())
