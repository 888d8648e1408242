"""What a volume or a Secret says is taken, or refused in one line that names it, whatever it is."""

import pytest

from csi.errors import InvalidArgumentError, event_text
from csi.identities.credentials import choose
from csi.volume import options
from csi.volume.location import LOCATION_KEYS, Location, location_of
from csi.volume.options import NodeShares, finished, mount_layer, read_options
from csi.volume.stores import StoreSettings, read_stores
from fusefs.settings.types import MIB, MinFree

SETTINGS = sorted(name.replace("_", "-") for name in options._TAKEN)
PLACE = Location(StoreSettings("aws"), "bucket", "p/")
SHARES = NodeShares(256 * MIB, 32, None, MinFree(20))
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
            layer = mount_layer(read, PLACE, SHARES, {}, is_read_only=False, fs_group=None)
            finished(layer, mountpoint="/mnt/key", cache_dir="/cache").to_json()
        except InvalidArgumentError as error:
            check_sentence(error, name)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_mount_option_is_taken_or_refused_by_its_name(name: str) -> None:
    for value in ODD:
        try:
            read_options({}, [f"{name}={value}"], is_inline=False)
        except InvalidArgumentError as error:
            check_sentence(error, name)


@pytest.mark.parametrize("name", sorted(LOCATION_KEYS))
def test_a_location_is_found_or_refused_by_its_name(name: str) -> None:
    for value in ODD:
        try:
            location_of({"bucket": "bucket", name: value}, read_stores(None))
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


def test_a_kms_key_is_no_longer_than_kms_takes() -> None:
    read_options({"kms-key": "x" * 2048}, (), is_inline=False)
    with pytest.raises(InvalidArgumentError, match=r"is not a KMS key"):
        read_options({"kms-key": "x" * 2049}, (), is_inline=False)
