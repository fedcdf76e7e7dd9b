"""Claims about data, batches, optimizers, formats, tasks and what one process does."""

from claims import Area, limit, refused, works

AREAS = (
    Area(
        "A certificate of one's own run",
        (
            works(
                "`evenstep prove`: cuts, formats, ranks, stages, kill and resume of a run file; table and JSON",
                "unit/cli/test_prove.py::test_a_sound_run_holds_in_every_row_and_nothing_is_written",
                "ranks/test_prove.py::test_ranks_and_a_killed_run_end_at_the_bits_of_one_process",
                "ranks/test_prove.py::test_ctrl_c_ends_it_with_130_and_leaves_no_process",
            ),
            works(
                "what fails is named: losses and weights, modules, buffers, generators, hooks, hidden state",
                "usage/test_prove.py::test_a_fault_is_caught_by_the_row_that_is_about_it_and_named",
            ),
            works(
                "no false alarm on sound runs, the recipes, and a Llama and T5 of `transformers`",
                "usage/test_prove.py::test_a_sound_run_fails_no_row_and_its_loop_by_hand_gives_the_same",
                "usage/test_prove.py::test_models_of_transformers_cut_unevenly_by_hand_and_resumed_are_the_same",
                "usage/test_prove.py::test_what_goes_by_the_update_fails_no_row",
                "ranks/test_prove.py::test_every_row_of_the_recipes_holds_or_does_not_apply",
            ),
            limit(
                "models that can't be in float64 are compared in float32, steps that magnify rounding by gradients",
                "usage/test_prove.py::test_a_model_that_is_not_for_float64_is_compared_in_float32_and_that_is_said",
                "usage/test_prove.py::test_steps_that_take_the_sign_of_rounding_are_compared_by_their_gradient",
            ),
        ),
    ),
    Area(
        "The loss",
        (
            works(
                "compared with the sum over halves: before the first update, in evaluations, by `evenstep check`",
                "unit/train/test_guard.py::"
                "test_a_loss_that_is_a_mean_is_refused_with_both_numbers_and_the_line_to_change",
                "unit/train/test_guard.py::test_the_advice_for_a_mean_helps",
            ),
            works(
                "… of losses that take derivatives, of statistics over a batch, and what to do to evaluate the former",
                "unit/train/test_guard_of_models.py::test_a_mean_of_derivatives_is_refused_and_a_sum_of_them_is_not",
                "unit/train/test_guard_of_models.py::test_statistics_of_a_batch_are_told_as_a_loss_of_the_whole",
                "unit/train/test_guard_of_models.py::"
                "test_a_loss_of_derivatives_can_not_be_evaluated_as_it_is_and_the_advice_works",
            ),
            limit(
                "with `check_loss=False` a micro-batch is cut for memory only by a `split` of the task's own",
                "unit/train/test_guard_of_models.py::"
                "test_a_loss_that_is_meant_over_the_micro_batch_is_not_cut_for_memory_unless_its_task_says_how",
            ),
            works(
                "no trace is left by that, and no run ends by it for lack of memory",
                "unit/train/test_guard.py::test_the_guard_leaves_no_trace",
                "usage/test_guard_on_ranks.py::test_a_run_that_passes_has_the_bits_of_one_without_the_guard",
            ),
            works(
                "a cross-entropy whose scores are never in memory at once: 16 bits, autocast, tied matrices, stages",
                "unit/train/test_cross_entropy.py::test_the_scores_of_all_tokens_are_never_in_memory",
                "unit/train/test_cross_entropy.py::"
                "test_as_the_last_stage_of_a_pipeline_with_a_tied_matrix_it_has_the_bits_of_one_process",
                "usage/test_cross_entropy.py::test_with_shards_it_is_called_in_the_forward_and_refused_outside_of_it",
            ),
            limit(
                "BatchNorm in training mode is said once; other layers that look at the whole batch are not found",
                "unit/train/test_guard.py::test_batch_norm_is_said_once_and_only_where_batches_are_cut",
            ),
            limit(
                "micro-batches of a single sample can't be halved, so nothing is compared",
                "unit/train/test_guard.py::test_a_micro_batch_of_one_sample_is_left_for_the_next_that_can_be_halved",
            ),
        ),
    ),
    Area(
        "Optimizers",
        (
            works(
                "all of `torch.optim` but LBFGS, several at once, and any with its interface: see optimizers.md",
                "prove: optimizers",
                "usage/test_optimizers.py::test_the_documentation_shows_the_table",
            ),
            works(
                "resumed with the same bits in every format",
                "unit/train/test_optimizer_state.py::"
                "test_a_resumed_run_of_nadam_and_all_others_has_the_same_bits_in_every_format",
            ),
            works(
                "optimizers with `train()` and `eval()`",
                "unit/train/test_optimizers.py::"
                "test_an_optimizer_with_modes_is_put_in_training_mode_and_evaluates_its_other_parameters",
            ),
            works(
                "torchao's optimizers with state of 8 and 4 bits (extra `quantization`): resumed with the same "
                "bits, also on ranks with `ordered` and `zero1`",
                "usage/test_schedules.py::test_state_in_8_and_4_bits_is_resumed_to_the_bit",
                "usage/test_schedules.py::"
                "test_state_in_8_bits_on_ranks_has_the_bits_of_one_process_resumes_and_is_refused_on_shards",
            ),
            refused(
                "torchao's optimizers with `fsdp`, with random rounding, and those that are not known",
                "usage/test_schedules.py::"
                "test_state_in_8_bits_on_ranks_has_the_bits_of_one_process_resumes_and_is_refused_on_shards",
                "unit/optim/test_low_bit.py::test_rounding_by_random_numbers_that_no_resumed_run_would_draw_is_refused",
                "unit/optim/test_low_bit.py::test_another_optimizer_of_torchao_is_refused_by_name",
            ),
            works(
                "optimizers that find their rate by themselves (`lr=None`, as Adafactor of `transformers`)",
                "unit/train/test_optimizers.py::"
                "test_an_optimizer_that_finds_its_rate_trains_and_what_needs_the_rate_is_refused",
            ),
            refused(
                "what takes gradients before they are complete, such as optimizers that step in the backward (LOMO)",
                "unit/train/test_optimizers.py::"
                "test_what_is_done_with_a_gradient_before_it_is_complete_is_refused_when_built",
                "unit/train/test_optimizers.py::"
                "test_a_hook_on_the_gradients_of_each_micro_batch_as_the_error_says_is_exact",
            ),
            works(
                "optimizers and hooks that set `parameter.data` to other tensors; refused on `fsdp` after the first",
                "unit/train/test_first_step.py::"
                "test_parameters_whose_data_become_other_tensors_are_averaged_saved_and_resumed",
                "unit/train/test_first_step.py::"
                "test_parameters_whose_data_become_other_tensors_are_shared_between_ranks",
                "unit/train/test_first_step.py::"
                "test_a_step_that_replaces_what_shards_are_gathered_from_is_refused_by_name",
            ),
            limit(
                "a first step that changes none of its parameters is named once; of later steps nothing is asked",
                "unit/train/test_first_step.py::test_a_step_that_changes_nothing_is_said_once",
            ),
            refused(
                "on `fsdp`: what is not known to step each element by itself",
                "unit/train/test_optimizers.py::"
                "test_fsdp_with_optimizers_that_look_at_whole_tensors_is_refused_when_built",
            ),
            refused(
                "on `zero1` and in stages: what may look at all parameters",
                "unit/train/test_optimizers.py::"
                "test_zero1_with_optimizers_that_may_look_at_all_parameters_is_refused_when_built",
            ),
            refused(
                "tensors kept where no `state_dict` gives them, in a run that saves",
                "unit/train/test_optimizers.py::"
                "test_an_optimizer_whose_inner_state_would_be_lost_on_resume_is_refused_by_name",
            ),
        ),
    ),
    Area(
        "Parameters",
        (
            works(
                "freezing and unfreezing in mid-run, with every strategy and in stages, resumed in the midst",
                "usage/test_surface.py::test_gradual_unfreezing_trains_as_a_plain_loop_does",
                "usage/test_surface.py::test_a_run_in_the_midst_of_unfreezing_is_gone_on_with_exactly",
            ),
            works(
                "norms frozen by `eval()` or by a `train` of the model's own; adapters that one merges for evaluations",
                "unit/pipeline/test_around.py::test_a_train_of_the_models_own_is_called_and_what_is_in_evaluation_mode_stays_so",
                "unit/pipeline/test_around.py::"
                "test_a_train_of_the_models_own_is_called_also_where_the_model_comes_in_evaluation_mode",
                "unit/train/test_engine.py::test_a_layer_that_merges_its_adapter_for_evaluations_goes_on_to_train_it",
            ),
            works(
                "parameters outside the optimizer stay as they are, and are named once",
                "usage/test_surface.py::test_parameters_that_are_not_in_the_optimizer_stay_as_they_are_and_are_named",
            ),
            works(
                "complex, float32 beside float64, empty; with `fsdp` only formats in list items of their own",
                "usage/test_surface.py::"
                "test_complex_mixed_and_empty_parameters_train_as_one_process_does_or_are_refused_by_name",
            ),
            works(
                "channels-last and transposed parameters, also with fused optimizers, on ranks and resumed",
                "usage/test_strides.py::test_parameters_that_do_not_lie_row_by_row_train_on_ranks_as_in_one_process",
            ),
            refused(
                "a parameter that is a part of a larger tensor, with a fused optimizer",
                "usage/test_strides.py::"
                "test_a_parameter_that_is_a_part_of_a_larger_tensor_is_refused_with_a_fused_optimizer_and_the_advice_works",
            ),
            works(
                "norms of layers and groups, on every strategy and in stages",
                "usage/test_norms.py::"
                "test_norms_of_layers_and_groups_are_those_of_one_process_and_a_single_number_counts_once",
            ),
            works(
                "a loop of one's own around `Engine`: any cut, several ranks, two models, several forwards",
                "unit/train/test_engine.py::test_the_loops_of_the_page_do_not_depend_on_the_cut",
                "unit/train/test_engine.py::test_the_loops_of_the_page_have_the_same_bits_on_two_ranks",
            ),
            works(
                "trained bfloat16 with `FullPrecision(bfloat16_parameters=True)`; frozen 16-bit parameters",
                "usage/test_surface.py::test_bfloat16_parameters_are_trained_where_that_is_said_to_be_meant",
            ),
            refused(
                "trained float16, and bfloat16 that is not said to be meant",
                "usage/test_surface.py::test_16_bit_parameters_without_masters_are_refused_by_name",
            ),
            refused(
                "parameters that tensor parallelism has cut",
                "usage/test_surface.py::test_parameters_that_tensor_parallelism_has_cut_are_refused_by_name",
            ),
            refused(
                "modules, parameters and groups that change in mid-run",
                "usage/test_surface.py::test_a_model_or_optimizer_that_is_changed_in_mid_run_is_refused_by_name",
                "usage/test_surface.py::test_a_parameter_group_that_is_added_in_mid_run_is_refused",
            ),
        ),
    ),
    Area(
        "Learning rates",
        (
            works(
                "schedules of updates: constant, linear, cosine, with restarts, wsd, inverse square root, polynomial, "
                "tri-stage, triangular, step, multiplicative, listed; each with a first rate above 0",
                "contract/test_lr_schedules.py::test_every_name_is_of_a_schedule_whose_warm_up_begins_above_zero",
                "unit/optim/schedules/test_counted.py::test_it_is_that_of_pytorch_by_update_and_by_epoch",
            ),
            works(
                "by epoch, also of data without a length, resumed with the same bits in the midst of one",
                "unit/train/test_lr_schedules.py::test_a_rate_by_epoch_is_that_of_the_updates_batch",
                "unit/train/test_lr_schedules.py::test_a_resumed_run_has_the_rates_and_bits_of_the_undisturbed_one",
            ),
            works(
                "on a plateau of a metric, whose memory is saved and taken back",
                "unit/optim/schedules/test_plateau.py::test_what_it_remembers_is_saved_and_taken_back",
                "unit/train/test_lr_schedules.py::test_an_evaluation_after_an_aborted_save_is_not_counted_twice",
            ),
            works(
                "parameter groups by patterns: rate, decay, optimizer class, schedule, frozen; layer-wise decay; "
                "decay of matrices only",
                "unit/train/test_grouped.py::test_each_parameter_is_stepped_as_one_optimizer_for_it_alone_would",
                "prove: groups",
                "usage/test_schedules.py::test_groups_have_the_bits_of_one_process_with_every_strategy_and_in_stages",
                "usage/test_schedules.py::test_groups_of_two_optimizers_are_resumed_on_ranks",
            ),
            works(
                "Muon for the matrices and AdamW for the rest, from the run file; schedule-free optimizers",
                "unit/train/test_grouped.py::test_muon_steps_the_matrices_and_adamw_the_rest",
                "usage/test_schedules.py::"
                "test_a_schedule_free_optimizer_has_its_modes_switched_on_every_strategy_and_resumes",
            ),
            refused(
                "a parameter of two groups by any of its names, a pattern that takes none, state of unknown classes "
                "of tensors where checkpoints are kept",
                "unit/train/test_grouped.py::test_a_tied_parameter_is_meant_by_each_of_its_names",
                "unit/train/test_grouped.py::test_what_cannot_be_is_refused_in_a_line",
                "usage/test_schedules.py::test_a_state_of_somebodys_own_tensors_is_refused_after_the_first_step",
            ),
            works(
                "a schedule of its own for each parameter group",
                "unit/train/test_lr_schedules.py::test_each_group_follows_its_own_schedule",
            ),
            works(
                "a rate is found (`find_lr`, `evenstep find-lr`) and all is as before, to the bit",
                "unit/train/test_lr_finder.py::test_it_leaves_model_optimizer_data_and_generators_as_they_were",
                "usage/test_schedules.py::test_a_rate_is_found_on_ranks_as_in_one_process_and_leaves_no_trace",
            ),
            works(
                "batch sizes, and with them accumulation, that change by update or epoch; resumed at the border",
                "unit/train/test_lr_schedules.py::test_batch_sizes_that_change_are_resumed_at_their_border",
                "unit/data/test_batch_sizes.py::test_every_epoch_is_cut_as_a_loop_over_the_whole_run_would",
            ),
            refused(
                "batch sizes that change of streams, and by updates of batches by tokens",
                "unit/data/test_batch_sizes.py::test_what_cannot_be_is_refused",
                "unit/data/test_batch_sizes.py::test_a_stream_has_one_size",
            ),
            refused(
                "a plateau, or early stopping, of evaluations that nothing asks for before the end",
                "unit/train/test_lr_schedules.py::"
                "test_who_follows_evaluations_that_nothing_asks_for_is_refused_and_the_advice_works",
            ),
            refused(
                "epochs in an `Engine`, and all but updates for coefficients of tasks",
                "unit/train/test_lr_schedules.py::test_an_engine_saves_what_a_plateau_remembers_and_refuses_epochs",
                "unit/train/test_lr_schedules.py::test_a_coefficient_follows_updates_only",
            ),
            works(
                "set by hooks and torch's schedulers where `lr_schedule` is None, and saved",
                "usage/test_surface.py::"
                "test_a_rate_that_torchs_own_scheduler_sets_is_the_one_that_updates_are_made_with",
                "usage/test_surface.py::test_a_rate_that_a_hook_sets_stays_and_is_resumed",
            ),
            refused(
                "a rate set by somebody else beside an `lr_schedule`",
                "usage/test_surface.py::test_a_rate_that_a_hook_sets_beside_an_lr_schedule_is_refused",
            ),
        ),
    ),
    Area(
        "Buffers",
        (
            works(
                "equal on all ranks after each update: statistics as their mean, with `momentum=None` over all "
                "micro-batches, counters summed",
                "unit/parallel/test_buffers.py::"
                "test_batch_norm_with_momentum_none_averages_all_micro_batches_of_all_ranks",
            ),
            limit(
                "others that forwards move are taken from the first rank that moved them, and named once",
                "unit/parallel/test_buffers.py::test_buffers_that_move_are_said_once_by_name_and_static_ones_are_not",
            ),
            limit(
                "frozen parameters that forwards move (momentum encoders) are treated likewise, and undone by an abort",
                "unit/train/test_frozen.py::test_what_an_aborted_update_did_to_a_teacher_in_the_model_is_undone",
                "unit/parallel/test_buffers.py::"
                "test_frozen_parameters_that_forwards_move_are_equal_on_ranks_of_which_one_has_less_to_do",
            ),
        ),
    ),
    Area(
        "Randomness",
        (
            works(
                "torch's, numpy's and Python's generators are keyed by seed, update and micro-batch",
                "unit/train/test_randomness.py::test_numpys_and_pythons_generators_are_keyed_for_forwards",
            ),
            works(
                "by layer where layers are known: a plain model is the same run whole and in stages, dropout included",
                "unit/train/test_randomness.py::test_a_plain_model_with_dropout_is_the_same_run_whole_and_in_stages",
            ),
            limit(
                "where layers can't be known (compiled as a whole), dropout is keyed by micro-batch, which is said",
                "unit/train/test_randomness.py::"
                "test_dropout_of_a_model_that_is_compiled_as_a_whole_is_said_to_be_keyed_otherwise",
            ),
        ),
    ),
    Area(
        "Compiled models",
        (
            works(
                "whole or in parts: names in checkpoints have no prefixes",
                "unit/test_names.py::"
                "test_parts_of_a_model_that_are_compiled_or_checkpointed_one_by_one_have_plain_names_everywhere",
            ),
            works(
                '`train.compile = "model"`: blocks one by one, whole and in stages: within 1e-6 of the run that is not '
                "compiled after 50 updates, and two compiled ones to the bit; the same dropout",
                "unit/train/test_compiled.py::"
                "test_machine_code_gives_the_run_within_1e_6_and_two_such_runs_the_same_bits",
            ),
            works(
                "… with accumulation, short last batches, an average, evaluations, resume into stages",
                "unit/train/test_compiled.py::test_a_run_is_resumed_with_the_same_bits_and_only_compiled",
                "unit/train/test_compiled.py::test_each_shape_and_mode_is_compiled_once_for_all_blocks",
            ),
            works(
                "… where a micro-batch is cut to fit; where an update is aborted and looked into",
                "unit/train/test_compiled.py::test_a_micro_batch_that_does_not_fit_is_cut_and_compiled_in_pieces",
                "unit/train/test_compiled.py::test_the_module_inside_a_block_that_is_not_finite_is_named",
            ),
            works(
                "… on several ranks with `ddp`, `ordered`, `zero1`, `fsdp`, hybrid shards",
                "usage/test_compiled.py::test_a_compiled_model_is_trained_with_each_strategy",
            ),
            works(
                "… on pipeline ranks, with the bits of one process",
                "usage/test_compiled.py::test_compiled_layers_in_stages_on_two_ranks_have_the_bits_of_one_process",
            ),
            works(
                "… on CUDA",
                "gpu/test_compiled.py::test_a_compiled_run_is_near_the_other_and_has_the_same_bits_each_time",
                "gpu/test_compiled.py::test_compiled_updates_are_not_waited_for",
            ),
            works("… shapes of thousands of lengths"),
            limit(
                "what is compiled in parts, again and again, or not at all is said",
                "unit/train/test_compiled.py::test_what_is_compiled_in_parts_is_said_with_the_reason",
                "unit/train/test_compiled.py::test_compiling_again_and_again_is_said_with_what_changes",
                "unit/train/test_compiled.py::test_a_block_with_hooks_inside_is_left_as_it_is_and_named",
            ),
            refused(
                "layers that are single operations, in stages or with dropout between; models compiled already",
                "unit/train/test_compiled.py::test_what_can_not_be_compiled_is_refused",
            ),
            refused(
                "no compiler on the machine; activations that are computed again (`memory.checkpoint`)",
                "unit/train/test_compiled.py::test_a_missing_compiler_is_said_before_anything_runs",
                "unit/train/test_compiled.py::test_activations_that_are_computed_again_are_refused_beside_it",
            ),
            works(
                '`train.compile = "update"`, all of an update as one graph: within 1e-6 of the run not compiled '
                "after 50 updates, two such runs to the bit, also resumed",
                "unit/train/test_compiled_update.py::test_machine_code_gives_the_run_within_1e_6_after_50_updates",
                "unit/train/test_compiled_update.py::test_two_runs_of_machine_code_have_the_same_bits_also_resumed",
            ),
            works(
                "… with AdamW, Adam, SGD: the formulas are torch's steps, and its own steps go on from their state",
                "unit/optim/test_formulas.py::test_the_formula_is_the_optimizers_step_in_float64",
                "unit/train/test_compiled_update.py::test_a_run_goes_on_compiled_and_not_in_turns",
            ),
            works(
                "… with accumulation, short last batches, averages, LR schedules, BatchNorm, tasks, aborts, overflows",
                "unit/train/test_compiled_update.py::test_a_compiled_update_is_the_one_that_is_not",
                "unit/train/test_compiled_update.py::test_several_tasks_with_coefficients_are_trained_as_without_compiling",
                "unit/train/test_compiled_update.py::test_an_update_that_is_not_finite_leaves_everything_as_it_was",
                "unit/train/test_compiled_update.py::test_an_overflow_in_float16_is_tried_again_at_half_the_scale",
                "unit/train/test_compiled_update.py::test_a_trainer_skips_and_goes_back_as_without_compiling",
            ),
            works(
                "… with weights and modules that stand in several places",
                "unit/train/test_compiled_update.py::test_what_stands_in_several_places_is_trained_as_without_compiling",
            ),
            works(
                '… and `train.compile = "model"`: killed and resumed, the bits of the run left alone',
                "prove: compiled",
                "unit/train/test_compiled_runs.py::test_a_compiled_run_that_was_stopped_ends_with_the_bits_of_one_that_was_not",
                "unit/train/test_compiled_runs.py::test_machine_code_that_was_stopped_ends_with_the_bits_of_that_which_was_not",
            ),
            works(
                "… in `bf16-mixed` and `16-mixed`, within their bound beside float64; several engines in a process",
                "unit/train/test_compiled_runs.py::test_updates_compiled_in_mixed_formats_are_those_that_are_not",
                "unit/train/test_compiled_runs.py::test_machine_code_in_mixed_formats_is_within_their_bound_and_two_runs_have_the_same_bits",
                "unit/train/test_compiled_runs.py::test_each_engine_of_a_process_has_graphs_of_its_own",
            ),
            works(
                "… on several ranks with `ddp`",
                "usage/test_compiled.py::test_updates_compiled_as_a_whole_on_several_ranks_are_those_that_are_not",
            ),
            works(
                "… captured on CUDA, one graph for each set of parameters that are used, and not waited for",
                "gpu/test_compiled_update.py::test_a_captured_update_is_the_one_that_is_not_and_is_the_same_again",
                "gpu/test_compiled_update.py::test_a_graph_is_captured_for_each_set_of_used_parameters",
                "gpu/test_compiled_update.py::test_captured_updates_are_not_waited_for",
            ),
            works(
                "… captured, and stopped: the run ends with the bits of one that was not",
                "gpu/test_compiled_update.py::"
                "test_a_captured_run_that_was_stopped_ends_with_the_bits_of_one_that_was_not",
            ),
            limit(
                "an update that is compiled again and again is said with what changes",
                "unit/train/test_compiled_update.py::test_compiling_again_and_again_is_said_with_what_changes",
            ),
            limit(
                "a compiler that is switched off is an error of the first update",
                "unit/train/test_compiled_update.py::test_a_compiler_that_is_switched_off_is_said_and_nothing_has_changed",
            ),
            refused(
                "what one graph can't hold: models, settings, options, hooks; what depends on numbers, when it comes",
                "unit/train/test_compiled_update.py::test_models_that_no_graph_can_hold_are_refused",
                "unit/train/test_compiled_update.py::test_settings_that_no_graph_can_hold_are_refused",
                "unit/train/test_compiled_update.py::test_options_that_no_graph_can_hold_are_refused",
                "unit/train/test_compiled_update.py::test_hooks_within_an_update_are_refused_and_others_are_not",
                "unit/train/test_compiled_update.py::test_what_depends_on_numbers_is_an_error_that_says_what_to_do",
            ),
        ),
    ),
    Area(
        "Metrics, writers, profiles",
        (
            works(
                "writers: console, JSONL, CSV, TensorBoard, and one's own by target in a run file",
                "contract/test_writers.py::test_every_value_at_every_update_arrives_whatever_the_periods",
                "contract/test_writers.py::test_a_killed_run_that_is_resumed_reads_as_if_it_had_not_been",
                "unit/cli/test_train.py::test_a_writer_of_ones_own_is_built_with_its_arguments",
            ),
            works(
                "W&B (extra `wandb`), offline; its service is not tried",
                "unit/events/writers/test_wandb.py::test_an_offline_run_has_every_value_at_its_update_and_all_that_is_shown",
            ),
            works(
                "MLflow (extra `mlflow`), with the store of files; servers and databases are not tried",
                "unit/events/writers/test_mlflow.py::"
                "test_the_store_has_every_value_at_its_update_the_parameters_and_all_that_is_shown",
                "unit/events/writers/test_mlflow.py::test_a_resumed_run_goes_on_in_the_same_and_says_what_has_changed",
            ),
            works(
                "a text file for Prometheus's node exporter",
                "unit/events/writers/test_prometheus.py::"
                "test_the_newest_value_of_each_metric_is_there_and_what_the_run_does",
            ),
            refused(
                "a writer that is none, is not installed, or has other arguments, also by `check`",
                "unit/cli/test_train.py::test_a_writer_that_is_none_is_refused_by_its_key",
                "unit/cli/test_train.py::test_a_writer_whose_package_is_missing_is_refused_by_check",
            ),
            limit(
                "W&B and MLflow take nothing back: what happens again after a resume is there twice",
            ),
            works(
                "texts, images and histograms that hooks and tasks show, in the run folder and by writers that can",
                "unit/events/writers/test_shown.py::"
                "test_hooks_and_tasks_show_and_the_writers_hear_of_the_configuration",
                "unit/events/writers/test_shown.py::test_the_run_folder_has_all_that_was_shown",
                "unit/events/test_shown.py::test_what_an_update_that_was_given_up_has_shown_is_forgotten",
            ),
            works(
                "seconds of each phase of an update; samples and tokens so far, also after a resume",
                "unit/train/test_phases.py::test_a_window_says_the_seconds_of_each_phase_per_update",
                "unit/train/test_phases.py::test_tokens_are_counted_on_after_a_stop_in_the_midst_of_a_window",
            ),
            works(
                "FLOPs and their share of the peak, of compiled models too; counting changes no bit",
                "unit/train/test_flops.py::test_the_rate_is_that_of_samples_times_what_matrices_take",
                "unit/train/test_flops.py::test_counting_changes_no_bit",
                "unit/train/test_flops.py::test_a_compiled_model_is_counted_as_it_is_written",
            ),
            works(
                "`--profile 10:13`: a trace, and a table by operator; the bits are those without",
                "unit/events/hooks/test_profile.py::test_the_updates_are_in_a_trace_with_the_names_of_what_was_done",
                "unit/events/hooks/test_profile.py::test_the_table_has_what_each_operator_took",
            ),
            works(
                "… with a record of the allocations on CUDA",
                "gpu/test_memory.py::test_a_profile_has_a_record_of_the_allocations",
            ),
            works(
                "`--limit.batches`, `--overfit`, `evenstep summary`",
                "unit/data/test_first_batches.py::test_each_epoch_is_the_beginning_of_the_whole_one_in_its_own_order",
                "unit/cli/test_trying_out.py::test_to_overfit_is_to_train_and_evaluate_on_the_first_samples_only",
                "unit/cli/test_model_table.py::test_each_module_is_there_with_its_shape_and_parameters",
            ),
            works(
                "an end of the run by its learning rate, or by the time of all its starts",
                "unit/events/hooks/test_stop_below_lr.py::"
                "test_a_run_ends_where_its_rate_has_fallen_below_the_number_but_not_in_its_warmup",
                "unit/events/hooks/test_stop_below_lr.py::test_a_resumed_run_stops_again_at_once_and_says_why",
                "unit/events/hooks/test_time_budget.py::test_the_time_of_all_starts_ends_the_run_for_good",
                "unit/events/hooks/test_time_budget.py::test_a_resumed_run_that_has_used_its_time_stops_at_once",
                "unit/events/hooks/test_time_budget.py::"
                "test_the_time_of_starts_that_are_stopped_killed_and_resumed_is_the_sum_of_what_was_kept",
            ),
            works(
                "`train/clipped`, the share of updates that were clipped, at any cut, and of ranks that step alone",
                "unit/train/test_clipped.py::test_each_update_says_whether_it_was_clipped_at_any_cut",
                "unit/events/test_storage.py::test_of_ranks_with_norms_of_their_own_the_share_that_was_clipped_is_kept",
            ),
            works(
                "evaluations from an update on, and of their first batches only",
                "unit/events/hooks/test_evaluate.py::test_before_its_first_update_it_asks_for_nothing",
                "unit/cli/test_trying_out.py::test_an_evaluation_may_be_of_its_first_batches_only",
            ),
            refused(
                "a profile or a trial that can't be: no such updates, no such samples, a stream, memory of a CPU",
                "unit/cli/test_train.py::test_a_profile_that_cannot_be_is_refused_by_its_key",
                "unit/events/hooks/test_profile.py::test_what_cannot_be_profiled_is_refused_before_training",
                "unit/cli/test_trying_out.py::test_what_cannot_be_tried_out_is_refused",
            ),
        ),
    ),
    Area(
        "The report",
        (
            works(
                "one page of one or several runs, without a network; whatever the files hold, there is a page",
                "unit/extras/report/test_page.py::test_the_page_asks_nothing_of_a_network",
                "unit/extras/report/test_page.py::test_whatever_the_files_hold_there_is_a_page",
                "unit/cli/test_report.py::test_several_runs_share_a_page_beside_their_folders",
            ),
            works(
                "clicked, zoomed, searched and smoothed in a browser, by mouse and keys; on a phone; light and dark",
                "usage/test_report_in_a_browser.py::test_curves_of_several_runs_are_drawn_each_in_its_colour_and_hidden_by_a_click",
                "usage/test_report_in_a_browser.py::test_a_chart_is_zoomed_by_dragging_by_keys_and_by_numbers_and_goes_back",
                "usage/test_report_in_a_browser.py::test_the_axis_may_count_updates_samples_tokens_or_time",
                "usage/test_report_in_a_browser.py::test_the_slider_smooths_a_noisy_curve_and_leaves_a_smooth_one",
                "usage/test_report_in_a_browser.py::test_a_metric_is_found_among_many_by_parts_of_its_name",
                "usage/test_report_in_a_browser.py::test_on_a_phone_nothing_stands_out_of_the_page",
            ),
            works(
                "`evenstep report --follow`: to this machine alone, what is new while a run trains",
                "usage/test_report_in_a_browser.py::test_a_followed_page_shows_what_is_new_and_keeps_what_was_chosen",
                "unit/extras/report/test_follow.py::test_a_page_of_somebody_else_s_whose_name_leads_here_gets_nothing",
            ),
            works(
                "the timeline of an update of every rank, beside its plan",
                "unit/extras/test_timeline.py::test_the_actions_of_one_update_are_timed_in_their_order",
                "unit/extras/report/test_timeline.py::test_the_plan_beside_it_is_the_same_with_the_median_of_each_action",
            ),
            works(
                "each start of a run: command, layout, state of the source, machine; settings beside their defaults",
                "unit/events/test_start.py::test_each_start_adds_a_line_with_command_layout_and_versions",
                "unit/config/test_defaults.py::test_every_key_with_a_default_has_it_whatever_was_set",
            ),
        ),
    ),
    Area(
        "The library",
        (
            works(
                "a `LightningModule` as it is: steps, logged metrics, optimizer, scheduler; Lightning's own figures",
                "unit/test_lightning.py::test_it_trains_as_lightning_does_where_batches_are_of_one_size",
                "unit/test_lightning.py::test_a_last_short_micro_batch_counts_by_its_samples",
                "unit/test_lightning.py::test_two_ranks_have_the_bits_of_one",
                "unit/test_lightning.py::test_it_resumes_exactly",
                "unit/test_lightning.py::test_lightning_goes_on_with_a_module_that_was_trained_here",
            ),
            refused(
                "of such a module: manual optimization, several optimizers, hooks that nobody calls, `batch_idx`",
                "unit/test_lightning.py::test_what_can_not_be_said_exactly_is_refused_by_name",
                "unit/test_lightning.py::"
                "test_a_step_that_asks_the_number_of_its_set_is_refused_and_one_that_takes_it_is_not",
            ),
            refused(
                "what other trainers' habits would do without effect; their arguments and methods, with what to write",
                "usage/test_other_trainers.py::test_what_follows_evaluations_is_refused_where_nothing_asks_for_any",
                "usage/test_other_trainers.py::test_what_another_trainer_takes_is_refused_with_what_to_write",
                "unit/test_keywords.py::test_what_another_trainer_has_is_answered_by_what_to_do",
            ),
            works(
                "the pages Coming from a loop, Accelerate, transformers and Lightning: both versions, the same figures",
                "usage/test_coming_from.py::test_both_versions_of_a_page_end_with_the_same_figures",
                "usage/test_coming_from.py::test_ours_takes_no_more_lines",
            ),
            works(
                "one's own LR schedule, hook, writer, precision, pipeline schedule, reducer, policy: extending.md",
                "usage/test_pages.py::test_the_python_of_a_page_runs_from_top_to_bottom",
            ),
            works(
                "`evenstep new` copies a recipe",
                "unit/cli/test_new.py::test_a_copy_of_each_recipe_is_a_run_of_its_own_name",
            ),
            works(
                "`Trainer(folder=…)` alone keeps metrics, checkpoints and the report",
                "usage/test_library.py::test_a_folder_alone_keeps_metrics_checkpoints_and_the_report",
            ),
            works(
                "Ctrl-C and SIGTERM save and end the program",
                "usage/test_library.py::test_ctrl_c_in_a_script_with_a_folder_saves_and_ends_the_script_in_a_few_lines",
                "usage/test_library.py::test_sigterm_saves_and_ends_the_script_with_the_exit_code_of_the_command_line",
            ),
            works(
                "names of run files for formats, schedules, strategies, writers and policies; a `DataLoader` as data",
                "usage/test_library.py::test_a_name_and_a_loader_train_as_the_objects_they_stand_for",
            ),
            works(
                "a live line in a terminal at 80 columns, and in a notebook (tested with a stand-in)",
                "unit/events/writers/test_console.py::test_bar_update_loss_rate_and_time_left_are_seen_at_80_columns",
                "unit/events/writers/test_console.py::test_a_notebook_gets_a_live_line_in_its_cell",
            ),
            refused(
                "a folder in which another run has trained",
                "usage/test_library.py::test_a_folder_of_another_run_is_refused_and_nothing_in_it_is_touched",
            ),
            refused(
                "usual mistakes with each argument, and in hooks, tasks and scripts",
                "usage/test_library.py::"
                "test_a_usual_mistake_with_an_argument_is_one_clear_line_when_the_trainer_is_built",
                "usage/test_mistakes.py::test_what_must_wait_for_the_end_of_an_update_is_refused_in_its_midst",
            ),
        ),
    ),
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
            works(
                "`bf16-true`, `16-true`: a model of 16 bits with float32 master weights, and `bf16-true-no-master`, "
                "`16-true-no-master`, rounded at random",
                "prove: formats",
            ),
            works(
                "models of 16 bits with every strategy, in stages, resumed elsewhere: ordered, the same bits",
                "usage/test_formats.py::test_each_format_has_the_bits_of_one_process_with_every_strategy_that_is_ordered",
                "usage/test_formats.py::test_each_format_has_the_bits_of_one_process_in_stages_with_tied_weights",
                "usage/test_formats.py::test_each_format_is_stopped_and_resumed_on_other_layouts_with_the_same_bits",
            ),
            works(
                "the loss scale is taken out once, whatever clips and steps",
                "unit/optim/test_stepping.py::test_the_loss_scale_is_taken_out_once_with_plain_sgd",
            ),
            works(
                "bytes per parameter, as computed",
                "unit/train/test_formats.py::test_a_parameter_costs_what_is_computed_and_that_is_what_is_allocated",
            ),
            works(
                "`float8-mixed` (extra `float8`), shown by emulation: three recipes, the products those of rounded "
                "values; inf and NaN are seen",
                "unit/train/test_float8.py::test_the_three_products_are_those_of_values_rounded_to_float8",
                "unit/train/test_float8.py::test_what_is_not_finite_is_not_rounded_away",
            ),
            works(
                "… any cut, up to the roundings of bfloat16",
                "unit/train/test_float8.py::test_an_update_does_not_depend_on_the_cut_but_by_the_roundings_of_bfloat16",
            ),
            works(
                "… with every strategy and in stages: the bits of one process; resumed on other layouts",
                "usage/test_float8.py::"
                "test_ordered_sums_have_the_bits_of_one_process_with_every_strategy_and_in_stages",
                "usage/test_float8.py::test_a_run_is_stopped_and_resumed_on_other_layouts_with_the_same_bits",
            ),
            works(
                "… compiled, and with activations computed again",
                "unit/train/test_float8.py::test_blocks_are_compiled_as_a_whole_and_train_alike",
                "unit/train/test_float8.py::test_the_bits_are_those_of_the_plain_run",
            ),
            works(
                "… on a GPU, at its speed ([figures](gpu.md#figures))",
                "gpu/test_updates.py::test_a_format_trains",
            ),
            refused(
                "float8 on devices that can't, of layers that can't, or without torchao",
                "unit/precision/test_float8_mixed.py::test_a_gpu_is_judged_by_its_compute_capability",
                "unit/precision/test_float8_mixed.py::test_where_no_layer_can_be_it_is_said_why_with_names",
                "unit/precision/test_float8_mixed.py::test_a_missing_torchao_is_said_with_the_extra",
            ),
            refused(
                "models of 16 bits: optimizers that evaluate other parameters or hold them in attributes, a float64 "
                "model; with `fsdp` another `gather_dtype` and layers with running statistics",
                "unit/train/test_formats.py::test_optimizers_that_stand_ins_would_pass_by_are_refused",
                "unit/train/test_formats.py::test_a_float64_model_is_refused_by_name",
                "unit/train/test_formats.py::"
                "test_another_format_to_gather_in_and_layers_with_statistics_in_shards_are_refused",
            ),
            refused(
                "models of 16 bits: orthogonal parameters",
                "unit/train/test_formats.py::"
                "test_orthogonal_parameters_are_refused_and_train_in_the_mode_that_is_advised",
            ),
            limit(
                "`bf16-mixed` and `16-mixed` on a CPU for which oneDNN has no kernel of an LSTM: torch's error, with "
                "what to do",
                "unit/train/test_formats.py::"
                "test_an_lstm_that_this_processor_has_no_kernel_of_is_explained_and_what_is_advised_trains",
            ),
        ),
    ),
    Area(
        "Quantisation",
        (
            works(
                "quantisation-aware training by torchao from a set update on (`QuantizationAware`, extra "
                "`quantization`), converted to layers that compute the same",
                "unit/extras/quantization/test_aware.py::"
                "test_rounding_begins_after_the_update_that_is_set_as_in_a_plain_loop_with_torchaos_layers",
                "unit/extras/quantization/test_aware.py::"
                "test_the_model_is_converted_to_one_that_computes_the_same_in_integers",
            ),
            works(
                "… with the bits of one process on ranks, with `zero1` and `fsdp`, in stages; resumed, and gone back",
                "usage/test_quantization.py::"
                "test_fake_quantised_layers_on_ranks_have_the_bits_of_one_process_and_are_resumed",
                "unit/extras/quantization/test_aware.py::"
                "test_a_run_that_goes_back_to_before_rounding_began_comes_to_the_same",
            ),
            works(
                "iterative product quantisation, group of layers after group (`ProductQuantization`): codebooks and "
                "the gradients of centroids",
                "unit/extras/quantization/test_codebook.py::test_centroids_and_assignments_are_those_of_the_definition",
                "unit/extras/quantization/test_product.py::"
                "test_updates_are_those_of_a_plain_loop_before_between_and_after_the_layers_are_quantised",
            ),
            works(
                "… resumed before, between and after, gone back, averaged; with the bits of one process on ranks, with "
                "`zero1`, `fsdp` (also hybrid), in stages and in stages with shards, and resumed on others of these",
                "unit/extras/quantization/test_product.py::test_a_run_is_resumed_to_the_bit_before_between_and_after",
                "unit/extras/quantization/test_product.py::"
                "test_a_run_that_goes_back_to_before_a_layer_was_quantised_comes_to_the_same",
                "unit/extras/quantization/test_product.py::"
                "test_the_average_of_what_is_quantised_begins_anew_and_is_that_of_the_centroids",
                "unit/extras/quantization/test_product.py::test_stages_quantise_their_own_layers_where_they_have_some",
                "usage/test_quantization.py::"
                "test_codebooks_on_ranks_have_the_bits_of_one_process_wherever_they_are_resumed",
                "usage/test_quantization.py::"
                "test_codebooks_of_stages_in_shards_and_of_copies_of_shards_have_the_bits_of_one_process",
            ),
            works(
                "… from a run file, checked; exported as plain weights",
                "unit/cli/test_quantization.py::test_it_is_checked_trained_and_resumed_to_the_bit",
                "unit/cli/test_quantization.py::test_the_exported_weights_are_those_of_the_codebooks",
            ),
            works(
                "quantisation noise (`QuantizationNoise`): blocks dropped in each update, at any cut, on ranks, "
                "`zero1`, `fsdp` and `local`, in stages, resumed, with codebooks",
                "unit/extras/quantization/test_noise.py::test_updates_are_those_of_a_plain_loop_at_every_cut",
                "unit/extras/quantization/test_noise.py::"
                "test_what_is_computed_again_in_the_backward_has_the_same_noise",
                "unit/extras/quantization/test_noise.py::test_ranks_that_step_alone_drop_the_same_blocks",
                "unit/extras/quantization/test_noise.py::test_a_run_is_resumed_to_the_bit",
                "unit/extras/quantization/test_noise.py::test_a_layer_has_noise_until_it_is_quantised",
                "usage/test_quantization.py::"
                "test_codebooks_are_alike_on_all_ranks_and_resumed_and_noise_has_the_bits_of_one_process",
            ),
            refused(
                "`local` (but for noise), `compile`; codebooks in models of 16 bits without `fsdp`; weights that are "
                "tied, also over stages; rounding that depends on the cut",
                "unit/extras/quantization/test_product.py::test_runs_that_it_is_not_for_are_refused_by_name",
                "unit/extras/quantization/test_product.py::test_a_weight_that_another_layer_has_too_is_refused",
                "unit/extras/quantization/test_product.py::test_patterns_and_ties_are_looked_at_over_all_stages",
                "unit/extras/quantization/test_noise.py::test_what_cannot_be_is_refused_by_name",
                "unit/extras/quantization/test_aware.py::test_runs_that_it_is_not_for_are_refused_by_name",
                "unit/extras/quantization/test_aware.py::test_what_cannot_be_is_refused_when_the_model_is_prepared",
                "unit/cli/test_quantization.py::test_a_strategy_that_it_is_not_for_is_refused_by_check",
            ),
        ),
    ),
    Area(
        "Memory",
        (
            works(
                "activations computed again in the backward, of blocks or of modules by a pattern: the same bits, "
                "whatever forwards draw from and move",
                "usage/test_recomputed.py::test_it_is_the_same_run_whatever_the_forward_draws_from_and_moves",
            ),
            works(
                "with every strategy and reduction, in stages with backwards in one piece and in two, with replicas",
                "usage/test_recomputed.py::test_it_is_the_same_run_on_two_ranks",
                "usage/test_recomputed.py::test_it_is_the_same_run_in_stages_with_backwards_in_one_piece_and_in_two",
                "usage/test_recomputed.py::test_it_is_the_same_run_in_stages_with_replicas",
            ),
            works(
                "shards within what is computed again",
                "usage/test_recomputed.py::test_shards_within_a_module_are_gathered_for_its_recomputation",
            ),
            works(
                "running statistics move once",
                "unit/train/test_activation_checkpointing.py::test_bits_names_and_running_statistics_are_those_of_a_run_that_keeps_all",
            ),
            works(
                "models that checkpoint by themselves, blocks compiled in place, mixed and 16-bit formats",
                "unit/train/test_activation_checkpointing.py::test_a_model_that_checkpoints_by_itself_may_be_recomputed_around_it",
                "unit/train/test_activation_checkpointing.py::test_a_compiled_block_is_computed_again_as_compiled",
                "unit/train/test_activation_checkpointing.py::test_it_is_the_same_in_number_formats",
            ),
            works(
                "less memory; a recomputation that finds none is cut",
                "unit/train/test_activation_checkpointing.py::test_an_update_takes_a_fraction_of_the_memory",
                "unit/train/test_activation_checkpointing.py::test_a_recomputation_that_runs_out_of_memory_is_cut",
            ),
            works(
                "peak, free, reserved and resident memory as metrics",
                "unit/events/hooks/test_memory_use.py::test_on_a_cpu_it_is_the_process_at_the_end_of_each_window",
            ),
            refused(
                "a model without blocks, and a pattern that fits no module",
                "unit/train/test_blocks.py::test_a_model_without_blocks_is_refused",
                "unit/train/test_blocks.py::test_a_pattern_that_fits_nothing_is_refused_with_what_there_is",
            ),
            refused(
                "modules within what was compiled as a whole",
                "unit/train/test_blocks.py::test_what_was_compiled_as_a_whole_is_refused_by_name",
            ),
            refused(
                "a buffer that begins to move after the first forward of a module that is computed again",
                "unit/train/test_activation_checkpointing.py::test_a_buffer_that_begins_to_move_late_is_refused_by_name",
            ),
            refused(
                "emptying the cache of a CPU",
                "unit/test_memory.py::test_a_device_that_keeps_nothing_is_refused",
            ),
        ),
    ),
    Area(
        "Devices",
        (
            works("CPU", "prove: cut "),
            works(
                "one CUDA device: each number format, cuts, stops and failures; `make gpu` ([gpu.md](gpu.md)) tries it",
                "gpu/test_updates.py::test_a_format_trains",
                "gpu/test_prove.py::test_a_run_is_proved_there",
                "gpu/test_commands.py::test_a_run_that_was_stopped_ends_with_the_bits_of_one_that_was_not",
            ),
            works("several CUDA devices, one for each rank"),
            works(
                "inside an update the host waits for no device, with a fused optimizer",
                "unit/train/test_no_waiting.py::test_an_update_with_everything_armed_reads_nothing",
                "gpu/test_updates.py::test_the_host_waits_for_nothing_inside_updates",
            ),
            works(
                "ranks that share a device, through copies on the host",
                "unit/parallel/test_through_host.py::test_a_run_has_the_same_bits_through_the_host",
                "gpu/test_ranks.py::test_one_sha256_over_all_cuts_with_ordered",
            ),
            refused(
                "`fsdp` on ranks that share a device",
                "unit/parallel/test_through_host.py::test_ranks_that_share_a_device_are_refused_shards",
            ),
            works("other accelerators that torch knows"),
            refused(
                "a device that is not there", "unit/train/test_trainer.py::test_a_device_that_is_not_there_is_refused"
            ),
            refused(
                "`xla`: torch_xla ended with torch 2.9",
                "unit/test_devices.py::test_a_device_that_torch_only_has_a_name_for_is_refused_with_what_to_take",
            ),
        ),
    ),
    Area(
        "Data",
        (
            works(
                "10¹² samples by count: a start takes milliseconds and less than 1 MB",
                "unit/data/test_map_data.py::test_a_start_takes_neither_time_nor_memory_that_grow_with_the_dataset",
            ),
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
                "faults: be read",
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
                "unit/extras/multitask/test_per_task.py::test_shared_gradients_are_combined_and_heads_keep_their_own",
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
                "`combine` with sparse gradients, and with tasks without names",
                "unit/extras/multitask/test_per_task.py::test_sparse_gradients_and_tasks_without_names_are_refused",
            ),
            limit(
                "`fsdp` runs the tasks in one order on all ranks; what a task raises there ends the run",
                "unit/parallel/test_tasks.py::test_what_one_rank_raised_ends_all_when_the_policy_says_so",
            ),
            works(
                "statistics of each task where activations are computed again",
                "unit/train/test_activation_checkpointing.py::test_statistics_of_each_task_are_moved_once",
            ),
            works(
                "statistics of each task in compiled blocks",
                "unit/train/test_compiled.py::test_statistics_of_each_task_are_those_of_the_run_that_is_not_compiled",
            ),
        ),
    ),
    Area(
        "What tasks are told and say",
        (
            works(
                "the update's number and whether it trains: `self.now`",
                "unit/train/test_now.py::test_a_task_knows_the_update_and_whether_it_trains",
            ),
            works(
                "metrics derived of others (`ppl` = exp of a mean), followed by the best and by early stopping",
                "unit/train/test_derived.py::"
                "test_a_perplexity_is_that_of_the_mean_over_all_and_not_a_mean_of_perplexities",
                "unit/train/test_derived.py::test_the_best_and_early_stopping_follow_it",
            ),
            works(
                "whatever hooks are told, under the same names (`before_epoch`, `before_evaluate`, …), by trainers",
                "unit/train/test_task_life.py::test_a_task_is_told_what_hooks_are_told_in_the_order_of_the_page",
                "unit/train/test_task_life.py::test_it_hears_before_hooks_do_and_of_its_own_micro_batches_only",
            ),
            limit(
                "an `Engine` tells of updates, their parts and evaluations; a task that waits for more is refused",
                "unit/train/test_task_life.py::"
                "test_an_engine_tells_of_updates_and_evaluations_and_refuses_what_it_does_not_know",
            ),
            works(
                "`evaluate`, which generates with the model: word error rate, BLEU from counts, over any cut and ranks",
                "unit/train/test_own_evaluation.py::"
                "test_what_is_generated_is_scored_as_all_texts_at_once_and_no_loss_is_made_up",
                "unit/train/test_own_evaluation.py::test_every_cut_on_any_ranks_gives_the_same_bits",
                "unit/train/test_own_evaluation.py::test_the_best_and_early_stopping_follow_what_is_generated",
                "unit/recipes/test_translation.py::test_the_bleu_of_an_evaluation_is_that_of_the_corpus",
            ),
            works(
                "… with `ddp`, `ordered`, `zero1`, `local`, `fsdp`; with averages, in 16 bits, cut where memory is low",
                "unit/train/test_own_evaluation.py::test_all_strategies_whose_ranks_hold_the_model_evaluate_alike",
                "unit/train/test_own_evaluation.py::test_it_is_evaluated_with_the_average_the_parameters_or_both",
                "unit/train/test_own_evaluation.py::test_in_16_bits_the_model_is_called_in_its_own_format",
                "unit/train/test_own_evaluation.py::test_what_does_not_fit_into_memory_is_generated_in_parts",
                "ranks/test_whole.py::test_on_two_processes",
            ),
            works(
                "… in stages, whose ranks each have the whole model meanwhile, with every strategy that stages have",
                "unit/train/test_whole_of_stages.py::test_what_is_written_in_stages_is_what_a_plain_model_writes",
                "unit/train/test_whole_of_stages.py::test_replicas_of_pipelines_evaluate_and_are_taught_alike",
                "unit/train/test_whole_of_stages.py::test_layers_that_functions_build_are_called_in_turn",
                "unit/recipes/test_translation.py::test_a_translator_in_stages_scores_what_it_does_on_one_process",
                "ranks/test_staged_shards.py::test_on_four_processes",
            ),
            refused(
                "`evaluate` in stages of models that can't be copied, or whose layers are changed after the cut",
                "unit/train/test_whole_of_stages.py::test_models_that_can_not_be_put_together_are_refused_by_name",
                "unit/train/test_whole_of_stages.py::"
                "test_layers_and_formats_that_are_changed_after_the_cut_are_refused_by_name",
                "unit/train/test_whole_of_stages.py::test_statistics_of_each_task_are_refused_by_name",
            ),
            works(
                "trained parameters of a task: reduced, clipped, averaged, saved, at any cut; `ddp`, `ordered`, "
                "`zero1`, `local`, `fsdp`",
                "unit/train/test_task_parameters.py::test_they_are_trained_clipped_and_averaged_as_a_plain_loop_does",
                "unit/train/test_task_parameters.py::test_no_cut_changes_what_is_trained",
                "unit/train/test_task_parameters.py::test_ranks_train_what_one_process_does",
                "unit/train/test_task_parameters.py::test_ranks_that_step_alone_share_them",
                "ranks/test_sharded.py::test_on_two_processes",
            ),
            works(
                "… resumed with the same bits, and in a group of their own in run files",
                "unit/train/test_task_parameters.py::test_a_run_that_is_stopped_goes_on_with_the_same_bits",
                "unit/builders/test_builders.py::"
                "test_parameters_of_a_task_are_a_group_of_their_own_and_named_by_patterns",
            ),
            refused(
                "trained parameters of a task that the optimizer holds in part, in stages, and in a compiled update",
                "unit/train/test_task_parameters.py::"
                "test_what_the_optimizer_does_not_hold_is_refused_and_the_model_is_as_it_was",
                "unit/train/test_task_parameters.py::test_what_can_not_be_trained_is_refused_by_name",
            ),
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
