"""What docs/distributed.md says of DistributedDataParallel, with two processes on the CPU (gloo).

Right is what torch.optim.AdamW makes of the gradient of one batch over all ranks' data.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import two_ranks as ranks
from harness import copies

import fused_accum

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="this torch has no gloo"
)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The parameters, or the error, of every way; a list with an entry per rank."""
    folder = tmp_path_factory.mktemp("ranks")
    root = Path(fused_accum.__file__).parent.parent
    running = [
        subprocess.Popen([sys.executable, ranks.__file__, str(rank), str(folder)],
                         env={**os.environ, "PYTHONPATH": str(root)},
                         stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(ranks.WORLD)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=300)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0] * ranks.WORLD, said
    loaded = [torch.load(folder / f"{rank}.pt") for rank in range(ranks.WORLD)]
    return {way.__name__: [result[way.__name__] for result in loaded] for way in ranks.WAYS}


def one_process(uneven=False, clip=None):
    model = ranks.new_model()
    optimizer = torch.optim.AdamW(model.parameters(), **ranks.OPTIONS)
    of_ranks = [ranks.data(rank, uneven) for rank in range(ranks.WORLD)]
    for windows in zip(*of_ranks):
        ranks.mean_loss(model, torch.cat([inputs for window in windows for inputs in window])).backward()
        if clip:
            assert torch.nn.utils.clip_grad_norm_(model.parameters(), clip) > clip
        optimizer.step()
        optimizer.zero_grad()
    return copies(model.parameters())


RIGHT = {
    "explicit": {},
    "explicit_clipped": {"clip": ranks.MAX_NORM},
    "explicit_tokens": {"uneven": True},
    "torchs_own": {},
    "in_backward": {},
    "in_backward_view": {},
    "direct": {},
    "replicas": {},
    "replicas_direct": {},
    "zero_redundancy": {},
}
APART = ["explicit_no_sync", "step_in_backward"]
REFUSED = {"in_backward_bf16": "Expected BFloat16"}  # by DDP's reducer


def test_every_way_is_judged():
    assert {way.__name__ for way in ranks.WAYS} == {*RIGHT, *APART, *REFUSED}


@pytest.mark.parametrize("way", RIGHT)
def test_ranks_agree_with_one_process(results, way):
    first, second = results[way]
    for a, b, expected in zip(first, second, one_process(**RIGHT[way]), strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, expected.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", APART)
def test_the_traps_that_the_page_warns_of(results, way):
    """Hooks of DDP run after ours, and explicit sums are not reduced: ranks drift apart, unnoticed."""
    first, second = results[way]
    assert any((a - b).abs().max() > 0.01 for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("way", REFUSED)
def test_what_ddp_refuses(results, way):
    assert all(REFUSED[way] in said for said in results[way])
