"""Reads NVIDIA machine code with the disassemblers inside the triton package."""

import re
import subprocess
import sysconfig
import tempfile
from pathlib import Path

TOOLS = Path(sysconfig.get_path("purelib"), "triton", "backends", "nvidia", "bin")
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)


def tool(name: str, *arguments: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [TOOLS / name, *arguments, file.name], capture_output=True, text=True, check=True
        ).stdout


def resources(cubin: bytes) -> dict[str, dict[str, int]]:
    """By function: REG of a thread; STACK and LOCAL in bytes."""
    printed = tool("cuobjdump", "-res-usage", cubin=cubin)
    found = re.findall(r"Function (\S+):\n\s*(REG:.*)", printed)
    return {name: {k: int(v) for k, v in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", line)} for name, line in found}


def instructions(cubin: bytes) -> dict[str, list[str]]:
    """By function: names of instructions, in order."""
    parts = re.split(r"^\s*\.section\s+\.text\.(\S+?),.*$", tool("nvdisasm", "-c", cubin=cubin), flags=re.MULTILINE)
    return {name: INSTRUCTION.findall(text) for name, text in zip(parts[1::2], parts[2::2])}
