"""What nvcc makes of the CUDA kernels for GPUs that are not here, from the machine code.

In the main loops every tensor is read and written in 128-bit pieces, nothing spills, float32 kernels hold no
instruction in double precision but those of sums of squares, registers are those of cuda_registers.json (by nvcc's
version).

`python tests/test_cuda_machine_code.py` writes that table anew.
"""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

import machine_code
import pytest
from cuda_emulated import KERNELS

TESTS = Path(__file__).parent
CSRC = TESTS.parent / "csrc"
TABLE = TESTS / "cuda_registers.json"
ARCHS = ("80", "90", "100")
SIZES = {"As<float>": 4, "As<double>": 8, "As<fa::bf16>": 2}  # bytes of an element
ALIGNED = 16
DOUBLE = re.compile(r"D(ADD|MUL|FMA|SETP|MNMX)\b|\w2\w\.(F64|\w+\.F64)|MUFU\.\w+64")


def builder():
    """setup.py as a module."""
    spec = importlib.util.spec_from_file_location("fused_accum_setup", TESTS.parent / "setup.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@cache
def nvcc():
    """The compiler that setup.py would use, or None."""
    if not (TESTS.parent / "setup.py").exists():
        return None
    setup = builder()
    try:
        return setup.Nvcc.find()
    except setup.CannotBuild:
        return None


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(nvcc() is None, reason="nvcc is not here, or cannot build"),
    pytest.mark.skipif(shutil.which("c++filt") is None, reason="c++filt (binutils) is not here"),
    pytest.mark.skipif(not machine_code.TOOLS.is_dir(), reason="there is no triton with its disassemblers"),
]


class Kernel(NamedTuple):
    """A kernel as compiled; ``name`` without namespaces, ``sm_90 step_rows<float, ...>``."""

    arch: str
    name: str
    code: list[str]
    registers: int
    local: int

    @property
    def arguments(self) -> list[str]:
        """Of the template."""
        return re.findall(r"As<\w+(?:::\w+)?>|[\w:]+(?:<\d+>)?", self.name.partition("<")[2])


def compiled(source: Path) -> list[Kernel]:
    """For all of ARCHS, as setup.py has it for those and newer ones: from one PTX, of the lowest."""
    with tempfile.TemporaryDirectory() as folder:

        def make(what: str, arch: str, of: Path) -> Path:
            made = Path(folder, f"{arch}.{what}")
            subprocess.run(
                [*nvcc().command, *builder().NVCC_FLAGS, f"-I{CSRC}", f"-{what}", f"-arch={arch}", "-o", made, of],
                check=True, capture_output=True,
            )  # fmt: skip
            return made

        ptx = make("ptx", f"compute_{ARCHS[0]}", source)
        return [kernel for arch in ARCHS for kernel in read(arch, make("cubin", f"sm_{arch}", ptx).read_bytes())]


def read(arch: str, cubin: bytes) -> list[Kernel]:
    usage, code = machine_code.resources(cubin), machine_code.instructions(cubin)
    readable = subprocess.run(["c++filt"], input="\n".join(usage), capture_output=True, text=True, check=True).stdout
    found = []
    for symbol, name in zip(usage, readable.splitlines()):
        short = name.replace("(anonymous namespace)::", "").removeprefix("void ").partition("(")[0]
        short = re.sub(r"\bfa::(?!bf16)", "", short).replace(" >", ">")
        use = usage[symbol]
        found.append(Kernel(f"sm_{arch}", short, code[symbol], use["REG"], use["STACK"] + use["LOCAL"]))
    return found


@cache
def kernels() -> list[Kernel]:
    with ThreadPoolExecutor(2) as pool:
        return [kernel for found in pool.map(compiled, KERNELS) for kernel in found]


def streams(kernel: Kernel):
    """Element sizes of the tensors that a kernel of tables reads, and of those it writes; None if only the launch
    knows."""
    arguments = kernel.arguments
    if kernel.name.startswith("accumulate_rows"):
        _, grad, accum, how, _, _ = arguments
        stored = [grad, *[accum] * (how != "Writes")], [accum]
    elif kernel.name.startswith("step_rows") and "Known" in arguments:
        _, param, accum, state, _, has_grad, has_accum = arguments
        both = [param, state, state] + [accum] * (has_accum == "true")
        stored = both + [param] * (has_grad == "true"), both
    elif kernel.name.startswith("step_rows") and ("Amsgrad" in arguments or "As<double>" in arguments):
        _, param, accum, state, _ = arguments
        both = [param, state, state, state, accum]
        stored = [*both, param], both
    else:
        return None
    if "AsLaunched" in kernel.name:
        return None
    return tuple([SIZES[one] for one in side] for side in stored)


def storages_of_scatter(kernel: Kernel):
    """Bytes of an element of the gradient and of the buffer, and the elements of a piece; None if known at launch."""
    if not kernel.name.startswith("scatter_rows") or "AsLaunched" in kernel.name:
        return None
    _, grad, accum, count = kernel.arguments
    return SIZES[grad], SIZES[accum], int(count)


def wide_accesses(kernel: Kernel, prefix: str) -> int:
    return sum(name.startswith(prefix) and ".128" in name for name in kernel.code)


def pieces(sizes: list[int], elements: int) -> int:
    return sum(size * elements // ALIGNED for size in sizes)


def test_the_kernels_are_all_here():
    names = [kernel.name.partition("<")[0] for kernel in kernels() if kernel.arch == "sm_90"]
    assert {name: names.count(name) for name in names} == {
        # fp32 and bf16, first or not, with sums of squares, or without in either table; fp64 and any, first or not as
        # the launch says, with sums of squares or without
        "accumulate_rows": 2 * 2 * 3 + 2 * 2,
        # fp32 and bf16: from the gradient, from the buffer, from both. As the launch says: fp32 and bf16 with
        # amsgrad; bf16 that keeps more; fp64; any dtypes
        "step_rows": 2 * 3 + 2 + 1 + 1 + 1,
        "accumulate_strided": 2,
        "measure_strided": 2,
        "step_strided": 2,
        "count_updates": 2,  # with either table
        "add_squares": 1,
        # fp32, bf16 into fp32, fp64 and any; in pieces of 128 bits and element by element
        "scatter_rows": 4 * 2,
    }


def test_main_loops_move_128_bits_at_a_time():
    seen = 0
    for kernel in kernels():
        if (tensors := streams(kernel)) is None:
            continue
        elements = ALIGNED // min(min(tensors[0]), min(tensors[1]))  # of a thread, at once
        loads, stores = wide_accesses(kernel, "LDG."), wide_accesses(kernel, "STG.")
        once_read, once_written = (pieces(side, elements) for side in tensors)
        # Copies of the loop body; of an accumulation several pieces at once, and then one.
        copies = loads // once_read
        assert (loads, stores) == (copies * once_read, copies * once_written), kernel[:2]
        assert copies >= (3 if kernel.name.startswith("accumulate") else 1), kernel[:2]
        seen += 1
    assert seen == 3 * (16 - 2 + 11 - 2)


def test_scattered_rows_move_128_bits_at_a_time():
    """Four tokens of a row under way together, and one; the buffer once. Or element by element."""
    seen = 0
    for kernel in kernels():
        if (sizes := storages_of_scatter(kernel)) is None:
            continue
        grad, accum, count = sizes
        once_read, once_written = grad * count // ALIGNED, accum * count // ALIGNED
        expected = (5 * once_read + once_written, once_written)
        assert (wide_accesses(kernel, "LDG."), wide_accesses(kernel, "STG.")) == expected, kernel[:2]
        seen += count > 1
    assert seen == 3 * 3


def test_kernels_of_any_dtype_move_128_bits_too():
    """Eight elements of 16 bits, or of 32 bits in two pieces, chosen at launch; but for what is scattered one by one,
    where it is not aligned."""
    for kernel in kernels():
        if "AsLaunched" in kernel.name and not kernel.name.endswith(" 1>"):
            assert wide_accesses(kernel, "LDG.") >= 3, kernel[:2]
            assert wide_accesses(kernel, "STG.") >= 3, kernel[:2]


def test_kernels_of_bf16_that_keeps_more_move_128_bits():
    """Eight elements; masters and their halves take turns at one place."""
    seen = 0
    for kernel in kernels():
        if kernel.name.startswith("step_rows<float, As<fa::bf16>") and "Keeps" in kernel.arguments:
            param, grad, accum, master, *state = 2, 2, 4, 4, 4, 4, 4
            assert wide_accesses(kernel, "LDG.") >= pieces([param, grad, accum, master, *state], 8), kernel[:2]
            assert wide_accesses(kernel, "STG.") >= pieces([param, accum, master, *state], 8), kernel[:2]
            seen += 1
    assert seen == 3


def test_all_memory_is_known_to_be_global():
    for kernel in kernels():
        assert not [name for name in kernel.code if re.match(r"(LD|ST)(\.|$)", name)], kernel[:2]


def test_nothing_spills():
    for kernel in kernels():
        if not kernel.name.startswith(("accumulate_strided", "step_strided")):
            assert kernel.local == 0, kernel[:2]
            assert not [name for name in kernel.code if name.startswith(("LDL", "STL"))], kernel[:2]


def test_float32_kernels_do_nothing_in_double_precision():
    seen = 0
    for kernel in kernels():
        double = {name.partition(".")[0] for name in kernel.code if DOUBLE.match(name)}
        if kernel.name.startswith("accumulate_rows<float") and kernel.arguments[-2] == "true":  # sums of squares
            assert double == {"F2F", "DFMA", "DADD"}, kernel[:2]
        elif kernel.name.startswith(("accumulate_rows<float", "step_rows<float", "scatter_rows<float")):
            assert not double, kernel[:2]
            seen += 1
        elif kernel.name.startswith("step_rows<double"):  # so that the pattern is known to find some
            assert double
    assert seen == 3 * (9 + 10 + 6)


def test_float32_adamw_takes_64_registers_at_most():
    for kernel in kernels():
        if kernel.name.startswith("step_rows<float, As<float>") and "Known" in kernel.arguments:
            assert kernel.registers <= 64, kernel[:2]


def test_registers():
    """Those of the table; under another nvcc than it knows, one allocation unit (8) more at most."""
    table = json.loads(TABLE.read_text())
    known = table.get(version())
    for kernel in kernels():
        if known:
            assert kernel.registers == known[kernel.name][kernel.arch], kernel[:2]
        else:
            most = max(other[kernel.name][kernel.arch] for other in table.values())
            assert kernel.registers <= most + 8, kernel[:2]


def version() -> str:
    said = subprocess.run([*nvcc().command, "--version"], capture_output=True, text=True, check=True).stdout
    return re.search(r"release ([\d.]+)", said)[1]


def write_table() -> None:
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    found: dict[str, dict[str, int]] = {}
    for kernel in kernels():
        found.setdefault(kernel.name, {})[kernel.arch] = kernel.registers
    table[version()] = found
    TABLE.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(write_table())
