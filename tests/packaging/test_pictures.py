"""The bench's pictures: what is drawn from a result, and that those of the documents are real."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bench.drawing import command
from bench.drawing.pictures import Bars, Picture, load, name_of, pictures

ROOT = Path(__file__).parents[2]
MEASUREMENTS = ROOT / "docs" / "measurements"
DUBLIN_CORE = "{http://purl.org/dc/elements/1.1/}"
LARGEST_FILE = 100_000
Samples = dict[str, dict[str, list[float]]]

SAMPLES: Samples = {
    "reread_dropped": {"native": [2000, 2100], "fusefs-kernel": [1900, 2200], "rclone": [700, 720]},
    "small_warm": {
        "native": [17_000, 16_000],
        "fusefs-kernel": [14_000, 13_000],
        "juicefs": [7_000, 7_200],
    },
    "first_large": {"obstore": [800, 780], "fusefs-kernel": [700, 790], "s3fs": [500, 560]},
    "opens1": {"native": [90_000], "fusefs-kernel": [9_000, 9_500]},
    "opens2": {"native": [140_000], "fusefs-kernel": [11_000, 10_500]},
    "opens2_cpu": {"fusefs-kernel": [41, 43]},
    "threads1_warm": {"native": [7_000], "fusefs-kernel": [6_900]},
    "small_p99_ms": {"fusefs-kernel": [26.4, 30.1], "rclone": [35.0, 33.0]},
}


def result(samples: Samples, rounds: int = 2) -> dict[str, Any]:
    """What the bench writes, as far as it is drawn."""
    plain = {
        row: {
            name: [{"round": number, "value": value} for number, value in enumerate(values)]
            for name, values in by_contender.items()
        }
        for row, by_contender in samples.items()
    }
    return {
        "date": "2026-01-02T03:04:05+00:00",
        "machine": {"processors": 4, "model": "a processor", "kernel": "6.18.1-x"},
        "options": {"rounds": rounds, "large": 1 << 30},
        "profiles": {"local": {"samples": plain}},
    }


def write(directory: Path, samples: Samples) -> Path:
    path = directory / "result.json"
    path.write_text(json.dumps(result(samples)))
    return path


def by_name(samples: Samples) -> dict[str, Picture]:
    return {picture.name: picture for picture in pictures(result(samples), "local")}


def texts(svg: Path) -> str:
    return " ".join(ElementTree.parse(svg).getroot().itertext())


# --- what is shown ---


def test_a_bar_is_the_median_with_the_single_rounds_ratios_as_its_range() -> None:
    panel = by_name(SAMPLES)["cached"].panels[0]
    assert isinstance(panel, Bars)
    marks = {mark.contender: mark for mark in panel.groups[0].marks}
    fusefs = marks["fusefs-kernel"]
    assert (fusefs.value, fusefs.low, fusefs.high) == (2050 / 2050, 1900 / 2000, 2200 / 2100)
    assert fusefs.text == "2,050 MB/s"


def test_missing_rows_contenders_and_rounds_are_left_out() -> None:
    samples: Samples = {
        "first_small": {"fusefs-kernel": [900.0], "rclone": [800.0, 700.0, 810.0], "s3fs": []},
        "first_large": {"fusefs-kernel": [700.0]},
        "opens1": {"native": [5.0], "rclone": [1.0]},
        "opens4": {"native": [6.0]},
        "a_row_of_another_version": {"fusefs-kernel": [1.0]},
    }
    found = by_name(samples)
    assert list(found) == ["first", "clients"]
    assert [len(panel.groups) for panel in found["first"].panels if isinstance(panel, Bars)] == [1]
    assert found["clients"].contenders == ["native"]


# --- the files ---


def test_each_picture_is_a_small_file_that_names_all_its_contenders(tmp_path: Path) -> None:
    path = write(tmp_path, SAMPLES)
    assert command.main([str(path)]) == 0
    for picture in pictures(load(path), "local"):
        svg = tmp_path / f"result-local-{picture.name}.svg"
        text = texts(svg)
        assert [name for name in picture.contenders if name_of(name) not in text] == []
        assert picture.title in text
        assert svg.stat().st_size < LARGEST_FILE


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "No such file"),
        ("{", "not JSON"),
        ("[]", "not a result of the bench"),
        ('{"profiles": {"local": {}}}', "not a result of the bench"),
        (json.dumps(result({})), "no row that is drawn"),
    ],
)
def test_a_file_that_cannot_be_drawn_is_named_in_one_line(
    content: str | None, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    if content is not None:
        path.write_text(content)
    assert command.main([str(path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"bench draw: {path}")
    assert why in line


# --- the documents ---


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
