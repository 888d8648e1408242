"""Bounds what botocore reads into memory: it reads all of an answer that is no object."""

from __future__ import annotations

from functools import cache
from typing import Any

from fusefs.store.http.answers import MOST_CONTENT, TooLongError


@cache
def bound() -> None:
    """Have no client of botocore's in this process read more than `MOST_CONTENT` bytes.

    It has no setting for that, and no event comes before an answer is read. What is raised
    there it raises as its `HTTPClientError`.
    """
    from botocore import awsrequest

    class BoundedResponse(awsrequest.AWSResponse):
        _content: bytes | None

        @property
        def content(self) -> Any:
            if self._content is None:
                content = bytearray()
                for piece in self.raw.stream():
                    content += piece
                    if len(content) > MOST_CONTENT:
                        raise TooLongError
                self._content = bytes(content)
            return self._content

    setattr(awsrequest, "AWSResponse", BoundedResponse)  # noqa: B010
