"""README.md and docs/: every Python block runs, every link leads somewhere, every command and every number is real.

The ```python blocks of a page run in order in one namespace, in an empty folder; a warning from fused_accum fails
them. Skipped, and counted, are those that import what is not installed, and those with ``<!-- skip: reason -->``
above.
"""

import ast
import importlib.util
import os
import re
import shlex
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks import tables

ROOT = Path(__file__).resolve().parent.parent
PAGES = tables.pages()
BLOCK = re.compile(r"(?:^<!-- skip: ([^\n]*) -->\n+)?^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAM = r"python3? -m ((?:fused_accum|benchmarks|tests)(?:\.\w+)*)(?![\w.<])([^`\n#&|]*)"
LONGEST_README = 200  # lines, not reached


class Block(NamedTuple):
    """A fenced block: its first line's number in the page, its code, and why it cannot run here, or ""."""

    line: int
    code: str
    why_not: str


def imported(code: str) -> set[str]:
    """The packages that a block imports."""
    nodes = list(ast.walk(ast.parse(code)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


def blocks(page: Path) -> list[Block]:
    found = []
    text = page.read_text()
    for match in BLOCK.finditer(text):
        said, code = match.groups()
        missing = [name for name in imported(code) if importlib.util.find_spec(name) is None]
        why_not = said or (f"no {', '.join(missing)} here" if missing else "")
        found.append(Block(text[: match.start(2)].count("\n"), code, why_not))
    return found


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


WITH_PYTHON = [page for page in PAGES if "```python" in page.read_text()]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=named)
def test_python_blocks_run(page, tmp_path, monkeypatch, capsys):
    found = blocks(page)
    fences = re.findall(r"^\s*```python", page.read_text(), re.MULTILINE)
    assert len(found) == len(fences), "a block escapes this test"
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for block in found:
        if block.why_not:
            continue
        code = compile("\n" * block.line + block.code, str(page), "exec")
        with warnings.catch_warnings():
            warnings.filterwarnings("error", category=UserWarning, module="fused_accum|__main__|torch.optim")
            warnings.filterwarnings("ignore", message="fused_accum runs on its slow backend")
            exec(code, namespace)
    capsys.readouterr()
    skipped = [f"line {block.line}: {block.why_not}" for block in found if block.why_not]
    if skipped:
        pytest.skip(f"{len(found) - len(skipped)} of {len(found)} blocks ran; not " + "; ".join(skipped))


# -- links ------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page):
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert not dead


def test_readme_is_short_and_names_every_page():
    readme = ROOT / "README.md"
    assert len(readme.read_text().splitlines()) < LONGEST_README
    linked = set(re.findall(r"\]\((docs/[\w-]+\.md)", readme.read_text()))
    assert linked == {named(page) for page in PAGES} - {"README.md"}


# -- commands and numbers ---------------------------------------------------------------------------------


def commands() -> set[tuple[str, str]]:
    """(module, rest of the line) of every ``python -m`` in README, docs and CONTRIBUTING that runs ours."""
    found = set()
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        text = re.sub(r"\\\n\s*", " ", page.read_text())
        for module, rest in re.findall(PROGRAM, text):
            found.add((module, rest.strip()))
    return found


def help_of(module: str, words: list[str], monkeypatch, capsys) -> str:
    """What ``python -m module words --help`` prints, without a new process for each."""
    monkeypatch.setattr(sys, "argv", [module, *words, "--help"])
    spec = importlib.util.find_spec(module)
    if spec.submodule_search_locations is not None:
        module += ".__main__"
    import runpy

    with pytest.raises(SystemExit) as end:
        runpy.run_module(module, run_name="__main__")
    assert not end.value.code
    return capsys.readouterr().out


def test_commands_have_the_options_that_pages_give_them(monkeypatch, capsys):
    found = commands()
    assert len(found) > 5
    helps: dict[tuple, str] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # runpy, of modules that tests have imported
        for module, rest in sorted(found):
            words = shlex.split(rest.replace("...", ""))
            command = [word for word in words[:1] if module == "fused_accum" and not word.startswith("-")]
            key = (module, *command)
            if key not in helps:
                helps[key] = help_of(module, command, monkeypatch, capsys)
            for option in (word.partition("=")[0] for word in words if word.startswith("-")):
                assert re.search(rf"(?<![\w-]){re.escape(option)}\b", helps[key]), f"{module} {rest}: no {option}"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_measured_tables_are_those_of_the_results(page):
    text = page.read_text()
    assert text.count("<!-- measured:") == len(tables.PLACE.findall(text)), "a table without its end"
    assert tables.filled(text) == text, "run python -m benchmarks.tables"


def test_readme_keeps_the_commands_that_ci_runs():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert sum("-m pytest" in line for line in lines) == 1
    assert sum("-m benchmarks.pretrain" in line for line in lines if line.startswith("python3 -m venv")) == 1


def test_no_path_of_a_machine_is_in_a_page():
    home = os.path.expanduser("~")
    for page in PAGES:
        assert home not in page.read_text()
        assert "/tmp/" not in page.read_text()
