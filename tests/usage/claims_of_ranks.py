"""Claims about ranks, stages, faults, resuming and checkpoints."""

from claims import Area, limit, refused, works

AREAS = (
    Area(
        "Processes",
        (
            works(
                "one process; several by `--launch.ranks` or torchrun, over gloo",
                "ranks/test_launch.py::test_launched_and_torchrun_and_one_process_end_at_the_same_bits",
            ),
            works("several machines", "ranks/test_hosts.py::test_a_run_on_two_hosts_outlives_one_of_them_bit_by_bit"),
            works(
                "`srun`, and jobs of SLURM (extra `slurm`), with a stand-in for the cluster",
                "ranks/test_slurm.py::test_srun_alone_starts_ranks",
                "ranks/test_slurm.py::test_tasks_of_a_submitit_job_are_ranks",
            ),
            works(
                "`mpirun` of Open MPI, MPICH and Intel MPI, by its variables; not run",
                "unit/parallel/test_rank_info.py::test_processes_of_mpirun_are_ranks_that_must_be_told_where_they_meet",
            ),
            works(
                "Ray Train, on one machine (a slow test, where Ray is installed): a worker is killed, the bits stay",
                "ranks/test_ray.py::test_a_run_of_ray_train_outlives_a_worker_bit_by_bit",
            ),
            works(
                "a job for Kubernetes that means each exit code: compared with its schema (extra `hosts`), not run",
                "unit/test_hosts_page.py::test_it_is_what_kubernetes_takes",
                "unit/test_hosts_page.py::test_each_exit_code_but_success_has_its_rule",
            ),
            works(
                "NCCL, with one rank: the bits of one process, also after it has met anew",
                "gpu/test_ranks.py::test_one_rank_over_the_devices_own_backend_has_the_bits_of_one_process",
            ),
            works("NCCL between several devices"),
            works("a real cluster of SLURM, Kubernetes or Ray"),
            refused(
                "several processes started, and no `strategy` given; models that torch shares already",
                "unit/train/test_arguments.py::test_two_processes_without_a_strategy_are_refused_when_built",
                "unit/train/test_arguments.py::test_a_model_that_torch_shares_already_is_refused_by_name",
            ),
            refused(
                "a strategy, or a mesh, over a part of the ranks, of which each would train alone",
                "unit/train/test_arguments.py::"
                "test_a_whole_model_that_a_part_of_the_ranks_shares_is_refused_when_built",
                "unit/train/test_arguments.py::"
                "test_ranks_that_were_split_off_are_refused_a_run_of_their_own_when_it_is_built",
                "unit/train/test_arguments.py::"
                "test_a_strategy_over_other_ranks_than_those_of_the_same_stages_is_refused_when_built",
            ),
            refused(
                "other optimizer options, schedules or averages on some ranks",
                "usage/test_surface.py::test_another_rate_on_each_rank_is_found_before_the_first_update",
            ),
            refused(
                '`parallel.strategy = "single"` on several ranks',
                "ranks/test_launch.py::test_a_strategy_for_one_process_is_refused_on_several",
            ),
            works(
                "ranks that are missing, double or different are named at the start",
                "ranks/test_joining.py::test_those_who_do_not_come_are_named_to_all_who_did",
                "ranks/test_joining.py::test_a_rank_that_exists_twice_is_named_with_both_processes",
            ),
            works("512 ranks agree on what they say, walked one by one", "prove: 512 ranks"),
        ),
    ),
    Area(
        "Strategies",
        (
            works("`ddp`, `zero1`, `fsdp` (full and hybrid shards): fast and ordered", "prove: ranks "),
            works("gathers in 16 bits", "ranks/test_sharded.py::test_on_two_processes"),
            works("CPU offload of `fsdp`"),
            works(
                "`local`: local SGD, BMUF (classical, Nesterov), SlowMo and DiLoCo are their definitions in float64",
                "unit/parallel/test_local.py::test_each_method_is_its_definition",
                "unit/parallel/test_outer.py::"
                "test_a_share_at_a_rate_of_0_is_the_limit_of_shares_at_rates_that_fall_towards_it",
                "prove: local",
            ),
            works(
                "… streaming DiLoCo: fragments in turn, means on their way",
                "unit/parallel/test_local.py::test_streaming_is_its_definition",
            ),
            works(
                "… left in the midst of a period and taken up with the same bits, in every precision, with an average",
                "usage/test_local.py::test_a_run_goes_on_where_it_was_with_the_same_bits",
            ),
            works(
                "… metrics of all ranks in each update; evaluations of what ranks share",
                "unit/train/test_local.py::test_metrics_are_sums_over_all_ranks_in_every_update",
                "unit/train/test_local.py::test_evaluated_is_what_ranks_share_and_training_goes_on_with_the_ranks_own",
            ),
            works(
                "… a gradient that is not finite on one rank costs that rank its step",
                "unit/train/test_local.py::test_a_gradient_that_is_not_finite_on_one_rank_costs_that_rank_its_step",
            ),
            works(
                "… a rank that runs out of memory does its own again, also while a mean is on its way", "faults: local"
            ),
            works(
                "… a loss scale of each rank's own; an overflow on one rank alone is tried again by that rank",
                "unit/train/test_local_scales.py::"
                "test_each_rank_comes_to_the_loss_scale_of_its_own_gradients_and_no_step_is_lost",
                "unit/train/test_local_scales.py::test_a_scale_of_its_own_is_saved_for_each_rank_and_restored_exactly",
                "faults: local",
            ),
            works(
                "… an average of what ranks share, in every update; evaluated, learned from, resumed",
                "unit/train/test_local_averages.py::test_the_average_follows_what_ranks_share_in_every_update",
                "unit/train/test_local_averages.py::test_a_task_learns_from_the_average_of_what_ranks_share",
                "prove: local",
            ),
            works(
                "… the state that a hook asks for, or that is saved after an error in one, has what ranks share",
                "unit/train/test_local.py::test_the_state_that_a_hook_asks_for_is_that_after_what_ranks_share",
                "unit/train/test_local.py::"
                "test_after_an_error_in_a_hook_nothing_is_saved_of_an_update_that_ranks_have_not_shared",
            ),
            refused(
                "`local`: a checkpoint of its ranks on another number of ranks, with another strategy, or put together",
                "unit/train/test_local.py::"
                "test_with_another_number_of_ranks_or_strategy_a_checkpoint_is_refused_by_name",
                "unit/train/test_local_scales.py::test_ranks_that_have_stepped_alone_are_not_put_together_again",
            ),
            works(
                "… replicas in stages: all bits of whole ones, in every schedule, tied, resumed as either",
                "unit/parallel/test_local.py::test_replicas_in_stages_are_the_same_definition",
                "unit/parallel/test_local.py::test_in_stages_a_run_has_all_bits_of_whole_replicas_also_resumed_as_such",
                "usage/test_local.py::"
                "test_replicas_in_stages_left_in_the_midst_of_a_period_end_at_the_bits_of_whole_ones",
                "faults: redo: local × 1f1b",
                "prove: local DiLoCo, 2 replicas",
            ),
            refused(
                "`local` with answers of all ranks together, such as `rewind`",
                "unit/train/test_local.py::test_what_can_not_be_is_refused_when_the_run_is_built",
                "unit/train/test_local.py::test_replicas_that_hold_no_whole_models_are_refused",
            ),
            limit("`local` is another algorithm: its parameters depend on the number of ranks"),
            works(
                "gradients of `ddp` in 16 bits (`parallel.compression`)",
                "unit/parallel/test_compression.py::test_a_sum_is_off_by_no_more_than_the_stated_bound",
            ),
            works(
                "unequal numbers of micro-batches per rank, also none",
                "unit/parallel/test_ddp.py::test_the_gradient_is_that_of_one_process_whatever_a_rank_has_used",
            ),
            refused(
                "sparse gradients on several ranks",
                "unit/parallel/test_ddp.py::test_sparse_gradients_are_refused_on_several_ranks",
            ),
            refused(
                "compression of gradients that are neither float32, float64 nor of its own format",
                "unit/parallel/test_compression.py::test_gradients_of_another_kind_are_refused",
            ),
            works(
                "`zero1` and `fsdp` deal out the state of an optimizer that has stepped before",
                "unit/parallel/test_zero1.py::test_state_made_by_the_constructor_or_by_steps_before_is_dealt_out",
            ),
            refused(
                "shard ranks that do not divide the ranks",
                "unit/parallel/test_sharded.py::test_shard_ranks_that_do_not_divide_the_ranks_are_refused",
            ),
            works(
                "resuming reads what the rank holds: shards, owned optimizer state, stages",
                "ranks/test_partial_resume.py::test_on_two_processes",
            ),
            works(
                "strategies of one's own, alone, in stages and with combined gradients",
                "unit/train/test_staged.py::test_a_strategy_of_ones_own_makes_a_reducer_for_each_stage",
                "unit/extras/multitask/test_per_task.py::test_products_ask_the_layout_of_a_strategy_of_ones_own",
            ),
            refused(
                "offload without an accelerator",
                "unit/parallel/test_sharded.py::test_offload_without_an_accelerator_is_refused",
            ),
            refused(
                "`fsdp` with torch before 2.13",
                "unit/parallel/test_sharded.py::test_a_torch_whose_fsdp2_lacks_what_is_asked_of_it_is_refused",
            ),
            limit(
                "`fsdp`: a rank with fewer micro-batches runs dummy passes; single numbers stay whole on all",
                "prove: ranks fsdp, fast",
            ),
        ),
    ),
    Area(
        "Models in stages",
        (
            works(
                "every schedule of `evenstep.pipeline.SCHEDULES`: the bits of one process",
                "unit/train/test_staged.py::test_every_pipeline_schedule_ends_at_the_bits_of_one_process",
            ),
            works(
                "schedules written in Python or as text, torch's as CSV",
                "unit/extras/planning/test_torch_csv.py::test_torchs_schedules_become_ours_and_take_as_long",
            ),
            works(
                "any DAG of layers, trees of tensors, masks and None between them",
                "unit/train/test_staged.py::test_trees_masks_missing_tensors_and_skip_edges_cross_stages",
            ),
            works(
                "outputs relayed from stage to stage (`parallel.relay_skips`)",
                "unit/pipeline/test_relay.py::test_ranks_relay_to_the_bits_of_one_process",
            ),
            works(
                "shapes that change with every micro-batch; tied parameters",
                "prove: pipeline 2 × 1f1b, ragged lengths",
                "prove: pipeline 4 × 1f1b, tied embeddings",
            ),
            works(
                "fewer micro-batches than ranks",
                "unit/train/test_staged.py::test_fewer_micro_batches_than_ranks_are_enough",
            ),
            works(
                "replicas of pipelines by `ddp`, `zero1` and `fsdp`",
                "prove: pipeline 2 × 1f1b × fsdp 2",
                "prove: pipeline 2 × 1f1b × zero1 2",
            ),
            works("encoder and decoder", "prove: pipeline 2 × 1f1b, encoder-decoder"),
            works("compiled layers", "unit/pipeline/test_pipeline_model.py::test_compiling_keeps_the_names"),
            works(
                "compiled layers with `fsdp`",
                "usage/test_compiled.py::test_a_compiled_model_is_trained_with_each_strategy",
            ),
            works(
                "stages that share a CUDA device, whose messages go through the host's memory; compiled layers in them",
                "gpu/test_ranks.py::test_one_sha256_over_all_cuts_with_ordered",
                "gpu/test_compiled.py::test_compiled_layers_in_stages_have_the_bits_of_one_process",
            ),
            refused(
                "plans that are incomplete, out of order, wait for ever, or reduce an earlier stage before a later one",
                "unit/pipeline/test_proof.py::test_what_is_wrong_is_named",
            ),
            refused(
                "sparse gradients; parameters that are cut over ranks",
                "unit/pipeline/test_pipeline_model.py::test_sparse_gradients_are_refused",
                "unit/pipeline/test_pipeline_model.py::test_parameters_that_are_cut_over_ranks_are_refused",
            ),
            refused(
                "more stages than layers", "unit/pipeline/test_layers.py::test_more_stages_than_layers_are_refused"
            ),
            limit(
                "a loss lacks the parameters of other ranks: a task that holds the model is told so",
                "unit/train/test_staged.py::test_a_task_that_holds_a_model_of_which_other_ranks_have_stages_is_said",
            ),
            limit(
                "only linear layers outside compiled ones fill the bubbles of schedules that split the backward",
                "unit/pipeline/test_deferred.py::test_compiled_parts_keep_their_backward_in_one_piece",
            ),
            works(
                "weight norm, pruning, hooks on gradients and complex layers, with every schedule",
                "unit/pipeline/test_deferred.py::test_weights_that_autograd_must_see_have_their_gradients_in_the_first_half",
                "unit/pipeline/test_deferred.py::"
                "test_two_halves_are_the_whole_in_complex_numbers_and_in_float64_under_autocast",
            ),
            refused(
                "tensors inside values that torch does not take apart, sparse ones, subclasses, and what can't be sent",
                "unit/pipeline/test_sendable.py::"
                "test_a_tensor_whose_gradient_would_be_lost_and_what_can_not_be_sent_are_refused",
                "unit/pipeline/test_sendable.py::test_what_is_made_anew_where_it_is_used_trains_as_the_refusal_says",
            ),
            refused(
                "hooks and saved state around the layers; a first layer of a stage that changes its input in place",
                "unit/pipeline/test_around.py::test_hooks_around_the_layers_are_refused_and_on_a_layer_they_are_called",
                "unit/pipeline/test_around.py::test_a_saved_buffer_that_no_layer_holds_is_refused_and_the_advice_works",
                "unit/pipeline/test_around.py::test_extra_state_that_no_layer_holds_is_refused_and_that_of_a_layer_is_saved",
                "unit/pipeline/test_around.py::test_a_stage_that_begins_with_a_change_in_place_is_refused_and_the_advice_works",
            ),
            refused(
                "a batch that a stage before the last writes into; what `inputs` leaves in the task for the loss",
                "unit/pipeline/test_around.py::test_a_stage_that_writes_into_the_batch_is_refused_and_the_advice_works",
                "unit/pipeline/test_around.py::test_what_inputs_leave_in_the_task_for_the_loss_is_refused_in_stages_and_the_advice_works",
            ),
            refused(
                "an output that a later stage takes as well, changed in place in a stage between",
                "unit/pipeline/test_around.py::test_what_a_later_stage_takes_may_not_be_changed_in_place_and_the_advice_works",
            ),
            refused(
                "ranks of a pipeline that read other batches than their peers",
                "unit/train/test_staged.py::test_ranks_of_a_pipeline_that_read_other_batches_are_refused_and_what_one_leaves_out_is_not",
                "unit/train/test_staged.py::test_a_sample_that_one_rank_of_a_pipeline_can_not_read_is_left_out_by_all_or_the_run_ends",
            ),
            refused(
                "ranks that cut a model otherwise than their peers",
                "unit/pipeline/test_pipeline_model.py::"
                "test_ranks_that_cut_otherwise_are_refused_on_all_instead_of_waiting",
            ),
        ),
    ),
    Area(
        "Planning pipelines",
        (
            works(
                "`evenstep plan`: given costs, and models that say their layers, measured",
                "unit/extras/planning/test_measure.py::test_each_layer_is_measured_with_what_comes_before_it",
            ),
            limit(
                "leaves out congestion and reductions; the optimizer's state is not measured",
                "unit/extras/planning/test_simulate.py::test_messages_delay_and_are_counted",
            ),
        ),
    ),
    Area(
        "Out of memory",
        (
            works(
                "cut and done again in each phase, on one rank of several, with every strategy and in pipelines",
                "faults: out of memory: ",
            ),
            works(
                "in the optimizer's step and in evaluations",
                "faults: out of memory: optimizer step",
                "faults: out of memory: evaluation",
            ),
            works(
                "ranks break off, meet again and redo the update: every strategy and pipeline, also with reductions "
                "under way, whole copies (`shard_ranks = 1`), failures in a row and failures while meeting",
                "faults: break, meet, redo: ",
            ),
            works("the same over NCCL, between several devices"),
            works(
                '`micro_batch_size = "auto"`; with `fsdp` and in pipelines the first updates find what fits',
                "faults: micro-batch size auto",
            ),
            works(
                "recognised in the words of CUDA, cuBLAS, cuDNN, HIP, MPS, XPU, numpy and the CPU's allocator",
                "unit/test_memory.py::test_out_of_memory_that_is_not_torch_s_class_is_recognised",
            ),
            works(
                "on a CUDA device: cut in one process; one of two ranks that share it has no memory, and both redo it",
                "gpu/test_memory.py::test_a_micro_batch_that_does_not_fit_is_cut_and_the_update_is_the_same",
                "gpu/test_ranks.py::test_ranks_of_which_one_has_no_memory_make_the_update_of_those_that_have",
            ),
            limit(
                "the same gradient up to rounding; parts draw their own dropout",
                "faults: out of memory: forward, rank 0 of 1, single",
            ),
            refused(
                '`"auto"` with batches by tokens',
                "unit/train/test_split_limit.py::test_what_can_not_be_cut_is_said",
            ),
        ),
    ),
    Area(
        "Ranks that fail or are lost",
        (
            works(
                "the others stop within seconds, or within `parallel.timeout_s` if it is frozen, and name it",
                "faults: kill, rank 1 of 2",
                "faults: freeze, rank 1 of 2",
            ),
            works(
                "`--launch.max_restarts`: what was saved resumes on any number of ranks",
                "ranks/test_elastic.py::test_a_killed_rank_is_started_again_and_the_run_ends_at_the_same_bits",
            ),
            works(
                '`failures.lost_rank = "continue"` (extra `torchft`): `ddp` and `ordered` on CPUs, map-style data',
                "ranks/test_elastic_run.py::test_processes_killed_one_after_the_other_in_the_midst_of_updates_leave_no_trace_in_the_parameters",
            ),
            works(
                "… with `local`: shares over those that are left; who comes begins with what is shared; resumed on any "
                "number of ranks",
                "faults: local: ",
                "ranks/test_elastic_run.py::"
                "test_what_is_left_of_processes_that_step_alone_is_where_it_is_by_hand_whatever_they_were_doing",
            ),
            works("… with means on their way (`overlap_updates`)", "faults: means are on their way"),
            refused(
                '`"continue"` with strategies and pipelines whose ranks hold a part of the state',
                "unit/extras/elastic/test_membership.py::test_ranks_that_may_be_lost_share_no_model",
            ),
            limit(
                "process 0 keeps the run folder: while it is lost the others wait for it, at most `parallel.timeout_s`",
                "faults: process 0 of 3 is killed",
            ),
            limit('`"continue"` on several machines, started by hand'),
        ),
    ),
    Area(
        "Resume and rewind",
        (
            works(
                "the same bits with the same cut, on another number of ranks, strategy or pipeline if ordered",
                "prove: resume ",
                "prove: ranks ordered, resumed on",
                "prove: pipeline resumed on",
            ),
            works(
                "other hooks, early stopping, best checkpoints or average: begin afresh or are given up, which is said",
                "usage/test_resume.py::"
                "test_hooks_with_state_may_be_added_dropped_and_changed_when_a_run_goes_on_and_it_is_said",
            ),
            works(
                "an edited recipe: `--recipe current`",
                "unit/cli/test_resume.py::"
                "test_the_advice_of_a_failed_run_works_when_the_recipe_is_mended_where_it_was_written",
            ),
            works("killed at any micro-batch", "prove: resume killed"),
            works("rewind in place, from the run's own checkpoints", "prove: faults rewind"),
            refused(
                "another model, optimizer, seed, precision or data",
                "unit/train/test_trainer.py::test_a_state_that_does_not_fit_is_refused_and_changes_nothing",
                "unit/cli/test_resume.py::test_a_setting_that_would_make_it_another_run_is_refused",
            ),
            limit(
                "loss spikes are noticed when metrics are written",
                "unit/train/test_spikes.py::test_a_spike_is_said_once_until_it_is_over",
            ),
        ),
    ),
    Area(
        "Averages and weights",
        (
            works(
                "an average in float32 of parameters and buffers, on every strategy and in stages; decay warmed up; "
                "resumed on others, also before it begins, with the same bits",
                "usage/test_layouts.py::test_an_average_that_begins_in_the_midst_goes_on_on_other_ranks_shards_and_"
                "stages_with_its_bits",
                "unit/optim/test_ema.py::test_a_warmed_up_average_follows_its_formula_in_float64",
                "usage/test_layouts.py::test_plain_models_are_one_run_in_every_layout",
                "prove: average ",
            ),
            works(
                "evaluations with the average, the parameters, or both",
                "unit/train/test_trainer.py::test_evaluations_are_made_with_the_average_the_parameters_or_both",
            ),
            works(
                "what tensors are called, integers and flags: as any, and copied",
                "unit/optim/test_ema.py::test_what_a_tensor_is_called_does_not_matter",
                "unit/optim/test_ema.py::test_integers_and_flags_are_copied_also_once_the_decay_has_begun",
            ),
            works(
                "tasks that learn from the average (teachers), at any cut, with `ddp`, `ordered`, `zero1`, `fsdp`",
                "unit/train/test_now.py::test_a_mean_teacher_trains_as_a_plain_loop_does_at_every_cut",
                "unit/train/test_now.py::test_two_ranks_have_the_bits_of_one",
                "unit/train/test_now.py::test_a_run_with_a_teacher_goes_on_with_the_same_bits",
                "ranks/test_whole.py::test_on_two_processes",
            ),
            works(
                "… in stages, on the rank of the last one, resumed on other stages with the same bits",
                "unit/train/test_whole_of_stages.py::test_a_teacher_in_stages_has_the_bits_of_one_process",
                "unit/train/test_now.py::test_in_stages_a_mean_teacher_trains_as_a_plain_loop_does",
                "unit/train/test_whole_of_stages.py::test_a_run_with_a_teacher_goes_on_with_other_stages",
                "ranks/test_staged_shards.py::test_on_four_processes",
            ),
            limit(
                "a teacher in stages is asked where losses are computed, of models that can be put together there",
                "unit/train/test_whole_of_stages.py::test_a_teacher_that_is_asked_where_it_is_not_says_where_it_is",
                "unit/train/test_whole_of_stages.py::"
                "test_layers_and_formats_that_are_changed_after_the_cut_are_refused_by_name",
            ),
            refused(
                "teachers without an average",
                "unit/train/test_now.py::test_what_a_teacher_can_not_have_is_refused_by_name",
            ),
            works(
                "`evenstep average`: the mean of the last or best checkpoints, also of shards and stages",
                "unit/checkpoint/test_averaging.py::test_it_is_the_mean_in_float64_rounded_once",
                "unit/checkpoint/test_averaging.py::test_a_fault_at_any_operation_leaves_the_whole_or_nothing",
                "usage/test_averages.py::test_checkpoints_of_shards_and_stages_are_averaged_and_evaluated",
            ),
            refused(
                "the mean of different models, of too few checkpoints, or one that is not finite",
                "unit/checkpoint/test_averaging.py::test_weights_that_have_no_mean_are_refused_by_name",
                "unit/checkpoint/test_averaging.py::test_the_last_and_the_best_are_found_or_missed_by_name",
            ),
            works(
                "weights of a run, of safetensors as the hub has them, or of `torch.save`; a part by pattern; frozen",
                "unit/train/test_loading.py::test_weights_are_loaded_from_every_place",
                "unit/train/test_loading.py::test_a_part_is_loaded_by_pattern_and_the_rest_stays",
                "unit/train/test_loading.py::test_stages_load_what_they_have_and_refuse_together",
                "unit/cli/test_init_from.py::"
                "test_what_was_frozen_stays_so_and_a_run_that_goes_on_needs_the_weights_no_more",
            ),
            refused(
                "weights that do not fit, all of it named, unless `partial`; what would be executed",
                "unit/train/test_loading.py::test_weights_that_do_not_fit_are_refused_by_name_and_the_advice_works",
                "unit/train/test_loading.py::test_what_can_not_be_read_is_refused_by_name",
            ),
            refused(
                "weights that are integers or complex for floating parameters, or two for a parameter that is tied",
                "unit/train/test_loading.py::test_numbers_that_mean_something_else_are_refused_and_the_advice_works",
                "unit/train/test_loading.py::"
                "test_a_file_with_two_values_of_a_tied_parameter_is_refused_and_the_advice_works",
            ),
            works(
                "`reset`: optimizer, LR schedule, metrics or data afresh from a checkpoint; updates are counted on",
                "unit/train/test_resets.py::test_the_optimizer_begins_afresh_and_the_count_of_updates_stays",
                "unit/train/test_resets.py::test_the_schedule_counts_from_there_also_after_a_second_stop",
                "unit/train/test_resets.py::test_the_data_begin_with_their_first_batch_also_other_data",
                "unit/train/test_resets.py::test_metrics_and_what_follows_them_begin_afresh",
            ),
            works(
                "new options of the optimizer win over saved ones, and are said",
                "unit/train/test_resets.py::"
                "test_new_options_of_the_optimizer_win_and_are_said_and_no_schedule_undoes_them",
            ),
            works(
                "`evenstep export`: safetensors, whole or cut with the hub's index, converted, the average or not",
                "unit/checkpoint/test_export.py::test_the_library_reads_what_is_exported",
                "unit/checkpoint/test_export.py::test_it_is_cut_by_size_with_the_hubs_index_and_loaded_again",
                "unit/checkpoint/test_export.py::test_a_fault_at_any_operation_leaves_nothing",
            ),
            works(
                "… of the parameters that a schedule-free optimizer evaluates, made by it",
                "unit/cli/test_export.py::test_of_an_optimizer_that_evaluates_other_parameters_those_are_exported",
            ),
            refused(
                "… without the run file of such a run",
                "unit/checkpoint/test_export.py::"
                "test_parameters_that_nobody_has_evaluated_are_not_exported_and_the_advice_works",
            ),
        ),
    ),
    Area(
        "Checkpoints",
        (
            works(
                "safetensors and JSON, written in the background or not",
                "unit/train/test_saving.py::test_saved_in_the_background_or_not_is_the_same",
            ),
            works(
                "copies from a CUDA device in the background, while training goes on",
                "gpu/test_memory.py::test_what_a_save_has_copied_is_what_was_there_when_it_began",
                "gpu/test_memory.py::test_a_run_is_gone_on_with_to_the_bit",
            ),
            works(
                "whole, or cut over ranks; read on any number of ranks",
                "unit/checkpoint/test_sharding.py::test_any_number_of_ranks_reads_what_any_other_wrote",
            ),
            works(
                "complete or absent, whatever is killed or full",
                "unit/checkpoint/test_kill.py::test_a_reader_always_finds_a_complete_checkpoint_after_a_kill",
                "unit/checkpoint/test_small_disk.py::test_a_full_disk_keeps_the_old_checkpoint_and_takes_the_next_that_fits",
            ),
            refused(
                "an address of a store where a folder is read: `--resume`, `init_from`, `export`, `average`, `inspect`",
                "unit/test_addresses.py::test_every_command_refuses_an_address_in_one_line",
                "unit/test_addresses.py::test_what_is_advised_fetches_it",
                "unit/cli/test_train.py::"
                "test_to_resume_from_an_address_is_refused_and_what_is_advised_goes_on_from_its_copies",
            ),
            works(
                "copies in an object store (fsspec), complete or absent; a run without its folder goes on from them",
                "unit/checkpoint/test_mirror.py::test_whoever_dies_at_any_operation_leaves_complete_copies_or_none",
                "unit/train/test_mirror.py::test_a_run_whose_folder_is_lost_goes_on_from_the_newest_copy",
                "unit/checkpoint/test_sharding.py::test_ranks_copy_their_parts_and_the_copy_counts_when_all_are_there",
            ),
            works(
                "the same with a server of S3's protocol on this machine (a slow test, with the extra `hosts`)",
                "ranks/test_object_store.py::"
                "test_a_run_that_loses_process_and_folder_at_any_instant_ends_at_the_same_bits",
                "ranks/test_object_store.py::test_machines_that_share_no_folder_go_on_from_copies",
            ),
            works("S3 itself, or another cloud"),
            refused(
                "a mirror without its package, bucket, credentials or rights; copies of another run",
                "unit/checkpoint/test_mirror.py::test_a_mirror_that_may_not_be_used_is_refused_before_training",
                "unit/cli/test_check.py::test_a_mirror_is_tried_and_a_copy_that_would_be_fetched_is_gone_on_from",
                "unit/train/test_mirror.py::test_a_new_run_does_not_begin_where_another_has_copies",
            ),
            refused(
                "anything pickled, damaged, foreign or newer",
                "unit/checkpoint/test_verify.py::test_a_pickle_is_not_read",
                "unit/checkpoint/test_verify.py::test_a_newer_format_asks_for_an_upgrade",
            ),
            refused(
                "a folder that another run is in",
                "unit/train/test_saving.py::test_two_runs_in_one_folder_are_refused_and_the_first_is_not_harmed",
            ),
            works(
                "after an error the last committed update is saved, and the failing batch kept for `evenstep replay`",
                "unit/train/test_saving.py::test_after_an_error_the_last_committed_update_is_saved_and_goes_on_to_the_same_bits",
            ),
            works(
                "after an error of one rank, parts that are cut over ranks are saved by those that hold them",
                "faults: error on one rank: parts saved",
            ),
            limit(
                "after an error inside the optimizer's step the newest checkpoint stands",
                "unit/train/test_saving.py::test_an_error_inside_the_optimizer_step_leaves_no_checkpoint_of_a_half_step",
            ),
        ),
    ),
)
