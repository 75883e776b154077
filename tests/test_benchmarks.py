"""The timing benchmarks: what they count, what they let through, what they write. Never a time."""

import contextlib
import io
import json
import math
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import harness, kernels, loops, modes, overhead, peers, results, wgrad, window
from benchmarks.harness import Estimate, Limit, NotEqual, Variant
from fused_accum import FusedAccumAdamW, backends

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
# One thread: on a busy machine torch's threads wait for each other at every one of thousands of tiny operations.
TINY = {
    kernels: ["--numel", "5000", "--rounds", "7", "--threads", "1"],
    modes: ["--tokens", "6", "9", "--width", "16", "--layers", "1", "--vocabulary", "50", "--microbatches", "3",
            "--rounds", "3", "--threads", "1"],
    overhead: ["--tensors", "1", "3", "--rounds", "7", "--threads", "1"],
    wgrad: ["--tokens", "3", "70", "--weight", "90", "40", "--weight", "300", "7", "--rounds", "7", "--threads", "1"],
    window: ["--shrink", "32", "--microbatches", "1", "3", "--rounds", "3", "--threads", "1"],
}
BENCHMARKS = pytest.mark.parametrize("program", TINY, ids=lambda program: program.__name__.split(".")[-1])

# Design, section 6: bytes per parameter of each pass, fp32 and bf16 (fp32 buffer and moments), zeroing included.
FLOORS = {
    "accumulate, first write": (8, 6),
    "accumulate, add": (12, 10),
    "step from the gradient": (28, 22),
    "step from the buffer": (32, 28),
    "step with the last add": (36, 30),
}
KEYS = {
    kernels: {"kernel", "dtype", "numel", "bytes_per_parameter", "ms", "gb_per_s", "add_gb_per_s", "fraction_of_add",
              "torch", "torch_ms", "speedup", "equal", "rounds"},
    modes: {"tokens", "mode", "microbatches", "parameters", "rounds", "ms", "torch_ms", "speedup", "gradient_bytes",
            "torch_gradient_bytes", "equal"},
    overhead: {"call", "tensors", "torch", "cold", "us", "torch_us", "part", "speedup", "equal", "rounds"},
    wgrad: {"tokens", "weight", "dtype", "rounds", "ms", "gflop_per_s", "speedup", "autograd_speedup",
            "first_speedup", "equal"},
    window: {"list", "dtype", "microbatches", "peer", "tensors", "parameters", "bytes_per_parameter", "ms", "peer_ms",
             "speedup", "exact", "fastest_exact", "equal", "rounds"},
}  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Every benchmark run once on tiny sizes: {module: (its --json, its --plot, what it printed)}."""
    folder, threads = tmp_path_factory.mktemp("benchmarks"), torch.get_num_threads()
    found = {}
    for program, arguments in TINY.items():
        name = program.__name__.split(".")[-1]
        files = folder / f"{name}.json", folder / f"{name}.png"
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert program.main([*arguments, "--json", str(files[0]), "--plot", str(files[1])]) == 0
        found[program] = (*files, printed.getvalue())
    torch.set_num_threads(threads)
    return found


# -- counted bytes ------------------------------------------------------------------------------------------


def test_counted_bytes_are_the_designs():
    assert {name: (k.bytes["fp32"], k.bytes["bf16"]) for name, k in kernels.KERNELS.items()} == FLOORS


@pytest.mark.parametrize("name", kernels.KERNELS)
@pytest.mark.parametrize(("dtype", "size"), [("fp32", 4), ("bf16", 2)])
def test_counted_bytes_follow_from_what_a_pass_reads_and_writes(name, dtype, size):
    kernel = kernels.KERNELS[name]
    moved = size * kernel.adds  # the gradient
    if kernel.steps:
        moved += 2 * size + 4 * 4  # parameter and two moments, read and written
        moved += 8 * kernel.sums  # buffer, read and zeroed
    else:
        moved += 4 + 4 * kernel.sums  # buffer, written, and read where it holds something
    assert kernel.bytes[dtype] == moved
    if kernel.steps and dtype == "bf16":
        assert kernel.bytes["bf16+fp32"] == moved - 2 + 8  # the parameter is only written, the master both
        assert kernel.bytes["bf16+split"] == moved + 4  # the other half, read and written


@pytest.mark.parametrize(("dtype", "microbatches", "counted"), [
    ("fp32", 1, 28), ("fp32", 2, 44), ("fp32", 8, 116), ("bf16", 1, 22), ("bf16", 8, 96),
    ("bf16+fp32", 1, 28), ("bf16+fp32", 8, 102), ("bf16+split", 1, 26), ("bf16+split", 8, 100),
])  # fmt: skip
def test_counted_bytes_of_a_window(dtype, microbatches, counted):
    assert window.window_bytes(dtype, microbatches) == counted


def test_counted_bytes_of_a_clipped_window():
    assert [window.window_bytes("fp32", n, True) for n in (1, 8)] == [4 + 28, 8 + 7 * 12 + 32]
    assert [window.window_bytes("bf16", n, True) for n in (1, 8)] == [2 + 22, 6 + 7 * 10 + 28]


def test_each_kernel_is_reached_through_the_optimizer():
    """`sums` and `adds` of a kernel are what the optimizer holds when it is called, and again the next time."""
    for kernel in kernels.KERNELS.values():
        ours = kernels.Ours(kernel, torch.ones(10), torch.ones(10), "auto")
        for _ in range(3):
            ours.before()
            assert (ours.optimizer.pending.microbatches > 0) == kernel.sums
            assert (ours.param.grad is not None) == kernel.adds
            ours.call()
            assert (ours.optimizer.pending.microbatches == 0) == kernel.steps
            ours.after()


def test_lists_are_as_said():
    lists = window.tensor_lists(1)
    sizes = {name: sum(math.prod(shape) for shape in shapes) for name, shapes in lists.items()}
    assert {name: len(shapes) for name, shapes in lists.items()} == {"gpt-50": 50, "gpt-300": 300}
    assert round(sizes["gpt-50"] / 1e6) == 27
    assert round(sizes["gpt-300"] / 1e6) == 20


# -- measuring ----------------------------------------------------------------------------------------------


def test_every_round_takes_every_variant_once_in_changing_order():
    log = []

    def clock(call, device):
        call()
        return 1.0

    def stages(name):
        def of(k):
            yield lambda: log.append((k, name, "before")), lambda: log.append((k, name, "timed"))
            log.append((k, name, "between"))
            yield harness.nothing, harness.nothing

        return of

    variants = [Variant(name, stages(name)) for name in "abc"]
    times = harness.interleave(variants, Limit(20), CPU, clock=clock)
    assert times == {name: [2.0] * 20 for name in "abc"}  # two parts each
    rounds = [[name for k, name, what in log if k == r and what == "timed"] for r in range(20)]
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    assert len({tuple(names) for names in rounds}) > 1
    assert [what for _, _, what in log] == ["before", "timed", "between"] * 60


def test_a_time_limit_leaves_enough_rounds():
    variants = [Variant("a", lambda k: [(harness.nothing, harness.nothing)])]
    assert len(harness.interleave(variants, Limit(50, seconds=0), CPU)["a"]) == harness.FEWEST_ROUNDS
    assert len(harness.interleave(variants, Limit(3, seconds=0), CPU)["a"]) == 3


@pytest.mark.parametrize(("count", "ranks"), [
    (1, (1, 1)), (5, (1, 5)), (6, (1, 6)), (9, (2, 8)), (15, (4, 12)), (20, (6, 15)), (100, (40, 61)),
])  # fmt: skip
def test_interval_of_a_median(count, ranks):
    """Order statistics; the ranks are those of tables of the sign test (two-sided, 5 %)."""
    samples = random.Random(0).sample([float(i + 1) for i in range(count)], count)
    assert harness.estimate(samples) == Estimate(ranks[0], (count + 1) / 2, ranks[1])


def test_ratios_are_taken_within_rounds():
    slow_round = [1.0, 2.0, 40.0, 1.0, 2.0, 3.0]  # the machine stalls in the third
    assert harness.ratio([3 * t for t in slow_round], slow_round) == Estimate(3.0, 3.0, 3.0)
    assert harness.rate(6.0, [2.0, 3.0, 6.0]).median == 2.0


# -- the gate -----------------------------------------------------------------------------------------------


def nudged(x, ulps):
    """x with every element moved up by `ulps` of its own."""
    whole = {4: torch.int32, 2: torch.int16}[x.element_size()]
    return (x.view(whole) + ulps).view(x.dtype)


@pytest.mark.parametrize(("dtype", "passing", "refused"), [(torch.float32, 8, 64), (torch.bfloat16, 1, 3)])
def test_gate_lets_roundings_through_and_no_more(dtype, passing, refused):
    x = (torch.rand(1000) + 1).to(dtype)
    assert harness.require_equal("x", {"x": x}, {"x": x.clone()}) == "same bits"
    assert harness.require_equal("x", {"x": nudged(x, passing)}, {"x": x}).endswith("of the tolerance")
    with pytest.raises(NotEqual, match="x is off by"):
        harness.require_equal("it", {"x": nudged(x, refused)}, {"x": x})


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_gate_sees_one_wrong_element(value):
    x = torch.rand(10_000) + 1
    wrong = x.clone()
    wrong[-1] = value
    with pytest.raises(NotEqual):
        harness.require_equal("it", {"x": wrong}, {"x": x})
    with pytest.raises(NotEqual):
        harness.require_equal("it", {"x": x}, {"x": wrong})


def test_gate_compares_like_with_like():
    x = torch.ones(3)
    with pytest.raises(NotEqual, match="float64"):
        harness.require_equal("it", {"x": x.double()}, {"x": x})
    with pytest.raises(NotEqual, match=r"\(1, 3\)"):
        harness.require_equal("it", {"x": x[None]}, {"x": x})
    with pytest.raises(NotEqual):
        harness.require_equal("it", {"x": x, "y": x}, {"x": x})


@BENCHMARKS
@pytest.mark.parametrize("call", ["accumulate", "step"])
def test_a_wrong_result_is_not_timed(program, call, monkeypatch, capsys, tmp_path):
    if program is wgrad:
        product = backends.base.Backend.add_product
        wrong = call == "accumulate"  # the first contribution, or a later one
        monkeypatch.setattr(
            type(backends.registry()["cpu"]), "add_product",
            lambda self, b, dy, x, first: product(self, b, 1.01 * dy if first == wrong else dy, x, first),
        )  # fmt: skip
    right = getattr(FusedAccumAdamW, call)
    monkeypatch.setattr(FusedAccumAdamW, call, lambda self: right(self, scale=1.01))
    file = tmp_path / "rows.json"
    with pytest.raises(SystemExit) as end:
        results.run(lambda: program.main([*TINY[program], "--json", str(file)]))
    shown = capsys.readouterr()
    assert end.value.code == 2
    assert "not equal: " in shown.err
    assert "|" not in shown.out
    assert not file.exists()


# -- what is written ----------------------------------------------------------------------------------------


@BENCHMARKS
def test_json(program, written):
    result = json.loads(written[program][0].read_text())
    assert result["benchmark"] == program.__name__.split(".")[-1]
    facts = result["environment"]
    assert facts["torch"] == torch.__version__
    assert facts["threads"] == 1
    assert {"processor", "cores", "commit", "python", "fused_accum", "backend", "cpu_isa", "load"} <= facts.keys()
    assert result["rows"]
    for row in result["rows"]:
        assert row.keys() == KEYS[program]
        for value in row.values():
            if isinstance(value, list):
                low, median, high = value
                assert 0 < low <= median <= high


def test_rows_cover_every_kernel_call_and_window(written):
    rows = {program: json.loads(files[0].read_text())["rows"] for program, files in written.items()}
    with_masters = [(k, d) for d in ("bf16+fp32", "bf16+split") for k in FLOORS if k.startswith("step")]
    expected = [(k, d) for d in ("fp32", "bf16") for k in FLOORS] + with_masters
    assert [(r["kernel"], r["dtype"]) for r in rows[kernels]] == expected
    assert [(r["tokens"], r["mode"]) for r in rows[modes]] == [(n, mode) for n in (6, 9) for mode in loops.MODES]
    assert {(r["call"], r["tensors"]) for r in rows[overhead]} == {
        (call, n) for call in ("accumulate", "step") for n in (1, 3)
    }
    assert [(r["dtype"], r["weight"], r["tokens"]) for r in rows[wgrad]] == [
        (dtype, f"{out} x {features}", tokens)
        for dtype in ("fp32", "bf16")
        for out, features in ((90, 40), (300, 7))
        for tokens in (3, 70)
    ]
    assert {(r["list"], r["dtype"], r["microbatches"]) for r in rows[window]} == {
        (f"{name}{clipped}", dtype, n)
        for name in ("gpt-50", "gpt-300")
        for clipped in ("", ", clipped")
        for dtype in ("fp32", "bf16", "bf16+fp32", "bf16+split")
        for n in (1, 3)
    }


def test_modes_count_gradient_memory(written):
    for row in json.loads(written[modes][0].read_text())["rows"]:
        size = 4 * row["parameters"]
        assert row["torch_gradient_bytes"] == size
        assert row["gradient_bytes"] == size * (2 if row["mode"] == "explicit" else 1)  # p.grad beside the buffer


def test_windows_say_which_peer_is_exact(written):
    rows = json.loads(written[window][0].read_text())["rows"]
    for row in rows:
        if row["peer"].startswith("torch AdamW"):  # it sums bf16 gradients in bf16
            assert row["exact"] == (row["dtype"] == "fp32")
        assert (row["equal"] == "not compared") == (not row["exact"])
        assert row["exact"] or not row["fastest_exact"]
    fastest = [(row["list"], row["dtype"], row["microbatches"]) for row in rows if row["fastest_exact"]]
    assert len(fastest) == len(set(fastest)) == 32


@BENCHMARKS
def test_table_and_plot(program, written):
    _, plot, printed = written[program]
    lines = [line for line in printed.splitlines() if line.startswith("|")]
    assert len({len(line) for line in lines}) <= 2  # aligned; overhead prints two tables
    assert plot.read_bytes().startswith(b"\x89PNG")


@BENCHMARKS
def test_against(program, written, tmp_path, capsys):
    """Against a file that was a million times better all is worse, against one that was as much worse nothing is."""
    new = json.loads(written[program][0].read_text())
    old = tmp_path / "old.json"
    figures = {"fraction_of_add", "speedup"} & KEYS[program]
    monstrous = [{k: [1e6 * x for x in v] if k in figures else v for k, v in row.items()} for row in new["rows"]]
    old.write_text(json.dumps({**new, "rows": monstrous}))
    assert program.main([*TINY[program], "--against", str(old)]) == 1
    worse = capsys.readouterr().out.split("worse than before:")[1].strip().splitlines()
    assert len(worse) == len(new["rows"]) * len(figures)

    terrible = [{k: [x / 1e6 for x in v] if k in figures else v for k, v in row.items()} for row in new["rows"]]
    old.write_text(json.dumps({**new, "rows": terrible}))
    assert program.main([*TINY[program], "--against", str(old)]) == 0


def test_against_refuses_what_cannot_be_compared(written):
    new = json.loads(written[kernels][0].read_text())
    with pytest.raises(SystemExit, match="'kernels'"):
        results.regressions({**new, "benchmark": "window"}, new, ("kernel",), ("speedup",))
    elsewhere = [{**row, "numel": 1} for row in new["rows"]]
    with pytest.raises(SystemExit, match="no row"):
        results.regressions({**new, "rows": elsewhere}, new, ("kernel", "dtype", "numel"), ("speedup",))


# -- the command line ---------------------------------------------------------------------------------------


@BENCHMARKS
def test_help_says_how_to_read_the_output(program):
    command = [sys.executable, "-m", program.__name__, "--help"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "How to read the output" in shown
    assert "What to expect" in shown


@BENCHMARKS
def test_backends(program, capsys):
    with pytest.raises(SystemExit, match="backend is 'abacus'"):
        program.main([*TINY[program], "--backend", "abacus"])
    assert capsys.readouterr().out == ""


def test_cold_calls_are_not_compared_with_warm_ones(written, tmp_path):
    file = tmp_path / "cold.json"
    assert overhead.main([*TINY[overhead], "--cold", "--json", str(file)]) == 0
    assert all(row["cold"] for row in json.loads(file.read_text())["rows"])
    with pytest.raises(SystemExit, match="no row"):
        overhead.main([*TINY[overhead], "--against", str(file)])


def test_optimi_takes_part_where_it_is_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "optimi", SimpleNamespace(AdamW=torch.optim.AdamW))
    rows = window.measure("two", [(5, 3), (7,)], "fp32", 2, Limit(2), "auto", CPU)
    assert rows[-1]["peer"] == "optimi AdamW"
    assert rows[-1]["exact"]
    monkeypatch.setitem(sys.modules, "optimi", None)  # not installed
    assert "optimi AdamW" not in peers.peers(kernels.WEIGHTS["fp32"], CPU)


def test_reference_backend(capsys):
    assert kernels.main([*TINY[kernels], "--backend", "reference", "--dtype", "fp32"]) == 0
    assert "backend reference" in capsys.readouterr().out
