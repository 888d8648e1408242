"""Which names are those of temporary files."""

from __future__ import annotations

import pytest

from fusefs.posix.write.temporary_names import has_random_part, is_temporary
from tests.support.semantics import states

RANDOM = (".tmpAb3xYz", "tmpk2_xw9qz", "tmp_obj_a7Bc9d", "tmp_pack_Xy12ab", "tmp.5oXhbEd7fK")
FILES = (
    "tmpk2_xw9qz.json",
    "sedB3kLmX",
    ".model.bin.Xy12aB",
    "mod.cpython-311.pyc.140234",
    ".~notebook.ipynb",
    "RECORDx_9ab2k1.tmp",
    "state.json.tmp-1234",
    "model.safetensors.incomplete",
    "data.csv.partial",
)
LASTING = (
    "tmp",
    "tmp_results",
    "template.py",
    "page.tmpl",
    ".vimrc.backup",
    "uv.lock",
    ".~lock.sheet.ods#",
    "a.pyc",
    "party",
)


@states(
    "Temporary are names with a random part (those of Python's and Rust's tempfile, of `mktemp`,"
    " git and rsync), NAME.tmp, NAME.temp, NAME.part, NAME.partial, NAME.incomplete, .~NAME, the"
    " first names of compiled Python modules and of `sed -i`, and NAME.lock if O_EXCL created it."
)
def test_names_of_temporary_files() -> None:
    for name in (*RANDOM, *FILES):
        assert is_temporary(f"a/{name}", is_exclusive=False), name
    for name in LASTING:
        assert not is_temporary(f"a/{name}", is_exclusive=False), name
    assert is_temporary("a/index.lock", is_exclusive=True)


@pytest.mark.parametrize("name", RANDOM)
def test_what_is_below_a_random_name_is_temporary(name: str) -> None:
    assert has_random_part(name)
    assert is_temporary(f"{name}/package/a.py", is_exclusive=False)
    assert not is_temporary("a.tmp/package/a.py", is_exclusive=False)
