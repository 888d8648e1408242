"""A machine whose clock is wrong: requests are signed with the store's time."""

from __future__ import annotations

import tempfile
import time

import pytest

from fusefs.store.errors import AccessDeniedError
from fusefs.store.http.server_clock import SKEWED, ServerClock
from fusefs.store.interface import BytesSink
from fusefs.store.s3.access import S3Settings
from fusefs.store.s3.store import S3Store
from tests.support.semantics import states
from tests.support.servers.flat_s3 import FlatS3
from tests.support.servers.in_process import Answer, Headers

KEYS = {"AWS_ACCESS_KEY_ID": "access", "AWS_SECRET_ACCESS_KEY": "secret"}
ALLOWED_S = 900


class LaterServer(FlatS3):
    """Its clock is `ahead_s` ahead, and it refuses what is signed with another time."""

    def __init__(self, ahead_s: float) -> None:
        self.ahead_s = ahead_s
        self.refused: list[str] = []
        super().__init__()

    def now(self) -> float:
        return time.time() + self.ahead_s

    def answer(self, method: str, target: str, headers: Headers, body: bytes) -> Answer:
        signed = time.strptime(headers["x-amz-date"], "%Y%m%dT%H%M%SZ")
        if abs(self.now() - (time.mktime(signed) - time.timezone)) <= ALLOWED_S:
            return super().answer(method, target, headers, body)
        self.refused.append(f"{method} {target}")
        return 403, {}, f"<Error><Code>{SKEWED}</Code></Error>".encode()


@states(
    "Where the machine's clock is off by more than S3 allows, requests are signed with the time "
    "that S3's answers tell."
)
@pytest.mark.parametrize("ahead_s", [4000.0, -100_000.0])
async def test_a_wrong_clock_costs_one_refusal(ahead_s: float) -> None:
    server = LaterServer(ahead_s)
    with server, tempfile.TemporaryFile() as file:
        file.write(b"hello")
        file.flush()
        store = S3Store(S3Settings("bucket", server.endpoint_url, keys=KEYS))
        sink = BytesSink(0, 5)
        try:
            info = await store.put_file("a", file.fileno(), 5)
            assert (await store.head("a")).etag == info.etag
            await store.download(info.version, 0, 5, sink)
            assert [one.key for one in (await store.list_page("")).objects] == ["a"]
            assert not await store.delete_many(["a"])
        finally:
            await store.aclose()
    assert (sink.data, server.contents()) == (b"hello", {})
    assert len(server.refused) == 1


async def test_a_refusal_for_another_reason_is_no_matter_of_time() -> None:
    class Refusing(LaterServer):
        def get(self, *_: object) -> Answer:
            self.refused.append("GET")
            return 403, {}, b"<Error><Code>AccessDenied</Code></Error>"

    server = Refusing(4000.0)
    with server:
        store = S3Store(S3Settings("bucket", server.endpoint_url, keys=KEYS))
        await store.list_page("")
        with pytest.raises(AccessDeniedError):
            await store.head("a")
        await store.aclose()
    assert server.refused[1:] == ["GET"] * (len(server.refused) - 1)
    assert len(server.refused) <= 4


@pytest.mark.parametrize("date", [None, "", "soon", "Mon, 01 Jan 2026 00:00:00 +9999"])
def test_a_date_that_is_none_corrects_nothing(date: str | None) -> None:
    clock = ServerClock()
    assert not clock.corrects(403, SKEWED, {} if date is None else {"date": date}, 0.0)
    assert clock.offset_s == 0.0
    assert abs(clock.now() - time.time()) < 60
