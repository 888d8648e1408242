"""A node's configuration."""

import fcntl
import os
import threading
from pathlib import Path

import pytest

from csi import main
from csi.node import config
from tests.support.waiting import until


def test_a_second_driver_of_a_node_waits_for_the_end_of_the_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = os.open(tmp_path / config.LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(first, fcntl.LOCK_EX)
    second = threading.Thread(target=config.be_the_only_driver, args=(tmp_path,), daemon=True)
    second.start()
    until(lambda: "another driver serves this node" in caplog.text)
    assert second.is_alive()
    os.close(first)
    second.join(30)
    assert not second.is_alive()


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("--memory-limit=64MiB", "'64MiB' is too small; the least is 112MiB"),
        ("--cache-size=50G", "'50G' is ambiguous; write 50GiB (units of 1024)"),
        ("--max-connections=0", "'0' is not a whole number from 1 to 1024"),
        ("--max-connections=5000", "'5000' is not a whole number from 1 to 1024"),
        ("--min-free=a fifth", "'a fifth' is not"),
        ("--metrics=9811", "'9811' is not like 127.0.0.1:9811"),
    ],
)
def test_a_limit_that_no_mount_could_have_is_refused_at_the_start_with_what_is_wrong(
    flag: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["node", "--endpoint", "unix:///csi.sock", "--node-id", "node-1", flag]
    with pytest.raises(SystemExit) as ended:
        main.make_parser().parse_args(line)
    assert ended.value.code == 2
    assert f"{flag.partition('=')[0]}: {sentence}" in capsys.readouterr().err
