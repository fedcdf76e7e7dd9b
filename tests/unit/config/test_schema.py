import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any, get_args

import pytest

import evenstep
from evenstep.config import schema, schema_between, schema_ranks
from evenstep.config.schema import Config, EmaTable, LossScaleTable
from evenstep.config.schema_lr import TABLES, ScheduleTable
from evenstep.config.section import Section
from evenstep.optim import ema, schedules
from evenstep.options import Checkpointing, Failures, Logging, Training
from evenstep.precision import Fp16Mixed


def sections(section: type[Section]) -> Iterator[type[Section]]:
    yield section
    for field in section.model_fields.values():
        yield from (found for inner in types_in(field.annotation) for found in sections(inner))


def types_in(annotation: object) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for argument in get_args(annotation):
        yield from types_in(argument)


def test_every_key_is_documented_in_a_sentence() -> None:
    undocumented = [
        f"{section.__name__}.{name}"
        for section in sections(Config)
        for name, field in section.model_fields.items()
        if not field.description or not field.description.endswith(".")
    ]
    assert undocumented == []


def test_the_public_keys_are_these() -> None:
    schema = Config.model_json_schema()
    assert sorted(schema["properties"]) == [
        *(
            "checkpoint",
            "coefficients",
            "combine",
            "data",
            "device",
            "early_stop",
            "ema",
            "evaluate",
            "failures",
            "float8",
            "hooks",
            "init_from",
            "launch",
            "limit",
        ),
        *(
            "log",
            "loss_scale",
            "lr_schedule",
            "memory",
            "mixture",
            "model",
            "name",
            "optimizer",
            "overfit",
            "parallel",
            "profile",
            "recipe",
            "reset",
            "resume",
        ),
        *("runs", "seed", "task", "tasks", "threads", "train"),
    ]
    assert schema["required"] == ["name", "model", "train", "optimizer"]
    definitions = {name: sorted(table["properties"]) for name, table in schema["$defs"].items()}
    assert definitions == PUBLIC_KEYS


PUBLIC_KEYS = {
    "Limit": ["batches"],
    "Profile": ["first", "last", "memory"],
    "Launch": ["max_restarts", "ranks", "slurm"],
    "Memory": ["checkpoint", "empty_cache_every_updates"],
    "Slurm": [
        *("account", "additional", "cpus_per_rank", "gpus_per_rank", "memory_gb", "nodes", "partition", "qos"),
        *("ranks_per_node", "timeout_minutes"),
    ],
    "Failures": [
        *("hook", "loader", "loader_retries", "loss_spike", "lost_rank", "max_rewinds", "max_skipped_samples"),
        *("non_finite", "out_of_memory", "spike_threshold", "spike_window_updates"),
    ],
    "Parallel": [
        *("compression", "gather_dtype", "offload", "pipeline", "pipeline_schedule", "reduction"),
        *("shard_ranks", "split_at", "stages_per_rank", "strategy", "timeout_s"),
    ],
    "Best": ["keep", "metric", "mode"],
    "Checkpoint": [
        *(
            "asynchronous",
            "best",
            "every_epochs",
            "every_minutes",
            "every_updates",
            "keep_every_updates",
            "keep_last",
            "mirror",
        ),
    ],
    "Coefficients": ["kind", "regression"],
    "Combine": ["alpha", "coefficient_lr", "kind", "parameters"],
    "Constant": ["kind", "warmup_updates"],
    "Cosine": ["end_factor", "kind", "warmup_updates"],
    "Data": [
        *(
            "batch_size_multiple",
            "batch_size_unit",
            "collate",
            "curriculum_epochs",
            "evaluations",
            "global_batch_size",
        ),
        *("global_batch_tokens", "length_window", "micro_batch_size", "micro_batch_tokens", "num_workers"),
        *("oversized", "packed", "prefetch_batches", "shared", "shuffle", "timeout_s", "train"),
    ],
    "EarlyStop": ["metric", "min_delta", "mode", "patience_evaluations"],
    "Ema": ["decay", "decay_warmup", "evaluated", "every_updates", "start_update"],
    "Evaluate": ["every_epochs", "every_updates", "from_update"],
    "Evaluation": ["args", "first_batches", "micro_batch_size", "target"],
    "Float8": ["emulate", "layers", "recipe"],
    "InitFrom": ["average", "freeze", "only", "partial", "path"],
    "InverseSqrt": ["kind", "warmup_updates"],
    "Linear": ["end_factor", "kind", "warmup_updates"],
    "Log": ["every_updates", "flops", "peak_tflops", "writers"],
    "LossScale": ["floor", "growth_updates", "initial", "tolerance"],
    "Mixture": ["draws", "end", "kind", "temperature"],
    "NamedTask": [
        *("args", "coefficient", "coefficient_schedule", "data", "metrics", "repeats"),
        *("sampling_weight", "target"),
    ],
    "OneTask": ["args", "metrics", "target"],
    "Optimizer": ["args", "groups", "layer_decay", "layers", "lr", "name", "target", "weight_decay_on"],
    "ParameterGroup": [
        *("args", "dims", "frozen", "lr", "lr_factor", "lr_schedule", "name", "patterns", "target", "weight_decay"),
    ],
    "Polynomial": ["end_factor", "kind", "power", "warmup_updates"],
    "CosineRestarts": ["end_factor", "kind", "period_factor", "period_updates", "shrink", "warmup_updates"],
    "Listed": ["factors", "kind", "rates", "unit", "warmup_updates"],
    "Multiplicative": ["factors", "kind", "min_factor", "unit", "warmup_updates"],
    "Plateau": [
        *("cooldown_evaluations", "factor", "kind", "metric", "min_delta", "min_factor", "mode"),
        *("patience_evaluations", "relative", "warmup_updates"),
    ],
    "Step": ["every", "factor", "kind", "min_factor", "unit", "warmup_updates"],
    "TriStage": ["decay_updates", "end_factor", "hold_updates", "kind", "start_factor", "warmup_updates"],
    "Triangular": ["kind", "low_factor", "period_updates", "shrink"],
    "Target": ["args", "target"],
    "Train": [
        *("cast_inputs", "channels_last", "check_loss", "clip_norm", "compile", "epochs", "float32_outputs"),
        *("max_minutes", "max_total_minutes", "norm_statistics", "precision"),
        *("settle_every_updates", "stop_below_lr", "updates"),
    ],
    "Wsd": ["decay_updates", "end_factor", "kind", "shape", "warmup_updates"],
}


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        setattr(TABLES["cosine"](), "end_factor", 0.5)  # noqa: B010 - the point is that it fails at run time


@pytest.mark.parametrize("section", TABLES.values())
def test_an_lr_schedule_has_the_fields_and_defaults_of_its_namesake(section: type[ScheduleTable]) -> None:
    namesake = getattr(schedules, section.__name__.removesuffix("Table"))
    there = {name: p.default for name, p in inspect.signature(namesake).parameters.items()}
    here = {name: field.default for name, field in section.model_fields.items() if name != "kind"}
    if section is TABLES["listed"]:  # where rates stand for factors of the optimizer's
        assert here.pop("rates") is here.pop("factors") is None
        del there["factors"]
    assert here.keys() == there.keys()
    for name, default in here.items():
        assert default == there[name] or section.model_fields[name].is_required()


def test_ema_and_loss_scale_have_the_defaults_of_their_namesakes() -> None:
    for section, namesake in ((EmaTable, ema.Ema), (LossScaleTable, Fp16Mixed)):
        there = {name: p.default for name, p in inspect.signature(namesake).parameters.items()}
        assert {name: field.default for name, field in section.model_fields.items()} == there


@pytest.mark.parametrize(
    ("section", "constructor"),
    [
        ("Data", evenstep.MapData),
        ("EarlyStop", evenstep.EarlyStop),
        ("Best", evenstep.Best),
        ("ParameterGroup", evenstep.ParameterGroup),
        ("Evaluate", evenstep.Evaluate),
        ("Mixture", evenstep.Mixture),
        ("Mixture", evenstep.Sampled),
        ("Combine", evenstep.GradNorm),
        ("Coefficients", evenstep.Uncertainty),
        ("Parallel", evenstep.Fsdp),
        ("Parallel", evenstep.Processes),
    ],
    ids=lambda one: one if isinstance(one, str) else one.__name__,
)
def test_a_table_has_the_defaults_of_what_is_constructed_from_it(section: str, constructor: Any) -> None:
    homes: tuple[Any, ...] = (schema, schema_between, schema_ranks)
    home = next(one for one in homes if hasattr(one, f"{section}Table"))
    table = getattr(home, f"{section}Table").model_fields
    there = {
        name: p.default for name, p in inspect.signature(constructor).parameters.items() if p.default is not p.empty
    }
    common = {name for name in there.keys() & table.keys() if not table[name].is_required()} - {"collate"}
    assert common
    assert {name: table[name].default for name in common} == {name: there[name] for name in common}


def test_a_table_of_an_option_object_has_its_fields() -> None:
    only_here = {
        # the trainer's own arguments, a precision's, and hooks
        "Train": {"updates", "epochs", "precision", "cast_inputs", "float32_outputs"}
        | {"max_minutes", "max_total_minutes", "stop_below_lr"},
        "Checkpoint": set(),
        "Failures": {"loader", "loader_retries", "lost_rank"},  # of the data, and of the ranks
        "Log": set(),
    }
    only_there = {
        "Train": {
            "ema",
            "coefficients",
            "combine",
            "memory",
        },  # tables of their own
        "Checkpoint": {"config"},
        "Failures": set(),
        "Log": set(),
    }
    for name, option in zip(only_here, (Training, Checkpointing, Failures, Logging), strict=True):
        keys = set(getattr(schema, f"{name}Table").model_fields)
        fields = {field.name for field in dataclasses.fields(option)}
        assert (keys - fields, fields - keys) == (only_here[name], only_there[name])
