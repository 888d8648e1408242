"""Blocks of the cluster cache: any range of one can be fetched and checked alone."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.cluster_cache.block import BLOCK, FRAME, TAG, BadBlockError, Block, Domain, FrameReader
from fusefs.store.interface import ObjectVersion

DOMAIN = Domain("http://store:8333", "bucket", b"secret")
SIZE = BLOCK + 3 * FRAME + 17
VERSION = ObjectVersion("a/key", '"etag"', SIZE)
CONTENT = random.Random(1).randbytes(SIZE)


def stored(domain: Domain, block: Block) -> bytes:
    pieces = []
    for number, start, stop in block.frames(block.start, block.stop):
        data = CONTENT[start:stop]
        pieces += [data, domain.tag(block, number, data)]
    return b"".join(pieces)


def read(domain: Domain, block: Block, start: int, stop: int, data: bytes, chunk: int) -> bytes:
    first, last = block.stored_range(start, stop)
    data = data[first:last]
    reader, found, at = FrameReader(domain, block, start, stop), [], start
    for begin in range(0, len(data), chunk):
        for offset, piece in reader.feed(data[begin : begin + chunk]):
            assert offset == at
            found.append(bytes(piece))
            at += len(piece)
    assert reader.is_complete
    return b"".join(found)


BLOCKS = [DOMAIN.block(VERSION, 0), DOMAIN.block(VERSION, SIZE - 1)]
STORED = [stored(DOMAIN, block) for block in BLOCKS]


def test_a_stored_block_has_the_size_that_it_tells() -> None:
    assert [(block.start, block.stop) for block in BLOCKS] == [(0, BLOCK), (BLOCK, SIZE)]
    assert [len(data) for data in STORED] == [block.stored_size for block in BLOCKS]
    assert BLOCKS[0].stored_size == BLOCK + BLOCK // FRAME * TAG


@given(st.integers(0, SIZE - 1), st.integers(1, 2 * FRAME), st.sampled_from([1 << 20, 100_000]))
def test_any_range_is_read(start: int, size: int, chunk: int) -> None:
    block = DOMAIN.block(VERSION, start)
    stop = min(start + size, block.stop)
    found = read(DOMAIN, block, start, stop, STORED[BLOCKS.index(block)], chunk)
    assert found == CONTENT[start:stop]


def test_an_endpoint_may_be_written_in_several_ways() -> None:
    def prefix(endpoint: str, bucket: str = "bucket") -> str:
        return Domain(endpoint, bucket, b"secret").prefix

    for plain, *others in (
        ("https://store", "https://Store", "https://store:443", "HTTPS://store/"),
        ("http://store", "http://store:80", "http://STORE:80/"),
        ("http://[::1]:8333", "http://[::1]:8333/"),
    ):
        assert {prefix(other) for other in others} == {prefix(plain)}
    apart = ("", "http://store", "https://store", "http://store:443", "http://store/path")
    assert len({prefix(endpoint) for endpoint in apart}) == len(apart)
    assert prefix("", "other") != prefix("")


@given(st.integers(0, len(STORED[1]) - 1), st.integers(1, 255))
def test_a_flipped_byte_is_noticed(at: int, mask: int) -> None:
    data = bytearray(STORED[1])
    data[at] ^= mask
    with pytest.raises(BadBlockError):
        read(DOMAIN, BLOCKS[1], BLOCK, SIZE, bytes(data), 1 << 20)


def test_no_frame_and_no_block_stands_for_another() -> None:
    data = STORED[0]
    swapped = (
        data[FRAME + TAG : 2 * (FRAME + TAG)] + data[: FRAME + TAG] + data[2 * (FRAME + TAG) :]
    )
    with pytest.raises(BadBlockError):
        read(DOMAIN, BLOCKS[0], 0, FRAME, swapped, 1 << 20)
    other = Block(BLOCKS[0].name + "x", 0, BLOCK)
    with pytest.raises(BadBlockError):
        read(DOMAIN, other, 0, FRAME, data, 1 << 20)


def test_who_has_another_key_finds_and_writes_nothing_that_passes() -> None:
    stranger = Domain("http://store:8333", "bucket", b"guess")
    block = stranger.block(VERSION, 0)
    assert block.name != BLOCKS[0].name
    forged = stored(stranger, BLOCKS[1])
    with pytest.raises(BadBlockError, match="was stored with another key"):
        read(DOMAIN, BLOCKS[1], BLOCK, SIZE, forged, 1 << 20)


def test_names_differ_with_all_that_makes_a_version() -> None:
    versions = [
        VERSION,
        ObjectVersion("a/ke", 'y"etag"', SIZE),
        ObjectVersion("a/key", '"other"', SIZE),
        ObjectVersion("a/key", '"etag"', SIZE + 1),
    ]
    domains = [
        DOMAIN,
        Domain("http://store:8333", "bucke", b"secret"),
        Domain("", "bucket", b"secret"),
    ]
    names = {domain.block(version, 0).name for domain in domains for version in versions}
    assert len(names) == len(domains) * len(versions)
