"""A daily test of a store: does it honour conditions of writes, and does it compare checksums?

One probe puts an object on the condition of an ETag that no object has (`If-Match`), another sends
a body with a wrong checksum. A store that honours both refuses both requests. Any other store
creates an object, which is deleted; no mount lists the object's directory (`PROBE_NAME`). For
`--conflict fail` the object is put in parts: Ceph's gateway honours conditions of PUTs, but not of
completions of uploads.

A condition that the store does not implement counts as not honoured. A capability that could not be
tested is unknown (None), and no code relies on it.
"""

from __future__ import annotations

import base64
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from fusefs.store import capabilities
from fusefs.store.capabilities import PROBE_NAME, Capabilities
from fusefs.store.errors import AccessDeniedError, ConflictError, StoreError, UnsupportedError
from fusefs.store.interface import IfMatch, Write
from fusefs.store.s3 import multipart, put
from fusefs.store.s3.address import Call
from fusefs.store.s3.requester import Requester

if TYPE_CHECKING:
    from fusefs.store.s3.store import S3Store

logger = logging.getLogger("fusefs.store")

# Seconds from a failed probe to the next.
AGAIN_S = 300.0
# An ETag and a checksum that no object has.
_OTHER_ETAG = '"00000000000000000000000000000000"'
_OTHER_CRC32 = base64.b64encode(b"\1\2\3\4").decode()
_BODY = b"?"


class Prober:
    """Determines the capabilities of one mount's store. Belongs to the event loop.

    Probes write below `prefix`. Their results are saved in `directory`, by the store's `identity`.
    `why_not` is the reason why this mount must not probe, or "".
    """

    def __init__(
        self,
        store: S3Store,
        prefix: str,
        directory: Path,
        identity: str,
        *,
        fails_on_conflict: bool,
        why_not: str,
    ) -> None:
        self._fence = store.fence
        self._store = store
        self._prefix = prefix
        self._directory = directory
        self._fails_on_conflict = fails_on_conflict
        self._identity = f"{identity} in parts" if fails_on_conflict else identity
        self._is_passive = bool(why_not)
        # Set once probing has ended or is postponed; `denial` is S3's refusal of the probe, or "".
        self.has_tried = trio.Event()
        self.denial = ""
        if why_not:
            store.fence.why_unknown = why_not

    async def recall(self) -> None:
        """Give the store's `Fence` the capabilities that were saved in the last day, if any."""
        found = await trio.to_thread.run_sync(capabilities.load, self._directory, self._identity)
        if found is not None:
            self._fence.capabilities = found

    async def require_strict(self) -> None:
        """Check, for `--conflict fail`, that the store honours conditions; probe it if unknown.

        Raises:
            UnsupportedError: the store is known to ignore conditions.
        """
        if self._wants_to_know:
            try:
                await self._probe()
            except StoreError as error:
                logger.warning("could not test if the store can do --conflict fail: %s", error)
        if self._fence.capabilities.conditions is False:
            raise UnsupportedError(
                "--conflict fail can't hold: this store ignores conditions of writes; mount with"
                " --conflict overwrite"
            )

    async def run(self) -> None:
        """Probe until capabilities are known or S3 denies access; warn of ignored conditions."""
        while self._wants_to_know:
            try:
                await self._probe()
            except AccessDeniedError as error:
                self._fence.why_unknown = self.denial = str(error)
                logger.info("could not test what the store supports: %s", error)
                break
            except StoreError as error:
                self._fence.why_unknown = str(error)
                logger.info("the store is tested again later: %s", error)
                self.has_tried.set()
                await trio.sleep(AGAIN_S)
        self.has_tried.set()
        if self._fence.capabilities.conditions is False:
            logger.warning(
                "this store ignores conditions: where two mounts create a file with O_EXCL"
                " at the same time, both may succeed"
            )
            if self._fails_on_conflict:
                logger.error("--conflict fail does not hold: this store ignores conditions")

    @property
    def _wants_to_know(self) -> bool:
        return not self._is_passive and not self._fence.capabilities.is_known

    async def _probe(self) -> None:
        found = await probe(self._store, self._prefix, in_parts=self._fails_on_conflict)
        self._fence.capabilities = found
        if found.missing:
            logger.info("this store lacks: %s", ", ".join(found.missing))
        await trio.to_thread.run_sync(capabilities.save, self._directory, self._identity, found)


async def probe(store: S3Store, prefix: str, *, in_parts: bool) -> Capabilities:
    """Test a store by writes below `prefix`; a cancelled test may leave an object there.

    Raises:
        StoreError: writing is not permitted there, or the store can't be reached.
    """
    key = f"{prefix}{PROBE_NAME}/object"
    with os.fdopen(os.memfd_create("fusefs-probe", os.MFD_CLOEXEC), "wb", buffering=0) as file:
        file.write(_BODY)
        found = Capabilities(
            conditions=await _honours_conditions(store, key, file.fileno(), in_parts=in_parts),
            checksums=await _compares_checksums(store.requester, key),
        )
    if found.missing:
        # Some servers show a prefix of deleted objects until it is deleted itself.
        for failure in await store.delete_many([key, f"{prefix}{PROBE_NAME}/"]):
            logger.warning("%s is left, and removed later: %s", failure.key, failure.error)
    return found


async def _honours_conditions(store: S3Store, key: str, fd: int, *, in_parts: bool) -> bool:
    """Put the file `fd` on the condition of an ETag that no object has; True if refused."""
    write = Write(condition=IfMatch(_OTHER_ETAG)).with_token(store.tokens)
    send = multipart.put if in_parts else put.put
    try:
        await send(store.fence, key, fd, len(_BODY), write)
    except ConflictError:
        return True
    except UnsupportedError:
        pass
    return False


async def _compares_checksums(requester: Requester, key: str) -> bool:
    """Put an object with a wrong CRC32; return True if the store refuses the request.

    Raises:
        StoreError: the request failed for another reason.
    """
    call = Call("PUT", "PUT", key, headers={"x-amz-checksum-crc32": _OTHER_CRC32}, body=_BODY)
    try:
        await requester.attempt(call)
    except StoreError as error:
        if 400 <= error.status < 500 and error.status != 429:
            return True
        raise requester.failed(call, error) from error
    return False
