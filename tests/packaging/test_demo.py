"""The demo, with a data set that is soon made, and the documents' pictures."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.drawing.pictures import Bars, load, pictures
from examples import demo
from fusefs.linux import mountinfo
from tests.support.servers.s3_server import S3Server
from tests.support.sharing import skip_without_fuse

MIB = 1 << 20


def test_the_demo_shows_what_it_says_and_leaves_nothing(
    s3: S3Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    skip_without_fuse()
    for name, small in {"CLASSES": 8, "IMAGES_PER_CLASS": 4, "SHARD_SIZE": 12 * MIB}.items():
        monkeypatch.setattr(demo, name, small)
    # Other tests count on the page cache.
    monkeypatch.setattr(demo, "IS_ROOT", False)
    demo.show(tmp_path, s3)
    output = capsys.readouterr().out
    for part in (
        "img0002.jpg",
        "class07,4",
        "first epoch, from S3:",
        "second epoch, from the cache:",
        "the same as before the upload",
        "read from the bucket past the mount: the same bytes",
        "everything is in the bucket",
    ):
        assert part in output
    assert not mountinfo.is_mountpoint(tmp_path / "data")


ROOT = Path(__file__).parents[2]
MEASUREMENTS = ROOT / "docs" / "measurements"
DUBLIN_CORE = "{http://purl.org/dc/elements/1.1/}"
LARGEST_FILE = 100_000


def pictures_of_document(document: Path) -> list[Path]:
    """The pictures that a page shows, each with a text for readers who don't see it."""
    links = re.findall(r"!\[[^\]]+\]\(([^)]+\.svg)\)", document.read_text())
    return [(document.parent / link).resolve() for link in links]


def committed() -> list[Path]:
    return sorted(MEASUREMENTS.glob("*.svg"))


def test_the_readme_shows_one_measurement_and_the_measurements_page_all() -> None:
    shown = set(pictures_of_document(ROOT / "README.md"))
    assert len(shown.intersection(committed())) == 1
    assert sorted(pictures_of_document(MEASUREMENTS / "README.md")) == committed()


@pytest.mark.parametrize("svg", committed(), ids=lambda svg: svg.stem)
def test_a_picture_of_the_documents_shows_the_numbers_of_its_result(svg: Path) -> None:
    """By their digest: another version of matplotlib draws them with other bytes."""
    root = ElementTree.parse(svg).getroot()
    source, digest = (
        "".join(root.find(f".//{DUBLIN_CORE}{name}").itertext())  # type: ignore[union-attr]
        for name in ("source", "identifier")
    )
    measured = load(MEASUREMENTS / source)
    drawn = {
        f"{Path(source).stem}-{profile}-{picture.name}": picture
        for profile in measured["profiles"]
        for picture in pictures(measured, profile)
    }
    picture = drawn[svg.stem]
    assert digest == picture.digest
    shown = " ".join(root.itertext())
    values = [
        mark.text
        for panel in picture.panels
        if isinstance(panel, Bars)
        for group in panel.groups
        for mark in group.marks
    ]
    assert [text for text in values if text not in shown] == []
    assert svg.stat().st_size < LARGEST_FILE
