"""state_dict, load_state_dict, deepcopy and pickle: what torch.optim does, plus an open window, minus lossy casts."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import chain
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .checkpoint_checks import SEED_KEY, saved_seed
from .runtime import Runtime
from .skipping import Count
from .state import STATE, complete

if TYPE_CHECKING:
    from .optimizer import FusedAccumAdamW

PICKLE_KEY = "_fused_accum"


def _parameters(opt: FusedAccumAdamW) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    for group in opt.param_groups:
        for p in group["params"]:
            yield p, group


def _updates(opt: FusedAccumAdamW) -> float:
    """The updates of all parameters together: tells an open window's own state from a later one."""
    steps = [opt.state[p].get("step", 0.0) for p, _ in _parameters(opt) if p in opt.state]
    return float(sum(map(float, steps)))


def _saved(run: Runtime, p: Tensor, accum: Tensor) -> Tensor:
    """A copy of the sum, in the buffer's dtype (a p.grad that is the sum may have another)."""
    return accum.detach().to(run.options.accum_dtype_for(p), copy=True)


def with_window(opt: FusedAccumAdamW) -> SimpleNamespace:
    """What ``Optimizer.state_dict`` is given in place of ``opt``: its state and groups, with copies of the window and
    the seed of stochastic rounding, without the state of parameters no longer in any group, which it cannot name.

    ``opt`` itself is left alone: memory that runs out here, or an interrupt, leaves nothing behind.
    """
    run = opt._run
    run.settle()
    members = {id(p): group for p, group in _parameters(opt)}
    state = {key: own for key, own in opt.state.items() if not isinstance(key, Tensor) or id(key) in members}
    entries = {SEED_KEY: run.options.rounding_seed} if run.options.stochastic_rounding else {}
    groups = [{**group, **entries} for group in opt.param_groups]
    if run.has_whole_window():
        entries = {**run.window.as_group_entries(), "accum_updates": _updates(opt)}
        for p, accum in run.contributions():
            if id(p) not in members:
                continue
            shown = dict(state.get(p, {}))
            complete(shown, p, members[id(p)], run.options)
            state[p] = {**shown, "accum": _saved(run, p, accum)}
        for group in groups:
            sums = {p for p in group["params"] if "accum" in state.get(p, {})}
            group.update(entries, accum_sums=len(sums))
    hooks = {"_optimizer_state_dict_pre_hooks": {}, "_optimizer_state_dict_post_hooks": {}}
    return SimpleNamespace(**{**vars(opt), **hooks, "state": state, "param_groups": groups})


def state_dict(opt: FusedAccumAdamW) -> dict[str, Any]:
    """``Optimizer.state_dict``, hooks included, with the open window in what it returns."""
    for hook in opt._optimizer_state_dict_pre_hooks.values():
        hook(opt)
    result = torch.optim.AdamW.state_dict(with_window(opt))
    for hook in opt._optimizer_state_dict_post_hooks.values():
        changed = hook(opt, result)
        result = result if changed is None else changed
    return result


def warn_mid_window_save(run: Runtime) -> None:
    if run.window.microbatches and run.spoiled() is None and not run.warned_mid_window_save:
        run.warned_mid_window_save = True
        warnings.warn(
            f"state_dict() was taken in mid-window: it holds {run.window.microbatches} micro-batch(es) not yet "
            "stepped. FusedAccumAdamW.load_state_dict() resumes from it exactly; torch.optim.AdamW, a flattened "
            "state_dict of torch.distributed.checkpoint and its load(), which reads only what a fresh optimizer "
            "has, drop that part. Save after step() to be independent of it",
            UserWarning,
            stacklevel=3,
        )


def reinstate(opt: FusedAccumAdamW) -> None:
    """Called within ``Optimizer.load_state_dict`` once it has cast all state to the parameters' dtypes: put back
    the incoming tensors' precision, and the incoming window."""
    run = opt._run
    incoming, run.incoming = run.incoming, None
    unused_masters = 0
    saved_ids = chain.from_iterable(group["params"] for group in incoming["param_groups"])
    accums: dict[int, tuple[Tensor, Tensor]] = {}
    for saved_id, (p, group) in zip(saved_ids, _parameters(opt)):
        saved = incoming["state"].get(saved_id)
        if saved is None or p not in opt.state:
            continue
        own = opt.state[p]
        for spec in STATE:
            if not isinstance(saved.get(spec.name), Tensor):
                continue
            if spec.name == "master" and not spec.wanted(p, group, run.options):
                del own["master"]
                unused_masters += 1
            else:
                own[spec.name] = saved[spec.name].to(device=p.device, dtype=spec.dtype(p, run.options))
        if "accum" in own:
            del own["accum"]
            accums[id(p)] = (p, saved["accum"])
    if unused_masters:
        warnings.warn(
            f"the loaded state_dict holds master weights of {unused_masters} parameter(s) for which this optimizer "
            "keeps none; they are dropped, and training goes on from the parameters as they are (pass "
            "master_weights= as in the saved run to keep them)",
            UserWarning,
            stacklevel=5,
        )
    if run.backward is not None:
        run.backward.drop()
    run.discard()
    if (seed := saved_seed(opt, incoming)) is not None:
        run.reseed(seed)
    updates = None
    for group in reversed(opt.param_groups):
        group.pop(SEED_KEY, None)
        if "accum_microbatches" in group:
            run.window.take_group_entries(group)
            updates = group.pop("accum_updates")
            del group["accum_sums"]
    if updates is not None and updates != _updates(opt):
        run.window.clear()
        warnings.warn(
            "the loaded state_dict holds an open window from before its last updates (it went through an optimizer "
            "that does not know it, such as torch.optim.AdamW); that window is dropped",
            UserWarning,
            stacklevel=5,
        )
    elif accums:
        run.restore(opt.param_groups, accums)


def pickled(opt: FusedAccumAdamW) -> dict[str, Any]:
    """What ``__getstate__`` adds: options, the window's books and its sums (by parameter)."""
    run = opt._run
    run.settle()
    whole = run.has_whole_window()
    return {
        "options": run.options,
        "skipped_steps": opt.skipped_steps,
        "amp_requested": run.amp_requested,
        "window": run.window.emptied() if run.window.microbatches and not whole else run.window,
        "sums": [(p, _saved(run, p, accum)) for p, accum in run.contributions()] if whole else [],
        "in_backward": run.hooks_missing or (run.backward is not None and run.backward.installed),
    }


def unpickle(opt: FusedAccumAdamW, saved: dict[str, Any]) -> None:
    """Rebuild the runtime of a copy from ``pickled``'s result."""
    run = opt._run = Runtime(saved["options"], opt)
    run.skipped_steps = Count(saved["skipped_steps"])
    run.amp_requested = saved["amp_requested"]
    run.window = saved["window"]
    run.hooks_missing = saved["in_backward"]
    if saved["sums"]:
        run.restore(opt.param_groups, {id(p): (p, accum) for p, accum in saved["sums"]})
