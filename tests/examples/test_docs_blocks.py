"""Every code block of the docs: Python runs as it stands, and commands say what there is."""

import argparse
import importlib
import importlib.util
import json
import re
import shlex
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import typer

from envs.adapters.mcp import MCPEnv
from rllib_gigpo_cli import app, parsers

_ROOT = Path(__file__).parents[2]
_DOCS = _ROOT / "docs"
_PAGES = [_ROOT / "README.md", *sorted(_DOCS.rglob("*.md"))]
_BLOCK = re.compile(
    r"(?:<!-- run: (?P<name>[^>]+) -->\n)?^```(?P<kind>[\w{}-]*)(?: [^\n]*)?\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


def _blocks(*, marked: bool) -> dict[str, str]:
    """Python blocks of the docs by page and name, or page and line."""
    found = {}
    for page in _PAGES[1:]:
        text = page.read_text()
        for block in _BLOCK.finditer(text):
            if block["kind"] == "python" and (block["name"] is not None) == marked:
                place = block["name"] or f"line {text.count(chr(10), 0, block.start()) + 1}"
                found[f"{page.relative_to(_DOCS)}: {place}"] = block["code"]
    return found


_WHOLE, _FRAGMENTS = _blocks(marked=True), _blocks(marked=False)
# What a fragment goes on with, as the text around it says.
_BEFORE = "from rllib_gigpo import AgentProfile, GiGPOConfig\n\nconfig = GiGPOConfig()\n"
# Fragments that cannot run, and why.
_NOT_RUN: dict[str, str] = {}


def test_marks_are_followed_by_a_block():
    marks = sum(page.read_text().count("<!-- run: ") for page in _PAGES[1:])
    assert marks == len(_WHOLE) > 0


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.name)
def test_every_fence_belongs_to_one_block(page: Path):
    text = page.read_text()
    fences = re.findall("^```", text, re.MULTILINE)
    assert len(fences) == 2 * len(list(_BLOCK.finditer(text)))


@pytest.mark.examples
@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize("name", _WHOLE)
def test_block_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(_WHOLE[name], name, "exec"), {"__name__": "docs"})


@pytest.mark.parametrize("name", sorted(set(_FRAGMENTS) - set(_NOT_RUN)))
def test_fragment_is_taken(name: str):
    exec(compile(_BEFORE + _FRAGMENTS[name], name, "exec"), {"__name__": "docs"})


# A server with the tools that the page's example needs, for any folder.
_FILE_SERVER = """
import json, os, sys
folder = sys.argv[1]
path = {"type": "string"}
names = {"write_file": {"path": path, "content": path}, "list_directory": {"path": path}}
tools = [
    {"name": name, "inputSchema": {"type": "object", "properties": fields}}
    for name, fields in names.items()
]
def answer(method, params):
    if method == "initialize":
        return {"protocolVersion": params["protocolVersion"], "capabilities": {}}
    if method == "tools/list":
        return {"tools": tools}
    place = os.path.join(folder, params["arguments"]["path"])
    if params["name"] == "write_file":
        open(place, "w").write(params["arguments"]["content"])
        return {"content": []}
    return {"content": [{"type": "text", "text": " ".join(os.listdir(place))}]}
for line in sys.stdin:
    asked = json.loads(line)
    if "id" in asked:
        result = answer(asked["method"], asked["params"])
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""


def _mcp_examples() -> list[str]:
    """Command lines of servers that the page on foreign environments names."""
    page = (_DOCS / "environments" / "foreign.md").read_text()
    python = re.findall(r'"""mcp:(.+server-filesystem.+)"""', page)
    typed = re.findall(r'--env ("mcp:.+server-filesystem.+")', page)
    # What the shell makes of it, between double quotes.
    shown = [shlex.split(line.replace("\\$", "$"))[0].removeprefix("mcp:") for line in typed]
    assert len(python) == len(shown) == 1
    return [*python, *shown]


@pytest.mark.parametrize("command", _mcp_examples())
def test_the_example_of_mcp_begins_every_episode_without_the_last_ones_files(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    server = tmp_path / "server.py"
    server.write_text(_FILE_SERVER)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (fragment,) = [code for name, code in _FRAGMENTS.items() if "server-filesystem" in code]
    names: dict[str, Any] = {"__name__": "docs"}
    exec(compile(_BEFORE + fragment, "foreign.md", "exec"), names)
    target = command.replace(
        "npx -y @modelcontextprotocol/server-filesystem", f"{sys.executable} {server}"
    )
    env = MCPEnv(target=target, reward=names["reward"], rows=names["config"].env_config["rows"])
    write = {"name": "write_file", "arguments": {"path": "report.txt", "content": "done"}}
    rewards = []
    for calls in ([json.dumps(write)], []):
        env.reset(seed=0)
        for call in [*calls, "<answer>done</answer>"]:
            reward = env.step(call)[1]
        rewards.append(reward)
    env.close()
    assert rewards == [1.0, 0.0]


# What is no command of ours. Other projects' programs need a network, a cluster, or their data.
_OTHERS = {
    ".",
    "/opt/appworld/bin/appworld",
    "/opt/appworld/bin/pip",
    "alfworld-download",
    "cd",
    "duckdb",
    "export",
    "pip",
    "python3",
    "ray",
    "tw-make",
}
# Blocks that show what is printed, or a drawing.
_SHOWN = ("seeds -> ", "will GiGPO help here", "config.recording(")


def _commands() -> list[str]:
    found = []
    for page in _PAGES:
        for block in _BLOCK.finditer(page.read_text()):
            if block["kind"] == "" and not block["code"].startswith(_SHOWN):
                lines = block["code"].replace("\\\n", " ").splitlines()
                found += [line for line in lines if line.strip()]
    return list(dict.fromkeys(found))


def _parse(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the program's own parser read what follows its name."""
    program, *rest = words
    if program == "make":
        assert re.search(rf"^{rest[0]}:", (_ROOT / "Makefile").read_text(), re.MULTILINE), rest
    elif program == "rllib-gigpo":
        _parse_own(rest[0], rest[1:])
    elif program == "ray" and "--" in rest:
        _parse(rest[rest.index("--") + 1 :], monkeypatch)
    elif program == "python" and rest[0] == "-m" and rest[1] != "venv":
        package, _, name = rest[1].partition(".")
        if package == "rllib_gigpo" and name != "memory_estimate":
            _parse_own(name.replace("_", "-"), rest[2:])
        else:
            assert importlib.util.find_spec(rest[1]) is not None, rest[1]
    elif program == "python" and rest[0].startswith("tuned_examples/"):
        monkeypatch.syspath_prepend(str(_ROOT / "tuned_examples"))
        module = importlib.import_module(Path(rest[0]).stem)
        parse = module.parse if hasattr(module, "parse") else module.parser.parse_args
        parse(rest[1:])
    else:
        assert program in _OTHERS or words[:3] == ["python", "-m", "venv"], program


def _parse_own(name: str, arguments: list[str]) -> None:
    parser: Callable[[], argparse.ArgumentParser] | None
    parser = getattr(parsers, f"{name.replace('-', '_')}_parser", None)
    if parser is not None:
        parser().parse_args(arguments)
        return
    command = typer.main.get_command(app).commands[name]  # pyright: ignore[reportAttributeAccessIssue]
    command.make_context(name, arguments)


@pytest.mark.parametrize("line", _commands())
def test_a_command_and_its_options_are_there(line: str, monkeypatch: pytest.MonkeyPatch):
    words = shlex.shlex(line, posix=True, punctuation_chars="&")
    words.whitespace_split = True
    for is_between, command in groupby(words, "&&".__eq__):
        if not is_between:
            _parse(list(command), monkeypatch)
