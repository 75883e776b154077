"""Two processes, gloo, DistributedDataParallel: what each way of accumulating makes of the parameters.

``python two_ranks.py RANK FOLDER`` runs every function of WAYS on its own half of the data and writes the resulting
parameters, or the error, to FOLDER/RANK.pt. test_ddp.py starts it twice.
"""

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fused_accum import FusedAccumAdamW

WORLD, WINDOWS, MICROBATCHES, ROWS = 2, 3, 3, 6
MAX_NORM = 0.05  # every window's gradient is longer
OPTIONS = {"lr": 0.1, "weight_decay": 0.2, "eps": 1e-3}  # an eps that tells a sum from a mean


def new_model(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)).to(dtype)


def data(rank, uneven=False):
    """For every window its micro-batches; with ``uneven``, of other lengths on each rank."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(WINDOWS):
        window = [torch.randn(WORLD, ROWS, 5, generator=generator) for _ in range(MICROBATCHES)]
        cut = [(2 * i + 3 * rank) % ROWS + 1 if uneven else ROWS for i in range(MICROBATCHES)]
        found.append([micro[rank, :rows] for micro, rows in zip(window, cut)])
    return found


def mean_loss(model, inputs):
    return model(inputs).square().mean()


def ours(model, **options):
    return FusedAccumAdamW(model.parameters(), **OPTIONS, **options)


def explicit(rank, **options):
    """Every backward reduced, then accumulate()."""
    model = new_model()
    ddp, optimizer = DistributedDataParallel(model), ours(model, **options)
    for window in data(rank):
        for inputs in window:
            mean_loss(ddp, inputs).backward()
            optimizer.accumulate(1 / MICROBATCHES)
        optimizer.step()
    return model


def explicit_clipped(rank):
    return explicit(rank, max_grad_norm=MAX_NORM)


def explicit_tokens(rank):
    """Micro-batches of other lengths on each rank: the loss carries the rank's share, the weight is of all ranks."""
    model = new_model()
    ddp, optimizer = DistributedDataParallel(model), ours(model)
    for window in data(rank, uneven=True):
        for inputs in window:
            tokens = torch.tensor(float(len(inputs)))
            dist.all_reduce(tokens)
            (mean_loss(ddp, inputs) * (len(inputs) * WORLD / tokens)).backward()
            optimizer.accumulate(weight=tokens)
        optimizer.step()
    return model


def explicit_no_sync(rank):
    """The trap: only the last micro-batch is reduced."""
    model = new_model()
    ddp, optimizer = DistributedDataParallel(model), ours(model)
    for window in data(rank):
        for inputs in window[:-1]:
            with ddp.no_sync():
                mean_loss(ddp, inputs).backward()
            optimizer.accumulate(1 / MICROBATCHES)
        mean_loss(ddp, window[-1]).backward()
        optimizer.step(scale=1 / MICROBATCHES)
    return model


def backwards(ddp, window):
    """One window of plain backwards, of which the last one is reduced."""
    for inputs in window[:-1]:
        with ddp.no_sync():
            (mean_loss(ddp, inputs) / MICROBATCHES).backward()
    (mean_loss(ddp, window[-1]) / MICROBATCHES).backward()


def torchs_own(rank):
    """p.grad summed by torch: one reduction a window, and step() alone is ours."""
    model = new_model()
    ddp, optimizer = DistributedDataParallel(model), ours(model)
    for window in data(rank):
        backwards(ddp, window)
        optimizer.step()
    return model


def in_backward(rank, dtype=torch.float32, **options):
    model = new_model(dtype)
    ddp, optimizer = DistributedDataParallel(model, **options), ours(model)
    with optimizer.accumulate_in_backward():
        for window in data(rank):
            backwards(ddp, [inputs.to(dtype) for inputs in window])
            optimizer.step()
    return model


def in_backward_view(rank):
    return in_backward(rank, gradient_as_bucket_view=True)


def in_backward_bf16(rank):
    return in_backward(rank, torch.bfloat16)


def direct(rank):
    model = new_model()
    ddp, optimizer = DistributedDataParallel(model), ours(model)
    with optimizer.direct_wgrad(model):
        for window in data(rank):
            backwards(ddp, window)
            optimizer.step()
    return model


def step_in_backward(rank):
    model = new_model()
    ddp, optimizer = DistributedDataParallel(model), ours(model)
    for window in data(rank):
        for inputs in window[:-1]:
            mean_loss(ddp, inputs).backward()
            optimizer.accumulate(1 / MICROBATCHES)
        with optimizer.step_in_backward():
            (mean_loss(ddp, window[-1]) / MICROBATCHES).backward()
    return model


def replicas(rank, direct=False):
    """No DDP: the sum is p.grad, one all_reduce a window."""
    model = new_model()
    optimizer = ours(model)
    handle = optimizer.direct_wgrad(model) if direct else optimizer.accumulate_in_backward()
    for window in data(rank):
        for inputs in window:
            (mean_loss(model, inputs) / (MICROBATCHES * WORLD)).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
    handle.remove()
    return model


def replicas_direct(rank):
    return replicas(rank, direct=True)


def zero_redundancy(rank):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when imported

    model = new_model()
    ddp = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), FusedAccumAdamW, **OPTIONS)
    for window in data(rank):
        backwards(ddp, window)
        optimizer.step()
        optimizer.zero_grad()
    return model


def zero_redundancy_resumed(rank):
    """Windows in the wrapped optimizer, which has the rank's shard; after the first, through a checkpoint."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = new_model()

    def wrapped():
        groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters())}]
        return ZeroRedundancyOptimizer(groups, FusedAccumAdamW, parameters_as_bucket_view=True, **OPTIONS)

    optimizer = wrapped()
    ddp = DistributedDataParallel(model)
    for n, window in enumerate(data(rank)):
        if n == 1:
            optimizer.consolidate_state_dict(to=0)
            saved = [optimizer.state_dict() if rank == 0 else None]
            dist.broadcast_object_list(saved)
            optimizer = wrapped()
            optimizer.load_state_dict(saved[0])
        for inputs in window:
            mean_loss(ddp, inputs).backward()
            optimizer.optim.accumulate(1 / MICROBATCHES)
            optimizer.zero_grad()  # of the other ranks' parameters
        optimizer.step()
    return model


WAYS = [explicit, explicit_clipped, explicit_tokens, explicit_no_sync, torchs_own, in_backward, in_backward_view,
        in_backward_bf16, direct, step_in_backward, replicas, replicas_direct, zero_redundancy,
        zero_redundancy_resumed]  # fmt: skip


def main(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD)
    results = {}
    for way in WAYS:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # DDP's, of strides
                results[way.__name__] = [p.detach() for p in way(rank).parameters()]
        except RuntimeError as error:
            results[way.__name__] = str(error)
        dist.barrier()
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
