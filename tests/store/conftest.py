"""What all tests of the store share."""

from __future__ import annotations

import pytest

from fusefs.store.s3 import clients


@pytest.fixture(autouse=True)
def has_many_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long reads over TLS are obstore's, on few processors as well: all paths are tested."""
    monkeypatch.setattr(clients, "FEW_PROCESSORS", 0)
