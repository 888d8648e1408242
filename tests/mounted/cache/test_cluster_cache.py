"""The cluster cache: what one mount has fetched, others read from there, whatever becomes of it."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster_nodes import section as of
from tests.support.mounting import Mount, Mounter, fusefs
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket, keys, new_bucket, stored
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.servers.s3_server import S3Server
from tests.support.sharing import stamped, version_of
from tests.support.waiting import until

MIB = 1 << 20
OBJECTS = {f"small/{number}": stamped(number, 5_000 + number) for number in range(30)}
OBJECTS["large"] = stamped(99, 20 * MIB + 7)
# Of 8 MiB each: three of the large object, and one of each small one.
BLOCKS = 33

Join = Callable[..., Mount]


@pytest.fixture(scope="module")
def tree(shared: Bucket) -> Bucket:
    for key, data in OBJECTS.items():
        shared.put(key, data)
    return shared


@dataclass
class Domain:
    """A bucket for blocks, and the secret of those who use it."""

    near: Bucket
    secret: Path

    def options(self, endpoint_url: str | None = None) -> list[str]:
        place = ["--cluster-cache", f"s3://{self.near.name}/blocks"]
        place += ["--cluster-cache-endpoint", endpoint_url or self.near.server.endpoint_url]
        return [*place, "--cluster-cache-key", str(self.secret)]


def new_domain(s3: S3Server, directory: Path) -> Domain:
    secret = directory / "secret"
    secret.write_text("a secret of the whole domain")
    return Domain(new_bucket(s3), secret)


@pytest.fixture
def empty(s3: S3Server, tmp_path: Path) -> Domain:
    return new_domain(s3, tmp_path)


@pytest.fixture(scope="module")
def full(
    s3: S3Server,
    tree: Bucket,
    faulty: FaultyS3,
    module_mounter: Mounter,
    tmp_path_factory: pytest.TempPathFactory,
) -> Domain:
    """One that has all blocks of the tree."""
    domain = new_domain(s3, tmp_path_factory.mktemp("full"))
    mount = module_mounter(*domain.options(), bucket=tree, endpoint_url=faulty.endpoint_url)
    fill(mount)
    mount.end()
    return domain


@pytest.fixture
def join(mounter: Mounter, tree: Bucket, faulty: FaultyS3) -> Join:
    """Mounts the tree on one more machine: `join(domain, "--option", …, endpoint_url=…)`."""
    machines = iter(range(100))

    def mount(domain: Domain, *options: str, endpoint_url: str | None = None) -> Mount:
        given = [*domain.options(endpoint_url), *options]
        cache = f"machine{next(machines)}"
        made = mounter(*given, bucket=tree, cache=cache, endpoint_url=faulty.endpoint_url)
        until(lambda: of(made)["state"] != "opening")
        return made

    return mount


def read(mount: Mount) -> None:
    for key, data in OBJECTS.items():
        assert (mount.path / key).read_bytes() == data, key


def finds_all(mount: Mount, faulty: FaultyS3) -> bool:
    """Read everything, and tell whether all was there, and most was read from there.

    S3 is far away meanwhile: an answer that is late on a busy machine comes first still.
    """
    far = faulty.add("GET", delay_s=5.0)
    read(mount)
    faulty.remove(far)
    found, fetched = of(mount), mount.status()["s3"]["bytes_fetched"]
    wrong = sum(found["lookups"][name] for name in ("misses", "bad", "refused"))
    return wrong == 0 and found["read_bytes"] > fetched


def fill(mount: Mount, blocks: int = BLOCKS) -> None:
    until(lambda: of(mount)["state"] != "opening")
    read(mount)
    until(lambda: of(mount)["fills"]["stored"] == blocks)


@states(
    "With `--cluster-cache`, what is not on the local disk is looked for in that bucket, "
    "and then read from S3; what came from S3 is stored there in the background once the "
    "local disk has all of a block (8 MiB of an object)."
)
def test_what_one_machine_has_read_another_one_has_without_s3(
    join: Join, full: Domain, faulty: FaultyS3
) -> None:
    assert len(keys(full.near)) == BLOCKS
    second = join(full)
    assert finds_all(second, faulty)
    assert of(second)["fills"]["stored"] <= of(second)["lookups"]["late"]


FAULTS: dict[str, dict[str, Any]] = {
    "is silent": {"stall": True},
    "falls silent": {"stall_after": 300_000},
    "fails": {"code": "InternalError"},
    "asks to slow down": {"code": "SlowDown"},
    "refuses": {"code": "AccessDenied"},
    "breaks off": {"cut_after": 300_000},
    "sends too little": {"short": 1000},
    "is slow": {"bytes_per_s": 300_000},
    "is no HTTP": {"status": 1000, "body": b"?"},
}


@states(
    "A cluster cache that is silent, slow, full or gone, or that has other bytes than were "
    "stored, causes no error: after half a second at most a read goes to S3 as well, and "
    "the first of the two to answer is read; an answer that stalls or comes slowly is given up, "
    "and S3 has the rest."
)
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_whatever_becomes_of_it_programs_read_what_s3_has(
    join: Join, full: Domain, faulty: FaultyS3, fault: dict[str, Any]
) -> None:
    faulty.clear()
    mount = join(full, endpoint_url=faulty.endpoint_url)
    faulty.add("GET", "blocks/*", **fault)
    read(mount)
    found = of(mount)["lookups"]
    assert sum(found[name] for name in ("late", "failed", "refused", "bad")) > 0
    if fault.keys() & {"stall", "code", "short"}:
        assert found["hits"] == 0
    assert mount.status()["s3"]["errors"] == 0
    faulty.clear()


@states(
    "What was changed in the cluster cache, or was stored there with another key than that "
    "of `--cluster-cache-key`, is never read; a changed block is replaced once it was "
    "found."
)
def test_blocks_that_were_changed_are_read_from_s3_and_replaced(
    join: Join, faulty: FaultyS3, s3: S3Server, tmp_path: Path
) -> None:
    domain = new_domain(s3, tmp_path)
    fill(join(domain))
    changed = keys(domain.near)[:8]
    for key in changed:
        block = bytearray(stored(domain.near, key))
        block[len(block) // 2] ^= 1
        domain.near.put(key, bytes(block))
    second = join(domain)
    read(second)
    assert of(second)["lookups"]["bad"] >= len(changed)
    until(lambda: of(second)["fills"]["stored"] == len(changed))
    third = join(domain)
    assert finds_all(third, faulty)


def test_who_has_another_key_shares_nothing_and_harms_no_other(
    join: Join, s3: S3Server, tmp_path: Path
) -> None:
    domain = new_domain(s3, tmp_path)
    fill(join(domain))
    ours = keys(domain.near)
    other = replace(domain, secret=tmp_path / "other")
    other.secret.write_text("the secret of somebody else")
    fill(join(other))  # as if it were empty
    theirs = {len(stored(domain.near, key)): key for key in {*keys(domain.near)} - {*ours}}
    for key in ours:
        domain.near.put(key, stored(domain.near, theirs[len(stored(domain.near, key))]))
    mount = join(domain)
    read(mount)
    assert of(mount)["lookups"]["bad"] > 0


def test_a_mount_starts_and_reads_while_it_is_gone(
    mounter: Mounter, tree: Bucket, empty: Domain
) -> None:
    mount = mounter(*empty.options("http://127.0.0.1:9"), bucket=tree)
    read(mount)
    assert of(mount)["state"] == "opening"


@states(
    "`fusefs warm --wait` returns when what it has fetched from S3 is in the cluster cache "
    "too, and tells how much that did not take."
)
def test_a_job_ends_when_what_it_fetched_can_be_read_by_others(
    join: Join, empty: Domain, faulty: FaultyS3
) -> None:
    first, second = join(empty), join(empty)
    fusefs("warm", "--wait", first.path)
    assert of(first)["fills"]["stored"] == BLOCKS
    assert finds_all(second, faulty)


def test_status_shows_it(join: Join, empty: Domain) -> None:
    mount = join(empty)
    fill(mount)
    shown = fusefs("status", mount.path).stdout
    place = rf"s3://{empty.near.name}/blocks/"
    assert re.search(rf"{place}: in use; 0 of \d+ lookups found.*{BLOCKS} stored", shown)


@states(
    "Names, sizes and ETags always come from the bucket itself: what a cluster cache has is as old "
    "as what the local disk has, for which the metadata TTL is the bound."
)
def test_an_object_that_was_replaced_is_read_as_it_is(
    join: Join, mounter: Mounter, bucket: Bucket, empty: Domain
) -> None:
    bucket.put("a", stamped(1, 100_000))
    first = mounter(*empty.options(), bucket=bucket, cache="first")
    until(lambda: of(first)["state"] != "opening")
    assert version_of((first.path / "a").read_bytes()) == 1
    until(lambda: of(first)["fills"]["stored"] == 1)
    bucket.put("a", stamped(2, 100_000))
    second = mounter(*empty.options(), bucket=bucket, cache="second")
    until(lambda: of(second)["state"] != "opening")
    assert version_of((second.path / "a").read_bytes()) == 2
    assert of(second)["lookups"]["hits"] == 0


def test_a_large_object_that_was_replaced_since_it_was_listed_is_read_as_it_is(
    mounter: Mounter, bucket: Bucket, empty: Domain
) -> None:
    size = 8 * MIB + 100_000
    bucket.put("a", stamped(1, size))
    first = mounter(*empty.options(), bucket=bucket, cache="first")
    until(lambda: of(first)["state"] != "opening")
    assert version_of((first.path / "a").read_bytes()) == 1
    until(lambda: of(first)["fills"]["stored"] == 2)
    for name in keys(empty.near):
        if name.endswith("/000001"):
            empty.near.delete(name)
    second = mounter(*empty.options(), "--metadata-ttl", "1h", bucket=bucket, cache="second")
    until(lambda: of(second)["state"] != "opening")
    assert (second.path / "a").stat().st_size == size
    bucket.put("a", stamped(2, size))
    assert version_of((second.path / "a").read_bytes()) == 2


def test_a_job_says_how_much_the_cluster_cache_did_not_take(
    join: Join, empty: Domain, faulty: FaultyS3
) -> None:
    faulty.clear()
    mount = join(empty, endpoint_url=faulty.endpoint_url)
    faulty.add("PUT", "blocks/*", code="InsufficientStorage", status=507)
    result = fusefs("warm", "--wait", mount.path)
    assert re.search(r"the cluster cache did not take \d+ blocks", result.stdout)
    assert of(mount)["fills"]["stored"] == 0
    faulty.clear()


def test_without_a_key_a_mount_warns(mounter: Mounter, empty: Domain) -> None:
    place = empty.options()[:-2]
    mount = mounter(*place)
    assert of(mount)["is_signed"] is False
    assert "--cluster-cache-key prevents that" in mount.log.read_text()
