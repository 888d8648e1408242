"""Which part of a volume is fetched for which pod."""

from __future__ import annotations

import pytest

from csi.errors import InvalidArgumentError
from csi.node.warmup import job_id
from csi.volume.options import MOST_SHARDS, WarmOption, read_options
from fusefs.daemon.jobs.cache_warmer import JobSpec
from fusefs.daemon.jobs.selection import Shard


@pytest.mark.parametrize(
    ("pod", "part"),
    [
        ("train-0-x7k2p", 0),  # an Indexed Job's
        ("train-3-bcdfg", 3),
        ("train-5-bcdfg", 1),  # more pods than parts
        ("set-workers-0-2-4567z", 2),  # a JobSet's
        ("web-2", 2),  # a StatefulSet's
        ("train-worker-3", 3),  # Kubeflow's
        ("train-3-22222", 3),
        ("train-x7k2p", None),  # a Job's that has no index
        ("web-6d4b75cb6d-hmcmx", None),  # a Deployment's
        ("night-28999999-x7k2p", None),  # a CronJob's: the number is a time
        ("train-3-abcde", None),  # no controller makes such letters up
        ("train-3-x7k2", None),
        ("train-3\n", None),
        ("train-٣", None),
        ("notebook", None),
        ("", None),
    ],
)
def test_the_number_of_a_pod_is_in_its_name(pod: str, part: int | None) -> None:
    given = WarmOption(("train",), is_first=True, shards=4)
    found = given.of_pod(pod)
    if part is None:
        assert found == WarmOption()  # nothing is fetched, and the pod does not wait
    else:
        assert found == WarmOption(("train",), is_first=True, shards=4, part=part)


def test_without_parts_the_pod_does_not_matter() -> None:
    given = WarmOption(("train",))
    assert given.of_pod("train-3-x7k2p") is given


@pytest.mark.parametrize("text", ["1", "4", "0004", str(MOST_SHARDS)])
def test_a_number_of_parts_is_read(text: str) -> None:
    read = read_options({"warm": ".", "warmShards": text}, (), is_inline=True)
    assert read.warm == WarmOption(("",), shards=int(text))


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "1/4", "4 ", "٤", "four", "1e3", str(MOST_SHARDS + 1), "9" * 5000]
)
def test_what_is_no_number_of_parts_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^warmShards: .* from 1 to {MOST_SHARDS}$"):
        read_options({"warm": ".", "warmShards": text}, (), is_inline=False)


@pytest.mark.parametrize("path", ["", "train", "a/b c"])
def test_the_driver_knows_what_the_daemon_calls_a_job(path: str) -> None:
    assert job_id(path, WarmOption((path,))) == JobSpec(path).id
    part = WarmOption((path,), shards=4, part=3)
    assert job_id(path, part) == JobSpec(path, Shard(3, 4)).id
