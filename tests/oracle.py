"""Independent float64 AdamW with gradient accumulation (design section 1), carrying rigorous error bounds.

Beside each value the oracle keeps a bound on what rounding may do to it, built from `cases.ROUNDOFF`,
`cases.SUBNORMAL` and `cases.ROUNDINGS` alone. A comparison is therefore as tight as the arithmetic allows for
any input (cancellation, tiny gradients, long windows), and one table serves all tests.
"""

from dataclasses import dataclass

import torch
from cases import ROUNDINGS, ROUNDOFF, SUBNORMAL
from torch import Tensor


@dataclass
class Micro:
    """One micro-batch: a gradient or None per parameter, and what accumulate() is given."""

    grads: list
    scale: float = 1.0
    weight: float | None = None


@dataclass
class Bounded:
    """A float64 value and a bound on the distance of any correctly computed one from it."""

    value: Tensor
    bound: Tensor

    @classmethod
    def exact(cls, tensor: Tensor) -> "Bounded":
        value = tensor.detach().to("cpu", torch.float64, copy=True)
        return cls(value, torch.zeros_like(value))


class Cell:
    """What the oracle knows of one parameter."""

    def __init__(self, p: Tensor, accum_dtype: torch.dtype, state_dtype: torch.dtype | None):
        double = p.dtype == torch.float64
        self.compute = torch.float64 if double else torch.float32
        self.accum_dtype = torch.float64 if double else accum_dtype
        self.state_dtype = p.dtype if double or state_dtype is None else state_dtype
        self.step = 0
        self.param = Bounded.exact(p)
        self.initial = p.detach().clone()
        zero = torch.zeros_like(self.param.value)
        self.exp_avg = Bounded(zero, zero)
        self.exp_avg_sq = Bounded(zero, zero)
        self.max_exp_avg_sq = Bounded(zero, zero)

    def rounding(self, magnitude, quantity: str, stored: torch.dtype | None = None, value=None):
        """Bound on the rounding errors of one equation whose terms have this magnitude in all."""
        # The oracle itself rounds like a float64 parameter does.
        own = 2 if self.compute == torch.float64 else 1
        error = own * ROUNDINGS[quantity] * (ROUNDOFF[self.compute] * magnitude + SUBNORMAL[self.compute])
        if stored is not None and stored != self.compute:
            error = error + ROUNDOFF[stored] * value.abs() + SUBNORMAL[stored]
        return error


class Oracle:
    """Follows `opt` (ours or torch's): hyper-parameters are read from its groups at every window."""

    def __init__(self, opt, accum_dtype=torch.float32, state_dtype=torch.float32, max_grad_norm=None):
        self.opt, self.accum_dtype, self.state_dtype = opt, accum_dtype, state_dtype
        self.max_grad_norm, self.norm = max_grad_norm, None
        self.cells: dict[Tensor, Cell] = {}
        self.watch()

    def watch(self) -> None:
        """Takes in parameters not seen before, with their present values."""
        for p in self.params:
            if p not in self.cells:
                self.cells[p] = Cell(p, self.accum_dtype, self.state_dtype)

    @property
    def params(self) -> list[Tensor]:
        return list(dict.fromkeys(p for group in self.opt.param_groups for p in group["params"]))

    def accum(self, micros: list[Micro]) -> list[Bounded | None]:
        """Equation (1): every parameter's buffer after these micro-batches; None without a contribution."""
        buffers = []
        for i, p in enumerate(self.params):
            cell, total = self.cells[p], None
            for micro in micros:
                factor = float(micro.scale) * (1.0 if micro.weight is None else float(micro.weight))
                if micro.grads[i] is None or factor == 0.0:
                    continue
                product = Bounded.exact(micro.grads[i])
                product.value *= factor
                product.bound = cell.rounding(product.value.abs(), "product")
                if micro.grads[i].dtype.itemsize > cell.compute.itemsize:
                    product.bound = product.bound + ROUNDOFF[cell.compute] * product.value.abs()
                if total is None:
                    value, magnitude, bound = product.value, 0 * product.value, product.bound
                else:
                    value = total.value + product.value
                    magnitude = value.abs() + product.value.abs()
                    bound = total.bound + product.bound
                bound = bound + cell.rounding(magnitude, "accum", cell.accum_dtype, value)
                total = Bounded(value, bound)
            buffers.append(total)
        return buffers

    def window(self, micros: list[Micro]) -> None:
        """A whole window: equations (1) to (5) for every parameter that has a contribution."""
        divisor = 1.0
        counted = [m for m in micros if any(g is not None for g in m.grads)]
        if any(m.weight is not None for m in counted):
            divisor = sum(float(m.weight) for m in counted)
            if divisor == 0.0:
                return
        buffers = dict(zip(self.params, self.accum(micros)))
        clip = self._clip([b for b in buffers.values() if b is not None], 1.0 / divisor)
        done = set()
        for group in self.opt.param_groups:
            for p in group["params"]:
                if p not in done and buffers[p] is not None:
                    self._update(self.cells[p], buffers[p], clip / divisor, group)
                done.add(p)

    def _clip(self, sums: list[Bounded], c: float) -> float:
        """clip_grad_norm_'s coefficient; what the norm may be off by is added to the bounds of ``sums``."""
        if self.max_grad_norm is None:
            return 1.0
        norm, off = (sum(float(x.square().sum()) for x in xs) ** 0.5
                     for xs in ([s.value for s in sums], [s.bound for s in sums]))  # fmt: skip
        self.norm = norm * c
        for s in sums:
            s.bound = s.bound + s.value.abs() * (off / norm + 64 * ROUNDOFF[torch.float64])
        return min(1.0, self.max_grad_norm / (self.norm + 1e-6))

    def _update(self, cell: Cell, accum: Bounded, c: float, group: dict) -> None:
        lr, eps, decay = float(group["lr"]), group["eps"], group["weight_decay"]
        beta1, beta2 = (float(beta) for beta in group["betas"])
        cell.step += 1
        gradient = Bounded(c * accum.value, c * accum.bound)
        if group["maximize"]:
            gradient.value = -gradient.value
        size = gradient.value.abs()
        gradient.bound = gradient.bound + cell.rounding(size, "gradient")

        m, v, stored = cell.exp_avg, cell.exp_avg_sq, cell.state_dtype
        value = m.value + (1 - beta1) * (gradient.value - m.value)
        bound = beta1 * m.bound + (1 - beta1) * gradient.bound
        magnitude = (1 - beta1) * (gradient.value - m.value).abs() + value.abs()
        m = Bounded(value, bound + cell.rounding(magnitude, "exp_avg", stored, value))

        value = beta2 * v.value + (1 - beta2) * size * size
        bound = beta2 * v.bound + (1 - beta2) * (2 * size + gradient.bound) * gradient.bound
        v = Bounded(value, bound + cell.rounding(value, "exp_avg_sq", stored, value))
        cell.exp_avg, cell.exp_avg_sq = m, v
        if group["amsgrad"]:
            top = cell.max_exp_avg_sq
            v = Bounded(torch.maximum(top.value, v.value), torch.maximum(top.bound, v.bound))
            cell.max_exp_avg_sq = v

        correction = (1 - beta2**cell.step) ** 0.5
        denominator = v.value.sqrt() / correction + eps
        low = (v.value - v.bound).clamp(min=0).sqrt() / correction
        high = (v.value + v.bound).sqrt() / correction
        spread = high - low + cell.rounding(denominator, "denominator")
        rate = lr / (1 - beta1**cell.step)
        update = rate * m.value / denominator
        floor = (low + eps).clamp(min=SUBNORMAL[torch.float64])
        bound = (rate * m.bound + update.abs() * spread) / floor
        bound = bound + cell.rounding(update.abs() + bound, "update")

        keep = 1 - lr * decay
        value = keep * cell.param.value - update
        magnitude = (keep * cell.param.value).abs() + value.abs()
        bound = bound + abs(keep) * cell.param.bound
        bound = bound + cell.rounding(magnitude, "param", cell.initial.dtype, value)
        cell.param = Bounded(value, bound)

    # ---- comparison ----------------------------------------------------------------------------------

    def check(self, state_of=None) -> None:
        """Asserts parameters, moments and `step` of the optimizer followed, and that no other state exists."""
        for i, p in enumerate(self.params):
            cell, state = self.cells[p], (state_of or self.opt.state).get(p, {})
            assert p.dtype == cell.initial.dtype
            if cell.step == 0:
                assert float(state.get("step", 0)) == 0, f"parameter {i} was never updated but has a step"
                assert same_bits(p, cell.initial), f"parameter {i} has no gradient and moved"
                continue
            assert float(state["step"]) == cell.step, f"parameter {i}: step {state['step']}, not {cell.step}"
            within(f"exp_avg of parameter {i}", state["exp_avg"], cell.exp_avg, cell.state_dtype)
            within(f"exp_avg_sq of parameter {i}", state["exp_avg_sq"], cell.exp_avg_sq, cell.state_dtype)
            if "max_exp_avg_sq" in state:
                name = f"max_exp_avg_sq of parameter {i}"
                within(name, state["max_exp_avg_sq"], cell.max_exp_avg_sq, cell.state_dtype)
            within(f"parameter {i}", p, cell.param, p.dtype)

    def adopt(self) -> None:
        """Goes on from the optimizer's own values, so that the next window is judged alone."""
        for p, cell in self.cells.items():
            state = self.opt.state.get(p, {})
            if float(state.get("step", 0)):
                cell.step, cell.param = int(state["step"]), Bounded.exact(p)
                for name in {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"} & state.keys():
                    setattr(cell, name, Bounded.exact(state[name]))


def within(name: str, actual: Tensor, expected: Bounded, dtype: torch.dtype) -> None:
    """Asserts dtype, shape, and that no element is further from the float64 value than its bound."""
    assert actual.dtype == dtype, f"{name} is {actual.dtype}, not {dtype}"
    assert actual.shape == expected.value.shape, f"{name} has shape {tuple(actual.shape)}"
    actual = actual.detach().to("cpu", torch.float64)
    distance = (actual - expected.value).abs()
    # Second-order terms of the bound; NaN compares false and fails.
    bound = 1.01 * expected.bound
    overflowed = actual.isinf() & (actual.sign() == expected.value.sign())
    overflowed &= expected.value.abs() + bound.nan_to_num() > torch.finfo(dtype).max
    wrong = ~((distance <= bound) | overflowed)
    if wrong.any():
        where = int((distance / expected.bound).nan_to_num(torch.inf).flatten().argmax())
        got, want, bound = (x.flatten()[where].item() for x in (actual, expected.value, expected.bound))
        raise AssertionError(
            f"{name}: {int(wrong.sum())} of {wrong.numel()} elements beyond their bound; worst at {where}: "
            f"{got!r}, expected {want!r}, off by {abs(got - want):.3g}, allowed {bound:.3g}"
        )


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Bit equality: NaN equals itself, -0 differs from 0."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    a, b = (x.detach().contiguous().reshape(-1).view(integer) for x in (a, b))
    return torch.equal(a, b)


def rms(actual: Tensor, exact: Tensor) -> float:
    """Root mean square distance from the float64 value."""
    return (actual.detach().double() - exact).square().mean().sqrt().item()
