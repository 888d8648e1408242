"""Directories as programs see them through a mount: listing, looking up, who may enter.

What a listing tells for all keys and page sizes is in test_directories.py;
here are the kernel's part and the requests that it costs.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Bucket, Mounter
from tests.support.libc import DirectoryStream
from tests.support.listing_server import ListingServer
from tests.support.mounting import Mount
from tests.support.s3_server import S3Server
from tests.support.semantics import states
from tests.support.sharing import drop_caches, mounted, read_all, until

NOBODY = 65534
SESSIONS = ("kernel", "pyfuse3")


# A bucket of which nothing changes, mounted once under each session

KEYS = [
    "readme.txt",
    "a/one", "a/two", "a/deep/er/est", "a-b", "a.txt", "a0",
    "marker/", "marked/", "marked/with-a-file",
    *(f"many/file-{n:04d}" for n in range(60)),
    *(f"wide/{n:02d}/x" for n in range(20)),
]  # fmt: skip


@pytest.fixture(scope="module")
def still(s3: S3Server) -> Bucket:
    bucket = Bucket(s3, s3.new_bucket(), s3.client())
    for key in KEYS:
        bucket.put(key, key.encode() if not key.endswith("/") else b"")
    return bucket


@pytest.fixture(scope="module", params=SESSIONS)
def tree(
    request: pytest.FixtureRequest,
    s3: S3Server,
    still: Bucket,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Mount]:
    if not os.path.exists("/dev/fuse"):
        pytest.skip("there is no /dev/fuse here")
    directory = tmp_path_factory.mktemp(request.param)
    options = ("--session", request.param, "--metadata-ttl", "1h")
    with mounted(s3, f"s3://{still.name}", directory, *options) as mount:
        yield mount


def expected_files() -> set[str]:
    return {key for key in KEYS if not key.endswith("/")}


@states("A directory is a common prefix: if there is an object `a/b`, there is a directory `a`.")
def test_a_walk_finds_exactly_the_buckets_keys(tree: Mount) -> None:
    found = {
        os.path.relpath(os.path.join(where, name), tree.path)
        for where, _, names in os.walk(tree.path)
        for name in names
    }
    assert found == expected_files()


def test_a_listing_tells_directories_from_files(tree: Mount) -> None:
    kinds = {entry.name: entry.is_dir() for entry in os.scandir(tree.path)}
    directories = {"a", "marker", "marked", "many", "wide"}
    assert kinds == {key.split("/")[0]: key.split("/")[0] in directories for key in KEYS}


def test_ls_shows_dot_and_dot_dot(tree: Mount) -> None:
    shown = subprocess.run(
        ["ls", "-a", str(tree.path / "a")], check=True, capture_output=True, text=True
    ).stdout.split()
    assert shown == [".", "..", "deep", "one", "two"]


@states("An object whose key ends in `/` (a marker, as consoles make them) makes a directory.")
def test_a_marker_makes_an_empty_directory(tree: Mount) -> None:
    assert (tree.path / "marker").is_dir()
    assert os.listdir(tree.path / "marker") == []


def test_a_marker_is_not_shown_among_the_files_of_its_directory(tree: Mount) -> None:
    assert os.listdir(tree.path / "marked") == ["with-a-file"]


def test_a_lookup_through_a_file_is_enotdir(tree: Mount) -> None:
    with pytest.raises(NotADirectoryError):
        os.stat(tree.path / "readme.txt" / "below")


def test_reading_a_directory_is_eisdir(tree: Mount) -> None:
    with pytest.raises(IsADirectoryError):
        read_all(tree.path / "a")


def test_listing_a_file_is_enotdir(tree: Mount) -> None:
    with pytest.raises(NotADirectoryError):
        os.listdir(tree.path / "readme.txt")


@states("`telldir` and `seekdir` go back to any place in an open directory.")
def test_telldir_and_seekdir_go_back_to_any_place(tree: Mount) -> None:
    with DirectoryStream(tree.path / "many") as stream:
        places, names = [stream.tell()], []
        while (entry := stream.read()) is not None:
            names.append(entry[0])
            places.append(stream.tell())
        assert len(names) == 62
        for index in (0, 1, 2, 5, 40, 61, 17):
            stream.seek(places[index])
            assert stream.names() == names[index:]


def test_rewinddir_starts_again(tree: Mount) -> None:
    with DirectoryStream(tree.path / "many") as stream:
        first = stream.names()
        stream.rewind()
        assert stream.names() == first


def test_two_streams_of_a_directory_do_not_disturb_each_other(tree: Mount) -> None:
    with DirectoryStream(tree.path / "many") as one, DirectoryStream(tree.path / "many") as other:
        assert [one.read(), one.read()] == [other.read(), other.read()]
        assert one.names() == other.names()


def test_a_listing_shows_the_inode_numbers_that_stat_shows(tree: Mount) -> None:
    for entry in os.scandir(tree.path):
        assert entry.inode() == os.stat(entry.path).st_ino


def test_dot_dot_leads_to_the_parent(tree: Mount) -> None:
    assert os.stat(tree.path / "a" / "deep" / "..").st_ino == os.stat(tree.path / "a").st_ino


def _inos(tree: Mount) -> dict[str, int]:
    return {
        os.path.join(where, name): os.lstat(os.path.join(where, name)).st_ino
        for where, directories, names in os.walk(tree.path)
        for name in [*directories, *names]
    }


@states("Inode numbers are a stable hash of the key, the same at any time and on any machine.")
def test_inode_numbers_stay_when_the_kernel_has_forgotten_them(tree: Mount) -> None:
    first = _inos(tree)
    nodes = tree.status()["metadata"]["nodes"]
    drop_caches()
    until(lambda: tree.status()["metadata"]["nodes"] < nodes or drop_caches(), "a forget")
    assert _inos(tree) == first


def test_no_two_files_share_an_inode_number(tree: Mount) -> None:
    inos = _inos(tree)
    assert len(set(inos.values())) == len(inos)


@states("A lookup in a directory that has been listed costs no request.")
def test_lookups_in_a_listed_directory_cost_no_request(tree: Mount) -> None:
    names = os.listdir(tree.path / "many")
    drop_caches()
    before = tree.status()["s3"]
    for name in names:
        assert (tree.path / "many" / name).stat().st_size == len("many/" + name)
    after = tree.status()["s3"]
    assert (after["lists"], after["heads"]) == (before["lists"], before["heads"])


@states("A name that does not exist is remembered as such for as long as listings are.")
def test_a_missing_name_is_asked_for_once(tree: Mount) -> None:
    assert not (tree.path / "a" / "missing").exists()
    drop_caches()
    before = tree.status()["s3"]
    for _ in range(5):
        assert not (tree.path / "a" / "missing").exists()
        assert not (tree.path / "a" / "missing-too").exists()
    after = tree.status()["s3"]
    assert (after["lists"], after["heads"]) == (before["lists"], before["heads"])


@states("The first lookup in a directory asks for a page of its neighbours too.")
def test_first_lookups_in_a_directory_do_not_cost_a_request_each(
    mount: Callable[..., Mount], bucket: Bucket
) -> None:
    for n in range(50):
        bucket.put(f"d/f{n:02d}", b"x")
    here = mount()
    before = here.status()["s3"]
    for n in range(50):
        assert (here.path / "d" / f"f{n:02d}").read_bytes() == b"x"
    after = here.status()["s3"]
    asked = after["lists"] - before["lists"] + after["heads"] - before["heads"]
    assert asked <= 10


# Keys that SeaweedFS can't hold, from a server that only lists

UNUSUAL = [
    "both", "both/inside", "both-not", "good", "x" * 256, "y" * 300 + "/inside", "ü" * 128,
    "empty//segment", "./dot", "../dot-dot", "here/./dot", "here/../dot-dot", "here/good",
    "/rooted",
]  # fmt: skip


@pytest.fixture(scope="module", params=SESSIONS)
def unusual(
    request: pytest.FixtureRequest, s3: S3Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mount]:
    if not os.path.exists("/dev/fuse"):
        pytest.skip("there is no /dev/fuse here")
    options = ("--session", request.param, "--anonymous", "--metadata-ttl", "1h")
    with (
        ListingServer(UNUSUAL).serving() as server,
        mounted(
            s3, "s3://some-bucket", tmp_path_factory.mktemp(request.param), *options,
            endpoint_url=server.endpoint_url,
        ) as mount,
    ):  # fmt: skip
        yield mount


@states("Where a key is also a prefix (`a` beside `a/b`), the directory is shown, the file hidden.")
def test_a_directory_hides_a_file_of_its_name(unusual: Mount) -> None:
    assert (unusual.path / "both").is_dir()
    assert os.listdir(unusual.path).count("both") == 1
    assert os.listdir(unusual.path / "both") == ["inside"]


@states(
    "A key that no file name can express is hidden: one with an empty, `.` or `..` segment, a"
    " segment of more than 255 bytes, or a NUL."
)
def test_keys_that_no_file_name_can_express_are_hidden(unusual: Mount) -> None:
    assert os.listdir(unusual.path) == ["both-not", "both", "empty", "good", "here"]
    assert os.listdir(unusual.path / "empty") == []
    assert os.listdir(unusual.path / "here") == ["good"]


@states("Hidden keys are counted in `fusefs status` (`metadata.hidden_keys`), and one is logged.")
def test_hidden_keys_are_counted_and_logged_once(unusual: Mount) -> None:
    for where in (".", "empty", "here", "both"):
        os.listdir(unusual.path / where)
    # Of the root: both, two long files, a long directory, ".", "..", "/"; the rest one level down.
    assert unusual.status()["metadata"]["hidden_keys"] >= 7 + 1 + 2
    assert unusual.log.read_text().count("hiding the key") == 1


# A directory of a hundred thousand objects


@states("A directory of any size lists completely, each name once, in bounded memory.")
@pytest.mark.parametrize("session", SESSIONS)
def test_a_hundred_thousand_objects_list_completely_in_bounded_memory(
    session: str, s3: S3Server, tmp_path: Path
) -> None:
    keys = [f"huge/object-{n:06d}.jpg" for n in range(100_000)]
    with (
        ListingServer(["small/x", *keys]).serving() as server,
        mounted(
            s3, "s3://huge-bucket", tmp_path, "--session", session, "--anonymous",
            endpoint_url=server.endpoint_url,
        ) as mount,
    ):  # fmt: skip
        assert os.listdir(mount.path / "small") == ["x"]
        before = mount.status()["daemon"]["rss_bytes"]
        with DirectoryStream(mount.path / "huge") as stream:
            names = stream.names()
        assert sorted(names) == [".", "..", *(key.removeprefix("huge/") for key in keys)]
        # A hundred pages, and one or two for the names before and after.
        assert server.lists < 110
        growth = mount.status()["daemon"]["peak_rss_bytes"] - before
        assert growth < 160 << 20
        here = mount.path / "huge" / "object-077777.jpg"
        asked = server.lists
        assert here.stat().st_size == 100
        assert server.lists == asked


# What changes while mounted


def seen(path: Path) -> bytes | None:
    try:
        return read_all(path)
    except FileNotFoundError:
        return None


@states("A change in the bucket is seen when the metadata TTL has passed, at the latest.")
@pytest.mark.parametrize("case", ["changed", "deleted", "new"])
def test_a_change_is_seen_after_the_ttl(
    mount: Callable[..., Mount], bucket: Bucket, case: str
) -> None:
    bucket.put("d/other", b"other")
    if case != "new":
        bucket.put("d/file", b"old")
    here = mount("--metadata-ttl", "500ms")
    assert seen(here.path / "d" / "file") == (None if case == "new" else b"old")
    if case == "deleted":
        bucket.delete("d/file")
    else:
        bucket.put("d/file", b"new one")
    wanted = None if case == "deleted" else b"new one"
    until(lambda: seen(here.path / "d" / "file") == wanted, "the change")
    listed = ["other"] if case == "deleted" else ["file", "other"]
    until(lambda: sorted(os.listdir(here.path / "d")) == listed, "the listing")
    if wanted is not None:
        assert (here.path / "d" / "file").stat().st_size == len(wanted)


@states("With `--metadata-ttl 0s` every open asks the bucket, and sees a change at once.")
def test_a_ttl_of_zero_sees_every_change_at_once(
    mount: Callable[..., Mount], bucket: Bucket
) -> None:
    here = mount("--metadata-ttl", "0s")
    path = here.path / "d" / "file"
    for number in range(5):
        data = b"%d" % number * (number + 1)
        bucket.put("d/file", data)
        assert read_all(path) == data
        assert path.stat().st_size == len(data)
        assert os.listdir(here.path / "d") == ["file"]
        bucket.delete("d/file")
        assert seen(path) is None


@states("With `--metadata-ttl indefinite` what was once listed is believed for ever.")
def test_an_indefinite_ttl_asks_never_again(mount: Callable[..., Mount], bucket: Bucket) -> None:
    bucket.put("d/file", b"old")
    here = mount("--metadata-ttl", "indefinite")
    assert read_all(here.path / "d" / "file") == b"old"
    bucket.put("d/file", b"newer")
    bucket.put("d/new", b"")
    drop_caches()
    before = here.status()["s3"]
    assert read_all(here.path / "d" / "file") == b"old"
    assert (here.path / "d" / "file").stat().st_size == 3
    assert seen(here.path / "d" / "new") is None
    assert here.status()["s3"] == before


def test_a_file_becomes_a_directory_and_back(mount: Callable[..., Mount], bucket: Bucket) -> None:
    here = mount("--metadata-ttl", "0s")
    name = here.path / "d" / "name"
    for _ in range(3):
        bucket.put("d/name", b"a file")
        assert read_all(name) == b"a file"
        bucket.delete("d/name")
        bucket.put("d/name/inside", b"in a directory")
        assert os.listdir(name) == ["inside"]
        assert read_all(name / "inside") == b"in a directory"
        bucket.delete("d/name/inside")


@pytest.mark.parametrize("session", SESSIONS)
@states("A directory ends with its last object, unless it has a marker.")
def test_a_directory_ends_with_its_last_object(session: str, s3: S3Server, tmp_path: Path) -> None:
    """On a server that only lists, for SeaweedFS keeps empty directories."""
    with (
        ListingServer(["d/only", "marked/", "marked/only", "other"]).serving() as server,
        mounted(
            s3, "s3://some-bucket", tmp_path, "--session", session, "--anonymous",
            "--metadata-ttl", "0s", endpoint_url=server.endpoint_url,
        ) as mount,
    ):  # fmt: skip
        assert os.listdir(mount.path) == ["d", "marked", "other"]
        assert os.listdir(mount.path / "d") == ["only"]
        server.keys = ["marked/", "other"]
        assert not (mount.path / "d").exists()
        assert os.listdir(mount.path / "marked") == []
        assert os.listdir(mount.path) == ["marked", "other"]


@states("A directory that is opened again shows what is there now, within the metadata TTL.")
def test_a_directory_opened_again_shows_new_names(
    mount: Callable[..., Mount], bucket: Bucket
) -> None:
    bucket.put("d/first", b"")
    here = mount("--metadata-ttl", "300ms")
    with DirectoryStream(here.path / "d") as stream:
        assert "first" in stream.names()
        bucket.put("d/second", b"")
        until(lambda: os.listdir(here.path / "d") == ["first", "second"], "the new name")


def test_readers_of_a_directory_that_changes_see_each_name_at_most_once(
    mount: Callable[..., Mount], bucket: Bucket
) -> None:
    stay = {f"stays-{n:02d}" for n in range(20)}
    for name in stay:
        bucket.put("d/" + name, b"")
    here = mount("--metadata-ttl", "0s")
    done = threading.Event()

    def change() -> None:
        n = 0
        while not done.is_set():
            bucket.put(f"d/comes-{n % 10}", b"")
            bucket.delete(f"d/comes-{(n + 5) % 10}")
            n += 1

    changer = threading.Thread(target=change)
    changer.start()
    try:
        for _ in range(30):
            names = os.listdir(here.path / "d")
            assert len(set(names)) == len(names)
            assert stay <= set(names)
    finally:
        done.set()
        changer.join()


# Who may do what


def as_nobody(*command: object) -> subprocess.CompletedProcess[str]:
    """Run a command as an ordinary user."""
    ids = [f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    return subprocess.run(
        ["setpriv", *ids, *map(str, command)], check=False, capture_output=True, text=True
    )


@pytest.fixture
def reachable(mount: Callable[..., Mount], tmp_path: Path) -> Callable[..., Mount]:
    """As `mount`, below directories that every user may pass."""
    passed = [tmp_path, *tmp_path.parents]
    for directory in passed:
        if directory.stat().st_uid == os.geteuid() and not directory.stat().st_mode & 0o001:
            directory.chmod(directory.stat().st_mode | 0o011)
    return mount


needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv"
)


@needs_root
@states("Only the user who mounted may use the mount, not even root, unless `--allow-other`.")
def test_another_user_is_refused(reachable: Callable[..., Mount], bucket: Bucket) -> None:
    bucket.put("file", b"secret")
    here = reachable("--file-mode", "0666", "--dir-mode", "0777")
    result = as_nobody("cat", here.path / "file")
    assert (result.returncode, "Permission denied" in result.stderr) == (1, True)


@needs_root
@states("With `--allow-other` the permission bits decide who may read.")
def test_another_user_is_let_in_by_allow_other_as_far_as_the_mode_says(
    reachable: Callable[..., Mount], bucket: Bucket
) -> None:
    bucket.put("file", b"public")
    here = reachable("--allow-other")
    assert as_nobody("cat", here.path / "file").stdout == "public"
    assert as_nobody("ls", here.path).stdout == "file\n"


@needs_root
def test_mode_bits_are_enforced(reachable: Callable[..., Mount], bucket: Bucket) -> None:
    bucket.put("d/file", b"private")
    here = reachable("--allow-other", "--file-mode", "0600", "--dir-mode", "0711")
    assert "Permission denied" in as_nobody("cat", here.path / "d" / "file").stderr
    assert "Permission denied" in as_nobody("ls", here.path / "d").stderr
    assert as_nobody("stat", here.path / "d" / "file").returncode == 0
    assert read_all(here.path / "d" / "file") == b"private"


@needs_root
@states("Owner, group and permissions are those of `--uid`, `--gid`, `--file-mode`, `--dir-mode`.")
def test_uid_gid_and_modes_are_what_the_options_say(
    reachable: Callable[..., Mount], bucket: Bucket
) -> None:
    bucket.put("d/file", b"mine")
    here = reachable(
        "--allow-other", "--uid", NOBODY, "--gid", 4321, "--file-mode", "0400", "--dir-mode", "0500"
    )
    file, directory = (here.path / "d" / "file").stat(), (here.path / "d").stat()
    assert (file.st_uid, file.st_gid, file.st_mode & 0o7777) == (NOBODY, 4321, 0o400)
    assert (directory.st_uid, directory.st_gid, directory.st_mode & 0o7777) == (
        NOBODY, 4321, 0o500,
    )  # fmt: skip
    assert as_nobody("cat", here.path / "d" / "file").stdout == "mine"


def test_without_options_files_belong_to_the_one_who_mounted(tree: Mount) -> None:
    file, directory = (tree.path / "readme.txt").stat(), tree.path.stat()
    assert (file.st_uid, file.st_gid, file.st_mode) == (os.geteuid(), os.getegid(), 0o100644)
    assert (directory.st_uid, directory.st_mode) == (os.geteuid(), 0o40755)


# Changes, all refused

CHANGES: dict[str, Callable[[Path], Any]] = {
    "create": lambda root: (root / "new").open("xb"),
    "open for writing": lambda root: (root / "readme.txt").open("r+b"),
    "open for appending": lambda root: (root / "readme.txt").open("ab"),
    "truncate by open": lambda root: (root / "readme.txt").open("wb"),
    "truncate": lambda root: os.truncate(root / "readme.txt", 0),
    "unlink": lambda root: os.unlink(root / "readme.txt"),
    "mkdir": lambda root: os.mkdir(root / "new"),
    "rmdir": lambda root: os.rmdir(root / "marker"),
    "rename": lambda root: os.rename(root / "readme.txt", root / "renamed"),
    "link": lambda root: os.link(root / "readme.txt", root / "linked"),
    "symlink": lambda root: os.symlink("readme.txt", root / "linked"),
    "chmod": lambda root: os.chmod(root / "readme.txt", 0o600),
    "chown": lambda root: os.chown(root / "readme.txt", 1, 1),
    "utimens": lambda root: os.utime(root / "readme.txt", (1, 1)),
    "setxattr": lambda root: os.setxattr(root / "readme.txt", "user.mine", b"1"),
    "removexattr": lambda root: os.removexattr(root / "readme.txt", "user.s3.key"),
    "mknod": lambda root: os.mknod(root / "fifo", stat.S_IFIFO | 0o600),
    "temporary file": lambda root: os.open(root, os.O_TMPFILE | os.O_RDWR),
}


@states("Every change is refused with EROFS.")
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_erofs(tree: Mount, change: str) -> None:
    with pytest.raises(OSError, match="Read-only file system") as caught:
        CHANGES[change](tree.path)
    assert caught.value.errno == errno.EROFS


@states("`access` grants no one the right to write.")
def test_access_denies_writing(tree: Mount) -> None:
    assert os.access(tree.path / "readme.txt", os.R_OK)
    assert not os.access(tree.path / "readme.txt", os.W_OK)
    assert not os.access(tree.path, os.W_OK)


@states("The mount is `nosuid` and `nodev`, and `ro`.")
def test_the_mount_has_the_flags_that_keep_it_harmless(tree: Mount) -> None:
    options = next(
        line.split()[5]
        for line in Path("/proc/self/mountinfo").read_text().splitlines()
        if line.split()[4] == str(tree.path)
    )
    assert {"ro", "nosuid", "nodev"} <= set(options.split(","))


@states("A mount of `s3://BUCKET/PREFIX/` shows what is below that prefix, and nothing beside it.")
def test_a_mount_of_a_prefix_shows_what_is_below_it(mounter: Mounter, bucket: Bucket) -> None:
    bucket.put("data/set/file", b"inside")
    bucket.put("data/settings", b"outside")
    here = mounter(prefix="data/set/")
    assert os.listdir(here.path) == ["file"]
    assert read_all(here.path / "file") == b"inside"
