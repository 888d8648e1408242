"""Names of temporary files, which a program soon renames or removes.

An atomic save writes a temporary file, closes it and renames it. If the close sent the file, the
save would cost a PUT, a COPY and a DELETE; so the close keeps the file on the local disk, and the
rename sends the file under its last name. At the close only the name shows that a file is
temporary, because the program's next steps are not known yet.
"""

from __future__ import annotations

import re

# Names with a random part: no two machines create the same name, and no program waits for one. All
# files below a directory of such a name (uv unpacks into one) are temporary.
_RANDOM = re.compile(
    r"""
    \.tmp[.-]?\w{6,}              # Rust's tempfile: uv, ruff, cargo
    | tmp[a-z0-9][a-z0-9_]{7}     # Python's tempfile: HF datasets, matplotlib, joblib
    | tmp_[a-z]+_\w{6}            # git's objects and packs
    | tmp\.\w{6,}                 # mktemp(1)
    """,
    re.VERBOSE,
)
# Names of temporary files; such a name of a directory says nothing about the files below it.
_FILE = re.compile(
    r"""
    tmp[a-z0-9][a-z0-9_]{7}\.\w+  # Python's NamedTemporaryFile with a suffix
    | sed\w{6}                    # sed -i
    | \..+\.(?![a-z]{6})\w{6}     # rsync; six small letters may be a word (.name.backup)
    | .+\.pyc\.\d+                # Python's compiled modules: pip, any import
    | \.~(?!lock).+               # Jupyter; LibreOffice's .~lock is for others to see
    | .+\.tmp([-.]\w+|\d+)?       # pip, torch's distributed checkpoints, Node.js, and many more
    | .+\.(temp|part|partial|incomplete)  # rclone, HF hub, downloads
    """,
    re.VERBOSE,
)


def has_random_part(path: str) -> bool:
    """True if a name in the path has a random part, so that no other machine creates the file."""
    return any(map(_RANDOM.fullmatch, path.split("/")))


def is_temporary(path: str, *, is_exclusive: bool) -> bool:
    """True if the path suggests that the file will soon be renamed or removed.

    A `.lock` file is temporary only if it was created with O_EXCL (`is_exclusive`), as git does:
    git renames it, while `uv.lock` stays.
    """
    name = path.rpartition("/")[2]
    return (
        has_random_part(path)
        or bool(_FILE.fullmatch(name))
        or (is_exclusive and name.endswith(".lock"))
    )
