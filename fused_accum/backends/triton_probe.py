"""Whether Triton works here, found out by trying: every reason names its remedy."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from collections.abc import Callable
from functools import cache

import torch

OLDEST_COMPUTE_CAPABILITY = (8, 0)  # of what Triton still supports
FOR_GPUS = "it is for GPUs (TRITON_INTERPRET=1, set before Python starts, lets Triton's slow interpreter run it)"


def why_not(device: torch.device, attempt: Callable[[torch.device], None]) -> str | None:
    """None when the kernels run on ``device``, else the reason; ``attempt`` compiles and runs a small one."""
    interpreted = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")
    if device.type == "cpu":
        return _why_no_triton() if interpreted else FOR_GPUS
    if interpreted:
        return "TRITON_INTERPRET is set, and the interpreter reads CPU memory only: unset it"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != device.type:
        return f"torch {torch.__version__} sees no {device.type} device: check the driver, or install a torch for it"
    reason = _why_no_triton()
    if reason is None:
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        reason = _why_not_gpu(torch.device(device.type, index), attempt)
    return reason


def _why_no_triton() -> str | None:
    try:
        import triton  # noqa: F401
    except ModuleNotFoundError as error:
        return f"triton is not installed ({error}): pip install triton"
    except Exception as error:
        return f"triton does not import ({type(error).__name__}: {error}): reinstall it, pip install triton"
    return None


@cache
def _why_not_gpu(device: torch.device, attempt: Callable[[torch.device], None]) -> str | None:
    """As ``why_not``, for a device that exists; a device is tried once per process."""
    if device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        if capability < OLDEST_COMPUTE_CAPABILITY:
            have, need = (".".join(map(str, pair)) for pair in (capability, OLDEST_COMPUTE_CAPABILITY))
            return f"{device} has compute capability {have}, Triton needs {need}: use backend 'cuda' or 'reference'"
    try:
        attempt(device)
    except Exception as error:
        return diagnosis(error)
    return None


def diagnosis(error: Exception) -> str:
    """Why a first kernel did not run, and what to do."""
    if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
        import triton

        where = error.filename or triton.knobs.cache.dir
        return f"its cache is not writable ({where}: {error.strerror}): set TRITON_CACHE_DIR to a directory that is"
    if "Failed to find C compiler" in str(error):
        return "there is no C compiler, which Triton needs to launch kernels: install gcc or clang, or set CC"
    if isinstance(error, (subprocess.CalledProcessError, FileNotFoundError)):
        header = os.path.join(sysconfig.get_path("include", _scheme()), "Python.h")
        if not os.path.exists(header):
            return f"{header} is missing, which Triton needs to launch kernels: install python3-dev (python3-devel)"
        return f"building Triton's launcher failed ({error}): check the C compiler (CC)"
    first_line = (str(error).strip() or "no message").splitlines()[0]
    return (
        f"a first kernel failed ({type(error).__name__}: {first_line}): reinstall torch and the triton that it "
        "requires, or use another backend"
    )


def _scheme() -> str:
    """The installation scheme in which Triton looks for Python.h."""
    scheme = sysconfig.get_default_scheme()
    return "posix_prefix" if scheme == "posix_local" else scheme
