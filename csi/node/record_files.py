"""How a driver reads its records, which a newer version of it may have written.

After a roll-back the older driver finds what the newer one has on record. It leaves out
the fields that it does not know: with a record that counts as lost, a running pod would
lose its mount.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any


def known_fields(kind: type[Any], path: Path) -> dict[str, Any]:
    """The fields of the dataclass `kind` that a file has, as JSON wrote them.

    Raises:
        OSError: there is no such file.
        ValueError, TypeError: it holds something else.
    """
    found = dict(json.loads(path.read_text()))
    known = {field.name for field in fields(kind)}
    return {name: value for name, value in found.items() if name in known}
