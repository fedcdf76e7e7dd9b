"""The failure policies of a run, as arguments of its trainer.

Each kind of incident has one; what they do is in `evenstep.train.failures`.
"""

from typing import Any

from evenstep.config.schema import Config
from evenstep.train import LossSpikes, Retry, Stop
from evenstep.train.failures import FAILURE_POLICIES


def build_failures(config: Config) -> dict[str, Any]:
    """The trainer's arguments that say what to do about what goes wrong."""
    failures = config.failures
    return {
        "on_non_finite": FAILURE_POLICIES[failures.non_finite](failures.max_rewinds),
        "on_out_of_memory": Stop() if failures.out_of_memory == "stop" else Retry(),
        "loss_spikes": _spikes(config),
        "on_hook_error": failures.hook,
        "max_skipped_samples": failures.max_skipped_samples,
        "fit_memory": config.data is not None and config.data.micro_batch_size == "auto",
    }


def _spikes(config: Config) -> LossSpikes | None:
    failures = config.failures
    if failures.loss_spike == "ignore":
        return None
    return LossSpikes(
        None if failures.loss_spike == "report" else FAILURE_POLICIES[failures.loss_spike](failures.max_rewinds),
        window_updates=failures.spike_window_updates,
        threshold=failures.spike_threshold,
    )
