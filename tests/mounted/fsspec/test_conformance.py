"""fsspec's own tests for file systems that read and write, on a real mount."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec.tests.abstract as abstract
import pytest

from fusefs.fsspec import FusefsFileSystem
from tests.support import sharing
from tests.support.servers.buckets import new_bucket
from tests.support.servers.s3_server import S3Server


@pytest.fixture(scope="module")
def mounted_bucket(s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    bucket = new_bucket(s3)
    directory: Path = tmp_path_factory.mktemp("conformance")
    options = ("--no-read-only", "--durability", "local")
    with sharing.mounted(s3, f"s3://{bucket.name}/", directory, *options):
        yield bucket.name


class Fixtures(abstract.AbstractFixtures):
    @pytest.fixture
    def fs(self) -> FusefsFileSystem:
        return FusefsFileSystem()

    @pytest.fixture
    def fs_path(self, mounted_bucket: str) -> Iterator[str]:
        path = f"{mounted_bucket}/of one test"
        yield path
        fs = FusefsFileSystem()
        if fs.exists(path):
            fs.rm(path, recursive=True)


class TestCopy(Fixtures, abstract.AbstractCopyTests):
    pass


class TestGet(Fixtures, abstract.AbstractGetTests):
    pass


class TestPut(Fixtures, abstract.AbstractPutTests):
    pass


class TestOpen(Fixtures, abstract.AbstractOpenTests):
    pass


class TestPipe(Fixtures, abstract.AbstractPipeTests):
    pass
