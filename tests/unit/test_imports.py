"""No modules import each other in a circle; which folder may import which, import-linter checks."""

import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp

ARCHITECTURE = Path(__file__).parents[2] / "docs" / "architecture.md"
ENTRY_POINTS = ("", "__main__", "mount_helper", "csi_command", "sampling")


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = grimp.build_graph("fusefs", "csi", exclude_type_checking_imports=False, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > 200
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        circle = " -> ".join(reversed(error.args[1]))
        raise AssertionError(f"a circle of imports: {circle}") from None


def test_the_arrows_of_the_picture_are_the_imports_of_folders() -> None:
    graph = grimp.build_graph("fusefs", "csi", cache_dir=None)
    imports: dict[str, set[str]] = {}
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            one, other = folder(module), folder(imported)
            if one != other and {one, other}.isdisjoint(ENTRY_POINTS):
                imports.setdefault(one, set()).add(other)
    arrows = re.findall(r"^    (\w+)(?:\[.*?\])? --> (\w+)", ARCHITECTURE.read_text(), re.MULTILINE)
    assert {
        (one, other)
        for one, others in imports.items()
        for other in others
        if not any(other in below(between, imports) for between in others)
    } == set(arrows)


def folder(module: str) -> str:
    """What stands for a module in the picture; `top` imports texts of `cli`, which imports it."""
    package, _, rest = module.partition(".")
    name = rest.partition(".")[0]
    return "csi" if package == "csi" else {"top": "cli"}.get(name, name)


def below(name: str, imports: dict[str, set[str]]) -> set[str]:
    """The folders that a folder imports, also by others."""
    direct = imports.get(name, set())
    return direct.union(*(below(other, imports) for other in direct))
