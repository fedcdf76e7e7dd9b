"""The name tables: what the words of a run file stand for, one line per variant.

A new precision mode, LR schedule, failure policy or writer is added here and in the schema.
"""

from collections.abc import Callable, Mapping

from evenstep.config.schema import Config, Failures, WriterName
from evenstep.events import ConsoleWriter, CsvWriter, JsonlWriter, TensorBoardWriter, Writer
from evenstep.optim.schedules import Constant, Cosine, InverseSqrt, Linear, LrSchedule, Polynomial, Wsd
from evenstep.parallel import Bf16, Compression, Fp16
from evenstep.precision import Bf16Mixed, Fp16Mixed, Full, Precision
from evenstep.train import (
    AlignedMtl,
    Combine,
    DropTask,
    FailurePolicy,
    GradNorm,
    PcGrad,
    Retry,
    Rewind,
    Separate,
    Skip,
    Stop,
)

PRECISIONS: Mapping[str, Callable[..., Precision]] = {
    "32-true": Full,
    "bf16-mixed": Bf16Mixed,
    "16-mixed": Fp16Mixed,
}
LR_SCHEDULES: Mapping[str, Callable[..., LrSchedule]] = {
    "constant": Constant,
    "linear": Linear,
    "cosine": Cosine,
    "wsd": Wsd,
    "inverse_sqrt": InverseSqrt,
    "polynomial": Polynomial,
}
COMPRESSIONS: Mapping[str, Callable[[], Compression]] = {"none": Compression, "bf16": Bf16, "fp16": Fp16}
FAILURE_POLICIES: Mapping[str, Callable[[Failures], FailurePolicy]] = {
    "stop": lambda _: Stop(),
    "skip": lambda _: Skip(),
    "retry": lambda _: Retry(limit=1),
    "rewind": lambda failures: Rewind(limit=failures.max_rewinds),
    "rewind_past": lambda failures: Rewind(past_data=True, limit=failures.max_rewinds),
    "drop_task": lambda _: DropTask(),
}
COMBINES: Mapping[str, Callable[..., Combine]] = {
    "separate": Separate,
    "pc_grad": PcGrad,
    "aligned_mtl": AlignedMtl,
    "grad_norm": GradNorm,
}
WRITERS: Mapping[WriterName, Callable[[Config], Writer]] = {
    "console": lambda config: ConsoleWriter(every_updates=config.log.every_updates),
    "jsonl": lambda _: JsonlWriter(),
    "csv": lambda _: CsvWriter(),
    "tensorboard": lambda _: TensorBoardWriter(),
}
