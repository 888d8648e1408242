"""The pictures of the documents show what was measured."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.drawing.pictures import Bars, load, pictures

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


def test_the_readme_shows_one_picture_and_the_measurements_page_all() -> None:
    shown = pictures_of_document(ROOT / "README.md")
    assert len(shown) == 1
    assert shown[0] in committed()
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
