"""Arguments that a trainer had before there were option objects: taken for one more version, with a warning."""

OLD_ARGUMENTS = {
    **{name: f"train.{name}" for name in ("clip_norm", "ema", "coefficients", "combine", "norm_statistics")},
    **{name: f"train.{name}" for name in ("channels_last", "check_loss", "settle_every_updates", "fit_memory")},
    "keep_checkpoints": "checkpoint.keep_last",
    "keep_every_updates": "checkpoint.keep_every_updates",
    "asynchronous_saves": "checkpoint.asynchronous",
    "config": "checkpoint.config",
    "on_non_finite": "failures.non_finite",
    "on_out_of_memory": "failures.out_of_memory",
    "loss_spikes": "failures.loss_spike",
    "max_skipped_samples": "failures.max_skipped_samples",
    "on_hook_error": "failures.hook",
    "log_every_updates": "log.every_updates",
    "writers": "log.writers",
}
"""Each, and the field that it is now."""

OLD_NONES = {"on_non_finite": "stop", "on_out_of_memory": "retry", "loss_spikes": "ignore"}
"""What None meant for some of them."""
