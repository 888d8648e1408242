"""Files that no row tells of, as a killed daemon leaves them."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable

import trio

from fusefs.cache.catalog import Catalog
from fusefs.cache.disk import FOLDERS, Disk

logger = logging.getLogger("fusefs.cache")

# Older than any batch of the catalog.
ORPHAN_AGE_S = 15.0


async def sweep_orphans(disk: Disk, catalog: Catalog, is_ours: Callable[[str, str], bool]) -> None:
    """Remove files that are neither ours (by name and generation), nor another mount's, nor young.

    Raises:
        OSError: the disk can't be read.
    """
    for folder in range(FOLDERS):
        for name, generation in await trio.to_thread.run_sync(disk.listed, folder):
            if not is_ours(name, generation):
                await trio.to_thread.run_sync(_remove, disk, catalog, name, generation)
        await trio.sleep(0.01)


def _remove(disk: Disk, catalog: Catalog, name: str, generation: str) -> None:
    def is_known() -> bool:
        row = catalog.find(name)
        return row is not None and row.generation == generation

    try:
        disk.remove_orphan(name, generation, ORPHAN_AGE_S, is_known)
    except sqlite3.Error as error:
        logger.debug("%s stays: %s", name, error)  # for the next start
