"""state_dict, load_state_dict, deepcopy and pickle: what torch.optim does, plus an open window, minus lossy casts."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .runtime import Runtime
from .skipping import Count
from .state import STATE, checked_rounding_seed, complete

if TYPE_CHECKING:
    from .optimizer import FusedAccumAdamW

PICKLE_KEY = "_fused_accum"
GROUP_KEYS = ("params", "lr", "betas", "eps", "weight_decay")  # the others have defaults
MOMENTS = ("step", "exp_avg", "exp_avg_sq")
SEED_KEY = "rounding_seed"  # of a saved group: step is the other part of the generator's state


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


@contextmanager
def visible_window(opt: FusedAccumAdamW) -> Iterator[None]:
    """While inside, the open window, and the seed of stochastic rounding, are part of ``opt.state`` and
    ``opt.param_groups``, where ``Optimizer.state_dict`` and its hooks find them; state of parameters no longer in any
    group is hidden, which ``Optimizer.state_dict`` cannot name. Both are put back on exit."""
    run = opt._run
    run.settle()
    members = {id(p): group for p, group in _parameters(opt)}
    before = dict(opt.state)
    for key in before:
        if isinstance(key, Tensor) and id(key) not in members:
            del opt.state[key]
    entries = {SEED_KEY: run.options.rounding_seed} if run.options.stochastic_rounding else {}
    if run.has_whole_window():
        entries |= {**run.window.as_group_entries(), "accum_updates": _updates(opt)}
        for p, accum in run.contributions():
            if id(p) not in members:
                continue
            shown = dict(opt.state.get(p, {}))
            complete(shown, p, members[id(p)], run.options)
            opt.state[p] = {**shown, "accum": _saved(run, p, accum)}
    for group in opt.param_groups:
        group.update(entries)
    try:
        yield
    finally:
        for group in opt.param_groups:
            for key in entries:
                del group[key]
        opt.state.clear()
        opt.state.update(before)


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


def refuse_foreign(incoming: dict[str, Any]) -> None:
    """Raise ValueError, before anything is loaded, for what is not the state_dict of an Adam."""
    if "state" not in incoming or "param_groups" not in incoming:
        raise ValueError(
            f"the loaded state_dict has the keys {', '.join(map(repr, list(incoming)[:5]))}, not 'state' and "
            "'param_groups'; load what optimizer.state_dict() returned (of a checkpoint that holds more, that part). "
            "Nothing was loaded"
        )
    held = [(f"param_groups[{i}]", GROUP_KEYS, group) for i, group in enumerate(incoming["param_groups"])]
    members = set(chain.from_iterable(group.get("params", ()) for _, _, group in held))
    states = [(key, saved) for key, saved in incoming["state"].items() if key in members and saved]
    held += [(f"state[{key!r}]", MOMENTS, saved) for key, saved in states]
    for where, wanted, found in held:
        lacking = ", ".join(repr(name) for name in wanted if name not in found)
        if lacking:
            raise ValueError(
                f"{where} of the loaded state_dict lacks {lacking} (it has {', '.join(map(repr, found))}). "
                "An optimizer's that is no Adam cannot be converted: load the model alone and start this optimizer "
                "anew; or add what is lacking. Nothing was loaded"
            )


def refuse_other_masters(opt: FusedAccumAdamW, incoming: dict[str, Any]) -> None:
    """Raise, before anything is loaded, where saved masters are of the other kind than this optimizer's."""
    options = opt._run.options
    spec = STATE[-1]
    saved_ids = chain.from_iterable(group["params"] for group in incoming["param_groups"])
    for saved_id, (p, group) in zip(saved_ids, _parameters(opt)):
        saved = incoming["state"].get(saved_id, {}).get("master")
        if isinstance(saved, Tensor) and spec.wanted(p, group, options) and saved.dtype != spec.dtype(p, options):
            kind = "split" if saved.dtype == torch.int16 else "fp32"
            raise ValueError(
                f"the loaded state_dict was saved with master_weights={kind!r}, this optimizer has "
                f"{options.master_weights!r}; construct it with master_weights={kind!r}, or remove 'master' from the "
                "loaded state to start from the parameters"
            )


def saved_seed(opt: FusedAccumAdamW, incoming: dict[str, Any]) -> int | None:
    """The seed that a state_dict was saved with, where ``opt`` rounds by chance; ValueError where it is none."""
    if not opt._run.options.stochastic_rounding:
        return None
    seeds = [checked_rounding_seed(group[SEED_KEY]) for group in incoming["param_groups"] if SEED_KEY in group]
    if len(set(seeds)) > 1:
        raise ValueError(
            f"the groups of the loaded state_dict have rounding_seed {', '.join(map(str, seeds))}; an optimizer has "
            "one: set them to the one to go on with"
        )
    return seeds[0] if seeds else None


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
        run.window.take_group_entries(group)
        updates = group.pop("accum_updates", updates)
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
