"""Documents: commands, links and files that are there, and statements that have tests."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.packaging.documents import (
    DOCS,
    PROJECT,
    anchors,
    fault_of,
    generated_pages,
    inline_code,
    known_commands,
    known_files,
    known_flags,
    own_commands,
    shell_blocks,
)

DOCUMENTS = [
    *sorted(DOCS.rglob("*.md")),
    *(
        PROJECT / path
        for path in (
            "README.md",
            "charts/fusefs-csi/README.md",
            "examples/kubernetes/README.md",
            "image/README.md",
            "manifests/README.md",
            "packaging/README.md",
        )
    ),
]
# Those that show options of no other programs in their text.
OPERATORS = [DOCS / "csi.md", *(DOCS / "operate").glob("*.md")]
SITE = PROJECT / "packaging/site/mkdocs.yml"
MOST_WORDS = 1250
LONG = {"semantics.md"}

each_document = pytest.mark.parametrize(
    "path", DOCUMENTS, ids=lambda path: str(path.relative_to(PROJECT))
)


@each_document
def test_a_shell_reads_the_commands(path: Path) -> None:
    for block in shell_blocks(path):
        done = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), block


@each_document
def test_our_programs_take_their_command_lines(path: Path) -> None:
    for block in shell_blocks(path):
        for command in own_commands(block):
            assert fault_of(command) is None, command


def test_there_are_command_lines_to_check() -> None:
    blocks = shell_blocks(PROJECT / "README.md")
    readme = [command for block in blocks for command in own_commands(block)]
    assert ["fusefs", "mount", "s3://BUCKET/PREFIX", "/data"] in readme
    assert fault_of(["fusefs", "warm", "--shards", "0/4", "/data"]) is not None


@each_document
def test_commands_in_the_text_are_known(path: Path) -> None:
    commands, flags = known_commands(), known_flags()
    for code in inline_code(path):
        words = code.split()
        if words[0] in commands:
            assert len(words) == 1 or words[1].startswith("-") or words[1] in commands[words[0]]
            is_ours = True
            # One that only names an option says less than it has to.
            fault = fault_of(words) if len(words) > 2 else None
            assert fault is None or "required" in fault or "expected" in fault, fault
        else:
            is_ours = path in OPERATORS and words[0].startswith("--")
        for word in words if is_ours else []:
            assert not word.startswith("--") or word.partition("=")[0] in flags, code


@each_document
def test_links_lead_to_what_is_there(path: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if str(target).removeprefix(f"{DOCS}/") in generated_pages():
            continue
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@each_document
def test_files_that_the_text_names_are_there(path: Path) -> None:
    there = known_files()
    for code in inline_code(path):
        for name in re.findall(r"[\w./-]+\.(?:py|c|yaml|toml|md)\b", code):
            is_of_users = name.startswith("/etc/fusefs/")
            assert is_of_users or any(f"/{known}".endswith(f"/{name}") for known in there), name


TESTS = Path(__file__).parents[1]
DOCUMENT = TESTS.parent / "docs" / "semantics.md"


def statements() -> list[str]:
    return [
        line.removeprefix("- ") for line in DOCUMENT.read_text().splitlines() if line[:2] == "- "
    ]


def quotations() -> dict[str, str]:
    """Every sentence that a test quotes, and in which file."""
    found = {}
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "states":
                for argument in node.args:
                    found[ast.literal_eval(argument)] = path.name
    return found


def test_every_statement_of_the_document_has_a_test() -> None:
    assert set(statements()) - quotations().keys() == set()


def test_every_quoted_statement_is_in_the_document() -> None:
    assert quotations().keys() - set(statements()) == set()


def test_every_page_is_in_the_site_and_short() -> None:
    """The guarantees, which tests quote, are for looking things up."""
    pages = {str(path.relative_to(DOCS)): path.read_text() for path in DOCS.rglob("*.md")}
    pages |= generated_pages()
    named = set(re.findall(r"^ +- .*?([\w/.-]+\.md)$", SITE.read_text(), re.MULTILINE))
    assert pages.keys() <= named
    pages |= {name: (PROJECT / name).read_text() for name in named - pages.keys()}
    words = {name: len(text.split()) for name, text in pages.items()}
    assert {name for name in words if words[name] > MOST_WORDS} == LONG
    assert len((PROJECT / "README.md").read_text().splitlines()) <= 120
