"""The C++ core without Python, under AddressSanitizer, UBSan and ThreadSanitizer (tests/native/driver.cpp)."""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
CSRC = TESTS.parent / "csrc"
# -O1 keeps line numbers honest and compiles in seconds. Contraction off, as setup.py has it.
FLAGS = [
    "-O1", "-g1", "-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fno-omit-frame-pointer", "-pthread",
    "-Wall", "-Wextra",
]  # fmt: skip
ISAS = {
    "baseline": ([], None),
    "avx2": (["-mavx2", "-mfma", "-mf16c"], "avx2"),
    "avx512": (["-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mfma"], "avx512vl"),
}
ADDRESS, UNDEFINED = "-fsanitize=address", "-fsanitize=undefined"

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed"),
    pytest.mark.skipif(not CSRC.is_dir(), reason="csrc/ is not beside the tests"),
]


def isas_of_this_machine():
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        flags = []
    return [name for name, (_, flag) in ISAS.items() if flag is None or flag in flags]


def run(*command, **environment):
    """Runs a command and returns its output; shows all of it when it fails."""
    done = subprocess.run(
        [str(word) for word in command], env={**os.environ, **environment}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{' '.join(map(str, command))} exited {done.returncode}:\n{done.stdout[-8000:]}"
    return done.stdout


def build(folder: Path, core: list[str], driver: list[str]) -> Path:
    """Compiles the core and the driver with their sanitizers; the driver, which only checks, with fewer."""
    isas = isas_of_this_machine()
    linked = [f"-DFA_HAVE_{name.upper()}" for name in isas if name != "baseline"]
    units = [
        (f"kernels_{name}", CSRC / "cpu_kernels.cpp", [*core, f"-DFA_ISA={name}", *ISAS[name][0]]) for name in isas
    ]
    others = sorted(path for path in CSRC.glob("cpu_*.cpp") if path.name != "cpu_kernels.cpp")
    units += [(path.stem, path, [*core, *linked]) for path in others]
    units.append(("driver", TESTS / "native" / "driver.cpp", driver))

    def compile_unit(unit):
        name, source, flags = unit
        run("g++", *FLAGS, *flags, f"-I{CSRC}", "-c", source, "-o", folder / f"{name}.o")
        return folder / f"{name}.o"

    with ThreadPoolExecutor(max_workers=2) as pool:
        objects = list(pool.map(compile_unit, units))
    run("g++", *FLAGS, *core, *objects, "-o", folder / "driver")
    return folder / "driver"


def check_report(output, sanitizers, record_property):
    lines = output.splitlines()
    for line in lines:
        record_property(f"CPU kernels under {sanitizers}", line)
    for name in isas_of_this_machine():
        (line,) = [line for line in lines if line.startswith(f"{name}: ")]
        assert "rows checked" in line


def test_address_and_undefined_behaviour(tmp_path, record_property):
    driver = build(tmp_path, [ADDRESS, UNDEFINED, "-fno-sanitize-recover=all"], [ADDRESS])
    output = run(driver, ASAN_OPTIONS="detect_leaks=1:strict_string_checks=1", UBSAN_OPTIONS="print_stacktrace=1")
    check_report(output, "AddressSanitizer and UBSan", record_property)


def test_threads(tmp_path, record_property):
    driver = build(tmp_path, ["-fsanitize=thread"], ["-fsanitize=thread"])
    output = run(driver, "threads", TSAN_OPTIONS="halt_on_error=1")
    check_report(output, "ThreadSanitizer", record_property)
