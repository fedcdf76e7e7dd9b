"""Calls of public constructors that do not fit, each answered in one line by what to write."""

import inspect
import pickle
import warnings
from importlib import import_module
from typing import Any

import pytest
import torch

import evenstep
from evenstep.config.keys import advice_for
from evenstep.errors import ArgumentError
from evenstep.keywords import _MADE_IN_UPDATES  # pyright: ignore[reportPrivateUsage]
from evenstep.optim.schedules import Cosine, Plateau, Wsd
from evenstep.other_trainers import MEANT, WRITE

PACKAGES = ("", ".checkpoint", ".data", ".events", ".optim", ".parallel", ".pipeline", ".precision", ".train")


def _constructors() -> list[Any]:
    found: dict[int, Any] = {}
    for package in (import_module(f"evenstep{name}") for name in PACKAGES):
        for name in package.__all__:
            one = getattr(package, name)
            plain = inspect.isclass(one) and one.__new__ is object.__new__ and "__final__" in vars(one)
            if plain and name not in _MADE_IN_UPDATES:
                found[id(one)] = one
    return list(found.values())


CONSTRUCTORS = _constructors()


def test_there_are_constructors() -> None:
    assert len(CONSTRUCTORS) > 60
    assert evenstep.Trainer in CONSTRUCTORS
    assert evenstep.MapData in CONSTRUCTORS


@pytest.mark.parametrize("constructor", CONSTRUCTORS, ids=lambda one: one.__name__)
def test_a_call_that_does_not_fit_is_answered_in_one_line(constructor: Any) -> None:
    name = constructor.__name__
    with pytest.raises(ArgumentError, match=f"^`{name}` has no argument `nothing_of_the_kind`; ") as unknown:
        constructor(nothing_of_the_kind=3)
    parameters = inspect.signature(constructor).parameters
    kinds = [one.kind for one in parameters.values()]
    faults = [str(unknown.value)]
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        with pytest.raises(ArgumentError, match=f"^`{name}` was given 30 arguments by place, but takes ") as many:
            constructor(*range(30))
        faults.append(str(many.value))
    needed = [one for one in parameters.values() if one.default is one.empty and one.kind is not one.VAR_POSITIONAL]
    if needed:
        with pytest.raises(ArgumentError, match=f"^`{name}` must be given `{needed[0].name}`") as lacking:
            constructor()
        faults.append(str(lacking.value))
    assert not [fault for fault in faults if "\n" in fault or (not fault.endswith(".") and not fault.endswith("?"))]


@pytest.mark.parametrize("constructor", CONSTRUCTORS, ids=lambda one: one.__name__)
def test_a_slip_of_the_pen_is_answered_by_the_name(constructor: Any) -> None:
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(constructor).parameters
    for name, parameter in parameters.items():
        if parameter.kind in kinds and len(name) > 4 and name[:-1] not in parameters:
            with pytest.raises(ArgumentError, match=f"`{name[:-1]}`; .*`{name}(=…)?`") as raised:
                constructor(**{name[:-1]: 3})
            assert "there are" not in str(raised.value)


@pytest.mark.parametrize("word", sorted(MEANT))
def test_another_trainers_name_is_answered_by_ours(word: str) -> None:
    for constructor in (evenstep.Trainer, evenstep.Engine):
        if word not in inspect.signature(constructor).parameters:
            with pytest.raises(ArgumentError, match=rf"^`\w+` has no argument `{word}`; ") as raised:
                constructor(**{word: 3})  # pyright: ignore
            assert "there are" not in str(raised.value)


@pytest.mark.parametrize("word", sorted(WRITE))
def test_a_name_without_a_counterpart_is_answered_by_what_to_do(word: str) -> None:
    for constructor in (evenstep.Trainer, evenstep.Engine):
        if word not in inspect.signature(constructor).parameters:
            with warnings.catch_warnings(), pytest.raises(ArgumentError) as raised:
                warnings.simplefilter("ignore", DeprecationWarning)  # of those that were arguments once
                constructor(**{word: 3})  # pyright: ignore
            assert "there are" not in str(raised.value)
            assert "did you mean" not in str(raised.value)


@pytest.mark.parametrize(
    ("schedule", "word", "ours"),
    [
        (Plateau, "cooldown", "cooldown_evaluations"),
        (Wsd, "cooldown", "decay_updates"),
        (Wsd, "num_decay_steps", "decay_updates"),
        (Cosine, "warmup_epochs", "warmup_updates"),
    ],
)
def test_a_schedules_word_elsewhere_is_answered_by_its_own(schedule: Any, word: str, ours: str) -> None:
    with pytest.raises(ArgumentError, match=f"has no argument `{word}`; write `{ours}=…`"):
        schedule(**{word: 3})
    keys = [*inspect.signature(schedule).parameters]
    assert f"`lr_schedule.{ours}`" in advice_for(("lr_schedule", word), keys)


MICRO_BATCHES = (
    "write `data=MapData(dataset, global_batch_size=…, micro_batch_size=…)`: the samples of an update, and of one "
    "forward."
)


@pytest.mark.parametrize(
    ("constructor", "word", "write"),
    [
        (evenstep.Trainer, "max_epochs", "write `epochs=…`."),
        (evenstep.Trainer, "max_steps", "write `updates=…`."),
        (evenstep.Trainer, "callbacks", "write `hooks=…`."),
        (evenstep.Trainer, "train_dataloader", "write `data=…`."),
        (evenstep.Trainer, "learning_rate", "write `optimizer=torch.optim.AdamW(model.parameters(), lr=…)`."),
        (evenstep.Trainer, "gradient_clip_val", "write `train=Training(clip_norm=…)`."),
        (evenstep.Trainer, "logger", "write `log=Logging(writers=…)`."),
        (evenstep.Trainer, "clipnorm", "did you mean `train=Training(clip_norm=…)`?"),
        (evenstep.Engine, "clip_norm", "write `train=Training(clip_norm=…)`."),
        (evenstep.Engine, "max_epochs", "give it to a `Trainer`."),
        (evenstep.MapData, "batch_size", "write `global_batch_size=…`."),
        (evenstep.MapData, "collate_fn", "write `collate=…`."),
        (evenstep.Training, "clipnorm", "did you mean `clip_norm`?"),
        (evenstep.EarlyStop, "monitor", "write `metric=…`."),
        (evenstep.Trainer, "check_val_every_n_epoch", "write `hooks=[Evaluate(every_epochs=…)]`."),
        (evenstep.Trainer, "evaluate_every_n_steps", "write `hooks=[Evaluate(every_updates=…)]`."),
        (evenstep.Trainer, "save_top_k", "write `checkpoint=Checkpointing(best=Best(metric=…, keep=…))`."),
        (evenstep.Best, "save_top_k", "write `keep=…`."),
        (evenstep.Checkpointing, "n_saved", "write `keep_last=…`."),
        (evenstep.Checkpointing, "train_time_interval", "write `every_minutes=…`."),
        (evenstep.Ema, "update_every_n_steps", "write `every_updates=…`."),
        (evenstep.Trainer, "torch_compile", "write `train=Training(compile=…)`."),
        (evenstep.Loss, "metric", "did you mean `metrics`?"),
        (evenstep.Trainer, "gradient_checkpointing", "write `train=Training(memory=Memory(checkpoint='blocks'))`."),
        (
            evenstep.Trainer,
            "eval_strategy",
            "write `hooks=[Evaluate(every_updates=…, every_epochs=…, from_update=…)]`.",
        ),
        (
            evenstep.Trainer,
            "fsdp_config",
            'write `strategy="ddp"`, `"zero1"` or `"fsdp"`, and start the ranks with torchrun.',
        ),
        (
            evenstep.Trainer,
            "max_duration",
            "write `epochs=…` or `updates=…`; for a time, `hooks=[TimeBudget(max_minutes=…)]`.",
        ),
        (evenstep.Cosine, "min_lr", "write `end_factor=…`, a share of the full rate."),
        (evenstep.Ema, "smoothing", "write `decay=…`."),
        (evenstep.Ema, "half_life", "write `decay=0.5 ** (1 / updates)`, after so many of which half is left."),
        (
            evenstep.Ema,
            "momentum",
            ("give it to the optimizer: `torch.optim.SGD(…, momentum=…)`; an average has `decay`, 1 - momentum."),
        ),
        (evenstep.Checkpointing, "max_keep_ckpts", "write `keep_last=…`."),
        (evenstep.Checkpointing, "save_best", "write `best=…`."),
        (evenstep.Fp16Mixed, "growth_interval", "write `growth_updates=…`."),
        (evenstep.Trainer, "train_micro_batch_size_per_gpu", MICRO_BATCHES),
        (evenstep.Trainer, "work_dir", "write `folder=…`."),
        (evenstep.Trainer, "time", "write `hooks=[TimeBudget(max_minutes=…)]`."),
        (
            evenstep.Trainer,
            "sync_every",
            (
                "give it to the strategy whose ranks step alone: "
                "`Local(Ddp(Processes(device)), every_updates=…, outer_lr=…)`."
            ),
        ),
        (
            evenstep.Training,
            "clip_value",
            (
                "leave it out: gradients are clipped by the norm of the whole update, "
                "`train=Training(clip_norm=…)`, and not by value."
            ),
        ),
    ],
)
def test_what_is_meant(constructor: Any, word: str, write: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        constructor(**{word: 3})
    assert str(raised.value) == f"`{constructor.__name__}` has no argument `{word}`; {write}"


def test_old_arguments_beside_a_wrong_one_warn_at_the_callers_line() -> None:
    with warnings.catch_warnings(record=True) as caught, pytest.raises(ArgumentError, match="max_epochs"):
        warnings.simplefilter("always")
        evenstep.Trainer(clip_norm=1.0, max_epochs=3)  # pyright: ignore
    assert caught[0].filename == __file__


def test_an_error_from_inside_a_constructor_stays_as_it_is() -> None:
    class Fails(dict[str, Any]):
        def items(self) -> Any:
            raise TypeError("the user's")

    with pytest.raises(TypeError, match="the user's"):
        evenstep.Fixed(Fails(box=1.0))


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("stop_below_lr", r"hooks=\[StopBelowLr\(…\)\]"),
        ("max_total_minutes", r"hooks=\[TimeBudget\(max_total_minutes=…\)\]"),
        ("early_stop", r"hooks=\[EarlyStop\(metric=…, patience_evaluations=…\)\]"),
        ("evaluate", r"hooks=\[Evaluate\(every_updates=…\)\]"),
        ("profile", r"hooks=\[Profile\(first=…, last=…\)\]"),
        ("overfit", r"fewer samples: `torch.utils.data.Subset"),
    ],
)
def test_a_key_of_a_run_file_is_told_as_it_is_said_in_a_script(argument: str, said: str) -> None:
    for build in (evenstep.Trainer, evenstep.Training):
        with pytest.raises(ArgumentError, match=said):
            build(**{argument: 1})  # pyright: ignore


# What other trainers have and this one has not, or has elsewhere: never a list of all arguments for an answer.
OF_OTHERS = """
    min_epochs min_steps limit_train_batches limit_val_batches limit_test_batches limit_predict_batches overfit_batches
    num_sanity_val_steps fast_dev_run gradient_clip_algorithm deterministic benchmark detect_anomaly inference_mode
    use_distributed_sampler profiler barebones sync_batchnorm reload_dataloaders_every_n_epochs enable_checkpointing
    enable_model_summary auto_lr_find swa track_grad_norm prepare_batch output_transform epoch_length swa_params
    max_train_steps_per_epoch max_eval_steps_per_epoch activation_checkpoint_params clip_grad_value
"""


@pytest.mark.parametrize("word", OF_OTHERS.split())
def test_what_another_trainer_has_is_answered_by_what_to_do(word: str) -> None:
    with pytest.raises(ArgumentError, match=rf"^`Trainer` has no argument `{word}`; (write|leave|call|set|give|do) "):
        evenstep.Trainer(**{word: 1})  # pyright: ignore


FUNCTIONS = [
    getattr(package, name)
    for package in (import_module(f"evenstep{name}") for name in ("", ".hf", ".lightning"))
    for name in package.__all__
    if inspect.isfunction(getattr(package, name))
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda one: one.__name__)
def test_a_function_is_answered_as_a_constructor_is(function: Any) -> None:
    name, parameters = function.__name__, inspect.signature(function).parameters
    if not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        with pytest.raises(ArgumentError, match=f"^`{name}` has no argument `nothing_of_the_kind`; "):
            function(nothing_of_the_kind=3)
    with pytest.raises(ArgumentError, match=f"^`{name}` was given 30 arguments by place, but takes "):
        function(*range(30))
    with pytest.raises(ArgumentError, match=f"^`{name}` must be given `{next(iter(parameters))}`"):
        function()
    assert pickle.loads(pickle.dumps(function)) is function


def test_a_slip_in_a_call_of_a_function_is_answered_by_the_name() -> None:
    with pytest.raises(ArgumentError, match=r"^`load_weights` has no argument `freezee`; did you mean `freeze`\?$"):
        evenstep.load_weights(None, "run", freezee=True)  # pyright: ignore


def test_an_error_from_inside_a_function_stays_as_it_is() -> None:
    def hidden(*_: Any) -> None:
        raise TypeError("the user's")

    from evenstep.keywords import answered

    with pytest.raises(TypeError, match="the user's"):
        answered(hidden)(3)


@pytest.mark.filterwarnings("ignore:.*torch.autograd.function.Function:DeprecationWarning")  # torch, of itself
def test_a_function_that_answers_is_compiled_in_one_piece() -> None:
    loss = torch.compile(evenstep.chunked_cross_entropy, backend="eager", fullgraph=True)
    given = torch.randn(6, 4), torch.randn(5, 4), torch.tensor([0, 1, 2, 3, 4, -100])
    torch.testing.assert_close(loss(*given), evenstep.chunked_cross_entropy(*given))


METHODS = {
    "train": ({"ckpt_path": "last"}, "has no argument `ckpt_path`; call `trainer.resume(…)` before `train`."),
    "resume": ({"ckpt_path": "last"}, "has no argument `ckpt_path`; write `source=…`."),
    "evaluate": ({"nam": "valid"}, "has no argument `nam`; did you mean `name`?"),
    "predict": ({}, "must be given `data` too; write `Trainer.predict(…, data=…)`."),
    "save": ({"path": "a"}, "has no argument `path`; give it to a `Trainer`."),
}


@pytest.mark.parametrize("name", METHODS)
def test_methods_of_a_trainer_answer_calls_of_other_trainers(name: str) -> None:
    given, says = METHODS[name]
    with pytest.raises(ArgumentError) as raised:
        getattr(evenstep.Trainer, name)(None, **given)
    assert str(raised.value) == f"`Trainer.{name}` {says}"
