"""An S3 server of any number of keys that stores none of them, but computes them.

`flat/` has `Shape.flat` objects, and `Shape.folders` folders, `part-00000/` and so on, have
`per_folder` each; each object has SIZE bytes that repeat its key. ListObjectsV2 (prefix, delimiter,
start-after, continuation-token, max-keys), GET and HEAD are answered to unsigned requests, and
everything else is refused (403). The number of a key among all keys is computed from the key and
the key from its number, so a page takes the same time anywhere in the bucket. A page joins prepared
rows with the part of the key that they share.

Run as a program it serves until its standard input ends, and prints its port first. One thread
serves one connection; the only state is the count of requests, which `GET /?stats` returns.
"""

import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit

SIZE = 4096
PAGE = 1000
FLAT_NAME, FLAT_ROW = "flat/object-%04d", "%03d.bin"
FOLDER_NAME, FOLDER_ROW = "part-%05d/sample-", "%03d.bin"
_AFTER_ALL = "\U0010ffff"
_MODIFIED = "2026-01-02T03:04:05.000Z"


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers of a bucket's objects; `flat` is at most 10 million."""

    folders: int
    per_folder: int
    flat: int

    def __post_init__(self) -> None:
        assert self.folders <= 100_000
        assert self.per_folder <= 1000
        assert self.flat <= 10_000_000

    def __len__(self) -> int:
        return self.flat + self.folders * self.per_folder

    def key(self, number: int) -> str:
        """Return the key at a place in the order of all keys."""
        stem, row = self.parts(number)
        return stem + FOLDER_ROW % row

    def parts(self, number: int) -> tuple[str, int]:
        """Return the part that a key shares with others, and its number among them."""
        if number < self.flat:
            return FLAT_NAME % (number // 1000), number % 1000
        folder, row = divmod(number - self.flat, self.per_folder)
        return FOLDER_NAME % folder, row

    def first_behind(self, key: str) -> int:
        """Return the number of the first key that is greater than `key`."""
        low, high = 0, len(self)
        while low < high:
            middle = (low + high) // 2
            if self.key(middle) <= key:
                low = middle + 1
            else:
                high = middle
        return low

    def find(self, key: str) -> bool:
        number = self.first_behind(key) - 1
        return number >= 0 and self.key(number) == key


class Lister:
    """Answers ListObjectsV2 for a bucket of one shape."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._rows = [(FOLDER_ROW % row + _tail(row)).encode() for row in range(1000)]

    def page(self, query: dict[str, str]) -> bytes:
        prefix = query.get("prefix", "")
        after = query.get("continuation-token") or query.get("start-after", "")
        most = min(PAGE, int(query.get("max-keys", PAGE)))
        start = self.shape.first_behind(
            max(after, prefix[:-1] + chr(ord(prefix[-1]) - 1) + _AFTER_ALL) if prefix else after
        )
        stop = self.shape.first_behind(prefix + _AFTER_ALL)
        if query.get("delimiter") and "/" not in prefix:
            return self._folders(prefix, after, start, stop, most)
        last = min(stop, start + most)
        next_key = self.shape.key(last - 1) if start < last < stop else ""
        return _document(self._contents(start, last), next_key)

    def _contents(self, start: int, stop: int) -> bytes:
        """Return the entries of the keys with numbers in [start, stop)."""
        runs = []
        while start < stop:
            stem, row = self.shape.parts(start)
            whole = 1000 if start < self.shape.flat else self.shape.per_folder
            count = min(stop - start, whole - row)
            if start < self.shape.flat:
                count = min(count, self.shape.flat - start)
            head = f"<Contents><Key>{stem}".encode()
            runs.append(head + head.join(self._rows[row : row + count]))
            start += count
        return b"".join(runs)

    def _folders(self, prefix: str, after: str, start: int, stop: int, most: int) -> bytes:
        """Return a page of the folders between two numbers, each as a common prefix."""
        found: list[str] = []
        while start < stop and len(found) < most:
            key = self.shape.key(start)
            folder = key[: key.index("/") + 1]
            if folder > after:
                found.append(folder)
            if start < self.shape.flat:
                start = self.shape.flat
            else:
                at = (start - self.shape.flat) // self.shape.per_folder
                start = self.shape.flat + (at + 1) * self.shape.per_folder
        body = "".join(
            f"<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>" for name in found
        )
        next_key = found[-1] + _AFTER_ALL if found and start < stop else ""
        return _document(body.encode(), next_key)


def _tail(row: int) -> str:
    return (
        f"</Key><LastModified>{_MODIFIED}</LastModified><ETag>&quot;{_etag(row)}&quot;</ETag>"
        f"<Size>{SIZE}</Size><StorageClass>STANDARD</StorageClass></Contents>"
    )


def _etag(row: int) -> str:
    return f"{row:032x}"


def _document(entries: bytes, next_key: str) -> bytes:
    token = f"<NextContinuationToken>{quote(next_key)}</NextContinuationToken>" if next_key else ""
    return b"".join(
        (
            b'<?xml version="1.0" encoding="UTF-8"?>'
            b'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            b"<EncodingType>url</EncodingType>",
            f"<IsTruncated>{str(bool(next_key)).lower()}</IsTruncated>{token}".encode(),
            entries,
            b"</ListBucketResult>",
        )
    )


def body_of(key: str) -> bytes:
    """Return the content of an object."""
    line = f"{key}\n".encode()
    return (line * (SIZE // len(line) + 1))[:SIZE]


_TYPE = "Content-Type: application/xml\r\n"


class Server:
    """Answers HTTP/1.1 requests of one bucket of a shape, whatever its name."""

    def __init__(self, shape: Shape) -> None:
        self._lister = Lister(shape)
        self._counted: Counter[str] = Counter()
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port: int = self._socket.getsockname()[1]

    def serve(self) -> None:
        """Serve connections, each in a thread, as long as this process lives."""
        while True:
            connection, _ = self._socket.accept()
            threading.Thread(target=self._converse, args=(connection,), daemon=True).start()

    def _converse(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        requests = connection.makefile("rb", buffering=1 << 16)
        with connection, requests, contextlib.suppress(OSError):
            while request := requests.readline():
                method, target, _ = request.decode().split(" ", 2)
                headers = {}
                while (line := requests.readline().strip()) and b":" in line:
                    name, _, value = line.decode().partition(":")
                    headers[name.lower()] = value.strip()
                requests.read(int(headers.get("content-length", 0)))
                connection.sendall(self._answer(method, target, headers))

    def _answer(self, method: str, target: str, headers: dict[str, str]) -> bytes:
        url = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(url.query, True).items()}
        if "stats" in query:
            return _reply("200 OK", json.dumps(self._counted).encode())
        key = unquote(url.path).lstrip("/").partition("/")[2]
        if method == "GET" and not key and "list-type" in query:
            self._counted["lists"] += 1
            return _reply("200 OK", self._lister.page(query), _TYPE)
        if method not in ("GET", "HEAD") or not key:
            self._counted["refused"] += 1
            return _reply("403 Forbidden", b"<Error><Code>AccessDenied</Code></Error>", _TYPE)
        self._counted[method] += 1
        return self._object(method, key, headers)

    def _object(self, method: str, key: str, headers: dict[str, str]) -> bytes:
        if not self._lister.shape.find(key):
            body = b"<Error><Code>NoSuchKey</Code></Error>" if method == "GET" else b""
            return _reply("404 Not Found", body, _TYPE)
        row = int(key[-7:-4])
        head = (
            f'ETag: "{_etag(row)}"\r\nLast-Modified: Fri, 02 Jan 2026 03:04:05 GMT\r\n'
            "Content-Type: application/octet-stream\r\nAccept-Ranges: bytes\r\n"
        )
        if method == "HEAD":
            return f"HTTP/1.1 200 OK\r\nContent-Length: {SIZE}\r\n{head}\r\n".encode()
        content, status = body_of(key), "200 OK"
        if "range" in headers:
            first, _, last = headers["range"].removeprefix("bytes=").partition("-")
            start, stop = int(first), min(SIZE, int(last or SIZE - 1) + 1)
            content, status = content[start:stop], "206 Partial Content"
            head += f"Content-Range: bytes {start}-{stop - 1}/{SIZE}\r\n"
        return _reply(status, content, head)


def _reply(status: str, body: bytes, head: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{head}\r\n".encode() + body


@contextlib.contextmanager
def serving(shape: Shape) -> Iterator[str]:
    """Serve such a bucket in another process during the block; yield its URL."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            __name__,
            str(shape.folders),
            str(shape.per_folder),
            str(shape.flat),
        ],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


def main() -> None:
    server = Server(Shape(*map(int, sys.argv[1:])))
    print(server.port, flush=True)
    threading.Thread(target=server.serve, daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    main()
