"""TLS: every path to S3 has the same authorities, and what one can't do the others do."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from csi.controller.bucket_client import Bucket as CsiBucket
from csi.identities.keys import AccessKeys
from csi.volume.stores import StoreSettings as CsiStore
from fusefs.store.errors import StoreError
from fusefs.store.http import trust
from tests.support.machine.surroundings import of_no_machine as of_no_machine
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.servers.s3_server import ACCESS_KEY, REGION, SECRET_KEY
from tests.support.servers.tls import TlsDoor, tls_door
from tests.support.servers.tls import secure as secure
from tests.support.store_reading import opened, read_body

CA = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
OTHER = CA.replace("AAAA", "BBBB")


@pytest.fixture(scope="module")
def own_authority(shared: Bucket, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsDoor]:
    """A certificate that has signed itself, and is an authority's."""
    directory = tmp_path_factory.mktemp("own")
    with tls_door(shared.server.endpoint_url, directory, is_own_authority=True) as door:
        yield door


async def test_a_certificate_that_is_its_own_authority_serves_all_reads(
    shared: Bucket, faulty: FaultyS3, own_authority: TlsDoor
) -> None:
    async with opened(shared, faulty, **own_authority.settings) as store:
        await read_body(store)
        assert store.counters()["retries"] == 0


@pytest.mark.parametrize("place", ["SSL_CERT_FILE", "SSL_CERT_DIR", "the system"])
@states(
    "All requests trust the same certificates: those of `--ca-bundle`, of `AWS_CA_BUNDLE` or"
    " `REQUESTS_CA_BUNDLE`, of `SSL_CERT_FILE` and `SSL_CERT_DIR`, or the system's."
)
async def test_an_authority_of_the_system_is_trusted_for_all_requests(
    shared: Bucket,
    faulty: FaultyS3,
    secure: TlsDoor,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    place: str,
) -> None:
    installed = tmp_path / "installed"
    installed.mkdir()
    (installed / "ours.crt").write_bytes(secure.authority.read_bytes())
    if place == "SSL_CERT_FILE":
        monkeypatch.setenv(place, str(installed / "ours.crt"))
    elif place == "SSL_CERT_DIR":
        monkeypatch.setenv(place, f"{tmp_path}:{installed}")
    else:
        monkeypatch.setattr(trust, "SYSTEM_FILES", (str(installed / "ours.crt"),))
    async with opened(shared, faulty, endpoint_url=secure.url) as store:
        await read_body(store)


async def _refusal(shared: Bucket, faulty: FaultyS3, **settings: Any) -> str:
    """What the check of a store says that is never tried again."""
    async with opened(shared, faulty, **settings) as store:
        with pytest.raises(StoreError) as raised:
            await store.check("")
        assert store.counters()["retries"] == 0
    return str(raised.value)


@states(
    "What waiting does not mend fails at once, with the cause in the log: a certificate that is"
    " not trusted, a proxy that refuses the password, an endpoint that redirects elsewhere."
)
async def test_an_unknown_authority_is_named_as_the_cause_and_not_tried_again(
    shared: Bucket, faulty: FaultyS3, secure: TlsDoor, own_authority: TlsDoor
) -> None:
    sentence = await _refusal(shared, faulty, endpoint_url=secure.url)
    assert f"no secure connection to {secure.url}" in sentence
    assert "of an authority that is not trusted" in sentence
    assert "its own authority" in await _refusal(shared, faulty, endpoint_url=own_authority.url)


async def test_a_certificate_for_another_name_is_refused(
    shared: Bucket, faulty: FaultyS3, tmp_path: Path
) -> None:
    with tls_door(shared.server.endpoint_url, tmp_path, name="DNS:s3.example.org") as door:
        sentence = await _refusal(shared, faulty, **door.settings)
        assert "its certificate is for another name" in sentence


async def test_a_server_without_tls_is_named_as_such(shared: Bucket, faulty: FaultyS3) -> None:
    url = shared.server.endpoint_url.replace("http:", "https:")
    assert "speaks no TLS" in await _refusal(shared, faulty, endpoint_url=url)


async def test_certificates_that_are_missing_matter_only_where_they_are_needed(
    shared: Bucket,
    faulty: FaultyS3,
    secure: TlsDoor,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "missing"))
    sentence = await _refusal(shared, faulty, endpoint_url=secure.url)
    assert "missing (SSL_CERT_FILE or SSL_CERT_DIR) can't be read" in sentence
    async with opened(shared, faulty) as store:
        await store.check("")


def test_the_controller_trusts_what_mounts_trust(
    shared: Bucket, secure: TlsDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared.put("record", b"{}")
    keys = AccessKeys(ACCESS_KEY, SECRET_KEY, None)
    unknown = CsiBucket(CsiStore("secure", secure.url, REGION), shared.name, None, keys)
    with pytest.raises(StoreError, match="not trusted"):
        unknown.get("record")
    monkeypatch.setenv("SSL_CERT_FILE", str(secure.authority))
    # The same store under another name, since clients are kept.
    known = CsiBucket(CsiStore("known", secure.url, REGION), shared.name, None, keys)
    assert known.get("record") == b"{}"


def test_what_is_named_first_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {
        name: tmp_path / name for name in ("setting", "config", "requests", "openssl", "system")
    }
    for path in paths.values():
        path.write_text(CA)
    monkeypatch.setattr(trust, "SYSTEM_FILES", (str(paths["system"]),))
    environment = {
        "REQUESTS_CA_BUNDLE": str(paths["requests"]),
        "SSL_CERT_FILE": str(paths["openssl"]),
    }
    config = str(paths["config"])
    assert trust.find(str(paths["setting"]), environment, config).path == str(paths["setting"])
    assert trust.find(None, environment, config).path == config
    assert trust.find(None, environment).path == environment.pop("REQUESTS_CA_BUNDLE")
    assert trust.find(None, environment).path == environment.pop("SSL_CERT_FILE")
    assert trust.find(None, environment).path == str(paths["system"])


def test_files_and_directories_of_certificates_are_put_together(tmp_path: Path) -> None:
    (tmp_path / "certs").mkdir()
    (tmp_path / "file").write_text(f"a comment\n{CA}")
    for name, text in (("a.pem", CA), ("b.crt", OTHER), ("README", "nothing")):
        (tmp_path / "certs" / name).write_text(text)
    environment = {
        "SSL_CERT_FILE": str(tmp_path / "file"),
        "SSL_CERT_DIR": f"{tmp_path / 'missing'}:{tmp_path / 'certs'}",
    }
    found = trust.find(None, environment)
    assert Path(found.path).read_text().split() == (CA + OTHER).split()
    with pytest.raises(StoreError, match="no certificate"):
        trust.find(str(tmp_path / "certs" / "README"), {})


def test_a_directory_of_certificates_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(StoreError, match=f"{tmp_path} .*Permission denied"):
        trust.find(str(tmp_path), {})
