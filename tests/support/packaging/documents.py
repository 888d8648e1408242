"""Shell commands in the Markdown documents, and whether our own programs know them."""

import argparse
import contextlib
import functools
import io
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path

from csi import main as csi_main
from fusefs.cli import main as cli_main

PROJECT = Path(__file__).parents[3]
DOCS = PROJECT / "docs"
Command = list[str]
_KEYWORDS = {"do", "done", "then", "else", "fi", "for", "if", "while"}
_PARSERS = {"fusefs": cli_main.make_parser, "fusefs-csi": csi_main.make_parser}


def shell_blocks(document: Path) -> list[str]:
    """The text of each fenced block of shell commands."""
    return re.findall(r"^```sh\n(.*?)^```$", document.read_text(), re.DOTALL | re.MULTILINE)


def commands(text: str) -> list[Command]:
    """The simple commands of a shell text, without redirections, assignments before them included.

    Commands in quotes (`sh -c`, `$(…)`) stay one word.
    """
    text = re.sub(r"(^|\s)#( .*)?$", "", text.replace("\\\n", " "), flags=re.MULTILINE)
    words = shlex.shlex(text, posix=True, punctuation_chars="|&;()<>\n")
    words.whitespace_split, words.whitespace, words.commenters = True, " \t", ""
    found: list[Command] = [[]]
    for word in words:
        if word in _KEYWORDS or set(word) <= set("|&;()\n"):
            found.append([])
        else:
            found[-1].append(word)
    return [command for command in found if command]


def own_commands(text: str) -> Iterator[Command]:
    """The command lines of `fusefs` and `fusefs-csi`, also behind kubectl exec, sudo, env or sh."""
    for command in commands(text):
        for number, word in enumerate(command):
            program = word.removeprefix(".venv/bin/")
            if program in _PARSERS and _begins(command[:number]):
                yield [program, *_without_redirection(command[number + 1 :])]
                break


def _begins(before: Command) -> bool:
    """True if what follows these words is a program's name."""
    if "--" in before:
        before = before[before.index("--") + 1 :]
    return all(word in ("sudo", "env", "time", "sh", "-c", "$") or "=" in word for word in before)


def _without_redirection(words: Command) -> Command:
    signs = [number for number, word in enumerate(words) if set(word) <= set("<>&")]
    return words[: signs[0]] if signs else words


def fault_of(command: Command) -> str | None:
    """What our program says against this command line; None if it takes it."""
    parser = _PARSERS[command[0]]()
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            parser.parse_args(command[1:])
    except SystemExit as end:
        return errors.getvalue().strip() if end.code else None
    return None


def inline_code(document: Path) -> list[str]:
    """The pieces of code within the text, without fenced blocks."""
    text = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [" ".join(piece.split()) for piece in re.findall(r"`([^`]+)`", text)]


@functools.cache
def known_flags() -> frozenset[str]:
    """Every option of every command of both programs."""
    flags: set[str] = set()
    pending: list[argparse.ArgumentParser] = [make() for make in _PARSERS.values()]
    while pending:
        for action in pending.pop()._actions:
            flags.update(action.option_strings)
            if isinstance(action, argparse._SubParsersAction):
                pending += action.choices.values()
    return frozenset(flags)


@functools.cache
def known_files() -> frozenset[str]:
    """The paths of the files of the repository, without those that are made or hidden."""
    folders = [path for path in PROJECT.iterdir() if path.is_dir() and path.name[0] not in "._"]
    found = [*PROJECT.glob("*.*")]
    for folder in folders:
        if folder.name != "build":
            found += folder.rglob("*.*")
    return frozenset(str(path.relative_to(PROJECT)) for path in found)


@functools.cache
def known_commands() -> dict[str, frozenset[str]]:
    """The subcommands of both programs."""
    return {
        name: frozenset(
            choice
            for action in make()._actions
            if isinstance(action, argparse._SubParsersAction)
            for choice in action.choices
        )
        for name, make in _PARSERS.items()
    }


@functools.cache
def generated_pages() -> dict[str, str]:
    """The pages below docs/ that `make docs` makes of the code, by their paths."""
    pages: dict[str, str] = runpy.run_path(str(PROJECT / "packaging/make_docs.py"))["site_pages"]()
    return pages


def anchors(document: Path) -> set[str]:
    """What links can name in it, as GitHub makes it of the headings."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }
