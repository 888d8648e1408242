"""The variables that say which certificates are trusted and which proxies are used."""

import pytest

CERTIFICATES = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR")
PROXIES = tuple(
    name
    for upper in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
    for name in (upper, upper.lower())
)


def clear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this machine's own not matter."""
    for name in (*CERTIFICATES, *PROXIES):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def of_no_machine(monkeypatch: pytest.MonkeyPatch, as_owner: None) -> None:
    """For modules that import it: `clear` before each test."""
    clear(monkeypatch)
