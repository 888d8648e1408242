"""Blocks, the secrets that name and sign them, and when the cluster cache is asked."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.cluster_cache import access, policy
from fusefs.cluster_cache.block import BLOCK, FRAME, TAG, BadBlockError, Block, Domain, FrameReader
from fusefs.cluster_cache.policy import Breaker, BreakerState, Deadline, Sampling
from fusefs.settings.mount import MountSettings, RawValue, build
from fusefs.store.interface import ObjectVersion
from tests.support.clock import Clock

DOMAIN = Domain("http://store:8333", "bucket", b"secret")
SIZE = BLOCK + 3 * FRAME + 17
VERSION = ObjectVersion("a/key", '"etag"', SIZE)
CONTENT = os.urandom(SIZE)


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
    sizes = [block.stored_range(block.start, block.stop)[1] for block in BLOCKS]
    assert [len(data) for data in STORED] == sizes
    assert sizes[0] == BLOCK + BLOCK // FRAME * TAG


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


CREDENTIALS = """
[default]
aws_access_key_id = AKIA1
aws_secret_access_key = secret
[other]
aws_access_key_id = AKIA2
"""


def settings_with(**texts: object) -> MountSettings:
    given = {"source": "s3://bucket", "mountpoint": "/mnt", "cluster_cache": "s3://near/blocks"}
    given |= {name: str(text) for name, text in texts.items()}
    return build({name: RawValue(text, f"--{name}") for name, text in given.items()})


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_the_secrets_are_what_the_files_have(tmp_path: Path) -> None:
    key = write(tmp_path / "key", b"\x00sixteen bytes, and more\n")
    keys = write(tmp_path / "keys", CREDENTIALS)
    settings = settings_with(cluster_cache_key=key, cluster_cache_credentials=keys)
    assert access.key(settings) == b"\x00sixteen bytes, and more"
    assert access.credentials(settings) == {
        "AWS_ACCESS_KEY_ID": "AKIA1",
        "AWS_SECRET_ACCESS_KEY": "secret",
    }


def test_what_is_handed_over_is_used_where_the_files_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = write(tmp_path / "key", b"\xff" * 32)
    keys = write(tmp_path / "keys", CREDENTIALS)
    settings = settings_with(cluster_cache_key=key, cluster_cache_credentials=keys)
    handed = access.read(settings)
    for variable, text in handed.items():
        monkeypatch.setenv(variable, str(write(tmp_path / variable, text)))
    key.unlink()
    keys.unlink()
    assert access.key(settings) == b"\xff" * 32
    found = access.credentials(settings)
    assert found is not None
    assert found["AWS_SECRET_ACCESS_KEY"] == "secret"
    # A daemon hands it on to the keeper that it starts.
    assert access.read(settings) == handed


def test_a_mount_without_files_has_no_key_and_its_own_credentials() -> None:
    settings = settings_with()
    assert access.read(settings) == {}
    assert access.key(settings) == b""
    assert access.credentials(settings) is None


@pytest.mark.parametrize("content", ["", "fifteen bytes..", "\n" * 40, "x" * 5000])
def test_a_key_that_is_too_short_or_too_long_is_refused_without_being_shown(
    tmp_path: Path, content: str
) -> None:
    settings = settings_with(cluster_cache_key=write(tmp_path / "key", content))
    with pytest.raises(access.AccessError, match=r"key: a key has 16 to 4096 bytes$"):
        access.read(settings)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "has no profile"),
        ("[other]\naws_access_key_id = a\n", "has no profile"),
        ("[default]\naws_access_key_id = a\n", "aws_secret_access_key"),
        ("aws_access_key_id = a\n", "has no profile"),
        (b"\xff\xfe", "has no profile"),
    ],
)
def test_credentials_that_are_none_are_refused(
    tmp_path: Path, content: str | bytes, why: str
) -> None:
    settings = settings_with(cluster_cache_credentials=write(tmp_path / "keys", content))
    with pytest.raises(access.AccessError, match=why):
        access.read(settings)


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    settings = settings_with(cluster_cache_key=tmp_path / "none")
    with pytest.raises(access.AccessError, match=r"/none cannot be read: No such file"):
        access.read(settings)


def test_the_deadline_is_three_means_within_its_bounds() -> None:
    deadline = Deadline()
    assert deadline.wait_s == policy.MOST_S
    deadline.note_first_byte(0.03)
    assert deadline.wait_s == pytest.approx(0.09)
    for _ in range(200):
        deadline.note_first_byte(0.001)
    assert deadline.wait_s == policy.LEAST_S
    for _ in range(200):
        deadline.note_first_byte(2.0)
    assert deadline.wait_s == policy.MOST_S


def test_late_answers_lengthen_the_deadline_while_all_are_slow() -> None:
    deadline = Deadline()
    deadline.note_late(9.0)
    assert deadline.wait_s == policy.MOST_S, "nothing is known yet"
    deadline.note_first_byte(0.02)
    for _ in range(50):
        deadline.note_late(0.09)
    assert deadline.wait_s > 0.2
    for _ in range(300):
        deadline.note_first_byte(0.005)
        deadline.note_first_byte(0.005)
        deadline.note_late(0.09)
    assert deadline.wait_s < 0.06, "one of three servers that hangs lengthens nothing"


def test_three_failures_open_the_breaker_and_one_probe_closes_it() -> None:
    time = Clock()
    breaker = Breaker(time)
    for _ in range(2):
        breaker.note_failure()
    breaker.note_success()
    for _ in range(2):
        breaker.note_failure()
    assert breaker.is_closed
    assert not breaker.take_probe()
    breaker.note_failure()
    assert (breaker.state, breaker.opened) == (BreakerState.OPEN, 1)
    time.now += policy.OPEN_S - 1
    assert not breaker.take_probe()
    time.now += 1
    assert breaker.take_probe()
    assert not breaker.take_probe(), "one at a time"
    breaker.note_failure()
    assert (breaker.state, breaker.opened) == (BreakerState.OPEN, 1)
    assert not breaker.take_probe(), "the next in its time"
    time.now += policy.OPEN_S
    assert breaker.take_probe()
    breaker.note_success()
    assert breaker.is_closed


def test_useless_answers_open_the_breaker_only_where_nothing_else_comes() -> None:
    breaker = Breaker(Clock())
    for _ in range(30):  # one of three volumes is lost
        breaker.note_failure(policy.USELESS)
        breaker.note_success()
        breaker.note_success()
    for _ in range(11):
        breaker.note_failure(policy.USELESS)
    assert breaker.is_closed
    breaker.note_failure(policy.USELESS)
    assert not breaker.is_closed


def test_while_nothing_is_found_some_lookups_are_made_and_all_after_a_hit() -> None:
    time = Clock()
    sampling = Sampling(time)

    def made(count: int) -> int:
        looked = 0
        for _ in range(count):
            if sampling.wants_lookup():
                looked += 1
                sampling.note_miss()
        return looked

    assert made(policy.MISSES) == policy.MISSES
    assert made(10 * policy.SAMPLE) == 10
    time.now += policy.SAMPLE_EVERY_S
    assert sampling.wants_lookup()
    sampling.note_hit()
    assert made(policy.MISSES) == policy.MISSES
