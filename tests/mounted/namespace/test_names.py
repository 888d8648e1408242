"""Keys and the file names that stand for them; what no name can express is hidden."""

import os
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mounting import WRITABLE, Mount, Mounter
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket
from tests.support.servers.flat_s3 import ListingServer

# Under each name its own UTF-8 is the content.
LOOK_ALIKE = ["look", "Look", "LOOK", "e\u0301tage", "\u00e9tage", "stra\u00dfe", "strasse"]
NAMES = [
    "Grüße an 東京 🚀.txt",
    " leading and trailing ",
    "100%.txt",
    "a%20b",
    "a+b",
    "a#b?c=d&e",
    "a*b[c]{d}~!$'();@,:|",
    'quo"te',
    "<xml>&amp;",
    "a\tb",
    "a\nb",
    "a\x01b",
    "a\x7fb",
    "-rf",
    "x" * 255,
    "ü" * 127 + "x",
    "...",
    ".hidden",
    "a.",
    *LOOK_ALIKE,
]


@pytest.fixture(scope="module")
def names(shared: Bucket, module_mounter: Mounter) -> Path:
    """The directory with the names."""
    for name in NAMES:
        shared.put("names/" + name, name.encode())
    return module_mounter().path / "names"


@states(
    "A key that the S3 client library can't express (one with control characters) is readable all"
    " the same."
)
@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_key_with_any_characters_is_readable(names: Path, name: str) -> None:
    assert (names / name).read_bytes() == name.encode()


@states(
    "An object `a/b.txt` is the file `b.txt` in the directory `a`; names are the key's own"
    " characters in UTF-8."
)
def test_a_listing_shows_names_as_they_are(names: Path) -> None:
    assert sorted(os.listdir(os.fsencode(names))) == sorted(name.encode() for name in NAMES)


@states("Names differ if one character differs: case and Unicode forms are kept apart, as on ext4.")
def test_names_that_look_alike_are_different_names(names: Path) -> None:
    """Those that are there have each their own content, and no other stands for them."""
    for name in LOOK_ALIKE:
        assert (names / name).read_bytes() == name.encode()
    forms = {form for name in NAMES for form in other_forms(name)} - set(NAMES)
    assert len(forms) > 20
    for form in forms:
        with pytest.raises(FileNotFoundError):
            os.stat(names / form)


def other_forms(name: str) -> list[str]:
    """What a file system that did not keep names apart would take for this name."""
    forms = [unicodedata.normalize(form, name) for form in ("NFC", "NFD", "NFKC", "NFKD")]
    return [form for form in [*forms, name.upper(), name.lower(), name.strip()] if len(form) < 128]


@states("A name of more than 255 bytes is ENAMETOOLONG, and one that is not UTF-8 does not exist.")
def test_a_name_of_256_bytes_is_too_long_and_one_that_is_not_utf_8_is_none(names: Path) -> None:
    for name in ("x" * 256, "ü" * 128):
        with pytest.raises(OSError, match="File name too long"):
            os.stat(names / name)
    with pytest.raises(FileNotFoundError):
        os.stat(os.fsencode(names) + b"/\xff\xfe")


# Keys that SeaweedFS can't hold, from a server that only lists

UNUSUAL = [
    "both",
    "both/inside",
    "both-not",
    "good",
    "x" * 256,
    "y" * 300 + "/inside",
    "ü" * 128,
    "empty//segment",
    "./dot",
    "../dot-dot",
    "here/./dot",
    "here/../dot-dot",
    "here/good",
    "/rooted",
    "nul\0",
    "here/n\0l/inside",
]
# "both", two long files, a long directory, ".", "..", "" and a NUL; the rest one level down.
HIDDEN = 8 + 1 + 3


@pytest.fixture(scope="module")
def unusual(module_mounter: Mounter) -> Iterator[Mount]:
    with ListingServer(UNUSUAL) as server:
        url = server.endpoint_url
        yield module_mounter("--anonymous", "--metadata-ttl", "1h", endpoint_url=url)


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
def test_hidden_keys_are_counted_once_each_and_one_is_logged(mounter: Mounter) -> None:
    with ListingServer(UNUSUAL) as server:
        url = server.endpoint_url
        mount = mounter("--anonymous", "--metadata-ttl", "0s", endpoint_url=url)
        assert mount.status()["metadata"]["hidden_keys"] == 0
        for _ in range(5):
            for where in (".", "empty", "here", "both"):
                os.listdir(mount.path / where)
        assert mount.status()["metadata"]["hidden_keys"] == HIDDEN
        assert mount.log.read_text().count("hiding the key") == 1


@states("A mount of `s3://BUCKET/PREFIX/` shows what is below that prefix, and nothing beside it.")
def test_a_mount_of_a_prefix_shows_what_is_below_it(mounter: Mounter, bucket: Bucket) -> None:
    bucket.put("data/set/file", b"inside")
    bucket.put("data/settings", b"outside")
    mount = mounter(prefix="data/set/")
    assert os.listdir(mount.path) == ["file"]
    assert (mount.path / "file").read_bytes() == b"inside"


RECORDS = ".fusefs/volumes/one.json"


@states(
    "`.fusefs` at the root of a bucket or a mount is hidden and cannot be created;"
    " elsewhere the name is ordinary."
)
def test_the_drivers_records_are_hidden_at_the_root_of_the_bucket_alone(
    mounter: Mounter, bucket: Bucket
) -> None:
    for key in (RECORDS, "data/.fusefs/own", "data/file"):
        bucket.put(key, b"{}")
    mount = mounter(WRITABLE)
    assert os.listdir(mount.path) == ["data"]
    assert not (mount.path / RECORDS).exists()
    with pytest.raises(OSError, match="File exists"):
        (mount.path / ".fusefs").mkdir()
    with pytest.raises(OSError, match="Invalid argument"):
        (mount.path / "data").rename(mount.path / ".fusefs")
    assert sorted(os.listdir(mount.path / "data")) == [".fusefs", "file"]
    assert (mount.path / "data" / ".fusefs" / "own").read_bytes() == b"{}"
    (mount.path / "data" / ".fusefs" / "new").write_bytes(b"new")
    assert "'.fusefs/': the CSI driver keeps its records there" in mount.log.read_text()
