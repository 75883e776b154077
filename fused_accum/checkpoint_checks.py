"""What a state_dict must be to be loaded: all of it is looked at before anything is."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .checks import name_in, short
from .state import STATE, checked_rounding_seed
from .window import Window

if TYPE_CHECKING:
    from .optimizer import FusedAccumAdamW

GROUP_KEYS = ("params", "lr", "betas", "eps", "weight_decay")  # the others have defaults
MOMENTS = ("step", "exp_avg", "exp_avg_sq")
SEED_KEY = "rounding_seed"  # of a saved group: step is the other part of the generator's state
WINDOW_KEYS = (*Window().as_group_entries(), "accum_updates", "accum_sums")  # of a group saved in mid-window
WHOLE = (
    "Load it as it was saved; or, to go on without its open window, remove 'accum' from all of its state and the "
    "'accum_...' entries from its groups. Nothing was loaded"
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
    own = ((p, group) for group in opt.param_groups for p in group["params"])
    for saved_id, (p, group) in zip(saved_ids, own):
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


def refuse_partial_window(opt: FusedAccumAdamW, incoming: dict[str, Any]) -> None:
    """Raise ValueError, before anything is loaded, for an open window of which a part is missing or does not fit."""
    pairs = list(zip(incoming["param_groups"], opt.param_groups))
    if any(len(saved["params"]) != len(group["params"]) for saved, group in pairs):
        return  # torch's own error
    books = []
    for index, (saved, group) in enumerate(pairs):
        where = f"param_groups[{index}] of the loaded state_dict"
        names = {key: name_in(group, index, place) for place, key in enumerate(saved["params"])}
        accums = {key: incoming["state"].get(key, {}).get("accum") for key in names}
        held = [key for key, accum in accums.items() if accum is not None]
        for key, p in zip(saved["params"], group["params"]):
            if accums[key] is not None:
                _refuse_other_sum(names[key], p, accums[key])
        lacking = [name for name in WINDOW_KEYS if name not in saved]
        if len(lacking) == len(WINDOW_KEYS) and not held:
            continue
        if lacking:
            what = f"'accum' of {len(held)} parameter(s), {names[held[0]]} first" if held else "others of these"
            raise ValueError(
                f"{where} lacks {', '.join(map(repr, lacking))}, without which the sums of its open window mean "
                f"nothing; it has {what}. {WHOLE}"
            )
        books.append([saved[name] for name in WINDOW_KEYS[:-1]])
        missing = saved["accum_sums"] - len(held)
        if missing:
            some = [name for key, name in names.items() if (key in held) == (missing < 0)]
            which = f"{abs(missing)} of " if len(some) > abs(missing) else ""
            raise ValueError(
                f"{where} was saved in mid-window with the sums ('accum') of {saved['accum_sums']} parameter(s), and "
                f"has those of {len(held)}: 'accum' is {'missing' if missing > 0 else 'too much'} in the state of "
                f"{which}{', '.join(some[:5])}{', ...' if len(some) > 5 else ''}. {WHOLE}"
            )
    if any(book != books[0] for book in books):
        raise ValueError(
            f"the groups of the loaded state_dict tell of different open windows ({', '.join(WINDOW_KEYS[:-1])}: "
            f"{' and '.join(map(str, books))}); an optimizer has one. {WHOLE}"
        )


def _refuse_other_sum(name: str, p: Tensor, accum: Any) -> None:
    if not isinstance(accum, Tensor) or not accum.is_floating_point() or accum.shape != p.shape:
        found = f"{short(accum.dtype)} {tuple(accum.shape)}" if isinstance(accum, Tensor) else repr(accum)
        raise ValueError(
            f"'accum' of parameter {name} in the loaded state_dict is {found}, the parameter {short(p.dtype)} "
            f"{tuple(p.shape)}; the sum of an open window is floating and has its parameter's shape. {WHOLE}"
        )
