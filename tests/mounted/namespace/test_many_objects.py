"""A bucket of many objects takes a bounded memory, whatever is listed and looked up in it.

The same at full size, 50 million objects, is measured: bench/scale/objects.py.
"""

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.scale.simulated_bucket import SIZE, Shape, body_of, serving
from tests.support.machine.libc import DirectoryStream
from tests.support.mounting import Mount, Mounter, cost
from tests.support.semantics import states
from tests.support.survival.surviving import replace_daemon
from tests.support.waiting import until

SHAPE = Shape(folders=40, per_folder=500, flat=30_000)
LIMIT = "112MiB"
# Of a walk: of the folders that tell about all others, where the kernel asks twice, and of at most
# one folder in forty whose listing shows names alone, as the kernel forgets others too slowly.
MOST_HEADS = 50 + SHAPE.per_folder
NAMES = [f"object-{number:07d}.bin" for number in range(SHAPE.flat)]


@pytest.fixture(scope="module")
def mount(module_mounter: Mounter) -> Iterator[Mount]:
    # On a busy machine a walk outlives what is believed for a minute.
    options = ("--metadata-ttl", "indefinite", "--anonymous", "--memory-limit", LIMIT)
    with serving(SHAPE) as url:
        mount = module_mounter(*options, endpoint_url=url)
        if not mount.status()["metadata"]["can_prune_nodes"]:
            pytest.skip("this kernel can't be made to forget names (Linux 6.18 can)")
        yield mount


def most_listed(mount: Mount) -> int:
    most: int = mount.status()["metadata"]["most_nodes"]
    # A reply with some hundred entries is under way, and so are lookups.
    return most + 1000


def nodes(mount: Mount) -> int:
    found: int = mount.status()["metadata"]["nodes"]
    return found


@states(
    "While there are more than that, listings show names alone, whose attributes are"
    " looked up when they are used: a directory of millions takes no more memory than others, also"
    " while it is open."
)
def test_a_large_directory_takes_no_node_for_each_name_while_it_is_listed(mount: Mount) -> None:
    with os.scandir(mount.path / "flat") as entries:
        names = []
        for entry in entries:
            names.append(entry.name)
            if len(names) % 10_000 == 0:
                assert nodes(mount) <= most_listed(mount)
                assert entry.stat().st_size == SIZE
    assert names == NAMES


def test_two_listings_at_once_and_one_that_is_left_are_complete(mount: Mount) -> None:
    found: list[list[str]] = []

    def read() -> None:
        found.append(os.listdir(mount.path / "flat"))

    with os.scandir(mount.path / "flat") as left:
        for _ in range(SHAPE.flat // 3):
            next(left)
        threads = [threading.Thread(target=read) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [NAMES, NAMES]


def test_any_place_of_a_large_directory_is_found_again(mount: Mount) -> None:
    with DirectoryStream(mount.path / "flat") as stream:
        places = []
        for number in range(SHAPE.flat // 2):
            if number % 2500 == 0:
                places.append((stream.tell(), stream.read()))
            else:
                stream.read()
        random.Random(1).shuffle(places)
        for place, entry in places:
            stream.seek(place)
            assert stream.read() == entry
        stream.rewind()
        assert stream.names() == [".", "..", *NAMES]


def test_a_place_in_a_large_directory_is_found_by_the_next_daemon(mount: Mount) -> None:
    with DirectoryStream(mount.path / "flat") as stream:
        for _ in range(12_002):
            stream.read()
        place, entry = stream.tell(), stream.read()
        replace_daemon(mount)
        assert stream.names() == NAMES[12_001:]
        stream.seek(place)
        assert stream.read() == entry
        assert stream.names() == NAMES[12_001:]


def test_a_walk_through_all_folders_takes_a_bounded_memory(mount: Mount) -> None:
    count = 0
    until(lambda: nodes(mount) <= most_listed(mount) - 1000, "earlier names are forgotten")

    def walk() -> None:
        nonlocal count
        for path, _, files in os.walk(mount.path):
            if not path.endswith("flat"):
                count += sum(os.stat(Path(path) / name).st_size == SIZE for name in files)

    assert cost(mount, walk).get("heads", 0) <= MOST_HEADS
    assert count == SHAPE.folders * SHAPE.per_folder
    assert nodes(mount) <= most_listed(mount)
    # Each folder has a segment, of which there is room for some.
    assert mount.status()["metadata"]["directories"] <= SHAPE.folders
    for number in random.Random(2).sample(range(len(SHAPE)), 20):
        key = SHAPE.key(number)
        assert (mount.path / key).read_bytes() == body_of(key)
