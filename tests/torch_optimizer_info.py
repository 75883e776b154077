"""FusedAccumAdamW as a row of PyTorch's own table of optimizers (torch.testing._internal.common_optimizers)."""

import pytest
import torch
from torch.testing._internal.common_optimizers import (
    OptimizerInfo,
    _get_optim_inputs_including_global_cliquey_kwargs,
    optim_db,
)

from fused_accum import FusedAccumAdamW

ADAMW = next(row for row in optim_db if row.optim_cls is torch.optim.AdamW)
INFO = OptimizerInfo(
    FusedAccumAdamW,
    optim_inputs_func=ADAMW.optim_inputs_func,
    optim_error_inputs_func=ADAMW.optim_error_inputs_func,
    supported_impls=("foreach", "fused"),  # not "differentiable"
    not_og_supported_flags=ADAMW.not_og_supported_flags,
    supports_fused_on=("cpu", "cuda"),
    has_capturable_arg=True,
    supports_complex=False,
)

# Tests of PyTorch's test_optim.py that cannot apply, and why. Those that its table leaves out by the flags above
# (complex, sparse, differentiable, second order) are not even made.
CANNOT_APPLY = {
    "test_grads_are_never_inplaced_into": "reads p.grad after step(), where a consumed gradient is None "
    "(documented); that gradients are never written to is tested by harness.run_window",
    "test_fused_error_on_params_on_meta": "wants torch's words for the error; ours names the parameter and the way "
    "out: test_params_on_meta",
    "test_defaults_changed_to_foreach": "replaces the function _multi_tensor_<name> of the optimizer's module by a "
    "mock; all our implementations are one kernel, and there is no such function",
}
# Knows a decoupled decay by the name of the class, "AdamW", and then takes a small lr: it runs under that name.
RUNS_AS_ADAMW = ("test_step_is_noop_for_zero_grads",)


def kwargs_for(device: str, dtype: torch.dtype) -> list[dict]:
    """AdamW's constructor arguments in PyTorch's table, each with every setting of ``foreach`` and ``fused``; new
    ones, for tests change them."""
    inputs = _get_optim_inputs_including_global_cliquey_kwargs(device, dtype, INFO, skip=("differentiable",))
    return [dict(input.kwargs) for input in inputs]


def mark_gpu_tests(scope: dict) -> None:
    """Give the test classes that ``instantiate_device_type_tests`` made for a GPU the mark ``gpu``."""
    for name, case in scope.items():
        if name.endswith("CUDA"):
            case.pytestmark = [pytest.mark.gpu]
