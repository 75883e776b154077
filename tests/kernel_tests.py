"""Tests of all backends that reach every kernel and every way to it: for backends that run slowly without a GPU."""

from pathlib import Path

NAMES = (
    "buffers_hold_the_scaled_sum",
    "first_contribution_does_not_read_the_buffer",
    "nan_and_inf_arrive_in_the_buffer",
    "gradient_that_is_a_view_of_another_tensor_is_not_written",
    "conjugate_and_negative_views_are_read_as_they_look",
    "scale_and_weight_may_be_tensors",
    "empty_tensor_in_every_position",
    "conversions_at_the_edges",
    "storing_rounds_to_nearest_even",
    "bf16_buffer_rounds_to_nearest_even_at_every_add",
    "mixed_dtypes_in_one_group",
    "gradient_dtype_may_change_within_a_window",
    "buffer_after_a_cast_between_windows",
    "many_dimensions",
    "moments_and_buffer_show_the_parameters_shape",
    "parameters_that_share_storage_are_updated_one_after_the_other",
    "neighbours_in_one_storage_do_not_touch_each_other",
    "data_swapped",
    "parameter_changes_layout_between_windows",
    "step_with_the_last_microbatch_equals_accumulate_then_step",
    "step_per_parameter",
    "groups_have_their_own_hyperparameters",
    "amsgrad_switched_on_and_off",
    "inference_mode",
    "versions_are_bumped",
    "dtypes_of_scattered_rows",
    "rows_that_no_token_names_are_not_touched",
    "replaced_parameters_refresh_the_masters",
    "split_is_exact_and_rounds_ties_away",
    "words_are_those_of_seed_step_parameter_and_element",
    "masters_with_max_grad_norm_equal_fp32_adamw_with_clip",
    "not_finite_without_skipping_is_as_in_torch",
)

# Of master weights, stochastic rounding, clipping and skipping, and of an embedding's gradient added directly.
PRECISION = (
    "everything_at_once",
    "replaced_parameters_refresh_the_masters",
    "replaced_parameters_count_with_split_masters",
    "mid_window_checkpoint_before_any_update",
    "versions_of_masters_are_bumped",
    "words_are_those_of_seed_step_parameter_and_element",
    "layout_in_memory_does_not_matter",
    "masters_with_max_grad_norm_equal_fp32_adamw_with_clip",
    "dtypes_and_groups",
    "norm_of_each_parameter",
    "not_finite_without_skipping_is_as_in_torch",
    "a_window_that_went_through_a_copy",
    "in_backward_a_replaced_p_grad_is_what_counts",
    "the_coefficient_may_stay_on_the_device",
    "the_decision_may_stay_on_the_device",
    "one_micro_batch",
    "large_gradients_are_finite",
    "a_rejected_micro_batch_does_not_count",
    "buffer_dtypes",
)


def found(names: tuple[str, ...] = NAMES) -> list[str]:
    """Those tests as pytest names them, relative to this folder."""
    texts = {path.name: path.read_text() for path in Path(__file__).parent.glob("test_*.py")}
    where = {name: [file for file, text in texts.items() if f"def test_{name}(" in text] for name in names}
    assert all(where.values()), f"renamed? {[name for name, files in where.items() if not files]}"
    return [f"{file}::test_{name}" for name, files in where.items() for file in files]
