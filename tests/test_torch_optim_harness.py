"""PyTorch's must-pass list for an optimizer, on PyTorch's own test harness: errors, updates, flags, groups.

Every test runs on each argument set of AdamW in PyTorch's table (torch_optimizer_info.py), on the CPU and, where
there is one, on a GPU (not run on one yet). State and hooks: test_torch_optim_harness_state.py. What of PyTorch's own
suite cannot apply, and why, is in torch_optimizer_info.CANNOT_APPLY; run_torch_suite.py runs that suite itself.
"""

import copy
import gc
import math

import pytest
import torch
from torch import nn

pytest.importorskip("expecttest", reason="PyTorch's test harness needs it: pip install -e '.[test]'")

from oracle import same_bits
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.testing._internal.common_device_type import instantiate_device_type_tests, onlyCUDA
from torch.testing._internal.common_dtype import floating_types_and
from torch.testing._internal.common_optimizers import OptimizerErrorEnum, optims
from torch.testing._internal.common_utils import TestCase, parametrize
from torch_optimizer_info import INFO, kwargs_for, mark_gpu_tests

FLAGS = ({}, {"foreach": True}, {"foreach": False}, {"fused": True}, {"fused": False})


def layer(device, dtype, contiguous=True):
    """A weight and a bias, dense or every second element of something larger, and an input for them."""
    values = [torch.randn(*shape, 2, device=device, dtype=dtype)[..., 0] for shape in ((10, 5), (10,))]
    if contiguous:
        values = [x.contiguous() for x in values]
    return *map(nn.Parameter, values), torch.randn(5, device=device, dtype=dtype)


def loss_of(weight, bias, x):
    return (weight @ x + bias).square().sum()


def follow(schedulers, loss):
    for scheduler in schedulers:
        scheduler.step(*[loss.detach()] if isinstance(scheduler, ReduceLROnPlateau) else [])


class TestUpdates(TestCase):
    @optims([INFO])
    def test_errors(self, device, dtype, optim_info):
        """What torch refuses, in torch's words; what torch warns of."""
        for case in optim_info.optim_error_inputs_func(device=device, dtype=dtype):
            assert case.error_on == OptimizerErrorEnum.CONSTRUCTION_ERROR
            warning = issubclass(case.error_type, Warning)
            expected = self.assertWarnsRegex if warning else self.assertRaisesRegex
            params, kwargs = case.optimizer_error_input.params, case.optimizer_error_input.kwargs
            with expected(case.error_type, case.error_regex):
                optim_info.optim_cls([torch.zeros(1)] if params is None else params, **kwargs)
        for other, words in (("foreach", "cannot be `True` together"), ("differentiable", "does not support")):
            with pytest.raises(RuntimeError, match=words):
                optim_info.optim_cls([torch.zeros(1, device=device)], fused=True, **{other: True})

    @parametrize("contiguous", [True, False])
    @parametrize("scheduled", [True, False])
    @optims([INFO])
    def test_the_loss_goes_the_right_way(self, device, dtype, optim_info, contiguous, scheduled):
        """Downwards, with maximize upwards; in windows of one micro-batch and of two."""
        for makers in optim_info.scheduler_inputs if scheduled else [[]]:
            for count in (1, 2):
                for kwargs in kwargs_for(device, dtype):
                    weight, bias, x = layer(device, dtype, contiguous)
                    opt = optim_info.optim_cls([weight, bias], **kwargs)
                    schedulers = [make(opt) for make in makers]
                    first = loss_of(weight, bias, x).item()
                    for _ in range(8):
                        for left in reversed(range(count)):
                            loss = loss_of(weight, bias, x)
                            loss.backward()
                            (opt.accumulate if left else opt.step)(scale=1 / count)
                        follow(schedulers, loss)
                    last = loss_of(weight, bias, x).item()
                    assert last > first if kwargs.get("maximize") else last < first

    @optims([INFO])
    def test_groups_under_a_scheduler(self, device, dtype, optim_info):
        for makers in optim_info.scheduler_inputs:
            weight, bias, x = layer(device, dtype)
            opt = optim_info.optim_cls([{"params": [weight]}, {"params": [bias], "lr": 0.01}])
            schedulers = [make(opt) for make in makers]
            losses = []

            def closure(opt=opt, weight=weight, bias=bias, x=x):
                opt.zero_grad()
                loss = loss_of(weight, bias, x)
                loss.backward()
                return loss

            for _ in range(8):
                losses.append(opt.step(closure))
                follow(schedulers, losses[-1])
            assert losses[-1] < losses[0]

    @parametrize("dims", [0, 1, 2])
    @optims([INFO])
    def test_lr_as_a_tensor(self, device, dtype, optim_info, dims):
        """Of one element, in memory of the host or of the device: what the number gives, to the bit."""
        for kwargs in kwargs_for(device, dtype):
            lr = float(torch.tensor(0.01))  # both start from the float32 number
            for where in {"cpu", torch.device(device).type}:
                weight, bias, x = layer(device, dtype)
                params = [weight, bias]
                twins = [nn.Parameter(p.detach().clone()) for p in params]
                tensor = torch.full([1] * dims, lr, device=where)
                if kwargs.get("foreach") and not kwargs.get("capturable"):
                    with pytest.raises(ValueError, match="lr as a Tensor is not supported"):
                        optim_info.optim_cls(twins, **{**kwargs, "lr": tensor})
                    continue
                opt = optim_info.optim_cls(twins, **{**kwargs, "lr": tensor})
                number = optim_info.optim_cls(params, **{**kwargs, "lr": lr})
                for _ in range(3):
                    loss_of(*params, x).backward()
                    loss_of(*twins, x).backward()
                    number.step()
                    opt.step()
                assert all(map(same_bits, params, twins))

    @optims([INFO], dtypes=floating_types_and(torch.bfloat16, torch.float16))
    def test_every_flag_is_the_loop(self, device, dtype, optim_info):
        """foreach and fused change no bit; and the result is that of torch.optim.AdamW's loop (in 16 bits, where that
        rounds after every operation, of its fused step), through an iteration without a backward, a layer frozen for
        two, and a gradient that is there only once."""
        theirs = {"fused": True} if dtype.itemsize == 2 else {"foreach": False}
        for input in optim_info.optim_inputs_func(device=device, dtype=dtype):
            runs = []
            for cls, flags in [(torch.optim.AdamW, theirs), *[(optim_info.optim_cls, f) for f in FLAGS]]:
                torch.manual_seed(1)
                model = nn.Sequential(nn.Linear(2, 3), nn.Sigmoid(), nn.Linear(3, 1), nn.Sigmoid()).to(device, dtype)
                x = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]], device=device, dtype=dtype)
                other = torch.ones((), device=device, dtype=dtype, requires_grad=True)
                other.grad = torch.full_like(other, 0.3)
                ours = {} if cls is torch.optim.AdamW else {"state_dtype": None}
                opt = cls([*model.parameters(), other], **{**copy.deepcopy(input.kwargs), **ours, **flags})
                for n in range(7):
                    model[2].requires_grad_(n not in (3, 4))
                    if n != 2:
                        model(x).sum().backward()
                    opt.step()
                    opt.zero_grad()
                runs.append((opt, [*model.parameters(), other]))
            (stock, expected), *flagged = runs
            for opt, params in flagged:
                for p, q, r in zip(expected, flagged[0][1], params):
                    assert same_bits(q, r)
                    torch.testing.assert_close(p, r)
                    assert stock.state[p].keys() == opt.state[r].keys()
                    for key, value in stock.state[p].items():
                        assert same_bits(opt.state[r][key], flagged[0][0].state[q][key])
                        assert opt.state[r][key].dtype == value.dtype
                        torch.testing.assert_close(value, opt.state[r][key])

    @optims([INFO])
    def test_dtypes_in_one_optimizer(self, device, dtype, optim_info):
        """Together they do what each does alone."""
        dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
        for kwargs in kwargs_for(device, dtype):
            params = [torch.rand(2, 3, dtype=d, device=device, requires_grad=True) for d in dtypes]
            twins = [p.detach().clone().requires_grad_() for p in params]
            together = optim_info.optim_cls(params, **copy.deepcopy(kwargs))
            alone = [optim_info.optim_cls([p], **copy.deepcopy(kwargs)) for p in twins]
            for _ in range(3):
                for p, q in zip(params, twins):
                    p.grad = torch.randn_like(p)
                    q.grad = p.grad.clone()
                for opt in (together, *alone):
                    opt.step()
            assert all(map(same_bits, params, twins))

    @parametrize("default", [torch.float64, torch.float16])
    @optims([INFO])
    def test_step_has_torchs_dtype(self, device, dtype, optim_info, default):
        """float32, or float64 where that is the default."""
        before = torch.get_default_dtype()
        try:
            torch.set_default_dtype(default)
            p = torch.ones(3, device=device, dtype=dtype)
            opt = optim_info.optim_cls([p])
            p.grad = torch.ones_like(p)
            opt.step()
            expected = torch.float64 if default == torch.float64 else torch.float32
            assert opt.state[p]["step"].dtype == expected
        finally:
            torch.set_default_dtype(before)

    @optims([INFO])
    def test_params_on_meta(self, device, dtype, optim_info):
        """Refused when stepped, and usable once they have data. torch's words are others."""
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(2, 3), nn.Sigmoid(), nn.Linear(3, 1)).to(dtype)
            for p in model.parameters():
                p.grad = torch.rand_like(p)
        opt = optim_info.optim_cls(model.parameters(), fused=True)
        with pytest.raises(RuntimeError, match=r"meta device.*to_empty"):
            opt.step()
        opt.zero_grad()
        model.to_empty(device=device)
        opt.param_groups[0]["params"] = params = list(model.parameters())  # to_empty makes new ones
        for p in params:
            p.data.fill_(1.0)
            p.grad = torch.ones_like(p)
        opt.step()
        assert all(bool((p < 1).all()) for p in model.parameters())

    @optims([INFO])
    def test_found_inf_stops_the_step(self, device, dtype, optim_info):
        """As GradScaler sets it: a tensor, with and without a scale beside it. The next step is the first."""
        for input in optim_info.optim_inputs_func(device=device):
            for scale in (None, torch.ones(1, device=device)):
                params = [torch.ones(1, device=device, dtype=dtype) for _ in range(5)]
                opt = optim_info.optim_cls(params, fused=True, **input.kwargs)
                for found in (1.0, 0.0):
                    for p in params:
                        p.grad = torch.ones_like(p)
                    opt.grad_scale, opt.found_inf = scale, torch.tensor(found, device=device)
                    opt.step()
                    for p in params:
                        assert (float(p) == 1.0) == bool(found)
                        assert float(opt.state[p].get("step", 0.0)) == 1.0 - found

    @optims([INFO])
    def test_decay_is_the_groups(self, device, dtype, optim_info):
        """Of two equal parameters in two groups the one without decay moves as it would alone, the other not."""
        for kwargs in kwargs_for(device, dtype):
            start, grads = torch.randn(10, 5, device=device, dtype=dtype), torch.randn(3, 10, 5, device=device)
            params = [nn.Parameter(start.clone()) for _ in range(3)]
            plain = {**kwargs, "weight_decay": 0.0}
            both = optim_info.optim_cls(
                [{"params": [params[0]], **kwargs, "weight_decay": 0.4}, {"params": [params[1]], **plain}]
            )
            alone = optim_info.optim_cls([params[2]], **plain)
            for g in grads:
                for p in params:
                    p.grad = g.to(dtype)
                both.step()
                alone.step()
            assert same_bits(params[1], params[2])
            assert not torch.allclose(params[0], params[1], rtol=1e-4)

    @optims([INFO])
    def test_lr_is_the_groups(self, device, dtype, optim_info):
        """A group without its own takes the constructor's, here too small to be seen."""
        for kwargs in kwargs_for(device, dtype):
            weight, bias, x = layer(device, dtype)
            still = nn.Parameter(torch.randn(2, 2, device=device, dtype=dtype))
            before = still.detach().clone()
            kwargs.setdefault("lr", 1e-3)
            opt = optim_info.optim_cls([{"params": [weight, bias], **kwargs}, {"params": [still]}], lr=1e-28)
            first = loss_of(weight, bias, x).item()
            for _ in range(8):
                loss_of(weight, bias, x).backward()
                still.grad = torch.rand_like(still)
                opt.step()
            last = loss_of(weight, bias, x).item()
            assert last > first if kwargs.get("maximize") else last < first
            assert same_bits(still, before)

    @parametrize("grad", ["none", "zero"])
    @optims([INFO])
    def test_nothing_moves_without_a_gradient(self, device, dtype, optim_info, grad):
        """None, as of what does not require one, leaves the state empty too; zeros, without decay, all but that."""
        for kwargs in kwargs_for(device, dtype):
            p = torch.randn(5, 1, device=device, dtype=dtype, requires_grad=grad == "zero")
            before = p.detach().clone()
            opt = optim_info.optim_cls([p], **{**kwargs, "weight_decay": 0.4 if grad == "none" else 0.0})
            p.grad = torch.zeros_like(p) if grad == "zero" else None
            loss = torch.tensor([1.0], device=device)
            assert opt.step(lambda loss=loss: loss) is loss
            assert same_bits(p, before)
            assert bool(opt.state[p]) == (grad == "zero")

    @optims([INFO])
    def test_gradients_are_not_written_to(self, device, dtype, optim_info):
        for kwargs in kwargs_for(device, dtype):
            p = torch.randn(5, 1, device=device, dtype=dtype, requires_grad=True)
            opt = optim_info.optim_cls([p], **kwargs)
            g = torch.rand_like(p)
            before = g.clone()
            for call in (opt.accumulate, opt.step):
                p.grad = g
                call()
            assert g._version == 0
            assert same_bits(g, before)

    @onlyCUDA
    @optims([INFO])
    def test_peak_memory_of_a_step(self, device, dtype, optim_info):
        """A step of one micro-batch needs no memory beyond the state; torch's foreach takes a copy of the list."""
        for kwargs in kwargs_for(device, dtype):
            params = [torch.rand(128, 128, device=device, dtype=dtype) for _ in range(10)]
            opt = optim_info.optim_cls(params, **kwargs)
            for _ in range(2):
                for p in params:
                    p.grad = torch.rand_like(p)
                gc.collect()
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                opt.step()
            assert torch.cuda.max_memory_allocated() - before < params[0].nbytes
            assert all(math.isfinite(float(p.sum())) for p in params)


instantiate_device_type_tests(TestUpdates, globals(), only_for=("cpu", "cuda"))
mark_gpu_tests(globals())
