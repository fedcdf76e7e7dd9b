"""What goes wrong in fairseq, LiBai, HAT and the pipelines of Megatron-LM and torch, and what shows it absent here."""

from claims import Area, works

_TRAIN, _EVENTS, _DATA = "unit/train/", "unit/events/", "unit/data/"
_OTHER = f"{_TRAIN}test_other_systems.py::test_"

FAIRSEQ = Area(
    "What goes wrong in fairseq, and not here",
    (
        works(
            "out of memory on one rank hangs its peers, or drops a batch that is still counted",
            "faults: out of memory:",
            f"{_TRAIN}test_microbatch.py::test_cut_finer_the_gradient_is_the_same",
        ),
        works(
            "dummy batches spoil the divisor, and 0 times a number that is not finite the gradient",
            "prove: ranks fsdp, fast",
            "unit/pipeline/test_runner.py::test_a_rank_without_work_still_takes_part_in_the_reduction",
        ),
        works(
            "gradients are unscaled twice; the loss scale is not saved, and its window follows the first scale",
            f"{_TRAIN}test_update.py::test_the_loss_scale_cancels_exactly_once_in_plain_sgd",
            "unit/precision/test_fp16_mixed.py::test_the_state_carries_window_share_and_borrowed_scale",
            "unit/precision/test_loss_scale.py::"
            "test_the_growth_window_is_what_was_asked_for_whatever_the_first_scale_is",
        ),
        works(
            "master weights are made anew of rounded ones on resume",
            f"{_TRAIN}test_formats.py::test_masters_are_saved_as_they_are_and_not_made_anew_of_the_rounded_weights",
        ),
        works(
            "a resume repeats and misses samples, also on another number of ranks",
            f"{_DATA}test_map_data.py::test_a_resume_at_every_position_gives_the_rest_of_the_sequence",
            "prove: ranks ordered, resumed on",
        ),
        works(
            "patience, what a plateau remembers, what ranks that step alone share, and generators are not saved",
            f"{_EVENTS}hooks/test_early_stop.py::test_waiting_goes_on_after_a_resume",
            "unit/optim/schedules/test_plateau.py::test_what_it_remembers_is_saved_and_taken_back",
            "unit/parallel/test_local.py::test_a_run_goes_on_in_the_midst_of_a_period_with_the_same_bits",
            "prove: resume",
        ),
        works(
            "the epoch does not reach workers that stay; a curriculum never begins to shuffle",
            f"{_DATA}test_workers.py::test_each_epoch_reaches_the_dataset_inside_persistent_workers",
            f"{_DATA}test_sampling.py::test_curriculum_epochs_come_in_the_datasets_order_and_later_ones_are_shuffled",
        ),
        works(
            "what is saved after an error: not after all errors, at epoch 0, by the first rank alone, or it hangs",
            f"{_TRAIN}test_saving.py::test_after_an_error_the_last_committed_update_is_saved_and_goes_on_to_the_same_bits",
            "faults: error on one rank: parts saved",
        ),
        works(
            "NaN on all ranks is called an inconsistency",
            "unit/parallel/test_trainer.py::test_what_is_nan_on_all_ranks_is_said_as_that_and_applied_nowhere",
        ),
        works(
            "a reset of the optimizer sets the count of updates to 0; new options lose to saved ones or the schedule",
            f"{_TRAIN}test_resets.py::test_the_optimizer_begins_afresh_and_the_count_of_updates_stays",
            f"{_TRAIN}test_resets.py::test_new_options_of_the_optimizer_win_and_are_said_and_no_schedule_undoes_them",
        ),
        works(
            "a checkpoint in the background lacks files, copies are not whole, the best are dropped or never deleted",
            f"{_TRAIN}test_saving.py::test_saved_in_the_background_or_not_is_the_same",
            "unit/checkpoint/test_writer.py::"
            "test_a_fault_at_any_operation_leaves_a_readable_checkpoint_and_no_partial_one",
            f"{_OTHER}of_negative_values_the_best_few_are_kept_and_a_worse_one_as_long_as_there_is_room",
        ),
        works(
            "an evaluation that fails loses what was trained before it",
            f"{_OTHER}after_an_evaluation_that_fails_the_model_trains_and_the_last_committed_update_is_saved",
        ),
        works(
            "an average breaks on integers, passes names over, or is missing without a word",
            "unit/optim/test_ema.py::test_integers_and_flags_are_copied_also_once_the_decay_has_begun",
            "unit/optim/test_ema.py::test_what_a_tensor_is_called_does_not_matter",
            "unit/cli/test_resume.py::test_early_stop_best_and_an_average_may_be_added_and_dropped_and_it_is_said",
        ),
        works(
            "a multiple of 8 drops a small last batch; an empty epoch is a NameError",
            f"{_DATA}test_batching.py::test_five_samples_are_not_dropped_for_a_multiple_of_8",
            f"{_DATA}test_stream_data.py::test_a_stream_that_gives_nothing_is_an_error",
        ),
        works(
            "metrics of what an exception left open go on counting",
            f"{_EVENTS}test_storage.py::test_given_up_updates_are_forgotten_before_they_are_settled",
            "unit/train/test_metrics.py::test_an_update_that_is_given_up_is_not_seen",
            "unit/train/test_engine.py::test_a_task_that_raises_leaves_the_engine_as_it_was",
        ),
        works(
            "(seed 1, update 5) draws what (seed 2, update 4) does",
            "unit/test_keys.py::test_seed_plus_update_is_not_what_counts",
        ),
        works(
            "the first rate of a warm-up is 0; a warm-up of 0 divides by it",
            "contract/test_lr_schedules.py::test_every_name_is_of_a_schedule_whose_warm_up_begins_above_zero",
            "unit/optim/schedules/test_inverse_sqrt.py::test_without_a_warm_up_nothing_is_divided_by_zero",
        ),
        works("a checkpoint is unpickled", "unit/checkpoint/test_verify.py::test_a_pickle_is_not_read"),
        works(
            "a checkpoint that was asked for and is not there begins a fresh run",
            f"{_TRAIN}test_trainer.py::test_a_missing_checkpoint_is_an_error_but_auto_starts_afresh",
        ),
    ),
)

LIBAI = Area(
    "What goes wrong in LiBai, and not here",
    (
        works(
            "after a failure in the last iteration the model is evaluated and saved as final",
            f"{_TRAIN}test_trainer.py::test_after_a_failure_nothing_is_evaluated_but_what_was_committed_is_saved",
        ),
        works(
            "a hook that fails at the beginning or the end hides the error, or keeps others from ending",
            f"{_EVENTS}test_bus.py::test_a_failing_after_never_hides_the_original_and_the_rest_still_runs",
            f"{_EVENTS}test_bus.py::test_a_failing_before_ends_only_what_was_begun",
        ),
        works(
            "evaluations are lost: of other periods than writers have, the last, of one class, of a second training",
            f"{_OTHER}every_evaluation_of_every_set_is_written_whatever_the_periods_and_in_a_second_training_too",
            f"{_EVENTS}test_storage.py::test_a_late_value_of_a_settled_update_is_kept",
        ),
        works(
            "samples are counted per micro-batch; what is left of an accumulation is dropped, or lost by a resume",
            f"{_OTHER}samples_are_counted_once_whatever_is_accumulated",
            "prove: cut",
            "prove: resume killed mid-accumulation",
        ),
        works(
            "the best value is not saved; inf may be the best",
            f"{_EVENTS}hooks/test_best.py::test_after_a_resume_a_worse_model_is_not_the_best",
            f"{_EVENTS}hooks/test_target.py::test_what_is_not_finite_is_never_better",
        ),
        works(
            "saves are not whole; a finished run can't be made longer",
            "unit/checkpoint/test_kill.py::test_a_reader_always_finds_a_complete_checkpoint_after_a_kill",
            f"{_TRAIN}test_trainer.py::test_training_twice_goes_on_and_a_done_run_does_nothing_more",
        ),
        works(
            "modes are not put back after an error; data that end break the loop",
            f"{_OTHER}after_an_evaluation_that_fails_the_model_trains_and_the_last_committed_update_is_saved",
            f"{_TRAIN}test_trainer.py::test_a_stream_without_length_trains_and_ends_with_its_data",
        ),
        works(
            "the second hook of a class loses its state; a misspelt method is ignored (detectron2, MMEngine)",
            f"{_EVENTS}test_bus.py::test_two_hooks_of_one_class_both_get_their_state_back",
            f"{_TRAIN}test_trainer.py::test_a_misspelt_hook_method_is_refused",
        ),
        works(
            "metrics of micro-batches are added, not averaged",
            f"{_TRAIN}test_trainer.py::test_metrics_are_sums_over_weights_never_means_of_means",
        ),
    ),
)

HAT = Area(
    "What goes wrong in HAT's processors, and not here",
    (
        works(
            "does the last batch of several win? gradients accumulate, of any kind of batch",
            f"{_TRAIN}test_task_life.py::test_gradients_of_several_batches_accumulate_and_the_last_one_does_not_win",
            f"{_TRAIN}test_tasks.py::test_every_form_of_batch_gives_the_accumulated_gradient_of_all",
        ),
        works(
            "each batch prints, and waits for the device",
            f"{_OTHER}nothing_is_printed_by_updates_and_evaluations",
            f"{_TRAIN}test_no_waiting.py::test_an_update_with_everything_armed_reads_nothing",
        ),
        works(
            "each batch is reduced by itself",
            "unit/parallel/test_tasks.py::test_an_update_of_three_tasks_makes_one_round_of_gradient_reduction",
        ),
        works(
            "with heads of their own ranks drift apart in silence, or fail in the second forward",
            "unit/parallel/test_ddp.py::test_the_gradient_is_that_of_one_process_whatever_a_rank_has_used",
        ),
        works(
            "a head that one rank alone has used is divided by all ranks; an idle one is moved by its optimizer",
            "unit/parallel/test_tasks.py::"
            "test_a_head_that_one_rank_alone_had_work_for_is_not_diluted_and_idle_ones_stay",
            "prove: tasks, an idle head",
        ),
        works(
            "two forwards and one backward are refused on ranks",
            f"{_TRAIN}test_engine.py::test_the_loops_of_the_page_have_the_same_bits_on_two_ranks",
        ),
        works(
            "a batch whose losses are all None is an error",
            f"{_TRAIN}test_tasks.py::test_a_batch_without_a_loss_is_accepted_and_counted_and_its_weight_counts",
        ),
        works(
            "a loss scale where none is wanted, or none where it is; bfloat16 is scaled; nothing of it on a CPU",
            "unit/precision/test_loss_scale.py::"
            "test_a_format_with_the_range_of_float32_has_no_loss_scale_and_takes_none",
            f"{_TRAIN}test_formats.py::test_an_overflow_advances_nothing_and_is_tried_again_at_half_the_scale",
        ),
        works(
            "a begin without an end, when data run out or something raises",
            f"{_TRAIN}test_life_cycle.py::test_begin_and_end_are_paired_when_a_task_raises",
        ),
        works(
            "what is left of an accumulation at the end of an epoch is dropped",
            f"{_DATA}test_batching.py::test_10_by_4_is_4_4_2",
        ),
        works(
            "a save puts the model out of channels-last order",
            f"{_TRAIN}test_life_cycle.py::test_channels_last_comes_after_transforms_and_survives_saving_and_resuming",
        ),
        works(
            "clipping and weights of tasks unscale twice",
            "unit/optim/test_apply.py::test_plain_sgd_gets_the_gradient_unscaled_and_clipped_exactly_once",
        ),
        works(
            "ranks draw different tasks, and a resume others",
            f"{_DATA}test_mixture.py::test_ranks_divide_what_one_process_has",
            f"{_DATA}test_mixture.py::test_any_position_is_a_place_to_start",
        ),
    ),
)

PIPELINES = Area(
    "What goes wrong in the pipelines of Megatron-LM and torch, and not here",
    (
        works(
            "micro-batches of unequal size or length; other shapes in evaluations, which torch computes wrongly",
            "prove: pipeline 2 × 1f1b, ragged lengths",
            f"{_OTHER}shapes_of_an_evaluation_may_be_others_views_cross_stages_and_nothing_runs_twice",
        ),
        works(
            "an output that is a view; a further forward wherever the mode changes",
            f"{_OTHER}shapes_of_an_evaluation_may_be_others_views_cross_stages_and_nothing_runs_twice",
            "unit/pipeline/test_wire.py::test_a_tree_arrives_as_it_was",
        ),
        works(
            "micro-batches must be a multiple of the ranks, or as many",
            f"{_TRAIN}test_staged.py::test_fewer_micro_batches_than_ranks_are_enough",
        ),
        works(
            "a mean of means, whatever a micro-batch weighs; padded targets count",
            "prove: pipeline 2 × 1f1b",
        ),
        works(
            "tied embeddings that nobody sums",
            f"{_TRAIN}test_staged.py::test_tied_parameters_train_as_one_parameter_does",
        ),
        works(
            "an output for another stage than the next; None and trees between stages",
            f"{_TRAIN}test_staged.py::test_trees_masks_missing_tensors_and_skip_edges_cross_stages",
        ),
        works(
            "memory that grows with the number of micro-batches",
            f"{_TRAIN}test_staged.py::test_what_waits_on_a_rank_does_not_grow_with_the_number_of_micro_batches",
        ),
        works(
            "a backward in two runs checkpointed forwards four times",
            "unit/pipeline/test_deferred.py::test_checkpointed_parts_are_right_and_run_forward_twice_only",
        ),
        works(
            "replicas beside schedules that split the backward",
            f"{_TRAIN}test_staged.py::test_replicas_of_pipelines_train_what_one_process_does",
        ),
        works(
            "a plan that its own validator refuses, and ranks that wait for each other",
            "unit/extras/planning/test_torch_csv.py::test_torchs_1f1b_is_ours_but_for_its_last_rank_which_is_refused",
            "unit/pipeline/test_proof.py::test_what_is_wrong_is_named",
        ),
        works(
            "layers that are compiled",
            "usage/test_compiled.py::test_compiled_layers_in_stages_on_two_ranks_have_the_bits_of_one_process",
        ),
    ),
)

AREAS = (FAIRSEQ, LIBAI, HAT, PIPELINES)
