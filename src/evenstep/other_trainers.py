"""What other trainers call their arguments: by which of ours they are answered, and what to write instead of others.

Looked up only where a call has failed or a run file has an unknown key. A word may stand for several of ours, the
likeliest first.
"""

LOGS = "log_every_n_steps logging_steps log_interval log_every logging_interval log_period print_freq steps_per_print"
SAVES = (
    "save_steps save_every save_every_updates save_interval_updates every_n_train_steps save_every_n_train_steps "
    "checkpoint_period save_interval_steps"
)
EVALUATES = (
    "eval_steps eval_every evaluate_every val_check_interval validate_interval_updates eval_interval "
    "evaluate_every_n_steps eval_period val_interval"
)
EVALUATES_BY_EPOCH = "check_val_every_n_epoch evaluate_every_n_epochs"
OURS = {
    "updates": "max_steps max_step max_update max_updates max_train_steps num_steps num_training_steps n_steps steps "
    "total_steps train_steps num_updates total_updates iterations max_iters train_iter train_iters num_train_steps",
    "epochs": "max_epochs max_epoch num_train_epochs num_epochs n_epochs train_epochs epoch train_epoch",
    "clip_norm": "gradient_clip_val gradient_clip max_grad_norm clip_grad clip_grad_norm grad_clip grad_norm_clip "
    "max_norm clip gradient_clipping",
    "precision": "mixed_precision fp16 bf16 amp amp_mode scaler grad_scaler dtype use_amp half float16 bfloat16 "
    "torch_dtype autocast "
    "fp8 float8 use_fp8 float8_recipe_name",
    "strategy": "devices num_devices num_nodes gpus num_gpus n_gpus tpu_cores num_processes world_size ddp fsdp "
    "deepspeed distributed plugins distributed_backend backend ddp_backend fsdp_config fsdp_plugin deepspeed_config "
    "deepspeed_plugin parallelism_config megatron_lm_plugin launcher env_cfg zero_optimization zero_stage "
    "zero_config mpu offload_optimizer prescale_gradients",
    "device": "accelerator cpu use_cpu no_cuda cuda",
    "data": "train_dataloader train_dataloaders train_dataset dataloader dataloaders train_loader loader train_data "
    "datamodule dataset train_set",
    "evaluations": "val_dataloader val_dataloaders valid_dataloader eval_dataset eval_datasets eval_dataloader "
    "val_dataset valid_dataset val_loader valid_loader val_data valid_data evaluation eval_data valid_set "
    "validation_data val_evaluator test_evaluator test_dataloader eval_loader val_dataloader_cfg",
    "hooks": "callbacks callback hook default_hooks custom_hooks",
    "writers": "logger loggers report_to log_with writer tensorboard wandb enable_progress_bar disable_tqdm "
    "progress_bar visualizer vis_backends",
    "every_updates": f"{LOGS} {SAVES} {EVALUATES} every_n_steps every_steps "
    "global_sync_iter localsgd_frequency sync_every update_every_n_steps interval period freq frequency every",
    "every_epochs": f"every_n_epochs {EVALUATES_BY_EPOCH} save_every_n_epochs save_interval validate_interval "
    f"save_period",
    "every_minutes": "train_time_interval",
    "keep": "save_top_k n_saved",
    "keep_last": "save_total_limit total_limit keep_last_epochs keep_interval_updates keep_last_n_checkpoints n_saved "
    "save_num_checkpoints_to_keep max_keep_ckpts max_to_keep checkpoint_hist",
    "folder": "default_root_dir output_dir project_dir save_dir run_dir logging_dir log_dir root_dir checkpoint_dir "
    "dirpath out_dir path run_name save_folder work_dir project exp_name experiment_name out_folder dump_folder "
    "logdir dir",
    "lr_schedule": "scheduler schedulers lr_scheduler lr_schedulers lr_scheduler_type warmup warmup_steps "
    "warmup_ratio num_warmup_steps schedule lr_scheduler_kwargs scale_schedule_ratio step_schedulers_every_batch "
    "step_scheduler_with_optimizer param_scheduler sched sched_kwargs sched_on_updates lr_config cos_lr lrf "
    "warmup_epochs warmup_iters warmup_lr warmup_lr_init warmup_factor decay_epochs decay_rate cooldown_epochs "
    "cooldown cooldown_updates cooldown_steps cooldown_iters num_decay_steps decay_steps",
    "warmup_updates": "num_warmup_steps warmup_steps warmup num_warmup_updates warmup_iters warmup_epochs",
    "decay_updates": "cooldown cooldown_updates cooldown_steps cooldown_iters num_decay_steps decay_steps",
    "cooldown_evaluations": "cooldown cooldown_epochs",
    "optimizer": "optimizers optim opt lr learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon betas momentum "
    "optim_args optim_wrapper opt_kwargs optimizer_config optimizer_name lr0 base_lr model_parameters",
    "model": "module net network lightning_module",
    "task": "criterion loss loss_fn loss_function loss_func compute_loss compute_metrics metrics tasks "
    "compute_loss_func batch_processor data_preprocessor train_step train_metrics val_metrics",
    "seed": "random_seed random_state manual_seed data_seed randomness",
    "global_batch_size": "batch_size train_batch_size total_batch_size batch samples_per_update ims_per_batch nbs",
    "micro_batch_size": "per_device_train_batch_size per_device_batch_size accumulate_grad_batches micro_batch "
    "gradient_accumulation_steps update_freq grad_accumulation_steps accumulation_steps grad_accum microbatch_size "
    "per_gpu_train_batch_size auto_find_batch_size num_microbatches_per_update device_train_microbatch_size "
    "samples_per_gpu train_micro_batch_size_per_gpu train_micro_batch_size test_micro_batch_size "
    "accumulative_counts num_accumulation_steps grad_accum_steps",
    "global_batch_tokens": "max_tokens batch_tokens tokens_per_batch tokens_per_update",
    "collate": "collate_fn data_collator collator",
    "num_workers": "dataloader_num_workers workers n_workers workers_per_gpu",
    "ema": "ema_decay averaging use_ema model_ema model_ema_decay ema_model",
    "compile": "torch_compile torch_compile_params enable_compile use_compile",
    "fit_memory": "auto_scale_batch_size",
    "start_update": "ema_start_update update_after_step update_starting_at_step begin_iter",
    "decay_warmup": "use_ema_warmup ema_warmup model_ema_warmup",
    "metric": "monitor metric_for_best_model best_checkpoint_metric",
    "patience_evaluations": "patience early_stopping_patience",
    "max_minutes": "max_time",
    "decay": "smoothing",
    "end_factor": "min_lr lr_end min_lr_rate eta_min",
    "outer_lr": "block_lr outer_learning_rate slowmo_lr",
    "outer_momentum": "block_momentum slowmo_momentum",
    "nesterov": "use_nbm",
    "synchronous_updates": "warmup_iterations",
    "keep_every_updates": "keep_period",
    "best": "save_best best_fn",
    "mode": "rule",
    "from_update": "val_begin begin",
    "asynchronous": "async_save async_checkpointing enable_async_checkpointing",
    "initial": "init_scale initial_scale",
    "growth_updates": "growth_interval loss_scale_window scale_window",
    "floor": "min_loss_scale min_scale",
    "overlap_updates": "fragment_sync_delay",
    "own_share": "fragment_update_alpha",
    "partial": "strict",
    "source": "ckpt_path resume_from_checkpoint checkpoint load_path",
}
"""The names of other trainers, by ours."""

MEANT: dict[str, list[str]] = {}
for _ours, _theirs in OURS.items():
    for _word in _theirs.split():
        MEANT.setdefault(_word, []).append(_ours)

_WRITE = (
    ("learning_rate lr", "give it to the optimizer: `torch.optim.AdamW(parameters, lr=…)`"),
    ("weight_decay betas", "give it to the optimizer: `torch.optim.AdamW(…)`"),
    ("momentum", "give it to the optimizer: `torch.optim.SGD(…, momentum=…)`; an average has `decay`, 1 - momentum"),
    (
        (
            "resume_from_checkpoint ckpt_path resume autoresume load_path start_epoch start_iter resume_epoch_or_step "
            "consumed_samples"
        ),
        "call `trainer.resume(…)` before `train`",
    ),
    (
        "init_from finetune_from_model pretrained init_checkpoint load_weights_from load_from load_weight",
        "call `evenstep.load_weights(model, …)` before the optimizer is built",
    ),
    (
        "args cfg config_params ds_config train_cfg val_cfg test_cfg",
        "give what it holds as arguments of their own, such as `epochs=…`",
    ),
    (
        f"{LOGS} every_n_steps every_steps logging_strategy logging_first_step console_log_interval",
        "write `log=Logging(every_updates=…)`",
    ),
    (
        SAVES,
        "write `checkpoint=Checkpointing(every_updates=…)`",
    ),
    (
        f"{EVALUATES} evaluate",
        "write `hooks=[Evaluate(every_updates=…)]`",
    ),
    (EVALUATES_BY_EPOCH, "write `hooks=[Evaluate(every_epochs=…)]`"),
    ("every_epochs", "write `checkpoint=Checkpointing(every_epochs=…)` or `hooks=[Evaluate(every_epochs=…)]`"),
    ("max_minutes time", "write `hooks=[TimeBudget(max_minutes=…)]`"),
    ("max_total_minutes", "write `hooks=[TimeBudget(max_total_minutes=…)]`"),
    ("stop_below_lr", "write `hooks=[StopBelowLr(…)]`"),
    ("early_stop", "write `hooks=[EarlyStop(metric=…, patience_evaluations=…)]`"),
    ("profile profiler", "write `hooks=[Profile(first=…, last=…)]`"),
    (
        "limit_train_batches max_steps_per_epoch max_train_steps_per_epoch epoch_length",
        "write `data=FirstBatches(data, n)` of `evenstep.data`: so many updates of each epoch",
    ),
    (
        "limit_val_batches limit_test_batches max_eval_steps_per_epoch",
        "write `evaluations=FirstBatches(data, n)` of `evenstep.data`",
    ),
    ("limit_predict_batches", "call `trainer.predict(FirstBatches(data, n))`, with `FirstBatches` of `evenstep.data`"),
    ("num_sanity_val_steps eval_on_start", "call `trainer.evaluate()` before `train`"),
    ("fast_dev_run", "write `updates=1` and no `folder`; a run file is tried by `evenstep check`"),
    ("min_steps min_epochs", "leave it out: only a hook that asks for it ends a run before its end"),
    (
        "gradient_clip_algorithm clip_grad_value clip_value gradient_clip_value clip_mode norm_type clip_grad_type",
        (
            "leave it out: gradients are clipped by the norm of the whole update, `train=Training(clip_norm=…)`, and "
            "not by value"
        ),
    ),
    ("deterministic", "call `torch.use_deterministic_algorithms(True)`; random numbers follow from `seed` always"),
    ("benchmark", "set `torch.backends.cudnn.benchmark` before the trainer is built"),
    (
        "detect_anomaly",
        (
            "leave it out: what is not finite is never applied, and its module named; torch's own is `with "
            "torch.autograd.detect_anomaly(): trainer.train()`"
        ),
    ),
    ("inference_mode", "leave it out: evaluations and predictions take no gradients"),
    ("use_distributed_sampler replace_sampler_ddp", "leave it out: ranks divide the samples of any `MapData`"),
    (
        "sync_batchnorm sync_bn",
        "leave it out: batches are normalised micro-batch by micro-batch; GroupNorm does not depend on the cut",
    ),
    ("reload_dataloaders_every_n_epochs", "give the dataset a `set_epoch(epoch)`, which is called before each epoch"),
    ("enable_checkpointing", "write `checkpoint=Checkpointing(keep_last=0)` for none, or give no `folder`"),
    ("enable_model_summary barebones verbose", "leave it out: nothing is shown or kept that is not asked for"),
    ("auto_lr_find lr_find", "call `evenstep.find_lr(trainer)` before `train`"),
    (
        "swa swa_params swa_lrs swa_epoch_start",
        "write `train=Training(ema=Ema(decay=…))`, or the mean of checkpoints by `evenstep average`",
    ),
    ("track_grad_norm", "leave it out: `train/grad_norm` is a metric of every run"),
    ("prepare_batch", "do it in `Task.transform`, which gets the batch on its device, or in `Task.inputs`"),
    ("output_transform", "do it in `Task.postprocess`, which gets the model's output"),
    (
        "activation_checkpoint_params activation_checkpointing gradient_checkpointing gradient_checkpointing_kwargs",
        "write `train=Training(memory=Memory(checkpoint='blocks'))`",
    ),
    ("save_last", "leave it out: the newest `keep_last` are kept, and the state at the end is one"),
    (
        "save_on_exception save_on_train_epoch_end",
        "leave it out: the last committed update is saved after an error as well, and evaluations come before saves",
    ),
    (
        "save_weights_only save_only_model save_filename save_overwrite save_optimizer filename_tmpl tag",
        "leave it out: a checkpoint is all of the run, and `evenstep export` writes its weights alone",
    ),
    (
        "check_finite strict",
        "leave it out: what is not finite is no better than anything, and a metric that is not there is an error",
    ),
    (
        "stopping_threshold divergence_threshold",
        "write a `Hook` whose `after_evaluate` calls `self.trainer.request_stop(…)`",
    ),
    ("check_on_train_epoch_end", "leave it out: evaluations are what is followed, whenever `Evaluate` asks for them"),
    ("every_minutes", "give a `Trainer` `checkpoint=Checkpointing(every_minutes=…)`"),
    ("keep", "write `checkpoint=Checkpointing(best=Best(metric=…, keep=…))`"),
    ("compile", "write `train=Training(compile='model')`"),
    (
        "fraction limit overfit overfit_batches train_subset_num_batches eval_subset_num_batches",
        "give `MapData` fewer samples: `torch.utils.data.Subset(dataset, range(n))`",
    ),
    ("patience_evaluations", "write `hooks=[EarlyStop(patience_evaluations=…)]`"),
    ("keep_last", "give a `Trainer` `checkpoint=Checkpointing(keep_last=…)`"),
    ("every_updates", "give it to a `Trainer`: `log=Logging(every_updates=…)`"),
    ("warmup_updates", "write `lr_schedule={'kind': 'cosine', 'warmup_updates': 100}`"),
    ("metric", "write `checkpoint=Checkpointing(best=Best(metric=…))`"),
    ("global_batch_size", "write `data=MapData(dataset, global_batch_size=…)`, which counts the samples of an update"),
    (
        "micro_batch_size",
        (
            "write `data=MapData(dataset, global_batch_size=…, micro_batch_size=…)`: the samples of an update, and of "
            "one forward"
        ),
    ),
    ("global_batch_tokens", "write `data=MapData(dataset, global_batch_tokens=…, lengths=…)`"),
    ("epochs updates folder checkpoint failures log hooks", "give it to a `Trainer`"),
    ("data", "give it to a `Trainer`, or an engine's `update(batch)` the batches"),
    ("evaluations", "give it to a `Trainer`, or an engine's `evaluate(batch)` the batches"),
    ("writers", "write `log=Logging(writers=…)` for a `Trainer`"),
    ("num_workers", "write `data=MapData(dataset, num_workers=…)`"),
    ("collate", "write `data=MapData(dataset, collate=…)`"),
    ("shuffle", "write `data=MapData(dataset, shuffle=…)`"),
    ("clip_norm", "write `train=Training(clip_norm=…)`"),
    (
        (
            "outer_lr outer_momentum outer_optimizer nesterov synchronous_updates sync_every localsgd_frequency "
            "global_sync_iter overlap_updates own_share"
        ),
        "give it to the strategy whose ranks step alone: `Local(Ddp(Processes(device)), every_updates=…, outer_lr=…)`",
    ),
    ("drop_last dataloader_drop_last", "leave it out: every sample is taken, in an update of its own weight"),
    ("sampler batch_sampler", "give a loader with batches of your own as `StreamData(loader, batched=True)`"),
    ("pin_memory dataloader_pin_memory", "leave it out: batches for an accelerator are pinned"),
    ("start_update decay_warmup", "write `train=Training(ema=Ema(start_update=…, decay_warmup=…))`"),
    ("max_duration stop_by", "write `epochs=…` or `updates=…`; for a time, `hooks=[TimeBudget(max_minutes=…)]`"),
    ("end_factor", "write `lr_schedule={'kind': 'cosine', 'end_factor': …}`, a share of the full rate"),
    ("decay", "write `train=Training(ema=Ema(decay=…))`"),
    ("half_life", "write `decay=0.5 ** (1 / updates)`, after so many of which half is left"),
    (
        "load_best_model_at_end greater_is_better",
        (
            "write `checkpoint=Checkpointing(best=Best(metric=…, mode=…))`, and load what it keeps by "
            "`evenstep.load_weights`"
        ),
    ),
    (
        "eval_strategy evaluation_strategy eval_delay",
        "write `hooks=[Evaluate(every_updates=…, every_epochs=…, from_update=…)]`",
    ),
    ("save_strategy", "write `checkpoint=Checkpointing(every_updates=…, every_epochs=…)`"),
    ("torch_empty_cache_steps", "write `train=Training(memory=Memory(empty_cache_every_updates=…))`"),
    (
        "load_weights_only load_strict_model_weights load_ignore_keys",
        "call `evenstep.load_weights(model, …, partial=…)` before the optimizer is built",
    ),
    (
        "logging_nan_inf_filter",
        "leave it out: what is not finite is never applied; `failures=Failures(non_finite=…)` says what then",
    ),
    (
        (
            "even_batches split_batches dispatch_batches average_tokens_across_devices ddp_find_unused_parameters "
            "find_unused_parameters ddp_sync_strategy"
        ),
        "leave it out: an update is that of all ranks' samples, whatever each of them has or uses",
    ),
    ("ddp_timeout dist_timeout", "give it to the ranks: `Ddp(Processes(device, timeout_s=…))`"),
    (
        "group_by_length length_column_name",
        "write `data=MapData(dataset, global_batch_tokens=…, lengths=…)`, which sorts by length",
    ),
    (
        "neftune_noise_alpha noise_alpha",
        "add the noise in a forward hook of the embedding: what it draws is keyed by micro-batch",
    ),
    (
        "label_smoothing label_smoothing_factor",
        "give it to the task, as those of `evenstep.hf` take it: `CausalLM(label_smoothing=…)`",
    ),
    ("algorithms", "write them as a task's `transform`, as hooks, or as `train=Training(ema=…)`"),
    (
        "full_determinism deterministic_mode rng_types use_seedable_sampler ignore_data_skip",
        "leave it out: a run has the same bits again, resumed or not; on several ranks too with `Ordered`",
    ),
    ("remove_unused_columns", "leave it out: a task's `inputs` says what the model is called with"),
    (
        "preprocess_logits_for_metrics batch_eval_metrics label_names eval_accumulation_steps",
        "let the task say it: `Loss(sum, metrics=…)`, `Task.metrics` or `Task.evaluate`",
    ),
    ("processing_class tokenizer", "tokenize in the dataset, or in `MapData(…, collate=…)`"),
    ("push_to_hub", "write `hooks=SavePretrained()` of `evenstep.hf`, and push the folder that it leaves"),
    ("use_liger_kernel", "leave it out; `CausalLM(chunked=True)` never has all scores in memory"),
    ("optim_target_modules", "write `optimizer=grouped_optimizer(…)`, whose groups are patterns of names"),
    ("include_num_input_tokens_seen", 'let the task\'s `unit` be "tokens": `progress/tokens`'),
    ("enable_jit_checkpoint", "leave it out: SIGTERM saves in any run with a `folder`"),
    ("strategy precision lr_schedule optimizer task seed", "give it to the trainer or engine"),
    ("best", "write `checkpoint=Checkpointing(best=Best(metric=…, mode=…))`"),
    ("rule", "write `checkpoint=Checkpointing(best=Best(metric=…, mode=…))`"),
    ("from_update", "write `hooks=[Evaluate(every_updates=…, from_update=…)]`"),
    ("dynamic_intervals", "write `hooks=[Evaluate(every_updates=10), Evaluate(every_updates=1, from_update=900)]`"),
    ("asynchronous keep_every_updates", "give a `Trainer` `checkpoint=Checkpointing(…)` with it"),
    ("checkpointer", "write `checkpoint=Checkpointing(every_updates=…, keep_last=…)`"),
    (
        "interval period",
        "write `log=Logging(every_updates=…)`, `checkpoint=Checkpointing(…)` or `hooks=[Evaluate(every_updates=…)]`",
    ),
    ("resume_opt no_resume_opt resume_optimizer", "call `trainer.resume(path, reset='optimizer')` for all but that"),
    ("nccl_fusion_threshold_mb nccl_fusion_max_ops bucket_cap_mb", "leave it out: gradients travel in 25 MB at a time"),
    ("save_begin", "leave it out; a hook asks for checkpoints at other times by `self.trainer.request_save()`"),
    (
        "initial growth_updates floor loss_scale initial_scale_power",
        (
            "write `precision=Fp16Mixed(initial=…, growth_updates=…, floor=…)`; it stays with more `growth_updates` "
            "than the run"
        ),
    ),
    (
        "growth_factor backoff_factor hysteresis consecutive_hysteresis",
        "leave it out: the scale is doubled and halved; `tolerance` is how many overflows lower it for one update only",
    ),
    ("smoothing", "give it to the task's loss; an average is `train=Training(ema=Ema(decay=…))`"),
    (
        "mixup cutmix mixup_alpha cutmix_alpha",
        "do it in `Task.transform`, whose random numbers are keyed by micro-batch",
    ),
    ("bce_loss", "let `Task.loss` give `F.binary_cross_entropy_with_logits(…, reduction='sum')`"),
    ("layer_decay paramwise_cfg", "write `optimizer=grouped_optimizer(…)`, which takes groups and `layer_decay`"),
    ("auto_scale_lr", "leave it out: what an update does, and so its rate, does not depend on how many ranks make it"),
    ("communication_data_type", "give it to the strategy: `Ddp(Processes(device), compression='bf16')`"),
    ("wall_clock_breakdown", "leave it out: a run with a `folder` logs `perf/forward_s` and its like"),
    ("log_level", "call `logging.getLogger('evenstep').setLevel(…)`"),
    ("freeze", "call `requires_grad_(False)` before the optimizer is built, or in a `Hook`"),
    (
        "imgsz multi_scale rect close_mosaic reload_dataloaders repeat",
        "do it in the dataset, whose `set_epoch(epoch)` is called before each epoch",
    ),
    ("dropout drop_path", "give it to the model's layers; what they draw is keyed by micro-batch"),
    ("plots", "leave it out: a run with a `folder` ends with a page, `report.html`"),
    ("exist_ok", "call `trainer.resume()`, which goes on in a `folder` that is there"),
    ("name", "write `folder='runs/NAME'`"),
    ("warmup_momentum momentum_config", "set it in `trainer.optimizer.param_groups` in a hook's `before_update`"),
    ("warmup_bias_lr", "write `lr_schedule=PerGroup({'biases': …}, …)` with a schedule of your own"),
    (
        "manager min_replica_size use_async_quorum quorum_timeout lighthouse_addr replica_id",
        "give the strategy a group that ranks leave and join, `Elastic(…)` of `evenstep.extras.elastic`",
    ),
    ("should_quantize", "leave it out: parameters are shared in their own format"),
    (
        "max_restarts nnodes nproc_per_node rdzv_backend",
        "give it to what starts the ranks: torchrun, or `evenstep train --launch.ranks 4 --launch.max_restarts 3`",
    ),
    ("persistent_workers", "leave it out: workers stay from epoch to epoch"),
    ("worker_init_fn", "do it in the dataset, when it is first read; generators are seeded for each sample"),
)
"""Names, ours or another trainer's, and what to do where the constructor has nothing of the kind."""

WRITE = {word: write for words, write in _WRITE for word in words.split()}

_EITHER = "set `{0}.every_updates` or `{0}.every_epochs`"
_OF_THE_MODEL = "give it to the model, in `model.args`"
KEYS: dict[str, str] = {
    word: answer
    for answer, words in {
        "seed": "seed_everything",
        "optimizer.lr": "learning_rate base_lr max_lr peak_lr lr0",
        "optimizer.name": "optim optimizer_name",
        "optimizer.args": "optim_args opt_kwargs optim_kwargs",
        "optimizer.args.betas": "adam_beta1 adam_beta2 adam_betas beta1 beta2",
        "optimizer.args.eps": "adam_epsilon adam_eps epsilon",
        "optimizer.groups": "optim_target_modules paramwise_cfg no_decay",
        "lr_schedule.kind": "lr_scheduler_type decay_type scheduler_name",
        "lr_schedule.warmup_updates": "warmup_steps num_warmup_steps warmup_iters t_warmup num_warmup_updates warmup",
        "set `lr_schedule.warmup_updates`, a number of updates": "warmup_ratio warmup_epochs",
        "lr_schedule.end_factor": "alpha_f min_lr_factor min_lr_rate lrf",
        "set `lr_schedule.end_factor`, a share of `optimizer.lr`": "min_lr lr_end eta_min",
        "lr_schedule.decay_updates": "decay_ratio",
        "lr_schedule.factor": "gamma",
        "lr_schedule.every": "step_size",
        "leave it out: schedules stretch over `train.updates`": "t_max total_iters lr_decay_iters scale_schedule_ratio",
        "leave it out: a warmup begins near 0": "warmup_init_lr warmup_lr warmup_lr_init warmup_factor",
        "log.every_updates": f"{LOGS} log_freq logging_freq console_log_interval logging_strategy logging_first_step",
        "log.writers": "enable_tensorboard enable_wandb tensorboard_logdir log_format no_progress_bar use_wandb "
        "wandb_project",
        "checkpoint.every_updates": f"{SAVES} save_freq checkpoint_interval checkpoint_every checkpoint_freq",
        _EITHER.format("checkpoint"): "save_strategy save_interval",
        "checkpoint.every_epochs": "save_every_n_epochs save_period",
        "leave it out: checkpoints at epochs' ends are for `checkpoint.every_epochs` alone": "no_epoch_checkpoints",
        "checkpoint.keep_last": "keep_latest_k keep_checkpoints save_total_limit keep",
        "checkpoint.keep_every_updates": "keep_period",
        "checkpoint.best": "load_best_model_at_end",
        "checkpoint.best.keep": "keep_best_checkpoints save_top_k",
        "checkpoint.best.metric": "metric_for_best_model best_checkpoint_metric",
        "checkpoint.best.mode": "greater_is_better maximize_best_checkpoint_metric",
        "checkpoint.asynchronous": "async_mode async_save async_checkpointing",
        "leave it out: checkpoints are kept of any run; `checkpoint.keep_last = 0` keeps none": "enable_checkpoint "
        "enable_checkpointing no_save",
        "evaluate.every_updates": f"{EVALUATES} val_every val_freq validate_every eval_freq validation_freq",
        "evaluate.every_epochs": f"{EVALUATES_BY_EPOCH} validate_interval",
        "evaluate.from_update": "eval_delay val_begin",
        _EITHER.format("evaluate"): "eval_strategy evaluation_strategy do_eval",
        "leave it out; `evenstep check RUN.toml` evaluates a batch of each set": "num_sanity_val_steps eval_on_start",
        "leave it out; `evenstep check RUN.toml` tries one update": "fast_dev_run",
        "leave it out: `evenstep train RUN.toml` trains": "do_train",
        "early_stop.patience_evaluations": "patience early_stopping_patience",
        "launch.ranks": "devices gpus num_gpus n_gpus num_processes nproc_per_node world_size distributed_world_size "
        "data_parallel_replicate_degree",
        "set `launch.slurm.nodes`, or start one rank for each device by torchrun": "num_nodes nnodes",
        "leave it out: whatever starts the ranks numbers them": "local_rank rank node_rank",
        "parallel.shard_ranks": "data_parallel_shard_degree",
        "parallel.pipeline": "pipeline_parallel_degree pipeline_parallel_size pipeline_model_parallel_size pp_size",
        "parallel.pipeline_schedule": "pipeline_parallel_schedule",
        "parallel.timeout_s": "ddp_timeout dist_timeout init_timeout_seconds train_timeout_seconds nccl_timeout",
        "leave it out: layers are not cut; `parallel.strategy` and `parallel.pipeline` divide a model": ""
        "tensor_parallel_degree context_parallel_degree tp_size cp_size tensor_model_parallel_size",
        "leave it out; `parallel.strategy` says how ranks share a model": "fsdp_reshard_after_forward",
        "data.train": "dataset_path train_subset dataset train_dataset train_data train_set trainset",
        "data.evaluations": "valid_subset val valid validation test eval val_set test_set eval_set",
        "data.global_batch_size": "global_train_batch_size",
        "data.micro_batch_size": "device_train_microbatch_size local_batch_size max_sentences "
        "pipeline_parallel_microbatch_size",
        "data.evaluations.NAME.micro_batch_size": "per_device_eval_batch_size eval_batch_size val_batch_size "
        "device_eval_batch_size test_batch_size valid_batch_size",
        "data.evaluations.NAME.first_batches": "limit_val_batches limit_test_batches eval_subset_num_batches",
        "set `data.global_batch_tokens`, with which batches are of similar lengths": "group_by_length",
        "tokenize in the dataset, or in a function of the recipe, `data.collate`": "tokenizer processing_class",
        "data.prefetch_batches": "dataloader_prefetch_factor prefetch_factor",
        "limit.batches": "limit_train_batches train_subset_num_batches steps_per_epoch max_steps_per_epoch",
        "set `train.updates` or `train.epochs`": "max_duration",
        "leave it out: a run ends after `train.updates` or `train.epochs`, unless a hook ends it": "min_steps "
        "min_epochs",
        "train.max_total_minutes": "stop_time_hours",
        "train.stop_below_lr": "stop_min_lr",
        "train.precision": "fp16_opt_level bf16_full_eval memory_efficient_fp16 mixed_precision_param "
        "mixed_precision_reduce",
        "call `torch.set_float32_matmul_precision('high')` in a file of the recipe": "tf32 allow_tf32",
        "call `torch.use_deterministic_algorithms(True)` in a file of the recipe": "deterministic",
        "set `torch.backends.cudnn.benchmark` in a file of the recipe": "benchmark cudnn_benchmark",
        "leave it out: what is not finite is never applied; `failures.non_finite` says what then": ""
        "logging_nan_inf_filter detect_anomaly",
        "leave it out: gradients are clipped by the norm of the whole update, `train.clip_norm`": ""
        "gradient_clip_algorithm clip_grad_value clip_value gradient_clip_value clip_mode norm_type clip_grad_type",
        'leave it out: a run has the same bits again; on several ranks too with `parallel.reduction = "ordered"`': ""
        "full_determinism deterministic_mode rng_types use_seedable_sampler ignore_data_skip",
        "loss_scale.initial": "fp16_init_scale init_scale initial_scale",
        "loss_scale.growth_updates": "fp16_scale_window loss_scale_window",
        "loss_scale.tolerance": "fp16_scale_tolerance hysteresis",
        "loss_scale.floor": "min_loss_scale",
        "ema.decay": "ema_decay model_ema_decay",
        "failures.non_finite": "nan on_nan skip_nan terminate_on_nan",
        "failures.out_of_memory": "oom",
        "memory.checkpoint": "gradient_checkpointing gradient_checkpointing_kwargs activation_checkpointing "
        "activation_checkpoint activation_checkpoint_params selective_ac_option",
        "memory.empty_cache_every_updates": "torch_empty_cache_steps empty_cache_freq",
        "train.compile": "torch_compile_backend torch_compile_mode",
        "profile": "profiler enable_profiling profile_freq",
        "resume": "resume_from_checkpoint ckpt_path autoresume load_path restore_file",
        "reset": "reset_optimizer reset_lr_scheduler",
        "init_from.path": "finetune_from_model pretrained init_checkpoint load_weights_from load_weights_only",
        "leave it out; another run has another `name`": "overwrite_output_dir exist_ok save_overwrite",
        "leave it out: `evenstep export RUN_FOLDER --to FILE` writes weights as safetensors": "save_safetensors",
        "leave it out: each rank writes its part into the one folder of the run": "save_on_each_node",
        "call `logging.getLogger('evenstep').setLevel(…)` in a file of the recipe": "log_level python_log_level",
        "leave it out: the losses of a task are divided by the weights that it gives": "sentence_avg",
        "recipe": "user_dir",
        "model.target": "arch flavor",
        _OF_THE_MODEL: "dropout attention_dropout max_seq_len seq_len hidden_size n_layers num_layers n_heads d_model "
        "vocab_size",
        "task.args": "label_smoothing label_smoothing_factor",
        "write a forward hook of the embedding into the recipe": "neftune_noise_alpha noise_alpha",
        'write `[[hooks]]` with `target = "evenstep.hf:SavePretrained"`, and push the folder that it leaves': ""
        "push_to_hub",
        "write them as a task's `transform`, as `hooks`, or as `ema`": "algorithms",
    }.items()
    for word in words.split()
}
"""What other trainers' words, at the top of a run file or in a table where they are not known, are here: a key, or a
sentence that says what to do. Words that mean the same as an argument and as a key are in `OURS`."""

FOR_ALL = tuple(
    write for _, write in _WRITE if write.startswith(("leave it out", "do it in", "let the task", "give the dataset"))
)
"""What of `WRITE` is right for run files too, as it speaks of no arguments."""

BY_NAME = {
    "precision": '`precision="bf16-mixed"`, `"16-mixed"` or `"float8-mixed"`',
    "strategy": '`strategy="ddp"`, `"zero1"` or `"fsdp"`, and start the ranks with torchrun',
    "device": '`device="cpu"`; "auto" takes the accelerator that is there',
    "lr_schedule": '`lr_schedule={"kind": "cosine", "warmup_updates": 100}`',
    "task": "`task=…`, an object of a class of `evenstep.Task`, whose `loss` gives the loss and its metrics",
    "optimizer": "`optimizer=torch.optim.AdamW(model.parameters(), lr=…)`",
    "end_factor": "`end_factor=…`, a share of the full rate",
    "partial": "`partial=True`, which is `strict=False`; without it all must fit",
}
"""How some of ours are written, where a name and dots say too little."""

SCHEDULES = {
    "multistep": "listed",
    "warmupmultistep": "listed",
    "exponential": "multiplicative",
    "warmup": "constant",
    "warmupdecay": "linear",
    "onecycle": "cosine",
    "lambda": "listed",
    "poly": "polynomial",
}
"""Ours for LR schedules of other trainers, by their names in lower case without "lr" or "scheduler" at the end."""

STRATEGIES: dict[str, str] = dict.fromkeys(("zero2", "zero3", "deepspeed", "fsdp2", "fully_shard", "hsdp"), "fsdp")
"""Ours for strategies of other trainers. ZeRO's stages 2 and 3 divide gradients, and parameters, between ranks."""

_METHODS = {
    "before_train": "before_run on_train_begin on_train_start on_fit_start on_loop_begin",
    "after_train": "after_run on_train_end on_fit_end on_loop_end on_exception",
    "before_epoch": "before_train_epoch on_epoch_begin on_epoch_start on_train_epoch_start",
    "after_epoch": "after_train_epoch on_epoch_end on_train_epoch_end",
    "before_update": "before_train_iter on_step_begin on_train_batch_start on_train_step_start",
    "after_update": "after_train_iter on_step_end on_train_batch_end on_train_step_end",
    "before_microbatch": "on_batch_begin",
    "after_microbatch": "on_batch_end on_substep_end",
    "before_forward": "on_forward_begin",
    "after_forward": "on_forward_end",
    "before_backward": "on_backward_begin on_before_backward",
    "after_backward": "on_backward_end on_after_backward",
    "before_step": "on_optimizer_step_begin on_before_optimizer_step on_pre_optimizer_step",
    "after_step": "on_optimizer_step_end on_optimizer_step",
    "before_evaluate": "before_val before_val_epoch before_test before_test_epoch on_validation_start on_eval_start",
    "after_evaluate": "after_val after_val_epoch after_test after_test_epoch on_evaluate on_validation_end "
    "on_validation_epoch_end on_eval_end",
    "before_save": "before_save_checkpoint",
    "after_save": "on_save",
    "state_dict": "on_save_checkpoint",
    "load_state_dict": "after_load_checkpoint on_load_checkpoint",
}
METHODS = {_theirs: _ours for _ours, _words in _METHODS.items() for _theirs in _words.split()}
"""Ours for methods of hooks and callbacks of other trainers."""

ATTRIBUTES = {
    "Trainer": {
        "`trainer.train()`": "fit run",
        "`trainer.evaluate()`, of the sets that were given as `evaluations`": "validate test val",
        "`trainer.save()`": "save_checkpoint save_model",
        "`trainer.request_stop(…)`": "should_stop terminate",
        "`trainer.train().metrics`, or `trainer.storage`": "callback_metrics logged_metrics",
        "`trainer.resume()`": "resume_or_load load_checkpoint",
        "`Trainer(hooks=…)`": "register_hook register_hooks add_callback",
        "`trainer.progress.update`": "global_step iter current_step",
        "`trainer.updates`": "max_iter max_iters max_steps",
        "`trainer.folder`": "work_dir output_dir",
        "`update` of an `evenstep.Engine`, for a loop of one's own": "run_step train_step",
        "`trainer.storage`": "message_hub event_storage",
        "`trainer.progress.position.epoch`": "epoch current_epoch",
    },
    "Engine": {
        "`engine.update(*microbatches)`, which does forwards, backwards, their reduction and the optimizer's step": ""
        "step backward zero_grad forward train_batch train_step run_step training_step fit run train manual_backward "
        "optimizer_step accumulate no_sync sync_gradients set_gradient_accumulation_boundary",
        "`engine.evaluate(*microbatches)`, of all ranks": "eval eval_batch validate test val validation_step eval_step "
        "gather gather_for_metrics",
        "`precision`, an argument of the engine": "autocast scaler mixed_precision",
        "`Training(clip_norm=…)`, the engine's argument `train`": "clip_grad_norm_ clip_grad_norm clip_gradients",
        "`torch.save(engine.state_dict(), path)`, which all ranks call and the first writes": "save save_checkpoint "
        "save_state save_model",
        "`engine.load_state_dict(torch.load(path))`": "load load_checkpoint load_state",
        "`engine.progress.update`": "global_step global_steps step_count current_step",
        "`loss`, `grad_norm` and `metrics()` of what `engine.update(…)` returns": "loss metrics get_global_grad_norm",
        "`engine.optimizer.param_groups`, and the argument `lr_schedule`": "lr get_lr lr_scheduler scheduler",
        "`engine.group`": "rank world_size process_index num_processes is_main_process is_local_main_process",
        "`engine.model`": "module unwrap_model",
    },
}
"""What is said of other trainers' attributes and methods, by the class that is asked for them."""
