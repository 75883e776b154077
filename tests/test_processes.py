"""Forked processes, thread counts, signals."""

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from harness import values

pytestmark = pytest.mark.filterwarnings("error")


# ---- processes -------------------------------------------------------------------------------------------


def run_script(script: str, *arguments: str) -> str:
    """Runs Python code in a process of its own; a deadlock ends it after a while."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=Path(__file__).parent, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


FORK = """
import os, sys, torch
from fused_accum import FusedAccumAdamW

threads = int(sys.argv[2])
torch.set_num_threads(1)  # torch's own pool would not survive the fork

def call(opt, p, k):
    p.grad = torch.full_like(p, k + 1.0)
    torch.set_num_threads(threads)
    (opt.step if k % 2 else opt.accumulate)(scale=0.5)
    torch.set_num_threads(1)

def fresh():
    p = torch.nn.Parameter(torch.linspace(-1, 1, 400_001))
    return FusedAccumAdamW([p], lr=0.5, backend=sys.argv[1]), p

def run(opt, p, start, stop):
    for k in range(start, stop):
        call(opt, p, k)
    return p.detach().double().sum().item(), p.detach()[12345].item()

def workers():
    return len(os.listdir("/proc/self/task")) - 1 if os.path.isdir("/proc/self/task") else threads - 1

opt, p = fresh()
expected, later = run(opt, p, 0, 8), run(opt, p, 8, 12)
opt, p = fresh()
run(opt, p, 0, 3)   # the pool is alive, and a window is open
reader, writer = os.pipe()
child = os.fork()
result = run(opt, p, 3, 8)
if child == 0:
    assert sys.argv[1] != "cpu" or workers() == threads - 1, workers()
    grandchild = os.fork()   # and again, from the child's own pool
    if grandchild == 0:
        os._exit(0 if run(opt, p, 8, 12) == later else 1)
    status = os.waitpid(grandchild, 0)[1]
    os.write(writer, repr((result, status)).encode())
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
theirs, grandchild_status = eval(os.read(reader, 1000).decode())
assert grandchild_status == 0
assert result == expected, (result, expected)
assert theirs == expected, (theirs, expected)
print("same in parent, child and grandchild")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="os.fork is not available on this platform")
def test_fork(on):
    """A child of a process whose pool has run does not wait for threads that it does not have."""
    name, device = on
    if device != "cpu":
        pytest.skip("a device context does not survive a fork")
    assert "same in parent" in run_script(FORK, name, "1" if name == "reference" else "3")


THREADS = """
import os, sys, torch
from fused_accum import FusedAccumAdamW

def tasks():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(1)  # torch's own operations start no threads, which ours would share
p = torch.nn.Parameter(torch.empty(1_000_000).fill_(1.0))
opt = FusedAccumAdamW([p], backend="cpu")
grad = torch.ones_like(p)
for threads in (1, 2, 3, 1):
    torch.set_num_threads(threads)
    before = tasks()
    for call in (opt.accumulate, opt.accumulate, opt.step):
        p.grad = grad
        call()
    print(threads, tasks() - before)
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="needs /proc to count threads")
def test_set_num_threads_is_honoured(on):
    if on[0] != "cpu":
        pytest.skip("only the native CPU backend starts threads")
    started = [tuple(map(int, line.split())) for line in run_script(THREADS).splitlines()]
    assert started == [(1, 0), (2, 1), (3, 1), (1, 0)]


def test_interrupt_does_not_split_an_update(make, on, device):
    """A signal handler that raises (Ctrl-C) runs before or after a native call's work, never in its middle."""
    import signal

    if on[0] == "reference":
        pytest.skip("plain Python can be interrupted anywhere")
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals arrive in the main thread")
    p = torch.nn.Parameter(torch.zeros(2_000_000, device=device))
    opt = make([p], lr=0.5, weight_decay=0.0)

    class Interrupted(Exception):
        pass

    def handler(*_):
        raise Interrupted

    old = signal.signal(signal.SIGALRM, handler)
    try:
        for n in range(10):
            p.grad = torch.ones_like(p)
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0005 * (n + 1))
                opt.step()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupted:
                pass
            assert len(p.detach().unique()) == 1
            steps = float(opt.state[p]["step"]) if p in opt.state and "step" in opt.state[p] else 0
            assert (p.detach()[0] != 0) == (steps > 0)
            p.grad = None
        opt.discard_microbatch()
        p.grad = values(p.shape, device=device)
        opt.step()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
