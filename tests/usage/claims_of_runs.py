"""Claims about data, batches, optimizers, formats, tasks and what one process does."""

from claims import Area, limit, refused, works

AREAS = (
    Area(
        "Accumulation and weights",
        (
            works("any cut of the global batch, unequal weights, micro-batches of weight 0", "prove: cut "),
            works("a weight that only the forward knows", "prove: cut late weight, 4 × 8"),
            works(
                "the last, short global batch", "unit/data/test_map_data.py::test_10_samples_by_4_are_batches_of_4_4_2"
            ),
            works(
                "dense gradients, and sparse ones of embeddings in one process",
                "unit/optim/test_apply.py::test_sparse_gradients_are_coalesced_before_their_norm",
            ),
            refused(
                "a weight that is negative, not finite, or no number",
                "unit/train/test_trainer.py::test_a_weight_that_is_none_is_told_so",
            ),
        ),
    ),
    Area(
        "Number formats",
        (
            works("`32-true`: float32 and float64 parameters", "prove: cut 4 × 8"),
            works("`bf16-mixed`", "unit/train/test_update.py::test_bf16_trains_close_to_float32_without_a_loss_scale"),
            works(
                "`16-mixed` with a dynamic loss scale; an overflow takes the same batch again",
                "unit/train/test_update.py::test_an_overflow_is_tried_again_with_the_same_batch_and_nothing_else_notices",
            ),
        ),
    ),
    Area(
        "Devices",
        (
            works("CPU", "prove: cut "),
            works("one CUDA device per rank"),
            works("other accelerators that torch knows"),
            refused(
                "a device that is not there", "unit/train/test_trainer.py::test_a_device_that_is_not_there_is_refused"
            ),
        ),
    ),
    Area(
        "Data",
        (
            works(
                "map-style datasets, by count or by token budget",
                "unit/data/test_map_data.py::test_every_cut_sees_every_sample_of_an_epoch_once_and_the_same_ones_per_update",
            ),
            works(
                "any number of workers: the same samples and augmentation",
                "unit/data/test_workers.py::test_workers_give_what_this_process_gives_augmentation_and_resume_included",
            ),
            works(
                "workers that die are started anew, at the same place",
                "unit/data/test_faults.py::test_workers_that_are_killed_are_started_anew_at_the_same_place",
            ),
            works(
                "samples that can't be read: read again, left out with their weight, or named",
                "faults: a sample that can't be read",
            ),
            works("ready-made batches", "unit/data/test_update_data.py::test_ranks_share_the_batches_of_every_update"),
            refused(
                "what is no dataset", "unit/data/test_dataset.py::test_what_is_no_dataset_is_refused_with_what_to_do"
            ),
        ),
    ),
    Area(
        "Several tasks",
        (
            works(
                "mixtures of map-style data and ready-made updates, every reduction, on one rank and several",
                "prove: tasks ",
            ),
            works(
                "single, ddp, ordered, zero1 and fsdp, in one round of gradient reduction",
                "unit/parallel/test_tasks.py::test_an_update_of_three_tasks_makes_one_round_of_gradient_reduction",
            ),
            works(
                "`combine`: PCGrad, Aligned-MTL, GradNorm",
                "unit/train/test_separately.py::test_shared_gradients_are_combined_and_heads_keep_their_own",
            ),
            works(
                "learned coefficients (uncertainty)",
                "unit/train/test_tasks.py::test_uncertainty_is_optimised_with_the_model_saved_and_idle_with_its_task",
            ),
            works("`DropTask`", "unit/train/test_tasks.py::test_one_bad_task_is_dropped_exactly_and_named"),
            works(
                "running statistics of each task: torch's BatchNorm and InstanceNorm",
                "unit/train/test_norms.py::test_statistics_per_task_are_those_of_a_run_of_that_task_alone_and_are_resumed",
            ),
            works(
                "metric objects of torchmetrics per task (extra `torchmetrics`), over any cut and ranks",
                "unit/train/test_metrics.py::test_an_evaluation_is_that_of_all_samples_at_once_for_any_cut_and_ranks",
            ),
            refused(
                "metrics whose value is not a single number",
                "unit/train/test_metrics.py::test_numbers_by_class_are_named_and_a_tensor_is_refused",
            ),
            refused(
                "`combine`, learned coefficients and `DropTask` on a model in stages: they need all gradients at once",
                "unit/train/test_staged.py::test_what_needs_all_gradients_at_once_is_refused_for_stages",
            ),
            refused(
                "`combine` with strategies that are not evenstep's own, and with sparse gradients",
                "unit/train/test_separately.py::test_strategies_that_divide_gradients_and_sparse_ones_are_refused",
            ),
            limit(
                "`fsdp` runs the tasks in one order on all ranks; what a task raises there ends the run",
                "unit/parallel/test_tasks.py::test_what_one_rank_raised_ends_all_when_the_policy_says_so",
            ),
            limit("statistics of each task under activation checkpointing and `torch.compile`"),
        ),
    ),
    Area(
        "Predictions",
        (
            works(
                "`Trainer.predict`: any data and tasks, in the order of the data, on the ranks that ask",
                "unit/train/test_predict.py::test_predictions_are_what_the_model_gives_in_the_order_of_the_data",
            ),
            works(
                "replicas, shards and stages give what one process does",
                "ranks/test_predict.py::test_stages_and_shards_predict_what_one_process_does",
            ),
        ),
    ),
)
