"""Calls that a driver refuses, and what kubelet adds to them for a pod's identity."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from csi.identities.credentials import ACCOUNT, NAMESPACE, TOKENS
from tests.support.csi.node import code_of

POD = {NAMESPACE: "team", ACCOUNT: "trainer"}


def tokens(token: str, audience: str) -> dict[str, str]:
    """A pod's token, as a Secret or the volume's attributes have it."""
    return {TOKENS: json.dumps({audience: {"token": token, "expirationTimestamp": "later"}})}


@contextlib.contextmanager
def refused(code: grpc.StatusCode, *words: str) -> Iterator[Any]:
    """The call inside ends with this code, and says each of the words."""
    with pytest.raises(grpc.RpcError) as error:
        yield error
    failure: Any = error.value
    assert code_of(error) == code, failure.details()
    for word in words:
        assert word in failure.details()
