"""Names of temporary files: those that a program gives away again, by a rename or a removal.

An atomic save writes a file of such a name, closes it and renames it. Sent at
the close it would cost a PUT, a COPY and a DELETE; so it is kept on the local
disk then, and the rename sends it under its last name. The name is all that a
close can go by: what a program will do with the file is not known yet.
"""

from __future__ import annotations

import re

# With a random part: no two nodes make the same name, and nobody waits for one. A directory of
# such a name (uv unpacks into one) makes everything below it temporary.
_RANDOM = re.compile(
    r"""
    \.tmp[.-]?\w{6,}              # Rust's tempfile: uv, ruff, cargo
    | tmp[a-z0-9][a-z0-9_]{7}     # Python's tempfile: HF datasets, matplotlib, joblib
    | tmp_[a-z]+_\w{6}            # git's objects and packs
    | tmp\.\w{6,}                 # mktemp(1)
    """,
    re.VERBOSE,
)
# Those of files alone.
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
    """True if no other node makes a file of this path: mkstemp(3) has chosen a name in it."""
    return any(map(_RANDOM.fullmatch, path.split("/")))


def is_temporary(path: str, *, is_exclusive: bool) -> bool:
    """True if a file is soon to have another name or none, as far as its path tells.

    With `is_exclusive` it was created with O_EXCL: a lock then, as git writes it and renames it,
    and not `uv.lock`, which stays.
    """
    name = path.rpartition("/")[2]
    return (
        has_random_part(path)
        or bool(_FILE.fullmatch(name))
        or (is_exclusive and name.endswith(".lock"))
    )
