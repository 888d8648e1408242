"""DeleteObjects as every store takes it, and with an answer that is one.

S3 demanded a Content-MD5 for many years, and many stores still do; botocore sends a
CRC32 in its place. The answer names what failed, so botocore takes an empty one, or a
proxy's page, for one in which nothing did.
"""

from __future__ import annotations

import base64
import hashlib
from typing import Any


def install(client: Any) -> None:
    """Have a boto3 S3 client send the MD5, and refuse what does not tell of deletes."""
    client.meta.events.register("before-sign.s3.DeleteObjects", _add_md5)
    client.meta.events.register("before-parse.s3.DeleteObjects", _refuse_other_answers)


def _add_md5(request: Any, **_: Any) -> None:
    body = request.body.encode() if isinstance(request.body, str) else request.body
    digest = hashlib.md5(body, usedforsecurity=False).digest()
    request.headers["Content-MD5"] = base64.b64encode(digest).decode()


def _refuse_other_answers(response_dict: dict[str, Any], **_: Any) -> None:
    # As botocore does with an error that has status 200.
    if response_dict["status_code"] == 200 and b"<DeleteResult" not in response_dict["body"]:
        response_dict["status_code"] = 500
