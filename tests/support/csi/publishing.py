"""Calls that a driver refuses."""

import contextlib
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from tests.support.csi.node import code_of


@contextlib.contextmanager
def refused(code: grpc.StatusCode, *words: str) -> Iterator[Any]:
    """The call inside ends with this code, and says each of the words."""
    with pytest.raises(grpc.RpcError) as error:
        yield error
    failure: Any = error.value
    assert code_of(error) == code, failure.details()
    for word in words:
        assert word in failure.details()
