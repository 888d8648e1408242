"""The contract of a bucket's store: what a method promises, and its errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from fusefs.store.fencing import TokenSource
from fusefs.store.interface import (
    PLAIN,
    Condition,
    DeleteFailure,
    ListPage,
    ObjectInfo,
    ObjectVersion,
    PendingUpload,
    Source,
    UnansweredChanges,
    UploadState,
    Write,
)
from fusefs.store.s3.multipart import Upload


class Store(Source, Protocol):
    """One bucket. All methods raise `StoreError`. `tokens` are those of the changes (fencing.py).

    Callers that find out what became of an earlier change look at the `unanswered` ones, too.
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
        """Return one page of the keys that start with `prefix`, after the full key `start_after`.

        Where the store lists in no order, the folder is listed whole and sorted first
        (store/s3/sorted_listing.py); with `sorts` False the page is returned as it is, and not
        `is_ordered`. So are the entries of a page of less than 1,000.
        """

    async def head(self, key: str) -> ObjectInfo:
        """Return what HEAD tells about `key`.

        Raises:
            NotFoundError: there is no such object.
        """

    async def put_file(self, key: str, fd: int, size: int, write: Write = PLAIN) -> ObjectInfo:
        """Make the first `size` bytes of a file the object `key`.

        One PUT up to `part_size` bytes, beyond it a multipart upload, which is aborted if it fails
        or is cancelled. S3 compares a checksum of all that is sent. After the return, also by
        cancellation, `fd` is not used any more. A single PUT that is cancelled may come to pass.
        After it `mtime_ns` is this machine's, to the second: S3 tells its own only to a HEAD, which
        would take half as long again. The metadata of the answer have the token.

        Raises:
            ConflictError: the condition does not hold; `.errno` is EEXIST for
                IF_ABSENT and ESTALE for IfMatch.
            CredentialsError: they were not renewed in the retry time.
            UnsupportedError: the store knows no such condition (others ignore it: probing.py).
            ValueError: the metadata can't be sent.
        """

    async def begin_upload(self, key: str, write: Write = PLAIN) -> Upload:
        """Begin a multipart upload, of whatever size, which `complete` ends.

        Raises:
            ValueError: the metadata can't be sent.
        """

    async def resume_upload(self, state: UploadState) -> Upload:
        """Go on with an upload that perhaps another process began, and may have completed.

        The bucket tells which parts it has; `verify` compares them with the file.

        Raises:
            NotFoundError: the upload was aborted, or the object replaced.
        """

    async def complete(self, upload: Upload, size: int, condition: Condition = None) -> ObjectInfo:
        """As `Upload.complete`."""

    async def abort_upload(self, key: str, upload_id: str) -> None:
        """Give an upload up and have its parts deleted; no error if there is none."""

    async def list_uploads(self, prefix: str) -> list[PendingUpload]:
        """All multipart uploads below `prefix`; only those on one's own record may be aborted."""

    async def copy(
        self,
        source: ObjectInfo | ObjectVersion,
        key: str,
        write: Write = PLAIN,
    ) -> ObjectInfo:
        """Have S3 copy exactly `source` to `key`, however large it is.

        Content type, storage class, tags and the like are kept, and so are the user metadata with
        the token, unless others are given; then `key` may be the source's. The copy may have
        another ETag. An `ObjectInfo` as source spares a HEAD, if the metadata is kept; what it does
        not tell the answer does not either. Where a store knows no conditions of copies, it copies
        without.

        Raises:
            ConflictError: the strict condition does not hold; `ExistsError` of IF_ABSENT.
            NotFoundError: there is no such source.
            StaleVersionError: the source is no longer this version.
        """

    async def delete(self, key: str, etag: str | None = None, *, adopts: bool = False) -> None:
        """Delete an object; no error if there is none.

        With a (quoted) `etag`, and where the store honours it, another object stays, without an
        error. With `adopts` another one is deleted as well, but never once an answer was lost: the
        first attempt may have deleted what was meant.

        Raises:
            ConflictError: a directory's marker was to be deleted, and an object with
                content is there.
        """

    async def delete_many(
        self, keys: Iterable[str], etags: Mapping[str, str] | None = None
    ) -> list[DeleteFailure]:
        """Delete objects, a thousand with each request, some with ETags; return what failed."""

    def counters(self) -> dict[str, int]:
        """Requests and bytes since the start, by the names that `status` shows.

        Of the moment are `awaiting_credentials`, the requests that try again because theirs were
        refused, and `connections`, how many may run at once.
        """
