"""What the tests of building and installing share: commands, empty environments, other Pythons."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(*command, env=None, cwd=None, fails=False, timeout=600):
    """Runs a command and returns its output; entries of ``env`` are added to the environment. Nothing is built for
    CUDA unless they say so: test_cuda_build.py does."""
    env = {**os.environ, "FUSED_ACCUM_CUDA_ARCHS": "none", "FUSED_ACCUM_FORCE_CUDA": "", **(env or {})}
    done = subprocess.run(
        [str(word) for word in command], env=env, cwd=cwd, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    assert (done.returncode != 0) == fails, f"{command} exited {done.returncode}:\n{done.stdout}"
    return done.stdout


def report(python, where, **env):
    """The report of an installation, run outside the tree; its exit code must be the one that it prints."""
    done = subprocess.run(
        [str(python), "-m", "fused_accum", "--json"], env={**os.environ, **env}, cwd=where,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    facts = json.loads(done.stdout)
    assert done.returncode == facts["exit_code"], done.stderr
    return facts


def extension(folder, name="_C"):
    found = list(folder.glob(f"{name}.*.so"))
    assert len(found) <= 1
    return found[0] if found else None


@cache
def packages() -> Path:
    """Where the running Python has its torch."""
    return Path(importlib.util.find_spec("torch").origin).parent.parent


def new_environment(folder, python=sys.executable, lend_torch=False, lent=None):
    """An empty virtual environment: its Python and its site-packages.

    Torch is lent by a path line, in place of a download of gigabytes, from the running Python or from ``lent``, a
    site-packages: the new site-packages come first, and the .pth files over there (of an editable fused_accum, say)
    are not read.
    """
    run(python, "-m", "venv", "--without-pip", folder)
    (site,) = (folder / "lib").glob("python*/site-packages")
    if lend_torch or lent:
        (site / "lent.pth").write_text(str(lent or packages()))
    return folder / "bin" / "python", site


def install(what, site, **env):
    """pip install without isolation: the build requirements are in this environment already."""
    words = ("install", "--no-build-isolation", "--no-deps", "--target", site)
    return run(sys.executable, "-m", "pip", *words, what, env=env)


def build_sdist(folder):
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", folder, ROOT)
    (sdist,) = folder.glob("*.tar.gz")
    return sdist


def build_wheel(python, sdist, folder, **env):
    env = {"FUSED_ACCUM_FORCE_CPP": "1", **env}
    run(python, "-m", "pip", "wheel", "--no-deps", "--no-cache-dir", "-w", folder, sdist, env=env)
    (wheel,) = folder.glob("*.whl")
    return wheel


def find_python(version):
    """A Python of that version with pip, or None."""
    candidates = [shutil.which(f"python{version}")]
    candidates += sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python3"))
    for candidate in filter(None, candidates):
        asked = subprocess.run(
            [str(candidate), "-c", "import pip, sys; print('%d.%d' % sys.version_info[:2])"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if asked.stdout.strip() == version:
            return candidate
    return None


def find_uv() -> list[str] | None:
    if importlib.util.find_spec("uv"):
        return [sys.executable, "-m", "uv"]
    return [found] if (found := shutil.which("uv")) else None
