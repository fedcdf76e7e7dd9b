"""`evenstep export RUN --to FILE`: writes the weights of a run as safetensors, whole or cut with the hub's index.

With `--layout hf` a folder as the hub has models, for which the run's model is built again from the run's folder.
"""

from pathlib import Path
from typing import Any, cast

from torch import nn

from evenstep.builders import evaluated_weights, make_model, open_run
from evenstep.checkpoint.export import export_weights
from evenstep.checkpoint.weights import StoredWeights, open_weights
from evenstep.cli.folder import BEGUN, CONFIG, IN_ONE_PROCESS, find_config
from evenstep.cli.inspect import spell_bytes
from evenstep.config.faults import refused_at
from evenstep.config.sources import settings_in
from evenstep.errors import ConfigError
from evenstep.process import EXIT_DONE


def run(
    path: str,
    *,
    to: str,
    average: bool,
    dtype: str | None,
    max_file_gb: float | None,
    layout: str | None,
    tokenizer: str | None,
) -> int:
    if tokenizer is not None and layout is None:
        raise ConfigError(["`--tokenizer` goes beside a model in the hub's layout; give `--layout hf` as well."])
    options: dict[str, Any] = {
        "average": average,
        "dtype": cast("Any", dtype),
        "max_file_bytes": None if max_file_gb is None else round(max_file_gb * 1e9),
    }
    with refused_at("evenstep export"):
        weights = path if average else _evaluated(path)
        if layout is None:
            files = export_weights(weights, to, **options)
        else:
            files = _as_model(path, weights, to, tokenizer, options)
    for file in files:
        print(f"{spell_bytes(file.stat().st_size):>10}  {file}")
    return EXIT_DONE


def _evaluated(path: str) -> str | StoredWeights:
    config = _folder_of(path) / CONFIG
    if not config.is_file() or not open_weights(path).trained_by:
        return path
    with open_run(config, settings_in({**BEGUN, **IN_ONE_PROCESS, "device": "cpu"}, "evenstep export")) as opened:
        return evaluated_weights(opened, path)


def _folder_of(path: str) -> Path:
    within = Path(path).absolute()
    return next((one for one in (within, *within.parents) if (one / CONFIG).is_file()), Path(path))


def _as_model(
    path: str, weights: str | StoredWeights, to: str, tokenizer: str | None, options: dict[str, Any]
) -> list[Path]:
    from evenstep.hf.saving import save_pretrained

    with open_run(find_config(_folder_of(path))) as opened:
        model = make_model(opened)
        if not isinstance(model, nn.Module):
            raise ConfigError(["`--layout hf` is for models of transformers, but this run's is given in layers."])
        return save_pretrained(model, to, weights=weights, tokenizer=tokenizer, **options)
