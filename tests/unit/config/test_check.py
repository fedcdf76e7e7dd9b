from collections.abc import Callable

import pytest

Faults = Callable[..., list[str]]
VALID = '\n[data.evaluations.valid]\ntarget = "parts.py:samples"\n'


@pytest.mark.parametrize(
    ("arguments", "added", "begins"),
    [
        (["--train.epochs", "3"], "", "`train.updates` and `train.epochs`: one of the two must be given, but both are"),
        (
            ["--train.updates", "none"],
            "",
            "`train.updates` and `train.epochs`: one of the two must be given, but neither",
        ),
        (["--data.global_batch_tokens", "9"], "", "`data.global_batch_size` and `data.global_batch_tokens`: one"),
        (["--data.global_batch_size", "none"], "", "`data.global_batch_size` and `data.global_batch_tokens`: one"),
        (["--optimizer.target", "parts.py:optimizer"], "", "`optimizer.name` and `optimizer.target`: one of the two"),
        (
            ["--data.micro_batch_size", "9"],
            "",
            "`data.micro_batch_size` must be at most the `data.global_batch_size` of 8",
        ),
        (
            ["--data.global_batch_size", "[[2, 4]]"],
            "",
            "`data.global_batch_size` must be in the order of its updates and",
        ),
        (["--data.batch_size_unit", "epochs"], "", "`data.batch_size_unit` is what sizes that change are counted in"),
        (
            ["--data.global_batch_size", "[[1, 4], [3, 8]]", "--data.micro_batch_size", "9"],
            "",
            "`data.micro_batch_size` must be at most the `data.global_batch_size` of 8, but is 9",
        ),
        (["--runs", ""], "", '`runs` must be a folder, but is ""; name it, `.` for the current one.'),
        (["--recipe", ""], "", '`recipe` must be a folder, but is ""; name it, `.` for that of this file.'),
        (["--data.oversized", "skip"], "", "`data.oversized` is for batches by tokens"),
        (["--data.curriculum_epochs", "1", "--data.shuffle", "false"], "", "`data.curriculum_epochs` is how many"),
        (
            ["--parallel.shard_ranks", "2"],
            "",
            '`parallel.shard_ranks` is for `parallel.strategy` "fsdp", but that is "auto"',
        ),
        (
            ["--parallel.pipeline", "2", "--parallel.strategy", "single"],
            "",
            '`parallel.strategy` is "single", but there are 2 ranks; ',
        ),
        (["--parallel.offload", "true", "--parallel.strategy", "ddp"], "", "`parallel.offload` is for `parallel.str"),
        (
            ["--failures.lost_rank", "continue", "--launch.ranks", "2", "--parallel.strategy", "zero1"],
            "",
            '`failures.lost_rank` "continue" cannot be',
        ),
        (
            ["--failures.lost_rank", "continue", "--launch.ranks", "2", "--failures.non_finite", "rewind"],
            "",
            '`failures.lost_rank` "continue" cannot be',
        ),
        (
            ["--failures.lost_rank", "continue", "--launch.ranks", "2", "--data.micro_batch_size", "auto"],
            "",
            '`failures.lost_rank` "continue" cannot be',
        ),
        (["--evaluate.every_updates", "2"], "", "`evaluate.every_updates` is 2, but there is nothing to evaluate on"),
        (["--evaluate.every_epochs", "2"], "", "`evaluate.every_epochs` is 2, but there is nothing to evaluate on"),
        (
            ["--checkpoint.best.metric", "valid/loss"],
            "",
            "`checkpoint.best.metric` is `valid/loss`, but there is no evaluation `valid`",
        ),
        (
            ["--checkpoint.best.metric", "vald/loss"],
            VALID,
            "`checkpoint.best.metric` is `vald/loss`, but there is no evaluation `vald`; did you mean `valid/loss`?",
        ),
        (["--evaluate.from_update", "4"], VALID, "`evaluate.from_update` is 4, but `evaluate` has neither"),
        (
            ["--early_stop.metric", "valid/loss"],
            VALID,
            "`early_stop.metric` is `valid/loss`, which is followed during the run, but nothing asks for evaluations",
        ),
        (
            ["--optimizer.groups.head", '{patterns = ["*"], lr = 0.1, lr_factor = 2.0}'],
            "",
            "`optimizer.groups.head.lr` and `optimizer.groups.head.lr_factor` of a group both say",
        ),
        (
            ["--optimizer.groups.head", '{patterns = ["*"], frozen = true, args = {momentum = 0.5}}'],
            "",
            "`optimizer.groups.head.args` has no effect on a group that is `optimizer.groups.head.frozen`; leave one",
        ),
        (
            ["--failures.max_skipped_samples", "3"],
            "",
            '`failures.max_skipped_samples` is for `failures.loader` "skip", b',
        ),
        (
            ["--failures.loss_spike", "ignore", "--failures.spike_threshold", "5"],
            "",
            '`failures.spike_threshold` is for `failures.loss_spike` "report", "stop", "rewind" or "rewind_past", but',
        ),
        (["--failures.max_rewinds", "1"], "", "`failures.max_rewinds` is 1, but neither `failures.non_finite` nor"),
        (
            ["--optimizer.groups.head", '{patterns = ["*"], lr_schedule = {warmup_updates = 11}}'],
            "",
            "`optimizer.groups.head.lr_schedule.warmup_updates` must be at most the 10 updates",
        ),
        (["--optimizer.layer_decay", "0.5"], "", "`optimizer.layer_decay` and `optimizer.layers` go together"),
        (["--optimizer.groups.others.patterns", '["*"]'], "", "a group can't be called 'others'"),
        (["--lr_schedule.warmup_updates", "11"], "", "`lr_schedule.warmup_updates` must be at most the 10 updates"),
        (
            ["--lr_schedule", '{kind = "wsd", warmup_updates = 6, decay_updates = 5}'],
            "",
            "`lr_schedule.warmup_updates` plus `lr_schedule.decay_updates` must be at most the 10 updates",
        ),
        (["--lr_schedule", '{kind = "step", every = 2, factor = 2.0}'], "", "`lr_schedule.factor` must be above 0 and"),
        (
            ["--lr_schedule", '{kind = "tri_stage", hold_updates = 6, decay_updates = 5}'],
            "",
            "`lr_schedule.warmup_updates`, `lr_schedule.hold_updates` and `lr_schedule.decay_updates` must together be",
        ),
        (["--lr_schedule.kind", "listed"], "", "`lr_schedule.factors` and `lr_schedule.rates`: one of the two must"),
        (
            ["--lr_schedule", '{kind = "listed", rates = [[1, 0.1], [20, 0.01]]}'],
            "",
            "`lr_schedule.rates` must begin within the 10 updates of the run, but one begins at 20",
        ),
        (["--lr_schedule.kind", "plateau"], VALID, "`lr_schedule.metric` is `valid/loss`, which is followed during"),
        (
            ["--lr_schedule", '{kind = "plateau", metric = "vald/loss"}', "--evaluate.every_updates", "1"],
            VALID,
            "`lr_schedule.metric` is `vald/loss`, but there is no evaluation `vald`; did you mean `valid/loss`?",
        ),
        (
            ["--loss_scale.floor", "1"],
            "",
            '`loss_scale` is for `train.precision` "16-mixed", "16-true" or "16-true-no-master", but that is',
        ),
        (
            ["--train.cast_inputs", "before-transfer", "--train.precision", "bf16-mixed"],
            "",
            '`train.cast_inputs` is for `train.precision` "bf16-true", "16-true", "bf16-true-no-master" or',
        ),
        (
            ["--train.float32_outputs", "false"],
            "",
            '`train.float32_outputs` is for `train.precision` "bf16-true", "16-true", "bf16-true-no-master" or',
        ),
        (
            ["--loss_scale", "{floor = 9, initial = 8}", "--train.precision", "16-true-no-master"],
            "",
            "`loss_scale.floor` must be at most the `loss_scale.initial` of 8, but is 9",
        ),
        (
            ["--loss_scale", "{floor = 9, initial = 8}", "--train.precision", "16-mixed"],
            "",
            "`loss_scale.floor` must be at most the `loss_scale.initial` of 8, but is 9",
        ),
        (["--ema.start_update", "10"], "", "`ema.start_update` must be below the 10 updates"),
        (["--log.writers", '["csv", "csv"]'], "", '`log.writers` has "csv" more than once'),
        (
            ["--parallel.compression", "bf16", "--parallel.reduction", "ordered"],
            "",
            '`parallel.compression` is for `parallel.reduction` "fast", but that is "ordered"',
        ),
        (
            ["--parallel.compression", "fp16", "--parallel.strategy", "single"],
            "",
            '`parallel.compression` is for `parallel.strategy` "auto" or "ddp", but that is "single"',
        ),
        (
            ["--launch.slurm.nodes", "2", "--launch.ranks", "4"],
            "",
            "`launch.slurm` cannot be with this `launch.ranks`: the ranks of a job are its `ranks_per_node`",
        ),
        (["--failures.lost_rank", "continue"], "", '`failures.lost_rank` is "continue", but the run has one rank'),
        (
            ["--launch.slurm.nodes", "2", "--launch.max_restarts", "1"],
            "",
            "`launch.slurm` cannot be with this `launch.max_restarts`",
        ),
        (["--resume", ""], "", '`resume` must be "never", "auto", or the folder of a run or a checkpoint, but is ""'),
        (["--resume", "atuo"], "", '`resume` must be "never", "auto", or the folder of a run or a checkpoint'),
        ([], VALID.replace("valid", "train"), "`data.evaluations.train` must have a name"),
        (["--name", "a/b"], "", "`name` (set by --name) must begin with a letter or digit"),
        (["--device", "gpu"], "", "`device` (set by --device) must be auto, cpu, mps, cuda or cuda:N"),
        (["--device", "xla"], "", '`device` (set by --device) can\'t be "xla": torch_xla, through which'),
        (["--optimizer.lr", "nan"], "", "`optimizer.lr` (set by --optimizer.lr) must be finite"),
        (["--ema.decay", "1"], "", "`ema.decay` (set by --ema.decay) must be less than 1, but is 1."),
        (["--train", "3"], "", "`train` (set by --train) must be a table, but is 3; its keys are updates, epochs"),
        (["--optimizer", "AdamW"], "", '`optimizer` (set by --optimizer) must be a table, but is "AdamW"; write `opti'),
        (["--lr_schedule", "cosine"], "", '`lr_schedule` (set by --lr_schedule) must be a table, but is "cosine"; wr'),
        (["--lr_schedule", "3"], "", "`lr_schedule` (set by --lr_schedule) must be a table, but is 3; its kinds are c"),
        (
            ["--init_from.path", "x", "--init_from.only", "y"],
            "",
            '`init_from.only` (set by --init_from.only) must be a list, but is "y"; write `init_from.only = ["y"]`.',
        ),
        (
            ["--log.writers", "jsonl,csv"],
            "",
            '`log.writers` (set by --log.writers) must be a list, but is "jsonl,csv"; write `log.writers = ["jsonl"',
        ),
        (
            ["--hooks", "a.py:B"],
            "",
            '`hooks` (set by --hooks) must be a list, but is "a.py:B"; write `hooks = [{target = "a.py:B"}]`.',
        ),
        (
            ["--hooks", "['a.py:B']"],
            "",
            '`hooks.0` (set by --hooks) must be a table, but is "a.py:B"; write `{target = "a.py:B"}`.',
        ),
        (
            [],
            "[data.evaluations]\ntarget = 'a.py:b'",
            '`data.evaluations.target` must be a table, but is "a.py:b", as the keys of `data.evaluations` are names',
        ),
        (
            ["--init_from", "{}"],
            "",
            "`init_from.path` is missing; set it: Where the weights are: a run folder, a checkpoint",
        ),
        (["--data.shuffle", "1"], "", "`data.shuffle` (set by --data.shuffle) must be true or false, but is 1."),
        (["--lr_schedule.kind", "cosin"], "", '`lr_schedule` (set by --lr_schedule.kind) must be "constant", "linear"'),
    ],
)
def test_what_cannot_be_is_one_fault(faults: Faults, arguments: list[str], added: str, begins: str) -> None:
    found = faults(*arguments, added=added)
    assert len(found) == 1, found
    assert found[0].startswith(begins)
    assert "\n" not in found[0]


def test_what_fits_together_is_no_fault(faults: Faults) -> None:
    arguments = ["--evaluate.every_updates", "2", "--checkpoint.best.metric", "valid/loss"]
    more = ["--early_stop.metric", "valid/accuracy", "--lr_schedule.warmup_updates", "10", "--ema.start_update", "9"]
    scale = ["--train.precision", "16-mixed", "--loss_scale.initial", "1024"]
    assert faults(*arguments, *more, *scale, added=VALID) == []


def test_a_metric_of_a_misspelt_evaluation_names_the_right_one(faults: Faults) -> None:
    (fault,) = faults("--checkpoint.best.metric", "vald/accuracy", added=VALID)
    assert fault.endswith("did you mean `valid/accuracy`?")


def test_what_has_arguments_or_lacks_a_name_is_told_what_to_write(faults: Faults) -> None:
    (said,) = faults(added="[data.collate]\ntarget = 'a.py:b'\nargs.c = 1")
    must = '`data.collate` must be FILE.py:NAME or package.module:NAME, but is {target = "a.py:b", args = {c = 1}}; '
    assert said == f'{must}write `data.collate = "a.py:b"`. What has arguments is made by a function of the recipe.'
    (said,) = faults(added="[data.evaluations]\ntarget = 'a.py:b'")
    assert said.endswith("are names of your own; write `data.evaluations.NAME.target`.")


def test_a_table_where_text_must_be_is_told_what_the_key_is(faults: Faults) -> None:
    (said,) = faults(added="[resume]\nfrom = [1, 'a']")
    assert said.startswith(
        '`resume` must be text, but is {from = [1, "a"]}; it is: what to start from: `never` for a new run'
    )
