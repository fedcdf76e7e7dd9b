"""What a step in each number format costs, beside the fused float32 step and the cast that it cannot do without.

With master weights a step is torch's fused AdamW on float32 weights and their cast to 16 bits, and `ratio` says how
much more that is here than by hand. Without them, stand-ins are made and rounded back at random; those figures are for
information. Times are processor time of one thread. Beside them, bytes per parameter: what is allocated after an
update, in `ratio` divided by what is computed.
"""

import gc
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import torch  # noqa: E402 - the folder of this script must be on the path first
from torch import Tensor, nn  # noqa: E402

from evenstep import Engine, Task  # noqa: E402
from evenstep.cli.check import footprint  # noqa: E402
from evenstep.internals import foreach_copy  # noqa: E402
from evenstep.optim.rounded import RoundedStepper  # noqa: E402
from evenstep.optim.stepper import MasterStepper  # noqa: E402
from harness.row import Row, Times, compared, table, write_rows  # noqa: E402

RESULTS = HERE / "results" / "formats.json"
BY_HAND, ROUNDS, CHUNK_S, BOUND, ALLOCATED = "fused float32 step and cast", 40, 0.1, 1.10, 1.01
FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}
SIZES = {"16 × 512 × 512": (16, (512, 512)), "256 × 64 × 64": (256, (64, 64))}
BYTES = ("32-true", "bf16-true", "16-true", "bf16-true-no-master", "16-true-no-master")
Step = Callable[[], None]


def weights(count: int, shape: Sequence[int]) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for _ in range(count)]


def gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Give all a gradient of float32, whatever they are."""
    generator = torch.Generator().manual_seed(1)
    for parameter in parameters:
        parameter.grad_dtype = torch.float32
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def by_hand(count: int, shape: Sequence[int], format: torch.dtype) -> Step:
    own = weights(count, shape)
    images = [one.detach().to(format) for one in own]
    gradients(own)
    optimizer = fused(own)

    def step() -> None:
        optimizer.step()
        with torch.no_grad():
            foreach_copy(images, own)

    return step


def with_masters(count: int, shape: Sequence[int], format: torch.dtype) -> Step:
    own = weights(count, shape)
    optimizer = fused(own)
    stepper = MasterStepper(optimizer, {str(number): one for number, one in enumerate(own)}, format)
    gradients(own)
    return lambda: stepper.step(1)


def without_masters(count: int, shape: Sequence[int], format: torch.dtype) -> Step:
    own = [nn.Parameter(one.detach().to(format)) for one in weights(count, shape)]
    optimizer = fused(own)
    names = {id(one): str(number) for number, one in enumerate(own)}
    stepper = RoundedStepper(optimizer, names, seed=1, first_element=lambda tensor: 0)
    gradients(own)
    return lambda: stepper.step(1)


CONTENDERS = {BY_HAND: by_hand, "with masters": with_masters, "without masters": without_masters}


def timed(step: Step, times: int) -> tuple[float, float]:
    """Seconds of processor time and by the clock, per step."""
    cpu, wall = time.thread_time(), time.perf_counter()
    for _ in range(times):
        step()
    return (time.thread_time() - cpu) / times, (time.perf_counter() - wall) / times


def steps_of(size: str, name: str) -> list[Row]:
    """The rows of one set of parameters and one format."""
    count, shape = SIZES[size]
    steps = {contender: make(count, shape, FORMATS[name]) for contender, make in CONTENDERS.items()}
    for step in steps.values():
        step()  # makes the optimizer's state
    chunk = max(1, int(CHUNK_S / timed(steps[BY_HAND], 3)[0]))
    times: dict[str, Times] = {contender: Times([], []) for contender in steps}
    for _ in range(ROUNDS):
        for contender, step in steps.items():
            cpu, wall = timed(step, chunk if contender != "without masters" else 1 + chunk // 8)
            times[contender].cpu_s.append(cpu)
            times[contender].wall_s.append(wall)
    case = f"AdamW step, {name}, {size}"
    bounds = {"with masters": BOUND}
    return [
        compared(case, contender, own, times[BY_HAND], unit="ms", per_s=1e3, bound=bounds.get(contender))
        for contender, own in times.items()
    ]


class Squares(Task):
    def inputs(self, batch: Any) -> Any:
        return batch

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return output.square().sum()


def bytes_alive() -> int:
    gc.collect()
    tensors = [one for one in gc.get_objects() if isinstance(one, Tensor)]
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


def memory_of(precision: str) -> Row:
    """What is allocated for the parameters of an engine after an update, beside what is computed."""
    before = bytes_alive()
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
    engine = Engine(model, Squares(), fused(model.parameters()), precision=precision, device="cpu")
    engine.update(torch.ones(2, 512))
    count = sum(one.numel() for one in model.parameters())
    allocated, computed = (bytes_alive() - before) / count, sum(footprint(engine).values()) / count
    ratio = max(allocated / computed, computed / allocated)
    return Row(
        case="bytes per parameter, AdamW",
        contender=precision,
        median=allocated,
        unit="B",
        ratio=ratio,
        spread=0.0,
        wall_ratio=ratio,
        bound=ALLOCATED,
    )


def main() -> list[Row]:
    """Measure, print the table, write the file."""
    torch.set_num_threads(1)
    rows = [row for size in SIZES for name in FORMATS for row in steps_of(size, name)]
    rows += [memory_of(precision) for precision in BYTES]
    print(table(rows))
    write_rows(RESULTS, rows)
    return rows


if __name__ == "__main__":
    main()
