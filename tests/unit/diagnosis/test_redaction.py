"""Reports, and the secrets that are removed from them."""

import errno
import json
import tarfile
from pathlib import Path

import pytest

from fusefs.diagnosis import report, subject
from fusefs.diagnosis.redaction import Secrets, known_secrets
from fusefs.diagnosis.subject import MountSubject
from fusefs.launch import registry
from fusefs.launch.control import CommandError

SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"


@pytest.mark.parametrize(
    "text",
    [
        f"secret {SECRET} in a sentence",
        json.dumps({"aws_secret_access_key": SECRET}),
        "https://bucket/key?x=" + SECRET.replace("/", "%2F").replace("+", "%2B"),
    ],
)
def test_a_known_secret_is_removed_wherever_it_stands(text: str) -> None:
    cleaned = Secrets([SECRET]).remove(text)
    assert "bPxRfiCY" not in cleaned
    assert "[removed]" in cleaned


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("aws_session_token = FwoGZXIvYXdzEJr", "FwoGZXIvYXdzEJr"),
        ('{"Authorization": "AWS4-HMAC-SHA256 Credential=x, Signature=abc"}', "Signature=abc"),
        ("Authorization: Bearer abcdef.123456", "abcdef.123456"),
        ("GET /k?X-Amz-Signature=0011aabb&X-Amz-Date=1", "0011aabb"),
        ("X-Amz-Security-Token=IQoJb3JpZ2lu", "IQoJb3JpZ2lu"),
        ("HTTPS_PROXY=http://user:pa55word@proxy:3128", "pa55word"),
        ("proxy http://user:p%40ss@proxy:3128/ refused", "p%40ss"),
        ("proxy http://user:p@ss-word@proxy:3128/ refused", "ss-word"),
        ("jwt eyJhbGciOiJSUzI1.eyJzdWIiOiIxMjM0.c2lnbmF0dXJl end", "c2lnbmF0dXJl"),
        ("password='two words'", "two words"),
        (
            "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nIBAAK\n-----END RSA PRIVATE KEY-----\nend",
            "IBAAK",
        ),
        ("-----BEGIN PRIVATE KEY-----\nMIIEow, cut off", "MIIEow"),
        ("key AKIAIOSFODNN7EXAMPLE", "IOSFODNN7EX"),
        (json.dumps(json.dumps({"SecretAccessKey": "wJalrX"})), "wJalrX"),
        (json.dumps({"SecretAccessKey": 'wJa"lrX'}), "lrX"),
        ('{"SecretAccessKey": "wJalrX, cut off', "wJalrX"),
        ('{"password": "short"}', "short"),
    ],
)
def test_what_looks_like_a_secret_is_removed(text: str, secret: str) -> None:
    assert secret not in Secrets([]).remove(text)


@pytest.mark.parametrize("key", ['runs/token="x"/b', "-----BEGIN PRIVATE KEY-----", 'a\\"b'])
def test_json_stays_json_whatever_keys_of_objects_look_like(key: str) -> None:
    found = Secrets([]).remove_plain({"pending": [{"key": key, "waited_s": 1.5}], key: None})
    assert found["pending"][0]["waited_s"] == 1.5
    assert len(found) == 2


def test_what_is_behind_the_name_of_a_secret_in_json_is_removed() -> None:
    settings = {"session_token": "abc", "secrets": {"a": ["b"]}, "credentials": 0.5, "token": None}
    assert Secrets([]).remove_plain(settings) == {
        "session_token": "[removed]",
        "secrets": {"a": ["[removed]"]},
        "credentials": 0.5,
        "token": None,
    }
    answer = {"log": json.dumps({"SecretAccessKey": "wJalrX"})}
    assert "wJalrX" not in Secrets([]).remove_plain(answer)["log"]


@pytest.mark.parametrize(
    "text", ["a.b-" * 20_000, "://a:b" * 50_000, 'token="' * 20_000, "\\" * 50_000, "eyJ" * 100_000]
)
def test_long_words_are_searched_in_time(text: str) -> None:
    assert Secrets([]).remove(text)  # a search without bounds would not end


def test_sentences_about_credentials_stay() -> None:
    text = "no credentials: no answer; the session token is not valid; is_temporary: true"
    assert Secrets([]).remove(text) == text


def test_secrets_are_found_in_environments_and_files_of_keys() -> None:
    found = known_secrets(
        {
            "AWS_SECRET_ACCESS_KEY": "from-the-environment",
            "HTTPS_PROXY": "http://me:of%2Fproxy@proxy:1",
            "HOME": "/root",
        },
        [
            "[default]\naws_access_key_id = AKIA\naws_secret_access_key = from-a-file\n",
            "aws_secret_access_key = without-a-section\n",
        ],
    )
    assert {"from-the-environment", "from-a-file", "without-a-section", "of/proxy"} <= set(found)
    assert "/root" not in found


def archived(path: Path) -> dict[str, str]:
    with tarfile.open(path) as tar:
        files = {member.name: tar.extractfile(member) for member in tar}
        return {name: file.read().decode() for name, file in files.items() if file is not None}


# A name that begins with a dot gives no hidden folder.
@pytest.mark.parametrize("name", ["report.tar.gz", ".report.tar.gz", "..report"])
def test_keys_that_look_like_secrets_leave_json(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = {"key": 'runs/token="x"/b', "path": Path("/a")}
    mounted = MountSubject(Path("/mnt/a"), status)
    monkeypatch.setattr(subject, "find_all", lambda: [mounted])
    report.write(tmp_path / name, None)
    found = json.loads(archived(tmp_path / name)["report/mount-1/status.json"])
    assert found == {"key": 'runs/token="[removed]"/b', "path": "/a"}


def test_a_mount_that_ends_meanwhile_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = ["/mnt/ended", "/mnt/there"]
    registrations = [registry.Registration(path, "", 0, 0) for path in paths]

    def find(mountpoint: Path) -> MountSubject:
        if mountpoint.name == "ended":
            raise CommandError("is not a mount of fusefs")
        return MountSubject(mountpoint, {})

    monkeypatch.setattr(registry, "all_mounts", lambda: registrations)
    monkeypatch.setattr(subject, "find", find)
    assert [str(one.mountpoint) for one in subject.find_all()] == ["/mnt/there"]


def test_an_archive_that_finds_no_room_is_named_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(report, "versions", fail)
    monkeypatch.setattr(subject, "find_all", list)
    with pytest.raises(OSError, match=r"No space left on device: .*a\.tar\.gz"):
        report.write(tmp_path / "a.tar.gz", None)
    assert not list(tmp_path.iterdir())
