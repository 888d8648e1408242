"""Deletions that take long, fail on the way or meet another call."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from csi.controller.service import ControllerService
from csi.generated import csi_pb2
from csi.volume.stores import Stores
from tests.support.csi.calls import Driver, refusal, serving
from tests.support.csi.volumes import (
    CLUSTER,
    KEYS,
    NAME,
    Code,
    Held,
    create,
    delete,
    record_key,
    request,
)
from tests.support.servers.buckets import Bucket, keys
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.sharing import PATIENCE_S


def test_a_long_deletion_tells_how_far_it_is_and_goes_on(
    driver: Driver, bucket: Bucket, faulty: FaultyS3
) -> None:
    volume = create(driver, bucket.name, store="faulty", onDelete="delete")
    bucket.put(f"{NAME}/data", b"")
    held = Held(faulty, "DELETE MANY")
    message = csi_pb2.DeleteVolumeRequest(volume_id=volume.volume_id, secrets=KEYS)
    with pytest.raises(grpc.RpcError) as caught:
        driver.controller.DeleteVolume(message, timeout=4)
    assert caught.value.code() is Code.ABORTED
    assert "0 objects deleted so far" in caught.value.details()
    code, _ = refusal(driver.controller.CreateVolume, request(bucket.name, store="faulty"))
    assert code is Code.ABORTED
    held.let_go()
    driver.controller.DeleteVolume(message, timeout=PATIENCE_S)
    assert set(keys(bucket)) == set()
    assert len(faulty.requests("DELETE MANY")) == 1


def test_a_volume_made_within_another_keeps_what_is_left_of_it(
    driver: Driver, bucket: Bucket, faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("csi.controller.bucket_client.PAGE", 3)
    volume = create(driver, bucket.name, store="faulty", onDelete="delete")
    for number in range(7):
        bucket.put(f"{NAME}/{number}", b"precious")
    held = Held(faulty, "DELETE MANY")
    with ThreadPoolExecutor(1) as pool:
        deletion = pool.submit(delete, driver, volume.volume_id)
        assert held.begun.wait(PATIENCE_S)
        create(driver, bucket.name, "pvc-late", prefix=f"{NAME}/late")
        held.let_go()
        deletion.result()
    left = {f"{NAME}/{number}" for number in range(3, 7)}
    assert set(keys(bucket)) == {*left, record_key("pvc-late")}


def test_many_objects_are_deleted_page_by_page(
    driver: Driver, bucket: Bucket, faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("csi.controller.bucket_client.PAGE", 3)
    volume = create(driver, bucket.name, store="faulty", onDelete="delete")
    for number in range(7):
        bucket.put(f"{NAME}/{number}", b"")
        create(driver, bucket.name, f"pvc-{number}")
    delete(driver, volume.volume_id)
    assert set(keys(bucket)) == {record_key(f"pvc-{number}") for number in range(7)}
    assert len(faulty.requests("DELETE MANY")) == 3
    # Each record is fetched once, however often they are listed; its own before that.
    assert len(faulty.requests("GET")) == 1 + 8


def test_uploads_that_cannot_be_listed_do_not_keep_a_volume(
    driver: Driver, bucket: Bucket, faulty: FaultyS3
) -> None:
    volume = create(driver, bucket.name, store="faulty", onDelete="delete")
    bucket.put(f"{NAME}/data", b"")
    faulty.add("UPLOADS", code="AccessDenied")
    delete(driver, volume.volume_id)
    assert set(keys(bucket)) == set()


@pytest.mark.parametrize("operation", ["GET", "LIST", "DELETE MANY", "UPLOADS", "DELETE"])
def test_a_deletion_goes_on_where_an_answer_was_lost(
    driver: Driver, bucket: Bucket, faulty: FaultyS3, operation: str
) -> None:
    volume = create(driver, bucket.name, store="faulty", onDelete="delete")
    bucket.put(f"{NAME}/data", b"")
    faulty.add(operation, times=1, lose_answer=True)
    delete(driver, volume.volume_id)
    assert set(keys(bucket)) == set()


def test_a_driver_that_was_left_behind_deletes_nothing_of_a_later_volume(
    driver: Driver, stores: Stores, bucket: Bucket, faulty: FaultyS3
) -> None:
    volume = create(driver, bucket.name, store="faulty", onDelete="delete")
    bucket.put(f"{NAME}/data", b"")
    held = Held(faulty, "LIST")
    with (
        serving([ControllerService(stores, CLUSTER)]) as successor,
        ThreadPoolExecutor(1) as pool,
    ):
        left_behind = pool.submit(delete, driver, volume.volume_id)
        assert held.begun.wait(PATIENCE_S)
        delete(successor, volume.volume_id)
        create(successor, bucket.name, store="faulty", onDelete="delete")
        bucket.put(f"{NAME}/data", b"precious")
        held.let_go()
        error: Any = left_behind.exception()
    assert error.code() is Code.ABORTED
    assert set(keys(bucket)) == {f"{NAME}/data", record_key()}


def test_a_deletion_that_failed_is_finished_by_the_next_call(
    driver: Driver, bucket: Bucket, faulty: FaultyS3
) -> None:
    volume = create(driver, bucket.name, store="faulty", onDelete="delete")
    bucket.put(f"{NAME}/data", b"")
    rule = faulty.add("DELETE MANY", code="InternalError")
    message = csi_pb2.DeleteVolumeRequest(volume_id=volume.volume_id, secrets=KEYS)
    assert refusal(driver.controller.DeleteVolume, message)[0] is Code.UNAVAILABLE
    assert set(keys(bucket)) == {f"{NAME}/data", record_key()}
    faulty.remove(rule)
    delete(driver, volume.volume_id)
    assert set(keys(bucket)) == set()
