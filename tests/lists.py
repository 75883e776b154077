"""Updates as lists of tensors, for tests below the optimizer."""

import torch
from harness import in_layout, values
from oracle import Oracle


def float64(*numbers):
    return torch.tensor(numbers[0] if len(numbers) == 1 else numbers, dtype=torch.float64)


def hyper_tensor(group, scale=1.0, coefficient=1.0):
    beta1, beta2 = group["betas"]
    return float64(group["lr"], beta1, beta2, group["eps"], group["weight_decay"], scale, coefficient)


class Lists:
    """Everything an update of some parameters works on, as lists."""

    def __init__(
        self, shapes, dtype=torch.float32, device="cpu", amsgrad=False, with_accum=True, layout="contiguous"
    ):  # fmt: skip
        def tensors(dtype=torch.float32, zero=False):
            made = [values(shape, dtype, device) for shape in shapes]
            return [in_layout(t.zero_() if zero else t, layout) for t in made]

        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.params, self.grads = tensors(dtype), tensors(dtype)
        self.accums = tensors(wide) if with_accum else []
        self.exp_avgs, self.exp_avg_sqs = tensors(wide, zero=True), tensors(wide, zero=True)
        self.max_exp_avg_sqs = tensors(wide, zero=True) if amsgrad else []
        self.steps = [torch.zeros(()) for _ in shapes]

    def all(self):
        return (
            self.params, self.grads, self.accums, self.exp_avgs, self.exp_avg_sqs, self.max_exp_avg_sqs, self.steps,
        )  # fmt: skip

    def oracle(self, **hyper):
        """An oracle whose window holds the buffers as a first micro-batch, then the gradients."""
        stock = torch.optim.AdamW([torch.nn.Parameter(p) for p in self.params], **hyper)
        return Oracle(stock), stock.param_groups[0]

    def check(self, oracle):
        oracle_params = oracle.params
        state = {}
        for i, p in enumerate(oracle_params):
            p.data = self.params[i]
            state[p] = {"step": self.steps[i], "exp_avg": self.exp_avgs[i], "exp_avg_sq": self.exp_avg_sqs[i]}
            if self.max_exp_avg_sqs:
                state[p]["max_exp_avg_sq"] = self.max_exp_avg_sqs[i]
        oracle.check(state)
