"""What the Triton kernels become, compiled ahead of time for GPUs that are not here.

From the machine code: every tensor is read and written in 128-bit pieces where a block is full, nothing spills,
registers are those of triton_registers.json. From PTX: fma where the kernels say so and nowhere else, IEEE
division and square root, no flushing of subnormals. The disassemblers are those of the triton package; without
them these tests fail.

`python tests/test_triton_machine_code.py` writes the table anew, for the installed triton.
"""

import json
import re
import sys
from functools import cache
from pathlib import Path

import machine_code
import pytest

if sys.platform != "linux":
    pytest.skip("there is no Triton but for Linux", allow_module_level=True)

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fused_accum.backends import triton_counts, triton_scatter
from fused_accum.backends import triton_kernels as kernels
from fused_accum.state import MASTER, PLAIN, SPLIT, STOCHASTIC

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="TRITON_INTERPRET is set: nothing is compiled"),
]

TABLE = Path(__file__).with_name("triton_registers.json")
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
F32, BF16, F16, F64 = tl.float32, tl.bfloat16, tl.float16, tl.float64


def on_rows(dtype):
    """What every kernel on a table of rows is compiled for, with arithmetic for ``dtype``."""
    wide = F64 if dtype == F64 else F32
    return {"WIDE": wide, "ALIGNED": True, "BLOCK": kernels.block_of(wide)}


def accumulate(grad, accum, add, squared=False):
    constants = {"GRAD_DTYPE": grad, "ACCUM_DTYPE": accum, "HAS_GRAD": True, "HAS_ACCUM": add, "STORES": True}
    return kernels.accumulate_kernel, on_rows(accum) | constants | {"SQUARED": squared}


def measure(grad, accum, has_grad):
    kernel, constants = accumulate(grad, accum, not has_grad, squared=True)
    return kernel, constants | {"HAS_GRAD": has_grad, "STORES": False}


def step(param, accum, moments, has_grad, has_accum, amsgrad=False, weights=PLAIN):
    """Gradients have the parameter's dtype."""
    constants = on_rows(param) | {"PARAM_DTYPE": param, "GRAD_DTYPE": param, "ACCUM_DTYPE": accum}
    constants |= dict.fromkeys(("EXP_AVG_DTYPE", "EXP_AVG_SQ_DTYPE", "MAX_DTYPE"), moments)
    constants |= {"HAS_GRAD": has_grad, "HAS_ACCUM": has_accum, "AMSGRAD": amsgrad, "WEIGHTS": weights}
    return kernels.adamw_kernel, constants


FLAGS = {"from the gradient": (True, False), "from the buffer": (False, True), "with the last add": (True, True)}


def steps(name, param, weights, ways=FLAGS):
    return {f"step {name} {way}": step(param, F32, F32, *FLAGS[way], weights=weights) for way in ways}


def add_up():
    return kernels.squares_kernel, {"BLOCK": kernels.block_of(F32), "CHUNK": kernels.CHUNK}


def count_updates():
    return triton_counts.count_kernel, {"ROWS": triton_counts.ROWS}


def scatter(grad, accum):
    constants = {"WIDE": F32, "ACCUM_DTYPE": accum, "GRAD_DTYPE": grad}
    return triton_scatter.scatter_kernel, constants | {"ALIGNED": True, "BLOCK": triton_scatter.WIDEST}


CASES = {
    "accumulate fp32, first": accumulate(F32, F32, False),
    "accumulate fp32": accumulate(F32, F32, True),
    "accumulate bf16 into fp32, first": accumulate(BF16, F32, False),
    "accumulate bf16 into fp32": accumulate(BF16, F32, True),
    "accumulate bf16 into bf16": accumulate(BF16, BF16, True),
    "accumulate bf16 into fp32, squared": accumulate(BF16, F32, True, squared=True),
    "measure a bf16 gradient": measure(BF16, F32, True),
    "measure a fp32 buffer": measure(F32, F32, False),
    **steps("fp32", F32, PLAIN),
    "step fp32 with the last add, amsgrad": step(F32, F32, F32, True, True, amsgrad=True),
    **steps("bf16", BF16, PLAIN),
    **steps("bf16 + fp32 master", BF16, MASTER, ["from the buffer", "with the last add"]),
    **steps("bf16 + split master", BF16, SPLIT, ["from the buffer", "with the last add"]),
    **steps("bf16 by chance", BF16, STOCHASTIC, ["with the last add"]),
    **steps("fp16 by chance", F16, STOCHASTIC, ["with the last add"]),
    "step fp64 with the last add, amsgrad": step(F64, F64, F64, True, True, amsgrad=True),
    "sums of squares": add_up(),
    "count updates": count_updates(),
    "scatter fp32": scatter(F32, F32),
    "scatter bf16 into fp32": scatter(BF16, F32),
}
POINTERS = {"rows": "*i64", "blocks": "*i32", "partials": "*fp64", "order": "*i64", "ends": "*i64",
            "width": "i32", "parts": "i32", "skip": "i32", "table": "*i64", "numbers": "*fp64", "counts": "*fp64",
            "narrow": "*fp32", "wide": "*fp64", "count": "i32"}  # fmt: skip
PAIRS = [pytest.param(case, target, id=f"{target}, {case}") for target in TARGETS for case in CASES]


@cache
def compiled(case: str, target: str):
    kernel, constants = CASES[case]
    signature = {name: POINTERS.get(name, "constexpr") for name in kernel.arg_names}
    tensors = {"scalars": constants.get("WIDE")}
    if kernel is triton_scatter.scatter_kernel:
        tensors = {"accum": constants["ACCUM_DTYPE"], "grad": constants["GRAD_DTYPE"]}
    signature |= {name: f"*{dtype.name}" for name, dtype in tensors.items() if name in signature}
    threads = kernels.THREADS * (2 if kernel is kernels.squares_kernel else 1)
    warps = 1 if kernel is triton_counts.count_kernel else threads // TARGETS[target].warp_size
    options = {"num_warps": warps, "enable_fp_fusion": False}
    if kernel is kernels.adamw_kernel and TARGETS[target].backend == "cuda":
        options["maxnreg"] = kernels.REGISTERS
    return triton.compile(ASTSource(kernel, signature, constants), target=TARGETS[target], options=options)


@cache
def usage(case: str, target: str) -> dict[str, int]:
    """Registers of a thread, and bytes or registers spilled."""
    binary = compiled(case, target).asm
    if "cubin" not in binary:
        found = dict(re.findall(r"\.(\w+_count):\s*(\d+)", binary["amdgcn"]))
        spilled = int(found["vgpr_spill_count"]) + int(found["sgpr_spill_count"])
        return {"registers": int(found["vgpr_count"]), "spilled": spilled}
    (found,) = machine_code.resources(binary["cubin"]).values()
    return {"registers": found["REG"], "spilled": found["STACK"] + found["LOCAL"]}


@cache
def instructions(case: str, target: str) -> list[str]:
    binary = compiled(case, target).asm
    if "cubin" not in binary:
        return re.findall(r"^\s+([a-z]\w+)", binary["amdgcn"], re.MULTILINE)
    (code,) = machine_code.instructions(binary["cubin"]).values()
    return code


def pieces(dtypes) -> int:
    """128-bit pieces of one thread's elements of these tensors."""
    each = 4 if F64 in dtypes else 8
    return sum(each * dtype.primitive_bitwidth // 128 for dtype in dtypes)


def traffic(case: str):
    """The dtypes of the tensors a kernel must read and of those it must write, in a full block."""
    kernel, c = CASES[case]
    if kernel in (kernels.squares_kernel, triton_counts.count_kernel):
        return [], []
    if kernel is triton_scatter.scatter_kernel:
        return [c["ACCUM_DTYPE"], *[c["GRAD_DTYPE"]] * triton_scatter.AT_ONCE.value], [c["ACCUM_DTYPE"]]
    sources = [c["GRAD_DTYPE"]] * c["HAS_GRAD"] + [c["ACCUM_DTYPE"]] * c["HAS_ACCUM"]
    if "STORES" in c:
        return sources, [c["ACCUM_DTYPE"]] * c["STORES"]
    both = [c["PARAM_DTYPE"], c["EXP_AVG_DTYPE"], c["EXP_AVG_SQ_DTYPE"]]
    both += [c["MAX_DTYPE"]] * c["AMSGRAD"] + [c["ACCUM_DTYPE"]] * c["HAS_ACCUM"]
    both += {MASTER: [F32], SPLIT: [tl.int16]}.get(c["WEIGHTS"], [])
    return both + [c["GRAD_DTYPE"]] * c["HAS_GRAD"], both


@pytest.mark.parametrize(("case", "target"), PAIRS)
def test_full_blocks_move_128_bits_at_a_time(case, target):
    code = instructions(case, target)
    if target.startswith("sm"):
        loads = [name for name in code if name.startswith("LDG.") and ".128" in name]
        stores = [name for name in code if name.startswith("STG.") and ".128" in name]
    else:  # tables are read with global_load
        loads = [name for name in code if name == "buffer_load_dwordx4"]
        stores = [name for name in code if name == "buffer_store_dwordx4"]
    read, written = traffic(case)
    assert (len(loads), len(stores)) == (pieces(read), pieces(written)), sorted(set(code))


@pytest.mark.parametrize(("case", "target"), PAIRS)
def test_nothing_spills(case, target):
    local = re.compile(r"(LDL|STL)\b|scratch_")
    assert usage(case, target)["spilled"] == 0
    assert not [name for name in instructions(case, target) if local.match(name)]


@pytest.mark.parametrize(("case", "target"), PAIRS)
def test_registers(case, target):
    """Those of the table; under another triton than it knows, one allocation unit (8) more at most."""
    table = json.loads(TABLE.read_text())
    found = usage(case, target)["registers"]
    if triton.__version__ in table:
        assert found == table[triton.__version__][case][target]
    else:
        assert found <= max(known[case][target] for known in table.values()) + 8


@pytest.mark.parametrize(("case", "target"), [p for p in PAIRS if p.values[1].startswith("sm")])
def test_rounding_is_written_out(case, target):
    ptx = compiled(case, target).asm["ptx"]
    kernel, c = CASES[case]
    each, suffix = (4, "f64") if c.get("WIDE") == F64 else (8, "f32")
    paths = 2  # full blocks and the tail
    fmas = int(c.get("HAS_GRAD", False) and c.get("HAS_ACCUM", False))
    quotients = roots = int(kernel is kernels.adamw_kernel)
    fmas += 4 * quotients
    if kernel is triton_counts.count_kernel:  # two powers, each of two products
        each, paths, suffix, fmas, quotients, roots = 1, 1, "f64", 4, 2, 1
    pairs = ptx.count("fma.rn.f32x2")  # Blackwell's: two elements in one instruction
    assert ptx.count(f"fma.rn.{suffix}") + pairs == fmas * each * paths
    assert ptx.count(f"div.rn.{suffix}") == quotients * each * paths
    assert ptx.count(f"sqrt.rn.{suffix}") == roots * each * paths
    assert not re.findall(r"\w+\.approx\S*|div\.full\S*|\S*\.ftz\S*|mad\.f\S*", ptx)


def write_table() -> None:
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    table[triton.__version__] = {
        case: {target: usage(case, target)["registers"] for target in TARGETS} for case in CASES
    }
    TABLE.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(write_table())
