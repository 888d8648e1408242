"""Attributes and mount options of volumes, and the numbers of pods: taken, or refused by name."""

import re
from pathlib import Path

import pytest

from csi.errors import InvalidArgumentError, event_text
from csi.identities.credentials import choose
from csi.node.warmup import job_id
from csi.volume import options
from csi.volume.location import LOCATION_KEYS, Location, location_of
from csi.volume.options import (
    MOST_SHARDS,
    NodeShares,
    WarmOption,
    finished,
    mount_layer,
    read_options,
)
from csi.volume.stores import StoreSettings, read_stores
from fusefs.daemon.jobs.cache_warmer import JobSpec
from fusefs.daemon.jobs.selection import Shard
from fusefs.settings.mount import MountSettings
from fusefs.settings.types import GIB, MIB, MinFree
from fusefs.store.s3.settings import WriteOptions
from tests.support.packaging.manifests import PROJECT

PLACE = Location(StoreSettings("main", "http://s3:1"), "bucket", "p/", "us-east-1")
SHARES = NodeShares(256 * MIB, 32, None, MinFree(20))


def settings(
    attributes: dict[str, str],
    *flags: str,
    shares: NodeShares = SHARES,
    is_read_only: bool = False,
    fs_group: int | None = None,
) -> MountSettings:
    wanted = read_options(attributes, flags, is_inline=False)
    layer = mount_layer(wanted, PLACE, shares, {}, is_read_only=is_read_only, fs_group=fs_group)
    return finished(layer, mountpoint="/mnt/key", cache_dir="/cache/domain")


def test_settings_are_taken_in_either_spelling_but_not_in_both_and_from_mount_options() -> None:
    made = settings({"metadataTtl": "5m", "file-mode": "640"}, "dir-mode=750", "uid=7,no-delete")
    assert made.metadata_ttl.otherwise == 300
    assert settings({"uid": "1"}, "uid=2").uid == 1  # the attribute counts
    assert (made.file_mode, made.dir_mode, made.uid, made.no_delete) == (0o640, 0o750, 7, True)
    with pytest.raises(InvalidArgumentError, match="cacheSize: given as cache-size as well"):
        read_options({"cacheSize": "1GiB", "cache-size": "2GiB"}, [], is_inline=False)


def test_a_volume_is_writable_unless_its_access_mode_or_an_option_says_otherwise() -> None:
    assert settings({}).read_only is False
    assert settings({}, "ro").read_only is True
    assert settings({}, "rw", is_read_only=True).read_only is True


@pytest.mark.parametrize(
    "name",
    [
        "endpoint-url",
        "profile",
        "ca-bundle",
        "cache-dir",
        "cacheDir",
        "shared-cache",
        "min-free",
        "user",
        "log-file",
        "foreground",
        "allow-other",
        "session",
        "source",
        "mountpoint",
        "addressing",
        "staging_size",
        "nonsense",
    ],
)
def test_what_is_the_nodes_to_decide_or_unknown_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=name):
        read_options({name: "x"}, [], is_inline=False)
    with pytest.raises(InvalidArgumentError, match=f"mountOptions: {name}"):
        read_options({}, [f"{name}=x"], is_inline=False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cacheSize", "much"),
        ("uid", "-1"),
        ("metadata-ttl", "soon"),
        ("roleArn", "me"),
        ("cacheDomain", "a/b"),
        ("drainTimeout", "x"),
        ("anonymous", "maybe"),
        ("allowLocalDurability", "perhaps"),
        ("durability", "disk"),
        ("maxConnections", "0"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(InvalidArgumentError, match=name):
        read_options({name: value}, [], is_inline=False)


@pytest.mark.parametrize("name", ["cacheDomain", "allowLocalDurability", "endpoint"])
def test_an_inline_volume_may_say_less(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=name):
        read_options({name: "true"}, [], is_inline=True)


def test_local_durability_needs_the_administrators_word() -> None:
    rules = "bucket,local:runs/**"
    for attributes, flags in (
        ({"durability": "local"}, []),
        ({"durability": rules}, []),
        ({}, [f"durability={rules},ro"]),
    ):
        with pytest.raises(InvalidArgumentError, match="durability: local loses files"):
            read_options(attributes, flags, is_inline=False)
        read_options({"allowLocalDurability": "true", **attributes}, flags, is_inline=False)
    assert settings({"durability": "bucket"}).durability.shown() == "bucket"
    bucket_alone = settings({}, "durability=auto,bucket:**/*.ckpt,ro")
    assert bucket_alone.durability.shown() == "auto,bucket:**/*.ckpt"
    assert bucket_alone.read_only


def test_a_volume_gets_the_nodes_share_or_less() -> None:
    shares = NodeShares(128 * MIB, 8, 10 * GIB, MinFree(20))
    for wanted in ({"memoryLimit": "4GiB", "maxConnections": "500", "cacheSize": "1TiB"}, {}):
        made = settings(wanted, shares=shares)
        assert (made.memory_limit, made.max_connections) == (128 * MIB, 8)
        assert made.cache_size == 10 * GIB
    assert settings({"cacheSize": "1GiB"}, shares=shares).cache_size == GIB
    assert settings({"retryTime": "2h"}).retry_time == 300
    less = settings({"memoryLimit": "112MiB", "maxConnections": "7"}, shares=shares)
    assert (less.memory_limit, less.max_connections) == (112 * MIB, 7)


def test_fs_group_makes_files_the_groups_and_writable_for_it() -> None:
    made = settings({"gid": "5"}, fs_group=2000)
    assert (made.gid, made.shared_group) == (2000, True)
    assert settings({"file-mode": "600"}, fs_group=2000).file_mode == 0o600


def test_where_the_volume_is_comes_from_its_store() -> None:
    made = settings({})
    assert made.endpoint_url == "http://s3:1"
    assert str(made.source) == "s3://bucket/p/"
    assert made.cache_dir == Path("/cache/domain")
    assert made.allow_other
    # Whoever is shut out of it reads its cache for no longer than this.
    assert made.revoke_after == 120


def test_what_a_volume_may_say_is_documented() -> None:
    text = (PROJECT / "docs/csi.md").read_text()
    table = text.split("| name | meaning |")[1].split("\n\n")[0]
    documented: set[str] = set()
    for row in table.splitlines()[2:]:
        _, names, meaning, _ = row.split("|")
        documented |= set(re.findall("`([^`]+)`", meaning if "a setting of" in names else names))
    documented -= {"fusefs mount", "onDelete", "metadataTtl"}  # the class's alone, another spelling
    settings = {name.replace("_", "-") for name in options._TAKEN}
    assert documented == settings | options._OWN | LOCATION_KEYS


def test_the_drivers_own_objects_are_written_as_the_volumes() -> None:
    key = "x" * 2048  # as long as KMS takes
    attributes = {"kmsKey": key, "acl": "bucket-owner-full-control"}
    volume = read_options(attributes, ["storage-class=STANDARD_IA"], is_inline=False)
    assert WriteOptions.of(volume.wanted) == WriteOptions(
        "STANDARD_IA", "aws:kms", key, "bucket-owner-full-control"
    )
    assert WriteOptions.of(read_options({}, [], is_inline=False).wanted) == WriteOptions()
    with pytest.raises(InvalidArgumentError, match=r"is not a KMS key"):
        read_options({"kms-key": key + "x"}, (), is_inline=False)


@pytest.mark.parametrize(
    ("pod", "part"),
    [
        ("train-0-x7k2p", 0),  # an Indexed Job's
        ("train-3-bcdfg", 3),
        ("train-5-bcdfg", 1),  # more pods than parts
        ("set-workers-0-2-4567z", 2),  # a JobSet's
        ("web-2", 2),  # a StatefulSet's
        ("train-worker-3", 3),  # Kubeflow's
        ("train-3-22222", 3),
        ("train-x7k2p", None),  # a Job's that has no index
        ("web-6d4b75cb6d-hmcmx", None),  # a Deployment's
        ("night-28999999-x7k2p", None),  # a CronJob's: the number is a time
        ("train-3-abcde", None),  # no controller makes such letters up
        ("train-3-x7k2", None),
        ("train-3\n", None),
        ("train-٣", None),
        ("notebook", None),
        ("", None),
    ],
)
def test_the_number_of_a_pod_is_in_its_name(pod: str, part: int | None) -> None:
    given = WarmOption(("train",), is_first=True, shards=4)
    assert (whole := WarmOption(("train",))).of_pod(pod) is whole
    found = given.of_pod(pod)
    if part is None:
        assert found == WarmOption()  # nothing is fetched, and the pod does not wait
    else:
        assert found == WarmOption(("train",), is_first=True, shards=4, part=part)


@pytest.mark.parametrize("text", ["1", "4", "0004", str(MOST_SHARDS)])
def test_a_number_of_parts_is_read(text: str) -> None:
    read = read_options({"warm": ".", "warmShards": text}, (), is_inline=True)
    assert read.warm == WarmOption(("",), shards=int(text))


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "1/4", "4 ", "٤", "four", "1e3", str(MOST_SHARDS + 1), "9" * 5000]
)
def test_what_is_no_number_of_parts_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^warmShards: .* from 1 to {MOST_SHARDS}$"):
        read_options({"warm": ".", "warmShards": text}, (), is_inline=False)


@pytest.mark.parametrize("path", ["", "train", "a/b c"])
def test_the_driver_knows_what_the_daemon_calls_a_job(path: str) -> None:
    assert job_id(path, WarmOption((path,))) == JobSpec(path).id
    part = WarmOption((path,), shards=4, part=3)
    assert job_id(path, part) == JobSpec(path, Shard(3, 4)).id


SETTINGS = sorted(name.replace("_", "-") for name in options._TAKEN)
ANYWHERE = Location(StoreSettings("aws"), "bucket", "p/")
NO_OPTIONS = read_options({}, (), is_inline=False)
ODD = [
    "",
    " ",
    "\n",
    "a\nb",
    "\0",
    "ü",
    "😀",
    "٣",
    "½",
    "\u202e",
    "-1",
    "1_0",
    "0x10",
    "${x}",
    "nan",
    "inf",
    "1e999",
    "1e308TiB",
    "9" * 5000,
    "x" * 100_000,
]


def check_sentence(error: InvalidArgumentError, name: str) -> None:
    text = event_text(str(error))
    assert text.isprintable()
    assert name in text
    assert len(text.encode()) <= 1024


@pytest.mark.parametrize("is_inline", [False, True], ids=["persistent", "inline"])
@pytest.mark.parametrize("name", [*SETTINGS, *sorted(options._OWN)])
def test_an_attribute_is_taken_or_refused_by_its_name(name: str, is_inline: bool) -> None:
    about_warm = {"warm": "."} if name.startswith("warm") else {}
    for value in ODD:
        try:
            read = read_options({**about_warm, name: value}, (), is_inline=is_inline)
            layer = mount_layer(read, ANYWHERE, SHARES, {}, is_read_only=False, fs_group=None)
            finished(layer, mountpoint="/mnt/key", cache_dir="/cache").as_texts()
        except InvalidArgumentError as error:
            check_sentence(error, name)


@pytest.mark.parametrize("name", [*SETTINGS, *sorted(LOCATION_KEYS)])
def test_a_mount_option_or_location_is_taken_or_refused_by_its_name(name: str) -> None:
    for value in ODD:
        try:
            if name in LOCATION_KEYS:
                location_of({"bucket": "bucket", name: value}, read_stores(None))
            else:
                read_options({}, [f"{name}={value}"], is_inline=False)
        except InvalidArgumentError as error:
            check_sentence(error, name)


@pytest.mark.parametrize("name", ["access_key_id", "secretAccessKey", "customer_key", "", "ü\n"])
def test_a_secret_is_taken_or_refused_and_not_shown(name: str) -> None:
    for value in ODD:
        secret = {"access_key_id": "AKIA", "secret_access_key": "secret"}
        secret = {known: text for known, text in secret.items() if known[:3] != name[:3]}
        sentence = refusal_of({**secret, name: value})
        assert len(value) < 9 or value not in sentence


def refusal_of(secret: dict[str, str]) -> str:
    """Why a Secret is refused; "" if it is not."""
    try:
        choose(secret, {}, NO_OPTIONS, StoreSettings("aws"), is_inline=False)
    except InvalidArgumentError as error:
        check_sentence(error, "Secret")
        return str(error)
    return ""
