"""Check of the credentials that sign requests: their source and remaining validity."""

from __future__ import annotations

import bisect
from typing import Any

import trio

from fusefs.diagnosis.findings import Finding, advice, ok, problem
from fusefs.settings.display import human_duration
from fusefs.store.engine.engine import open_engine
from fusefs.store.errors import NoCredentialsError, SilentSourceError, StoreError
from fusefs.store.s3.access import Access, AccessSource
from fusefs.store.s3.settings import S3Settings

LONGEST_S = 7 * 86_400


def check(settings: S3Settings) -> tuple[Finding, Access | None]:
    """Find credentials; return a finding, and the `Access` to S3 (None on a problem). Blocks."""
    try:
        access = trio.run(_connect, settings)
    except StoreError as error:
        text, what_to_do = str(error), "correct this first: every request to S3 needs credentials"
        if isinstance(error, NoCredentialsError | SilentSourceError):  # with text and advice
            text, _, what_to_do = text.partition(": ")
        return problem("credentials", text, what_to_do), None
    if access.credentials is None:
        return ok("credentials", "requests are not signed (--anonymous)"), access
    return _describe(access.credentials), access


async def _connect(settings: S3Settings) -> Access:
    async with open_engine(1) as engine:
        return await AccessSource(settings, engine.nursery).connect()


def _describe(credentials: Any) -> Finding:
    """Return a finding with the source, the end of the key's id and the remaining validity."""
    key = credentials.get_frozen_credentials()
    method = str(credentials.method)
    text = f"key …{key.access_key[-4:]} from {method}"
    figures: dict[str, Any] = {"method": method, "is_temporary": bool(key.token)}
    if (valid_s := remaining_s(credentials)) is not None:
        figures["valid_seconds"] = valid_s
        text += f", valid for {human_duration(valid_s)}"
        # Keys from the environment are not renewed: botocore reads the same variables again.
        if method != "env":
            return ok("credentials", f"{text}, then renewed", **figures)
    if key.token:
        return advice(
            "credentials",
            f"{text}, temporary and not renewed",
            "the mount loses access when they expire: use a profile, SSO, a role or a web identity "
            "that botocore can renew",
            **figures,
        )
    return ok("credentials", text, **figures)


def remaining_s(credentials: Any) -> int | None:
    """Return the seconds until renewable credentials expire; None for other credentials.

    botocore only says if credentials expire within a given time, so a search finds this time.
    """
    needs_refresh = getattr(credentials, "refresh_needed", None)
    if needs_refresh is None or not needs_refresh(LONGEST_S):
        return None
    return bisect.bisect_left(range(LONGEST_S), True, key=needs_refresh)
