"""Generated code that is kept compiled between starts."""

from __future__ import annotations

import builtins
import dataclasses
import os
import subprocess
import sys
from dataclasses import FrozenInstanceError, dataclass
from pathlib import Path
from typing import Any, NoReturn

import attr
import pytest

from fusefs.daemon import generated_code
from fusefs.daemon.generated_code import GeneratedCode


def refuse(*_given: Any, **_named: Any) -> NoReturn:
    raise AssertionError("something is compiled")


def classes() -> tuple[type, type]:
    """A new class of each kind, as a module makes them."""

    @dataclass(frozen=True, slots=True)
    class Point:
        x: int
        y: int = 2

    @attr.s(auto_attribs=True, eq=False)
    class Size:
        width: int
        height: int = 3

    return Point, Size


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Where a file may be written as Python writes bytecode."""
    own = tmp_path / f"__init__.{sys.implementation.cache_tag}.pyc"
    own.write_bytes(generated_code.MAGIC_NUMBER + bytes(12))
    return str(tmp_path / "generated")


@pytest.fixture(autouse=True)
def _writes_bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)


def test_what_was_compiled_before_is_not_compiled_again(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = GeneratedCode(path)
    with first.used():
        classes()
    first.save()
    second = GeneratedCode(path)
    with monkeypatch.context() as patch:
        patch.setattr(builtins, "compile", refuse)
        with second.used():
            point, size = classes()
    assert repr(point(1)).endswith("Point(x=1, y=2)")
    assert point(1) == point(1, 2)
    assert len({point(1), point(1, 2), point(2)}) == 2
    with pytest.raises(FrozenInstanceError):
        point(1).x = 3
    assert repr(size(1)) == "Size(width=1, height=3)"
    assert "exec" not in vars(dataclasses)
    assert "compile" not in vars(attr._make)


def test_code_is_compiled_with_the_caller_s_future(path: str) -> None:
    names: dict[str, Any] = {"__name__": "module"}
    for future in ("", "from __future__ import annotations\n"):
        code = GeneratedCode(path)
        caller: dict[str, Any] = {"run": code._exec, "names": names}
        exec(
            builtins.compile(
                f"{future}run('def f(a: 1): pass', names, names)", "m", "exec", dont_inherit=True
            ),
            caller,
        )
        assert names["f"].__annotations__ == {"a": "1" if future else 1}
        code.save()


def test_a_text_that_differs_in_each_process_is_not_kept(path: str) -> None:
    def keys(seed: str) -> str:
        script = (
            "from fusefs.daemon.generated_code import GeneratedCode\n"
            f"code = GeneratedCode({path!r})\n"
            "with code.used():\n    import trio\n"
            "print(*sorted(key.hex() for key in code._new))"
        )
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        return subprocess.check_output([sys.executable, "-c", script], env=environment, text=True)

    first = keys("1")
    assert first.strip()
    assert keys("2") == first


def test_a_file_of_another_interpreter_is_not_used(path: str) -> None:
    Path(path).write_bytes(b"1234 no marshal")
    code = GeneratedCode(path)
    with code.used():
        point, _ = classes()
    assert point(1).y == 2
    code.save()
    assert Path(path).read_bytes().startswith(generated_code.MAGIC_NUMBER)


@pytest.mark.parametrize("kind", ["no bytecode is written", "bytecode is not compared", "none"])
def test_nothing_is_written_where_the_files_are_not_python_s(
    path: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Path(path).parent / f"__init__.{sys.implementation.cache_tag}.pyc"
    if kind == "no bytecode is written":
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
    elif kind == "none":
        own.unlink()
    else:
        own.write_bytes(generated_code.MAGIC_NUMBER + b"\1" + bytes(11))
    code = GeneratedCode(path)
    with code.used():
        classes()
    code.save()
    assert not os.path.exists(path)


def test_the_file_of_this_program_has_all_that_a_daemon_generates(tmp_path: Path) -> None:
    script = """
import sys
from fusefs.daemon import generated_code
code = generated_code.GeneratedCode(sys.argv[1])
with code.used():
    import fusefs.daemon.main
print(len(code._new))
code.write()
"""
    command = [sys.executable, "-P", "-c", script, str(tmp_path / "file")]
    counts = [int(subprocess.check_output(command)) for _ in range(2)]
    assert counts[0] > 300
    assert counts[1] == 0


def test_a_damaged_file_is_as_none(path: str) -> None:
    first = GeneratedCode(path)
    with first.used():
        classes()
    first.save()
    whole = Path(path).read_bytes()
    for length in range(len(whole)):
        Path(path).write_bytes(whole[:length])
        assert not GeneratedCode(path)._known
    for at in range(0, len(whole), 7):
        changed = bytearray(whole)
        changed[at] ^= 1
        Path(path).write_bytes(changed)
        assert not GeneratedCode(path)._known
    Path(path).write_bytes(whole)
    assert GeneratedCode(path)._known


def test_attrs_of_another_layout_compile_as_ever(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "attr._make", None)
    with GeneratedCode(path).used():
        point, size = classes()
    assert (point(1).y, size(1).height) == (2, 3)
