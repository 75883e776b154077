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
)


def found() -> list[str]:
    """Them as pytest names them, relative to this folder."""
    texts = {path.name: path.read_text() for path in Path(__file__).parent.glob("test_*.py")}
    where = {name: [file for file, text in texts.items() if f"def test_{name}(" in text] for name in NAMES}
    assert all(where.values()), f"renamed? {[name for name, files in where.items() if not files]}"
    return [f"{file}::test_{name}" for name, files in where.items() for file in files]
