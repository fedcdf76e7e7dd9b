"""Every kind of refusal of a run when it begins: what is asked for, and what `check` and `train` say alike.

A refusal that is added to a rule or constructor that a run file reaches belongs here as well.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """One.

    Args:
        settings: over the tiny recipe's run file.
        says: a part of the message.
        code: the exit code: 2 where the configuration by itself can't be, 1 where what it names can't.
    """

    settings: tuple[str, ...]
    says: str = ""
    code: int = 2


def _of(*settings: str, says: str = "", code: int = 2) -> Refusal:
    return Refusal(settings=settings, says=says, code=code)


BEST, STOP = "--checkpoint.best", "--early_stop"
ALONE: dict[str, Refusal] = {
    "a number out of its range": _of("--train.updates", "0", says="must be at least 1, but is 0"),
    "a key that is none": _of("--train.updatse", "3", says="did you mean"),
    "updates and epochs": _of("--train.epochs", "1", says="one of the two must be given"),
    "no optimizer": _of("--optimizer.name", "none", says="one of the two must be given"),
    "both global batches": _of("--data.global_batch_tokens", "8", says="one of the two must be given"),
    "a micro-batch above the global one": _of("--data.micro_batch_size", "9", says="must be at most the"),
    "auto with tokens": _of("--data.micro_batch_size", "auto", "--data.micro_batch_tokens", "4", says="by tokens"),
    "a curriculum without shuffling": _of("--data.curriculum_epochs", "1", "--data.shuffle", "false", says="`data.shu"),
    "tokens' options": _of("--data.length_window", "4", says="for batches by tokens"),
    "an evaluation called train": _of("--data.evaluations.train.target", "parts.py:pairs", says='that isn\'t "train"'),
    "nothing to evaluate on": _of("--data.evaluations.valid", "none", says="nothing to evaluate on"),
    "the best of no evaluation": _of(BEST, '{metric = "vaild/loss"}', says="did you mean `valid/loss`?"),
    "stopping early without evaluations": _of(
        STOP,
        '{metric = "valid/loss", patience_evaluations = 1}',
        "--evaluate.every_updates",
        "none",
        says="`early_stop.metric`",
    ),
    "a warmup that is too long": _of(
        "--lr_schedule", '{kind = "cosine", warmup_updates = 9}', says="must be at most the 4 updates"
    ),
    "a loss scale without float16": _of("--loss_scale.initial", "8", says="is for `train.precision`"),
    "a floor above the loss scale": _of(
        "--loss_scale", "{floor = 9, initial = 8}", "--train.precision", "16-mixed", says="`loss_scale.floor`"
    ),
    "float8 layers without float8": _of(
        "--float8.recipe", "tensorwise", says='is for `train.precision` "float8-mixed"'
    ),
    "float8 in no layers": _of(
        "--train.precision", "float8-mixed", "--float8", '{layers = "none"}', says='`float8.layers` must be "blocks" or'
    ),
    "float8 on a CPU": _of("--train.precision", "float8-mixed", says="but the device is 'cpu'", code=1),
    "an average that never begins": _of("--ema.start_update", "9", says="would never begin"),
    "recomputed blocks of a model without": _of(
        "--memory.checkpoint", "blocks", says='is "blocks", but Still has', code=1
    ),
    "recomputed modules that are none": _of("--memory.checkpoint", "layer.*", says="there are `layers.", code=1),
    "a cache on a CPU": _of("--memory.empty_cache_every_updates", "9", says="but the run is on a CPU", code=1),
    "ordered sums in one graph": _of(
        *("--train.compile", "update", "--parallel.reduction", "ordered"), says="`train.compile` is 'update', but `"
    ),
    "fitted micro-batches in one graph": _of(
        *("--train.compile", "update", "--data.micro_batch_size", "auto"), says="but one graph can't hold"
    ),
    "another format in one graph": _of(
        *("--train.compile", "update", "--train.precision", "bf16-true"), says="`train.precision` is 'bf16-true'"
    ),
    "recomputing nothing": _of("--memory.checkpoint", '""', says="or a pattern of module names"),
    "compression where sums are ordered": _of(
        "--parallel.compression", "bf16", "--parallel.reduction", "ordered", says="`parallel.compression`"
    ),
    "compression without ddp": _of("--parallel.compression", "bf16", "--parallel.strategy", "zero1", says="leave"),
    "shards without fsdp": _of("--parallel.shard_ranks", "2", says='is for `parallel.strategy` "fsdp"'),
    "stages without a pipeline": _of("--parallel.stages_per_rank", "2", says="is for `parallel.pipeline` of 2 or more"),
    "a pipeline of one process": _of(
        "--parallel.pipeline", "2", "--parallel.strategy", "single", says="but there are 2 ranks"
    ),
    "ranks that are no multiple": _of("--launch.ranks", "3", "--parallel.pipeline", "2", says="must be a multiple"),
    "rewinding to one checkpoint": _of(
        "--failures.non_finite", "rewind", "--checkpoint.keep_last", "1", says="keep 2 or more"
    ),
    "lost ranks with shards": _of(
        "--failures.lost_rank",
        "continue",
        "--parallel.strategy",
        "fsdp",
        says='`failures.lost_rank` "continue" cannot be',
    ),
    "a writer twice": _of("--log.writers", '["csv", "csv"]', says="more than once"),
    "a resume that is no folder": _of("--resume", "atuo", says='did you mean "auto"?'),
    "a recipe that is not there": _of("--recipe", "gone", says="there is no such folder"),
    "a target that is not there": _of("--model.target", "parts.py:Nett", says="Nett"),
    "an argument that it does not take": _of("--model.args", "{widht = 3}", says="widht"),
    "an optimizer that is none": _of("--optimizer.name", "Adamm", says="did you mean"),
    "an optimizer that asks again": _of("--optimizer.name", "LBFGS", says="LBFGS"),
    "a model that is none": _of("--model.target", "wrong.py:no_model", says="must give", code=1),
    "a model that raises": _of("--model.target", "wrong.py:raising", says="no such file: weights.pt", code=1),
    "a model that is frozen": _of("--model.target", "wrong.py:frozen", says="nothing to train", code=1),
    "a task that is none": _of("--task.target", "wrong.py:NoTask", says="must give a subclass of `Task`", code=1),
    "a task with two ways of dividing": _of("--task.target", "wrong.py:Early", says="leave one of them out", code=1),
    "no data": _of("--data.train.target", "wrong.py:empty", says="This is about `data.train`", code=1),
    "no evaluation data": _of(
        "--data.evaluations.valid.target",
        "wrong.py:empty",
        "--data.evaluations.valid.args",
        "{}",
        says="This is about `data.evaluations.valid`",
        code=1,
    ),
    "a stream that can't say where it is": _of("--data.train.target", "wrong.py:Stream", says="state_dict", code=1),
    "a stream with workers": _of("--data.train.target", "wrong.py:Counted", "--data.num_workers", "1", says="a stream"),
    "lengths that are not known": _of(
        "--data.global_batch_size",
        "none",
        "--data.micro_batch_size",
        "none",
        "--data.global_batch_tokens",
        "8",
        says="lengths",
    ),
    "a hook that is misspelt": _of(
        "--hooks", '[{target = "wrong.py:Misspelt"}]', says="did you mean `after_update`?", code=1
    ),
    "dropping a task of one": _of("--failures.non_finite", "drop_task", says="asks for several tasks"),
    "a device that is not there": _of("--device", "cuda:99", says="cuda:99", code=1),
    "a folder of too long a name": _of(
        "--runs", "x" * 300, says="at most 255 are allowed here; give a shorter one", code=1
    ),
    "a folder that can't be": _of("--runs", "run.toml", says="can't be made, because", code=1),
}
FSDP = ("--parallel.strategy", "fsdp")
TOGETHER: dict[str, Refusal] = {
    "several ranks without a strategy": _of("--parallel.strategy", "single", says="but there are 2 ranks"),
    "shards in the CPU's memory on a CPU": _of(
        *FSDP, "--parallel.offload", "true", says="`offload` keeps shards", code=1
    ),
    "copies that do not divide the ranks": _of(
        *FSDP, "--parallel.shard_ranks", "3", says="`shard_ranks` must divide the 2", code=1
    ),
    "shards with a fused step that torch has none of": _of(
        *FSDP, "--optimizer.args.fused", "true", says="no fused kernel of SGD for shards", code=1
    ),
    "ordered shards with a fused step": _of(
        *FSDP,
        "--parallel.reduction",
        "ordered",
        "--optimizer.name",
        "AdamW",
        "--optimizer.args.fused",
        "true",
        says="torch's fused optimizers",
        code=1,
    ),
    "shards gathered in another format than the model's": _of(
        *FSDP,
        "--train.precision",
        "16-true",
        "--parallel.gather_dtype",
        "bf16",
        says="or left out, but is bfloat16",
        code=1,
    ),
    "a pipeline of a model without layers": _of("--parallel.pipeline", "2", says="`parallel.pipeline` is 2, but"),
    "a schedule that is none": _of(
        "--parallel.pipeline", "2", "--parallel.pipeline_schedule", "1f2b", says="is it '1f1b'"
    ),
}
# what only trying finds: train says it when it is there, check at once
LATE: dict[str, Refusal] = {
    "the best of a metric that evaluations do not give": _of(
        BEST, '{metric = "valid/clsoe", mode = "max"}', says="did you mean `valid/close`?", code=1
    ),
    "stopping by a metric that evaluations do not give": _of(
        STOP, '{metric = "valid/lost", patience_evaluations = 1}', says="did you mean `valid/loss`?", code=1
    ),
    "the best of a metric that training does not give": _of(
        BEST, '{metric = "train/clsoe"}', says="did you mean `train/close`?", code=1
    ),
    "a task that breaks in evaluation": _of("--task.target", "parts.py:OnlyTrains", says="labels", code=1),
    "a hook whose state can't be saved": _of("--hooks", '[{target = "wrong.py:Unsaveable"}]', says="kept", code=1),
}
