"""The tables every test reads: shapes, dtypes, layouts, hyper-parameters, tolerances. Data only."""

import torch

# CPU kernels split a bucket into chunks; these sizes sit on vector (8, 16, 64) and chunk boundaries,
# beside the degenerate ones that have broken other libraries (empty in any position, 0-dim).
SHAPES = {
    "empty": (0,),
    "empty-3d": (3, 0, 5),
    "0-dim": (),
    "one": (1,),
    "seven": (7,),
    "63": (63,),
    "64": (64,),
    "65": (65,),
    "matrix": (13, 17),
    "conv": (6, 5, 3, 3),
    "1023": (1023,),
    "1025": (1025,),
    "16383": (16383,),
    "16384": (16384,),
    "16385": (16385,),
    "32767": (32767,),
    "32769": (32769,),
    "65535": (65535,),
    "65536": (65536,),
    "65537": (65537,),
}
SMALL_SHAPES = ["empty", "0-dim", "one", "seven", "65", "matrix", "conv"]
BEYOND_CACHE = (1_000_003,)  # a prime; fp32 parameter, gradient, buffer and moments are 20 MB

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
LOW_PRECISION = ["bf16", "fp16"]

# Layouts of one 4-d shape; `harness.in_layout` builds them. "expanded" (stride 0) is for gradients only:
# a parameter whose elements share memory has no meaning under an in-place update.
LAYOUT_SHAPE = (6, 4, 5, 3)
PARAMETER_LAYOUTS = ["contiguous", "transposed", "channels_last", "misaligned", "sliced", "stepped"]
GRADIENT_LAYOUTS = [*PARAMETER_LAYOUTS, "expanded", "expanded-all"]

# Large lr and weight decay, so that a wrong order of decay and update, or a wrong scale, is visible.
HYPER = {
    "default": {},
    "large": {"lr": 0.5, "weight_decay": 0.5},
    "no-decay": {"lr": 0.1, "weight_decay": 0.0},
    "betas": {"lr": 0.3, "betas": (0.6, 0.8), "weight_decay": 0.1},
    "beta1=0": {"lr": 0.3, "betas": (0.0, 0.99), "weight_decay": 0.2},
    "beta2=0.5": {"lr": 0.3, "betas": (0.9, 0.5), "weight_decay": 0.2},
    "beta2=0": {"lr": 0.1, "betas": (0.9, 0.0), "weight_decay": 0.1},
    "large-eps": {"lr": 1.0, "eps": 0.1, "weight_decay": 0.1},
    "tiny-lr": {"lr": 1e-7, "weight_decay": 0.3},
    "lr=0": {"lr": 0.0, "weight_decay": 0.5},
    "amsgrad": {"lr": 0.5, "betas": (0.5, 0.6), "weight_decay": 0.3, "amsgrad": True},
    "maximize": {"lr": 0.5, "weight_decay": 0.3, "maximize": True},
    "amsgrad-maximize": {"lr": 0.2, "betas": (0.5, 0.6), "eps": 1e-3, "amsgrad": True, "maximize": True},
}

# Windows as (scale, weight) per micro-batch; the last one of each is given to step().
WINDOWS = {
    "N=1": [(1.0, None)],
    "N=1-scaled": [(0.37, None)],
    "mean-of-4": [(0.25, None)] * 4,
    "uneven": [(0.3, None), (0.6, None), (0.1, None)],
    "sum": [(1.0, None), (1.0, None)],
    "zero-scale": [(0.5, None), (0.0, None), (0.5, None)],
    "tokens": [(1.0, 3), (1.0, 7)],
    "tokens-scaled": [(0.5, 100.0), (2.0, 17.0), (1.0, 1e-3)],
    "tokens-zero": [(1.0, 5), (1.0, 0), (1.0, 2)],
    "tokens-N=1": [(1.0, 513)],
}

# ---- The one tolerance table -------------------------------------------------------------------------
# `oracle.Oracle` carries, beside each float64 value, a bound on the error that rounding may cause. It is
# built from these numbers and nothing else: the unit roundoff of every dtype, its smallest subnormal (what
# underflow loses), and, per quantity, how many roundings of the compute dtype its equation makes
# (scalars that were rounded once on the host are counted with it).
ROUNDOFF = {
    torch.float32: 2.0**-24, torch.float64: 2.0**-53, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11,
}  # fmt: skip
SUBNORMAL = {
    torch.float32: 2.0**-149, torch.float64: 2.0**-1074, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24,
}  # fmt: skip
ROUNDINGS = {
    "product": 2,  # s*g: the scalar, the product
    "accum": 1,  # a + s*g, then what storing it in the buffer's dtype costs
    "gradient": 2,  # c*a: the scalar, the product
    "exp_avg": 4,  # m + (1-beta1)*(G-m): the scalar, the difference, the product, the sum
    "exp_avg_sq": 5,  # beta2*v + (1-beta2)*G*G: two scalars, two products, the sum
    "denominator": 4,  # sqrt(v)/sqrt(1-beta2^t) + eps: the root, the scalars, the quotient, the sum
    "update": 4,  # (lr/(1-beta1^t)) * m / denominator: the scalar, the product, the quotient
    "param": 3,  # p*(1-lr*wd) - update: the scalar, the product, the difference
}

# Root mean square error against float64 may be at most this multiple of torch.optim.AdamW(fused=True)'s.
RMS_RATIO = 1.02
