"""PyTorch's must-pass list for an optimizer, on PyTorch's own test harness: state dicts, copies, hooks, printing.

See test_torch_optim_harness.py.
"""

import copy
import io

import pytest
import torch
from torch import nn

pytest.importorskip("expecttest", reason="PyTorch's test harness needs it: pip install -e '.[test]'")

from harness import copies
from oracle import same_bits
from torch.optim import SGD
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.testing._internal.common_device_type import instantiate_device_type_tests, onlyCUDA
from torch.testing._internal.common_optimizers import optims
from torch.testing._internal.common_utils import TestCase, parametrize
from torch_optimizer_info import INFO, kwargs_for, mark_gpu_tests


def backward(model, x):
    model.zero_grad()
    model(x).square().sum().backward()


def conv_net(device, dtype):
    model = nn.Sequential(nn.Conv2d(4, 2, 1, stride=2), nn.BatchNorm2d(2)).to(device, dtype)
    return model, torch.rand(1, 4, 16, 16, device=device, dtype=dtype)


def trained(cls, device, dtype, kwargs, named=False, steps=3):
    model, x = conv_net(device, dtype)
    opt = cls(model.named_parameters() if named else model.parameters(), **kwargs)
    for _ in range(steps):
        backward(model, x)
        opt.step()
    return model, x, opt


def without_names(state):
    groups = [{k: v for k, v in group.items() if k != "param_names"} for group in state["param_groups"]]
    return {**state, "param_groups": groups}


class TestState(TestCase):
    @parametrize("first_named", [True, False])
    @parametrize("second_named", [True, False])
    @optims([INFO])
    def test_state_dict_is_deterministic(self, device, dtype, optim_info, first_named, second_named):
        """What was loaded trains as what was saved, and its state_dict is the same; names follow whoever has some."""
        for kwargs in kwargs_for(device, dtype):
            model, x, opt = trained(optim_info.optim_cls, device, dtype, kwargs, first_named)
            twin = copy.deepcopy(model)
            source = twin.named_parameters() if second_named else twin.parameters()
            other = optim_info.optim_cls(source, **kwargs)
            other.load_state_dict(copy.deepcopy(opt.state_dict()))
            for _ in range(3):
                for net, one in ((model, opt), (twin, other)):
                    backward(net, x)
                    one.step()
                assert all(map(same_bits, model.parameters(), twin.parameters()))
            saved = other.state_dict()
            self.assertEqual(without_names(opt.state_dict()), without_names(saved))  # noqa: PT009
            names = [name for name, _ in model.named_parameters()]
            assert saved["param_groups"][0].get("param_names") == (names if first_named or second_named else None)
            # A parameter that occurs twice has one number.
            other.param_groups.extend(other.param_groups)
            twice = other.state_dict()["param_groups"]
            assert twice[0]["params"] == twice[-1]["params"] == opt.state_dict()["param_groups"][0]["params"]

    @optims([INFO])
    def test_older_state_dict(self, device, dtype, optim_info):
        """Flags that newer versions of torch added may be missing."""
        for kwargs in kwargs_for(device, dtype):
            model, x, opt = trained(optim_info.optim_cls, device, dtype, kwargs)
            old = copy.deepcopy(opt.state_dict())
            for group in old["param_groups"]:
                for flag in optim_info.not_og_supported_flags:
                    group.pop(flag)
            opt.load_state_dict(old)
            backward(model, x)
            opt.step()
            assert {float(state["step"]) for state in opt.state.values()} == {4.0}

    @parametrize("named", [True, False])
    @optims([INFO])
    def test_saved_file(self, device, dtype, optim_info, named):
        """Through a file, with weights_only, nothing changes; in mid-window neither."""
        for kwargs in kwargs_for(device, dtype):
            model, x, opt = trained(optim_info.optim_cls, device, dtype, kwargs, named)
            for pending in (0, 1):
                if pending:
                    backward(model, x)
                    opt.accumulate(weight=3)
                    with pytest.warns(UserWarning, match="mid-window"):
                        saved = opt.state_dict()
                    assert "accum" in saved["state"][0]
                else:
                    saved = opt.state_dict()
                file = io.BytesIO()
                torch.save(saved, file)
                for weights_only in (True, False):
                    file.seek(0)
                    self.assertEqual(torch.load(file, weights_only=weights_only), saved)  # noqa: PT009

    @optims([INFO])
    def test_step_that_is_no_tensor(self, device, dtype, optim_info):
        for kwargs in kwargs_for(device, dtype):
            model, x, opt = trained(optim_info.optim_cls, device, dtype, kwargs)
            old = copy.deepcopy(opt.state_dict())
            for state in old["state"].values():
                state["step"] = state["step"].item()
            opt.load_state_dict(old)
            backward(model, x)
            opt.step()
            assert {float(state["step"]) for state in opt.state.values()} == {4.0}

    @onlyCUDA
    @optims([INFO])
    def test_state_dict_onto_a_device(self, device, dtype, optim_info):
        """A host run's checkpoint continues on the device; steps are there where torch puts them when loading."""
        for kwargs in kwargs_for("cpu", dtype):
            model, _, opt = trained(optim_info.optim_cls, "cpu", dtype, kwargs)
            params = list(model.parameters())
            twins = [nn.Parameter(p.detach().to(device)) for p in params]
            other = optim_info.optim_cls(twins, **kwargs)
            saved = copy.deepcopy(opt.state_dict())
            other.load_state_dict(saved)
            self.assertEqual(saved, opt.state_dict())  # noqa: PT009  loading left it alone
            where = device if kwargs.get("capturable") or kwargs.get("fused") else "cpu"
            assert {state["step"].device.type for state in other.state.values()} == {torch.device(where).type}
            for _ in range(3):
                for p, q in zip(params, twins):
                    p.grad = torch.randn_like(p)
                    q.grad = p.grad.to(device)
                opt.step()
                other.step()
            for p, q in zip(params, twins):
                torch.testing.assert_close(p, q.cpu())

    @onlyCUDA
    @parametrize("flag", ["fused", "capturable"])
    @optims([INFO])
    def test_checkpoint_that_was_moved_to_the_host(self, device, dtype, flag, optim_info):
        """torch.load(map_location="cpu") of a device optimizer: all state, steps too, comes from the host."""
        for input in optim_info.optim_inputs_func(device="cpu"):
            p = torch.tensor([0.1, 0.2], dtype=dtype)
            source = optim_info.optim_cls([p], **input.kwargs)
            p.grad = torch.rand_like(p)
            source.step()
            saved = copy.deepcopy(source.state_dict())
            saved["param_groups"][0][flag] = True
            q = p.detach().to(device)
            opt = optim_info.optim_cls([q], **{**input.kwargs, flag: True})
            opt.load_state_dict(saved)
            p.grad = torch.rand_like(p)
            q.grad = p.grad.to(device)
            for one in (source, opt):
                one.step()
            torch.testing.assert_close(p, q.cpu())
            assert float(opt.state[q]["step"]) == 2.0

    @optims([INFO])
    def test_deepcopy_copies_all_public_attributes(self, device, dtype, optim_info):
        for kwargs in kwargs_for(device, dtype):
            _, _, opt = trained(optim_info.optim_cls, device, dtype, kwargs)
            public = [{key for key in vars(one) if not key.startswith("_")} for one in (opt, copy.deepcopy(opt))]
            assert public[0] == public[1]

    @optims([INFO])
    def test_state_is_there_after_a_step(self, device, dtype, optim_info):
        for kwargs in kwargs_for(device, dtype):
            model, _, opt = trained(optim_info.optim_cls, device, dtype, kwargs, steps=1)
            assert set(opt.state) == set(model.parameters())
            assert all(opt.state.values())

    @optims([INFO])
    def test_it_can_be_printed(self, device, dtype, optim_info):
        for kwargs in kwargs_for(device, dtype):
            text = repr(optim_info.optim_cls([torch.zeros(2, 3, device=device, dtype=dtype)], **kwargs))
            assert text.startswith("FusedAccumAdamW (\nParameter Group 0\n")
            for key in kwargs:
                assert f"{key}: " in text


class TestHooks(TestCase):
    @parametrize("before", [True, False])
    @parametrize("after", [True, False])
    @optims([INFO])
    def test_state_dict_hooks(self, device, dtype, optim_info, before, after):
        """The first may add to the state, even what is no parameter; the last may change the result."""
        for kwargs in kwargs_for(device, dtype):
            opt = optim_info.optim_cls([torch.rand(2, 3, device=device, dtype=dtype)], **kwargs)
            if before:
                opt.register_state_dict_pre_hook(lambda opt: opt.state.update(test=1))
            if after:
                opt.register_state_dict_post_hook(
                    lambda opt, state: {**state, "state": {}, "seen": state["state"].get("test")}
                )
            saved = opt.state_dict()
            assert saved["state"].get("test") == (1 if before and not after else None)
            assert saved.get("seen") == (1 if before and after else None)

    @optims([INFO])
    def test_load_state_dict_hooks(self, device, dtype, optim_info):
        """One may change what is loaded or return another; the order is that of registration, but for prepend."""
        for kwargs in kwargs_for(device, dtype):
            opt = optim_info.optim_cls([torch.rand(2, 3, device=device, dtype=dtype)], **kwargs)
            seen = []

            def change(opt, state):
                state["param_groups"][0]["lr"] = 0.002

            def replace(opt, state, seen=seen):
                seen.append("replaced")
                state = copy.deepcopy(state)
                state["param_groups"][0]["lr"] = 0.003
                return state

            opt.register_load_state_dict_pre_hook(change)
            opt.load_state_dict(opt.state_dict())
            assert opt.param_groups[0]["lr"] == 0.002
            first = opt.register_load_state_dict_pre_hook(replace, prepend=True)
            opt.load_state_dict(opt.state_dict())
            assert opt.param_groups[0]["lr"] == 0.002
            first.remove()
            opt.register_load_state_dict_pre_hook(replace)
            opt.register_load_state_dict_post_hook(
                lambda opt, seen=seen: seen.append(opt.param_groups[0]["lr"])  # may return nothing
            )
            opt.load_state_dict(opt.state_dict())
            assert seen == ["replaced", "replaced", 0.003]

    @optims([INFO])
    def test_step_hooks(self, device, dtype, optim_info):
        """Those of all optimizers around those of this one; each once a step, none once removed."""
        (p,) = copies([torch.ones(1, 2, device=device, dtype=dtype)])
        for kwargs in kwargs_for(device, dtype):
            opt, sgd, calls = optim_info.optim_cls([p], **kwargs), SGD([p]), []

            def note(word, calls=calls):
                return lambda opt, args, kwargs: calls.append(word)

            handles = [
                register_optimizer_step_pre_hook(note("all before")),
                register_optimizer_step_post_hook(note("all after")),
                *[one.register_step_pre_hook(note("before")) for one in (opt, sgd)],
                *[one.register_step_post_hook(note("after")) for one in (opt, sgd)],
            ]
            once = ["all before", "before", "after", "all after"]
            try:
                for n, one in enumerate((opt, sgd, opt), 1):
                    p.grad = torch.ones_like(p)
                    one.step()
                    assert calls == once * n
                p.grad = torch.ones_like(p)
                opt.accumulate()  # is not a step
                assert calls == once * 3
            finally:
                for handle in handles:
                    handle.remove()
            opt.step()
            assert calls == once * 3


instantiate_device_type_tests(TestState, globals(), only_for=("cpu", "cuda"))
instantiate_device_type_tests(TestHooks, globals(), only_for=("cpu", "cuda"))
mark_gpu_tests(globals())
