"""Answers a call of a constructor or public function that does not fit: an unknown name, one too few, one by place.

Python's own TypeError names the wrong one and not the right one. Who comes from another trainer writes that one's
names, so the commonest of them stand here beside ours. Nothing is done unless a call has failed. It loads no torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, ParamSpec, TypeVar, cast

from evenstep.errors import ArgumentError

P = ParamSpec("P")
T = TypeVar("T")

_LOGS = "log_every_n_steps logging_steps log_interval log_every logging_interval"
_SAVES = "save_steps save_every save_every_updates save_interval_updates every_n_train_steps save_every_n_train_steps"
_EVALUATES = (
    "eval_steps eval_every evaluate_every val_check_interval validate_interval_updates eval_interval "
    "evaluate_every_n_steps"
)
_EVALUATES_BY_EPOCH = "check_val_every_n_epoch evaluate_every_n_epochs"
_OURS = {
    "updates": "max_steps max_step max_update max_updates max_train_steps num_steps num_training_steps n_steps steps "
    "total_steps train_steps num_updates total_updates iterations max_iters",
    "epochs": "max_epochs max_epoch num_train_epochs num_epochs n_epochs train_epochs epoch",
    "clip_norm": "gradient_clip_val gradient_clip max_grad_norm clip_grad clip_grad_norm grad_clip grad_norm_clip "
    "max_norm clip gradient_clipping",
    "precision": "mixed_precision fp16 bf16 amp amp_mode scaler grad_scaler dtype use_amp half float16 bfloat16 "
    "torch_dtype autocast "
    "fp8 float8 use_fp8 float8_recipe_name",
    "strategy": "devices num_devices num_nodes gpus num_gpus n_gpus tpu_cores num_processes world_size ddp fsdp "
    "deepspeed distributed plugins distributed_backend backend ddp_backend fsdp_config fsdp_plugin deepspeed_config "
    "deepspeed_plugin parallelism_config megatron_lm_plugin",
    "device": "accelerator cpu use_cpu no_cuda cuda",
    "data": "train_dataloader train_dataloaders train_dataset dataloader dataloaders train_loader loader train_data "
    "datamodule dataset train_set",
    "evaluations": "val_dataloader val_dataloaders valid_dataloader eval_dataset eval_datasets eval_dataloader "
    "val_dataset valid_dataset val_loader valid_loader val_data valid_data evaluation eval_data valid_set "
    "validation_data",
    "hooks": "callbacks callback hook",
    "writers": "logger loggers report_to log_with writer tensorboard wandb enable_progress_bar disable_tqdm "
    "progress_bar",
    "every_updates": f"{_LOGS} {_SAVES} {_EVALUATES} every_n_steps every_steps "
    "global_sync_iter localsgd_frequency sync_every update_every_n_steps",
    "every_epochs": f"every_n_epochs {_EVALUATES_BY_EPOCH} save_every_n_epochs save_interval validate_interval",
    "every_minutes": "train_time_interval",
    "keep": "save_top_k n_saved",
    "keep_last": "save_total_limit total_limit keep_last_epochs keep_interval_updates keep_last_n_checkpoints n_saved "
    "save_num_checkpoints_to_keep",
    "folder": "default_root_dir output_dir project_dir save_dir run_dir logging_dir log_dir root_dir checkpoint_dir "
    "dirpath out_dir path run_name save_folder",
    "lr_schedule": "scheduler schedulers lr_scheduler lr_schedulers lr_scheduler_type warmup warmup_steps "
    "warmup_ratio num_warmup_steps schedule lr_scheduler_kwargs scale_schedule_ratio step_schedulers_every_batch "
    "step_scheduler_with_optimizer",
    "warmup_updates": "num_warmup_steps warmup_steps warmup num_warmup_updates",
    "optimizer": "optimizers optim opt lr learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon betas momentum "
    "optim_args",
    "model": "module net network lightning_module",
    "task": "criterion loss loss_fn loss_function loss_func compute_loss compute_metrics metrics tasks "
    "compute_loss_func",
    "seed": "random_seed random_state manual_seed data_seed",
    "global_batch_size": "batch_size train_batch_size total_batch_size batch samples_per_update",
    "micro_batch_size": "per_device_train_batch_size per_device_batch_size accumulate_grad_batches micro_batch "
    "gradient_accumulation_steps update_freq grad_accumulation_steps accumulation_steps grad_accum microbatch_size "
    "per_gpu_train_batch_size auto_find_batch_size num_microbatches_per_update device_train_microbatch_size",
    "global_batch_tokens": "max_tokens batch_tokens tokens_per_batch tokens_per_update",
    "collate": "collate_fn data_collator collator",
    "num_workers": "dataloader_num_workers workers n_workers",
    "ema": "ema_decay averaging use_ema",
    "compile": "torch_compile torch_compile_params enable_compile use_compile",
    "fit_memory": "auto_scale_batch_size",
    "start_update": "ema_start_update update_after_step update_starting_at_step",
    "decay_warmup": "use_ema_warmup ema_warmup",
    "metric": "monitor metric_for_best_model best_checkpoint_metric",
    "patience_evaluations": "patience early_stopping_patience",
    "max_minutes": "max_time",
    "decay": "smoothing",
    "end_factor": "min_lr lr_end min_lr_rate eta_min",
    "outer_lr": "block_lr outer_learning_rate slowmo_lr",
    "outer_momentum": "block_momentum slowmo_momentum",
    "nesterov": "use_nbm",
    "synchronous_updates": "warmup_iterations",
}
"""The names of other trainers, by ours."""

_MEANT: dict[str, list[str]] = {}
for _ours, _theirs in _OURS.items():
    for _word in _theirs.split():
        _MEANT.setdefault(_word, []).append(_ours)

_ELSEWHERE = {
    **dict.fromkeys(("learning_rate", "lr"), "give it to the optimizer: `torch.optim.AdamW(parameters, lr=…)`"),
    **dict.fromkeys(("weight_decay", "betas", "momentum"), "give it to the optimizer: `torch.optim.AdamW(…)`"),
    **dict.fromkeys(("resume_from_checkpoint", "ckpt_path", "resume"), "call `trainer.resume(…)` before `train`"),
    **dict.fromkeys(
        ("init_from", "finetune_from_model", "pretrained", "init_checkpoint", "load_weights_from"),
        "call `evenstep.load_weights(model, …)` before the optimizer is built",
    ),
    "args": "give what it holds as arguments of their own, such as `epochs=…`",
    **dict.fromkeys(_LOGS.split(), "write `log=Logging(every_updates=…)`"),
    **dict.fromkeys(_SAVES.split(), "write `checkpoint=Checkpointing(every_updates=…)`"),
    **dict.fromkeys(_EVALUATES.split(), "write `hooks=[Evaluate(every_updates=…)]`"),
    **dict.fromkeys(_EVALUATES_BY_EPOCH.split(), "write `hooks=[Evaluate(every_epochs=…)]`"),
    "every_epochs": "write `checkpoint=Checkpointing(every_epochs=…)` or `hooks=[Evaluate(every_epochs=…)]`",
    "max_minutes": "write `hooks=[TimeBudget(max_minutes=…)]`",
    "max_total_minutes": "write `hooks=[TimeBudget(max_total_minutes=…)]`",
    "stop_below_lr": "write `hooks=[StopBelowLr(…)]`",
    "early_stop": "write `hooks=[EarlyStop(metric=…, patience_evaluations=…)]`",
    "evaluate": "write `hooks=[Evaluate(every_updates=…)]`",
    **dict.fromkeys(("profile", "profiler"), "write `hooks=[Profile(first=…, last=…)]`"),
    **dict.fromkeys(
        ("limit_train_batches", "max_steps_per_epoch", "max_train_steps_per_epoch", "epoch_length"),
        "write `data=FirstBatches(data, n)` of `evenstep.data`: so many updates of each epoch",
    ),
    **dict.fromkeys(
        ("limit_val_batches", "limit_test_batches", "max_eval_steps_per_epoch"),
        "write `evaluations=FirstBatches(data, n)` of `evenstep.data`",
    ),
    "limit_predict_batches": "call `trainer.predict(FirstBatches(data, n))`, with `FirstBatches` of `evenstep.data`",
    "num_sanity_val_steps": "call `trainer.evaluate()` before `train`",
    "fast_dev_run": "write `updates=1` and no `folder`; a run file is tried by `evenstep check`",
    **dict.fromkeys(
        ("min_steps", "min_epochs"), "leave it out: only a hook that asks for it ends a run before its end"
    ),
    **dict.fromkeys(
        ("gradient_clip_algorithm", "clip_grad_value", "clip_value"),
        "leave it out: gradients are clipped by their norm, `train=Training(clip_norm=…)`, and not by value",
    ),
    "deterministic": "call `torch.use_deterministic_algorithms(True)`; random numbers follow from `seed` always",
    "benchmark": "set `torch.backends.cudnn.benchmark` before the trainer is built",
    "detect_anomaly": "leave it out: what is not finite is never applied, and its module named; torch's own is "
    "`with torch.autograd.detect_anomaly(): trainer.train()`",
    "inference_mode": "leave it out: evaluations and predictions take no gradients",
    **dict.fromkeys(
        ("use_distributed_sampler", "replace_sampler_ddp"), "leave it out: ranks divide the samples of any `MapData`"
    ),
    **dict.fromkeys(
        ("sync_batchnorm", "sync_bn"),
        "leave it out: batches are normalised micro-batch by micro-batch; GroupNorm does not depend on the cut",
    ),
    "reload_dataloaders_every_n_epochs": "give the dataset a `set_epoch(epoch)`, which is called before each epoch",
    "enable_checkpointing": "write `checkpoint=Checkpointing(keep_last=0)` for none, or give no `folder`",
    **dict.fromkeys(
        ("enable_model_summary", "barebones", "verbose"), "leave it out: nothing is shown or kept that is not asked for"
    ),
    **dict.fromkeys(("auto_lr_find", "lr_find"), "call `evenstep.find_lr(trainer)` before `train`"),
    **dict.fromkeys(
        ("swa", "swa_params", "swa_lrs", "swa_epoch_start"),
        "write `train=Training(ema=Ema(decay=…))`, or the mean of checkpoints by `evenstep average`",
    ),
    "track_grad_norm": "leave it out: `train/grad_norm` is a metric of every run",
    "prepare_batch": "do it in `Task.transform`, which gets the batch on its device, or in `Task.inputs`",
    "output_transform": "do it in `Task.postprocess`, which gets the model's output",
    **dict.fromkeys(
        ("activation_checkpoint_params", "activation_checkpointing", "gradient_checkpointing"),
        "write `train=Training(memory=Memory(checkpoint='blocks'))`",
    ),
    "save_last": "leave it out: the newest `keep_last` are kept, and the state at the end is one",
    **dict.fromkeys(
        ("save_on_exception", "save_on_train_epoch_end"),
        "leave it out: the last committed update is saved after an error as well, and evaluations come before saves",
    ),
    "save_weights_only": "leave it out: `evenstep export` writes the weights of a checkpoint alone",
    **dict.fromkeys(
        ("check_finite", "strict"),
        "leave it out: what is not finite is no better than anything, and a metric that is not there is an error",
    ),
    **dict.fromkeys(
        ("stopping_threshold", "divergence_threshold"),
        "write a `Hook` whose `after_evaluate` calls `self.trainer.request_stop(…)`",
    ),
    "check_on_train_epoch_end": "leave it out: evaluations are what is followed, whenever `Evaluate` asks for them",
    "every_minutes": "give a `Trainer` `checkpoint=Checkpointing(every_minutes=…)`",
    "keep": "write `checkpoint=Checkpointing(best=Best(metric=…, keep=…))`",
    "compile": "write `train=Training(compile='model')`",
    **dict.fromkeys(
        ("limit", "overfit", "overfit_batches", "train_subset_num_batches", "eval_subset_num_batches"),
        "give `MapData` fewer samples: `torch.utils.data.Subset(dataset, range(n))`",
    ),
    "patience_evaluations": "write `hooks=[EarlyStop(patience_evaluations=…)]`",
    **dict.fromkeys(("every_n_steps", "every_steps"), "write `log=Logging(every_updates=…)`"),
    "keep_last": "give a `Trainer` `checkpoint=Checkpointing(keep_last=…)`",
    "every_updates": "give it to a `Trainer`: `log=Logging(every_updates=…)`",
    "warmup_updates": "write `lr_schedule={'kind': 'cosine', 'warmup_updates': 100}`",
    "metric": "write `checkpoint=Checkpointing(best=Best(metric=…))`",
    "global_batch_size": "write `data=MapData(dataset, global_batch_size=…)`, which counts the samples of an update",
    "micro_batch_size": "write `data=MapData(dataset, global_batch_size=…, micro_batch_size=…)`: the samples of an "
    "update, and of one forward",
    "global_batch_tokens": "write `data=MapData(dataset, global_batch_tokens=…, lengths=…)`",
    "epochs": "give it to a `Trainer`",
    "updates": "give it to a `Trainer`",
    "data": "give it to a `Trainer`, or an engine's `update(batch)` the batches",
    "evaluations": "give it to a `Trainer`, or an engine's `evaluate(batch)` the batches",
    **dict.fromkeys(("folder", "checkpoint", "failures", "log"), "give it to a `Trainer`"),
    "hooks": "give it to a `Trainer`",
    "writers": "write `log=Logging(writers=…)` for a `Trainer`",
    "num_workers": "write `data=MapData(dataset, num_workers=…)`",
    "collate": "write `data=MapData(dataset, collate=…)`",
    "shuffle": "write `data=MapData(dataset, shuffle=…)`",
    "clip_norm": "write `train=Training(clip_norm=…)`",
    **dict.fromkeys(
        ("outer_lr", "outer_momentum", "nesterov", "synchronous_updates"),
        "give it to the strategy whose ranks step alone: `Local(Ddp(Processes(device)), outer_momentum=…)`",
    ),
    **dict.fromkeys(
        ("drop_last", "dataloader_drop_last"), "leave it out: every sample is taken, in an update of its own weight"
    ),
    **dict.fromkeys(("sampler", "batch_sampler"), "give the samples in an order of your own to `StreamData(loader)`"),
    **dict.fromkeys(("pin_memory", "dataloader_pin_memory"), "leave it out: batches for an accelerator are pinned"),
    **dict.fromkeys(
        ("start_update", "decay_warmup"), "write `train=Training(ema=Ema(start_update=…, decay_warmup=…))`"
    ),
    "max_duration": "write `epochs=…` or `updates=…`; for a time, `hooks=[TimeBudget(max_minutes=…)]`",
    "end_factor": "write `lr_schedule={'kind': 'cosine', 'end_factor': …}`, a share of the full rate",
    "decay": "write `train=Training(ema=Ema(decay=…))`",
    "half_life": "write `decay=0.5 ** (1 / updates)`, after so many of which half is left",
    **dict.fromkeys(
        ["load_best_model_at_end", "greater_is_better"],
        "write `checkpoint=Checkpointing(best=Best(metric=…, mode=…))`, and load what it keeps by "
        "`evenstep.load_weights`",
    ),
    **dict.fromkeys(
        ["eval_strategy", "evaluation_strategy", "eval_delay"],
        "write `hooks=[Evaluate(every_updates=…, every_epochs=…, from_update=…)]`",
    ),
    "eval_on_start": "call `trainer.evaluate()` before `train`",
    "save_strategy": "write `checkpoint=Checkpointing(every_updates=…, every_epochs=…)`",
    **dict.fromkeys(
        ["logging_strategy", "logging_first_step", "console_log_interval"], "write `log=Logging(every_updates=…)`"
    ),
    **dict.fromkeys(
        ["gradient_checkpointing", "activation_checkpointing", "gradient_checkpointing_kwargs"],
        "write `train=Training(memory=Memory(checkpoint='blocks'))`",
    ),
    "torch_empty_cache_steps": "write `train=Training(memory=Memory(empty_cache_every_updates=…))`",
    **dict.fromkeys(["autoresume", "load_path"], "call `trainer.resume(…)` before `train`"),
    **dict.fromkeys(
        ["load_weights_only", "load_strict_model_weights", "load_ignore_keys"],
        "call `evenstep.load_weights(model, …, partial=…)` before the optimizer is built",
    ),
    **dict.fromkeys(
        ["save_only_model", "save_weights_only", "save_filename", "save_overwrite"],
        "leave it out: a checkpoint is all of the run, and `evenstep export` writes its weights alone",
    ),
    "logging_nan_inf_filter": "leave it out: what is not finite is never applied; `failures=Failures(non_finite=…)` "
    "says what then",
    **dict.fromkeys(
        [
            "even_batches",
            "split_batches",
            "dispatch_batches",
            "average_tokens_across_devices",
            "ddp_find_unused_parameters",
            "find_unused_parameters",
            "ddp_sync_strategy",
        ],
        "leave it out: an update is that of all ranks' samples, whatever each of them has or uses",
    ),
    **dict.fromkeys(["ddp_timeout", "dist_timeout"], "give it to the ranks: `Ddp(Processes(device, timeout_s=…))`"),
    **dict.fromkeys(
        ["group_by_length", "length_column_name"],
        "write `data=MapData(dataset, global_batch_tokens=…, lengths=…)`, which sorts by length",
    ),
    **dict.fromkeys(
        ["neftune_noise_alpha", "noise_alpha"],
        "add the noise in a forward hook of the embedding: what it draws is keyed by micro-batch",
    ),
    **dict.fromkeys(
        ["label_smoothing", "label_smoothing_factor"],
        "give it to the task, as those of `evenstep.hf` take it: `CausalLM(label_smoothing=…)`",
    ),
    **dict.fromkeys(
        ["clip_value", "clip_grad_value", "gradient_clip_algorithm", "gradient_clip_value"],
        "clip by the norm of the whole update, `train=Training(clip_norm=…)`; nothing clips by value",
    ),
    "algorithms": "write them as a task's `transform`, as hooks, or as `train=Training(ema=…)`",
    **dict.fromkeys(
        ("full_determinism", "deterministic_mode", "rng_types", "use_seedable_sampler", "ignore_data_skip"),
        "leave it out: a run has the same bits again, resumed or not; on several ranks too with `Ordered`",
    ),
    "remove_unused_columns": "leave it out: a task's `inputs` says what the model is called with",
    **dict.fromkeys(
        ["preprocess_logits_for_metrics", "batch_eval_metrics", "label_names", "eval_accumulation_steps"],
        "let the task say it: `Loss(sum, metrics=…)`, `Task.metrics` or `Task.evaluate`",
    ),
    **dict.fromkeys(["processing_class", "tokenizer"], "tokenize in the dataset, or in `MapData(…, collate=…)`"),
    "push_to_hub": "write `hooks=SavePretrained()` of `evenstep.hf`, and push the folder that it leaves",
    "use_liger_kernel": "leave it out; `CausalLM(chunked=True)` never has all scores in memory",
    "optim_target_modules": "write `optimizer=grouped_optimizer(…)`, whose groups are patterns of names",
    "include_num_input_tokens_seen": 'let the task\'s `unit` be "tokens": `progress/tokens`',
    "enable_jit_checkpoint": "leave it out: SIGTERM saves in any run with a `folder`",
    "profiler": "write `hooks=[Profile(first=…, last=…)]`",
    "strategy": "give it to the trainer or engine",
    "precision": "give it to the trainer or engine",
    "lr_schedule": "give it to the trainer or engine",
    "optimizer": "give it to the trainer or engine",
    "task": "give it to the trainer or engine",
    "seed": "give it to the trainer or engine",
}
"""What to do about a name, ours or another trainer's, where the constructor has nothing of the kind."""

_BY_NAME = {
    "precision": '`precision="bf16-mixed"`, `"16-mixed"` or `"float8-mixed"`',
    "strategy": '`strategy="ddp"`, `"zero1"` or `"fsdp"`, and start the ranks with torchrun',
    "device": '`device="cpu"`; "auto" takes the accelerator that is there',
    "lr_schedule": '`lr_schedule={"kind": "cosine", "warmup_updates": 100}`',
    "task": "`task=…`, an object of a class of `evenstep.Task`, whose `loss` gives the loss and its metrics",
    "optimizer": "`optimizer=torch.optim.AdamW(model.parameters(), lr=…)`",
    "end_factor": "`end_factor=…`, a share of the full rate",
}
_OF_BATCHES = ("data", "evaluations", "global_batch_size", "micro_batch_size", "global_batch_tokens", "collate")
_MADE_IN_UPDATES = ("Action", "Committed", "Trained")  # many, and not by a person


def ours(word: str) -> Sequence[str]:
    """Our names for what other trainers call `word`, the likeliest first.

    >>> ours("max_epochs"), ours("lr")
    (['epochs'], ['optimizer'])
    """
    return _MEANT.get(word.lower(), ())


def answer_calls(target: T) -> T:
    """A public name; if it is a class that a person builds, a call that does not fit is answered from now on.

    Only classes that nobody derives from: what derives from one has a constructor of its own. They stay what they are,
    and tell the same signature.

    >>> class Curve:
    ...     __final__ = True
    ...     def __init__(self, *, warmup_updates=0): pass
    >>> answer_calls(Curve)(warmup_update=3)
    Traceback (most recent call last):
    evenstep.errors.ArgumentError: `Curve` has no argument `warmup_update`; did you mean `warmup_updates`?
    """
    kind: Any = target
    if not isinstance(kind, type) or "__final__" not in vars(kind) or kind.__name__ in _MADE_IN_UPDATES:
        return target
    if kind.__new__ is object.__new__ and not hasattr(kind.__init__, "answers"):
        build: Any = _nothing if kind.__init__ is object.__init__ else kind.__init__
        kind.__init__ = answering(build)
    return target


def _nothing(self: object) -> None:
    pass


def answering(constructor: Callable[..., None]) -> Callable[..., None]:
    """An `__init__` that answers calls that do not fit."""

    @wraps(constructor)
    def __init__(self: object, /, *args: Any, **given: Any) -> None:
        try:
            constructor(self, *args, **given)
        except TypeError:
            own = signature(constructor)
            check_call(type(self).__name__, own.replace(parameters=[*own.parameters.values()][1:]), args, given)
            raise

    cast("Any", __init__).answers = True
    return __init__


def answered(function: Callable[P, T]) -> Callable[P, T]:
    """A public function that answers calls that do not fit; written above its definition.

    >>> @answered
    ... def halve(number, *, rounded=False): return number / 2
    >>> halve(3, round=True)
    Traceback (most recent call last):
    evenstep.errors.ArgumentError: `halve` has no argument `round`; did you mean `rounded`?
    """

    @wraps(function)
    def answering_call(*args: P.args, **given: P.kwargs) -> T:
        try:
            return function(*args, **given)
        except TypeError:
            check_call(function.__name__, signature(function), args, given)
            raise

    return answering_call


def check_call(said: str, takes: Signature, args: tuple[Any, ...], given: Mapping[str, Any]) -> None:
    """Raise ArgumentError if what takes these parameters can't be called so; the message says what was meant.

    Args:
        said: its name.
    """
    try:
        takes.bind(*args, **given)
    except TypeError as error:
        text = str(error)
    else:
        return
    parameters = dict(takes.parameters)
    unknown = [name for name in given if name not in parameters]
    if unknown:
        faults = [f"`{said}` has no argument `{name}`; {advice_for(name, parameters)}" for name in unknown]
        raise ArgumentError(" ".join(faults)) from None
    placed = [one.name for one in parameters.values() if one.kind is Parameter.POSITIONAL_OR_KEYWORD]
    if len(args) > len(placed):
        by_name = [name for name in parameters if name not in placed]
        many = f"{len(args)} argument{'s' if len(args) > 1 else ''} by place"
        how = f"write `{by_name[0]}=…`" if by_name else "leave the others out"
        most = f"{', '.join(placed)} at most" if placed else "none" if not by_name else "its arguments by name"
        raise ArgumentError(f"`{said}` was given {many}, but takes {most}; {how}.") from None
    placed = placed[: len(args)]
    twice = [name for name in placed if name in given]
    if twice:
        raise ArgumentError(
            f"`{said}` was given `{twice[0]}` twice, by place and by name; leave one of them out."
        ) from None
    lacking = [
        one.name
        for one in parameters.values()
        if one.default is Parameter.empty and one.name not in {*placed, *given} and one.kind is not one.VAR_POSITIONAL
    ]
    if not lacking:
        raise ArgumentError(f"`{said}` can't be called so: {text}; see `help({said})`.") from None
    names = " and ".join(filter(None, [", ".join(f"`{name}`" for name in lacking[:-1]), f"`{lacking[-1]}`"]))
    write = ", ".join(f"{name}=…" for name in lacking)
    raise ArgumentError(f"`{said}` must be given {names} too; write `{said}(…, {write})`.") from None


def advice_for(name: str, known: Mapping[str, object]) -> str:
    """What to write instead of an argument that is none of `known`, as the end of a sentence.

    >>> advice_for("max_epochs", {"epochs": 1, "updates": 1}), advice_for("weigth", {"weight": 1})
    ('write `epochs=…`.', 'did you mean `weight`?')
    >>> advice_for("lr", {"optimizer": 1})
    'write `optimizer=torch.optim.AdamW(model.parameters(), lr=…)`.'
    """
    word = name.lower()
    meant = [word, *ours(word)]
    for one in meant:
        if one in known:
            return f"write {_BY_NAME.get(one, f'`{one}=…`')}."
    close = get_close_matches(word, known, n=1, cutoff=0.6 if "task" in known else 0.7)
    if "task" not in known and close:  # neither a trainer nor an engine, to which other trainers' names belong
        return f"did you mean `{close[0]}`?"
    if word in _ELSEWHERE:
        return f"{_ELSEWHERE[word]}."
    options = {
        field.name: f"{name}={type(default).__name__}({field.name}=…)"
        for name, one in known.items()
        if is_dataclass(default := getattr(one, "default", None)) and not isinstance(default, type)
        for field in fields(default)
    }
    for one in meant:
        if one in options:
            return f"write `{options[one]}`."
    if "task" in known and "data" not in known and any(one in _OF_BATCHES for one in meant):
        return "an engine is given its batches by whoever calls it: `engine.update(first, second)`."
    for one in meant:
        if one in _ELSEWHERE:
            return f"{_ELSEWHERE[one]}."
    if close:
        return f"did you mean `{close[0]}`?"
    if "task" not in known:
        return f"there are {', '.join(known)}." if known else "it takes none."
    if close := get_close_matches(word, options, n=1):
        return f"did you mean `{options[close[0]]}`?"
    if word not in _MEANT and (close := get_close_matches(word, _MEANT, n=1, cutoff=0.85)):
        return advice_for(close[0], known)
    return f"there are {', '.join(known)}."
