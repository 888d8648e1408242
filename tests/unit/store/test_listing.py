"""Reading ListObjectsV2 answers of various servers, in and out of order."""

import struct
from urllib.parse import quote_plus
from xml.sax.saxutils import escape

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.store.engine.engine import Completion
from fusefs.store.errors import StoreError, UnsupportedError
from fusefs.store.interface import ListPage, ObjectInfo
from fusefs.store.s3 import documents
from fusefs.store.s3.list import parse
from fusefs.store.s3.settings import S3Settings
from fusefs.store.s3.sorted_listing import SortedListings, is_in_order
from fusefs.store.s3.store import open_store
from tests.support.servers.flat_s3 import FlatS3

AWS = ("Key", "LastModified", "ETag", "Size", "StorageClass")
SEAWEEDFS = ("Key", "ETag", "Size", "StorageClass", "LastModified")
NAMESPACE = ' xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
# A page behind which nothing can be listed.
UNNAMED = "<IsTruncated>true</IsTruncated><CommonPrefixes/>"
DEFAULTS = {
    "Key": "a",
    "LastModified": "2026-11-21T04:15:07.000Z",
    "ETag": "&quot;x&quot;",
    "Size": "1",
    "StorageClass": "STANDARD",
}


def entry(order: tuple[str, ...] = AWS, **fields: str) -> str:
    fields = {**DEFAULTS, **fields}
    return (
        "<Contents>" + "".join(f"<{name}>{fields[name]}</{name}>" for name in order) + "</Contents>"
    )


def document(*parts: str, namespace: str = NAMESPACE, encoding: str = "url") -> bytes:
    element = f"<EncodingType>{encoding}</EncodingType>" if encoding else ""
    return (
        f'<?xml version="1.0" encoding="UTF-8"?>\n<ListBucketResult{namespace}>'
        f"<Name>bucket</Name>{''.join(parts)}{element}</ListBucketResult>"
    ).encode()


@pytest.mark.parametrize("order", [AWS, SEAWEEDFS])
@pytest.mark.parametrize("namespace", [NAMESPACE, ""])
def test_an_entry_is_read_whole(order: tuple[str, ...], namespace: str) -> None:
    body = document(
        entry(order, Key="dir/a.bin", Size="12", StorageClass="GLACIER"), namespace=namespace
    )
    (info,) = parse(body).objects
    assert (info.key, info.size, info.etag, info.storage_class) == (
        "dir/a.bin",
        12,
        '"x"',
        "GLACIER",
    )
    assert info.mtime_ns == 1795234507 * 10**9


@pytest.mark.parametrize("etag", ["&quot;x&quot;", "&#34;x&#34;", '"x"', "x"])
def test_an_etag_is_quoted_however_it_comes(etag: str) -> None:
    assert parse(document(entry(ETag=etag))).objects[0].etag == '"x"'


@pytest.mark.parametrize(
    "when",
    [
        "2026-11-21T04:15:07Z",
        "2026-11-21T04:15:07+00:00",
        "2026-11-21T05:15:07+01:00",
        "2026-11-21T04:15:07",
        # HEAD and GET tell whole seconds: an object has one time, whoever tells it.
        "2026-11-21T04:15:07.923000000Z",
        "2026-11-21T04:15:07.923Z",
    ],
)
def test_times_are_read_in_each_usual_form(when: str) -> None:
    assert parse(document(entry(LastModified=when))).objects[0].mtime_ns == 1795234507 * 10**9


@pytest.mark.parametrize("year", ["0001", "9999"])
def test_a_time_that_stands_for_none_fits_64_bits(year: str) -> None:
    body = document(entry(LastModified=f"{year}-01-01T00:00:00Z"))
    struct.pack("q", parse(body).objects[0].mtime_ns)


@pytest.mark.parametrize(
    ("encoded", "key"), [("a%20b", "a b"), ("a%2520b", "a%20b"), ("dir/", "dir/")]
)
def test_keys_that_others_encode_otherwise_are_decoded(encoded: str, key: str) -> None:
    assert parse(document(entry(Key=encoded))).objects[0].key == key


def test_keys_are_taken_as_they_are_where_nothing_is_encoded() -> None:
    body = document(entry(Key="a+b%20c&amp;d"), encoding="")
    assert parse(body).objects[0].key == "a+b%20c&d"


def test_a_page_that_goes_on_has_a_token() -> None:
    page = parse(
        document(
            "<IsTruncated>true</IsTruncated><NextContinuationToken>t&amp;1</NextContinuationToken>",
            entry(Key="a"),
            "<CommonPrefixes><Prefix>b%2B/</Prefix></CommonPrefixes>",
        )
    )
    assert (page.next_token, page.prefixes, page.last) == ("t&1", ["b+/"], "b+/")


def test_the_last_page_has_no_token() -> None:
    body = document("<IsTruncated>false</IsTruncated><NextContinuationToken/>", entry())
    assert parse(body).next_token is None


def test_an_empty_listing_is_a_page() -> None:
    page = parse(document("<Prefix></Prefix><KeyCount>0</KeyCount>"))
    assert (page.objects, page.prefixes, page.next_token, page.last) == ([], [], None, "")


def test_entries_that_differ_are_all_read() -> None:
    body = document(
        entry(Key="a"),
        entry(SEAWEEDFS, Key="b"),
        entry((*AWS, "ChecksumType"), Key="c", ChecksumType="FULL_OBJECT"),
        "<Contents><Key>d</Key><LastModified>2026-11-21T04:15:07Z</LastModified><ETag>x</ETag>"
        "<Size>1</Size><Owner><ID>1</ID></Owner></Contents>",
    )
    assert [info.key for info in parse(body).objects] == ["a", "b", "c", "d"]


def test_prefixes_between_entries_are_read() -> None:
    prefix = "<CommonPrefixes><Prefix>b/</Prefix></CommonPrefixes>"
    page = parse(document(entry(Key="a"), prefix, entry(Key="c"), entry(Key="d")))
    assert ([info.key for info in page.objects], page.prefixes) == (["a", "c", "d"], ["b/"])


def test_a_missing_storage_class_is_the_standard_one() -> None:
    body = document(entry(("Key", "Size", "ETag", "LastModified")))
    assert parse(body).objects[0].storage_class == "STANDARD"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>Sign in</html>",
        b"<html><body>Sign in",
        b"\xff\xfe",
        document()[:-5],
        document(entry())[:200],
        document(UNNAMED),
    ],
)
def test_what_is_not_a_listing_is_an_error(body: bytes) -> None:
    with pytest.raises(StoreError):
        parse(body)


@pytest.mark.parametrize(
    "odd",
    [
        entry(Key="b", Size=""),
        entry(Key="b", Size="-1"),
        entry(Key="b", Size=str(1 << 63)),
        entry(AWS[:-1], Key="b", Size=str(1 << 64)),
        entry(Key="b", LastModified="soon"),
        entry(AWS[:2], Key="b"),
        *(entry(Key="b", ETag=etag) for etag in ("a&#10;b", "\u20ac", "x" * (64 << 10))),
    ],
)
def test_an_entry_that_can_not_be_used_is_there_for_its_key_alone(odd: str) -> None:
    first, second, third = parse(document(entry(Key="a"), odd, entry(Key="c"))).objects
    assert (first.key, first.etag, third.key, third.etag) == ("a", '"x"', "c", '"x"')
    assert (second.key, second.etag, second.size) == ("b", "", 0)


def test_an_entry_without_a_key_is_counted() -> None:
    page = parse(document(entry(Key=""), entry(AWS[1:]), "<CommonPrefixes/>", entry(Key="c")))
    assert ([info.key for info in page.objects], page.unnamed) == (["c"], 3)


def test_an_entry_beside_the_prefix_is_counted() -> None:
    page = parse(document(entry(Key="a/b"), entry(Key="c")), "a/")
    assert ([info.key for info in page.objects], page.unnamed) == (["a/b"], 1)


@pytest.mark.parametrize("text", ["a\nb", "\u20ac", "x" * (64 << 10)])
def test_a_storage_class_that_is_none_is_the_usual_one(text: str) -> None:
    assert parse(document(entry(StorageClass=text))).objects[0].storage_class == "STANDARD"


@pytest.mark.parametrize(
    "echo", ["<Prefix>one&#x01;x/</Prefix>", "<StartAfter>a&#1;\x02&#X1F;</StartAfter>"]
)
@pytest.mark.parametrize("entries", [(), (entry(Key="one%01x%2Ff"),)], ids=["none", "one"])
def test_a_prefix_that_xml_can_not_write_is_passed_over(
    entries: tuple[str, ...], echo: str
) -> None:
    """Ceph's gateway encodes the keys, and repeats the prefix as it is."""
    assert [info.key for info in parse(document(echo, *entries)).objects] == [
        "one\x01x/f" for _ in entries
    ]


def test_a_listing_that_has_all_come_is_not_requested_again() -> None:
    for body, is_final in ((document(UNNAMED), True), (document()[:-5], False)):
        with pytest.raises(StoreError) as raised:
            parse(body)
        assert raised.value.is_retryable != is_final


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), max_size=5))
def test_every_key_arrives_as_it_is(keys: list[str]) -> None:
    body = document(*(entry(Key=escape(quote_plus(key))) for key in keys))
    assert [info.key for info in parse(body).objects] == keys


def page(*keys: str, more: bool = True) -> ListPage:
    objects = [ObjectInfo(key, 1, '"e"', 0) for key in keys if not key.endswith("/")]
    prefixes = [key for key in keys if key.endswith("/")]
    return ListPage(objects, prefixes, "more" if more else None, max(keys, default=""))


@pytest.mark.parametrize(
    ("listed", "delimiter", "after", "is_it"),
    [
        (page("a", "b", "c"), "/", "", True),
        (page("b", "a", more=False), "/", "", True),  # all of it
        (page("b", "a"), "/", "", False),
        (page("b", "c", more=False), "/", "b", False),  # it goes on with what there was
        (page("b/", "b-c/"), "/", "", False),
        (page("b/x", "b-c/x", "c"), "", "a/x", True),  # by path segments
        (page("b/x", "c", "b/y"), "", "", False),
        (page(), "/", "a", True),
    ],
)
def test_a_page_is_in_order_if_the_next_can_go_on_behind_it(
    listed: ListPage, delimiter: str, after: str, is_it: bool
) -> None:
    assert is_in_order(listed, delimiter, after) is is_it


async def test_a_server_that_always_sends_the_same_page_is_given_up() -> None:
    async def fetch(_folder: str, _delimiter: str, _token: str) -> ListPage:
        return page("d/b", "d/a")

    with pytest.raises(UnsupportedError, match="no end"):
        await SortedListings(fetch).page("d/", "/", "", 1000)


async def test_pages_are_of_the_prefix_alone() -> None:
    pages = [page("d/ab", "d/é/", "d/a"), page("d/b", "d/a\U0001f680", more=False)]

    async def fetch(folder: str, _delimiter: str, token: str) -> ListPage:
        assert folder == "d/"
        return pages[1] if token else pages[0]

    listings = SortedListings(fetch)
    first = await listings.page("d/a", "/", "", 2)
    assert ([info.key for info in first.objects], first.next_token) == (["d/a", "d/ab"], "d/ab")
    second = await listings.page("d/a", "/", first.last, 2)
    assert [info.key for info in second.objects] == ["d/a\U0001f680"]
    assert (second.next_token, second.listed_at) == (None, first.listed_at)
    assert (await listings.page("d/", "/", "d/b", 9)).prefixes == ["d/é/"]
    assert (listings.count, listings.has("d/x", "/"), listings.has("d/", "")) == (1, True, False)


async def test_a_page_without_entries_is_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with FlatS3() as server:
        server.has_gaps = True
        server.put("d/a")
        settings = S3Settings("bucket", endpoint_url=server.endpoint_url, anonymous=True)
        async with open_store(settings) as store:
            for most in (1, 1000):
                listed = await store.list_page("d/", max_keys=most)
                assert [info.key for info in listed.objects] == ["d/a"]
            assert (await store.list_page("d/", start_after="d/a")).objects == []
            first = server.list_page({})
            monkeypatch.setattr(server, "list_page", lambda _query: first)
            with pytest.raises(UnsupportedError, match="no end"):
                await store.list_page("d/")


@pytest.mark.parametrize("encoding", ["Shift_JIS", "none"])
def test_a_document_in_an_odd_encoding_is_no_result(encoding: str) -> None:
    body = f'<?xml version="1.0" encoding="{encoding}"?><CopyObjectResult/>'.encode()
    answer = Completion(200, {}, body, 0, None, 0, 0, "", 0, 0, 0)
    with pytest.raises(StoreError, match="did not say what it did"):
        documents.read(answer, "CopyObjectResult")
