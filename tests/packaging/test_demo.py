"""The demo, with a data set that is soon made."""

from __future__ import annotations

from pathlib import Path

import pytest

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
