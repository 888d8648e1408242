"""Directories of very many objects: complete, and what they cost in memory."""

from pathlib import Path

from tests.support.machine.libc import DirectoryStream
from tests.support.mounting import Mount, Mounter
from tests.support.semantics import states
from tests.support.servers.flat_s3 import ListingServer
from tests.support.waiting import until

COUNT = 70_000
# More entries than are kept.
FOLDERS = 3
MIB = 1 << 20


def names_in(directory: Path) -> list[str]:
    with DirectoryStream(directory) as stream:
        return stream.names()


def nodes(mount: Mount) -> int:
    count: int = mount.status()["metadata"]["nodes"]
    return count


def have_all_forgotten(mount: Mount) -> None:
    """Have the kernel forget every name."""

    def is_forgotten() -> bool:
        mount.forget()
        return nodes(mount) < COUNT // 100

    until(is_forgotten, "the kernel forgets the names")


@states(
    "A directory of any size lists completely, each name once.",
    "A name that the kernel remembers takes about 1 KiB of the daemon's memory until it is"
    " forgotten.",
    "Listings that are kept take a bounded memory: 200,000 entries of all directories at most.",
)
def test_large_directories_list_completely_and_memory_is_for_what_is_remembered(
    mounter: Mounter,
) -> None:
    names = [f"object-{number:06d}.jpg" for number in range(COUNT)]
    keys = [f"d{number}/{name}" for number in range(FOLDERS) for name in names]
    with ListingServer(keys) as server:
        # The root's own listing is out of date after a second otherwise.
        options = ("--anonymous", "--metadata-ttl", "indefinite")
        mount = mounter(*options, endpoint_url=server.endpoint_url)
        at_rest = mount.status()["daemon"]["rss_bytes"]

        def growth() -> int:
            peak: int = mount.status()["daemon"]["peak_rss_bytes"]
            return peak - at_rest

        for number in range(FOLDERS):
            folder = mount.path / f"d{number}"
            before = server.lists
            assert sorted(names_in(folder)) == [".", "..", *names]
            # A page for each thousand, and one or two for the names before and after.
            assert server.lists - before < COUNT // 1000 + 10
            if number == 0:
                assert growth() < 1.5 * 1024 * COUNT
            lists = server.lists
            assert (folder / names[55_555]).stat().st_size == 100
            assert server.lists == lists
            have_all_forgotten(mount)
        # Of all listings two are kept.
        for number, is_kept in ((FOLDERS - 1, True), (0, False)):
            lists = server.lists
            assert (mount.path / f"d{number}" / names[44_444]).stat().st_size == 100
            assert (server.lists == lists) == is_kept
        # 140 MiB; and 280 if no node was given back.
        assert growth() < 180 * MIB
