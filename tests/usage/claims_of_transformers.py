"""Claims about models of transformers."""

from claims import Area, limit, refused, works

AREAS = (
    Area(
        "Models of transformers",
        (
            works(
                "the loss of decoders, encoder-decoders and classifiers: a sum over what is counted; weights of tokens "
                "and classes",
                "unit/hf/test_language.py::test_the_loss_is_the_sum_over_the_tokens_of_each_document",
                "unit/hf/test_language.py::test_weights_are_those_of_the_labels_beside_them",
                "unit/hf/test_language.py::test_an_encoder_decoder_learns_the_labels_where_they_stand",
                "unit/hf/test_classification.py::test_the_loss_is_that_of_transformers_times_the_number_of_labels",
                "unit/hf/test_classification.py::test_weights_count_a_label_more_or_less",
            ),
            works(
                "Llama and T5 have the same parameters with any cut, on 2 ranks of `ddp` and `fsdp`, and the same bits "
                "resumed",
                "unit/hf/test_language.py::test_any_cut_gives_the_same_parameters",
                "unit/hf/test_language.py::test_a_resumed_run_has_the_same_bits",
                "ranks/test_hf.py::test_two_ranks_have_the_parameters_of_one_and_generate_alike",
            ),
            works(
                "packed rows: a token's loss is that in its document alone; the run has the parameters of one unpacked",
                "unit/hf/test_packing.py::test_a_packed_token_has_the_loss_that_it_has_in_its_document_alone",
                "unit/hf/test_packing.py::test_packed_or_not_and_however_cut_a_run_has_the_same_parameters",
                "unit/hf/test_packing.py::test_a_run_may_be_packed_from_where_it_was_left_unpacked",
            ),
            works(
                "token budgets of packed rows (`packed`), without padding; the updates do not depend on the rows",
                "unit/hf/test_packing.py::test_updates_of_so_many_packed_tokens_do_not_depend_on_the_rows",
                "unit/data/test_sampling.py::"
                "test_packed_batches_take_the_samples_in_their_order_while_the_sum_of_their_tokens_is_within_the_budget",
            ),
            works(
                "scores that are never in memory at once, with `fsdp` as well",
                "unit/hf/test_language.py::test_the_scores_of_all_tokens_are_never_in_memory",
                "ranks/test_hf.py::test_two_ranks_have_the_parameters_of_one_and_generate_alike",
            ),
            works(
                "folders in the hub's layout are begun with and written; tied weights once",
                "unit/hf/test_saving.py::test_what_is_written_gives_the_same_scores",
                "unit/hf/test_saving.py::test_a_run_begins_with_what_transformers_has_written",
                "unit/recipes/test_sft.py::test_a_trained_run_is_exported_as_the_hub_has_models",
            ),
            works(
                "a folder in the hub's layout at the end of a run (`SavePretrained`), of the last or best checkpoint, "
                "on 2 ranks of `ddp` and `fsdp`; refused in stages",
                "unit/hf/test_pretrained.py::test_a_run_leaves_its_last_or_its_best_model_as_the_hub_has_models",
                "unit/hf/test_pretrained.py::test_what_is_there_stays_whole_until_there_is_something_newer",
                "unit/hf/test_pretrained.py::test_what_has_no_such_layout_is_refused_before_training",
                "ranks/test_hf.py::test_two_ranks_have_the_parameters_of_one_and_generate_alike",
            ),
            works(
                "adapters of peft train alone, resume exactly, and are read by peft",
                "unit/hf/test_saving.py::test_adapters_train_alone_resume_exactly_and_are_read_by_peft",
                "ranks/test_hf.py::test_two_ranks_have_the_parameters_of_one_and_generate_alike",
            ),
            works(
                "learned prompts of peft, which predict the first token; smoothed labels of tokens and classes",
                "unit/hf/test_language.py::test_a_learned_prompt_predicts_the_first_token_as_in_transformers",
                "unit/hf/test_language.py::test_label_smoothing_spreads_a_part_of_the_target_evenly",
                "unit/hf/test_classification.py::test_label_smoothing_is_that_of_transformers",
            ),
            works(
                "seventy families of transformers have the parameters of a plain loop in float64, whole and cut",
                "unit/hf/test_families.py::test_a_family_has_the_parameters_of_a_plain_loop_whole_and_cut",
            ),
            works(
                "the losses of transformers' Trainer to 1e-6 under every cut (recipe `sft`)",
                "unit/recipes/test_sft.py::test_some_updates_have_the_losses_of_transformers",
                "unit/recipes/test_sft.py::test_each_cut_has_the_curve_of_transformers",
            ),
            refused(
                "losses over a whole batch, such as those that spread tokens over experts; models in stages",
                "unit/hf/test_language.py::test_models_that_add_a_loss_over_a_whole_batch_are_refused",
            ),
            refused(
                "packed rows for a model that lets documents see each other, or without saying `packed`",
                "unit/hf/test_packing.py::test_a_model_that_does_not_keep_documents_apart_is_refused",
                "unit/hf/test_language.py::test_what_a_batch_lacks_is_said",
            ),
            refused(
                "`chunked` for a model that does more with its head's scores than to give them",
                "unit/hf/test_language.py::test_what_can_not_be_made_in_chunks_is_refused",
            ),
            refused(
                "columns of tokens that a model, or packing, would ignore: masks of other libraries, misspelt names",
                "unit/hf/test_columns.py::test_a_mask_that_the_model_would_ignore_is_refused_by_its_name",
                "unit/hf/test_columns.py::test_a_column_of_tokens_that_packing_would_drop_is_refused_by_its_name",
                "unit/hf/test_columns.py::test_the_advice_trains_what_the_mask_is_meant_to_say",
            ),
            limit(
                "a checkpoint of adapters holds the frozen weights as well; the export does not",
                "unit/hf/test_saving.py::test_adapters_train_alone_resume_exactly_and_are_read_by_peft",
            ),
        ),
    ),
)
