"""The interface of the bucket's store: the promises and errors of each method."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from fusefs.store.errors import NotFoundError
from fusefs.store.fencing import TokenSource
from fusefs.store.interface import (
    PLAIN,
    Condition,
    DeleteFailure,
    ListPage,
    ObjectInfo,
    ObjectVersion,
    PendingUpload,
    UnansweredChanges,
    UploadState,
    Write,
)
from fusefs.store.s3.multipart import Upload


class Store(Protocol):
    """One bucket. All methods raise `StoreError`. `tokens` mark the mount's changes (fencing.py).

    `unanswered` has the sent changes that S3 has not answered, and may still carry out.
    """

    tokens: TokenSource
    unanswered: UnansweredChanges

    async def list_page(
        self,
        prefix: str,
        *,
        delimiter: str = "/",
        start_after: str = "",
        max_keys: int = 1000,
        sorts: bool = True,
    ) -> ListPage:
        """Return a page of the keys that start with `prefix` and come after the key `start_after`.

        If the store lists in no order, the whole folder is listed and sorted first
        (store/s3/sorted_listing.py); if `sorts` is False, the store's page is returned unsorted,
        with `is_ordered` False. A page of less than 1,000 entries is never sorted.
        """

    async def head(self, key: str) -> ObjectInfo:
        """Return the description of the object `key`, by a HEAD request.

        Raises:
            NotFoundError: there is no such object.
        """

    async def put_file(self, key: str, fd: int, size: int, write: Write = PLAIN) -> ObjectInfo:
        """Write the first `size` bytes of a file as the object `key`.

        Up to `part_size` bytes take one PUT; more take a multipart upload, which is aborted if it
        fails or is cancelled. S3 compares a checksum of all bytes. After the return, also by
        cancellation, `fd` is not used any more. A cancelled PUT may still take effect. After a PUT,
        `mtime_ns` is this machine's time, to the second: only a HEAD returns S3's time, and would
        make the call take half as long again. The metadata in the result includes the token.

        Raises:
            ConflictError: the condition does not hold; `.errno` is EEXIST for IF_ABSENT and ESTALE
                for IfMatch.
            CredentialsError: the credentials were not renewed in the retry time.
            UnsupportedError: the store refuses conditions; other stores ignore them (probing.py).
            ValueError: the metadata can't be sent.
        """

    async def begin_upload(self, key: str, write: Write = PLAIN) -> Upload:
        """Begin a multipart upload of a file of any size; `complete` makes it an object.

        Raises:
            ValueError: the metadata can't be sent.
        """

    async def resume_upload(self, state: UploadState) -> Upload:
        """Resume an upload that another process may have begun, and may even have completed.

        The parts that the bucket has are listed; `verify` compares them with the file.

        Raises:
            NotFoundError: the upload was aborted, or its object was replaced.
        """

    async def complete(self, upload: Upload, size: int, condition: Condition = None) -> ObjectInfo:
        """Complete an upload, as `Upload.complete` does."""

    async def abort_upload(self, key: str, upload_id: str) -> None:
        """Abort an upload, which deletes its parts; no error if there is no such upload."""

    async def list_uploads(self, prefix: str) -> list[PendingUpload]:
        """Return the multipart uploads of all clients below `prefix`; abort only your own."""

    async def copy(
        self, source: ObjectInfo | ObjectVersion, key: str, write: Write = PLAIN
    ) -> ObjectInfo:
        """Copy exactly `source` to `key` on the server, whatever its size.

        Content type, storage class, tags and other properties are kept. User metadata and the token
        are kept unless `write` has new ones; then `key` may also be the source's own key. A copy in
        parts gets a token and an ETag of its own. If the metadata is kept, an `ObjectInfo` as
        source saves a HEAD; fields that it lacks are missing from the result too. If the store does
        not implement conditions for copies, the copy is unconditional.

        Raises:
            ConflictError: the condition of `write` does not hold; `ExistsError` for IF_ABSENT.
            NotFoundError: there is no such source.
            StaleVersionError: the source is no longer this version.
        """

    async def delete(self, key: str, etag: str | None = None, *, adopts: bool = False) -> None:
        """Delete an object; no error if there is none.

        With a (quoted) `etag`, a store that honours conditions of deletes keeps an object with
        another ETag; that is no error. With `adopts`, such an object is deleted too, unless an
        attempt before had no answer, and so may have deleted the intended object.

        Raises:
            ConflictError: a directory's marker was to be deleted, but the object has content.
        """

    async def delete_many(
        self, keys: Iterable[str], etags: Mapping[str, str] | None = None
    ) -> list[DeleteFailure]:
        """Delete objects, those in `etags` only if they have that ETag; return the failures."""

    async def confirm(self, key: str, found: ObjectInfo | None) -> None:
        """Record that S3 has `found` at `key` (None: no object) after a change without an answer.

        StoreError if a request before that change, executed late, has removed the object again.
        """


async def find(store: Store, key: str) -> ObjectInfo | None:
    """Request the object under a key by a HEAD; None if the bucket has none."""
    try:
        return await store.head(key)
    except NotFoundError:
        return None
