"""What kubelet asks on each node: publish a volume at a path, and take it away again.

There is no staging: the pod's identity, fresh tokens and fsGroup come with
publish alone. Publishing finds or makes the mount for the volume (see `mounts`)
and binds it to the target path. Kubelet publishes every minute or so what is
published already, to bring fresh credentials; that stores them and asks nobody
anything. What it finds dead it mounts anew, on top: only a mount that is
stacked shows up in containers that run.

The state of a volume is what mountinfo and its mount records say. Each call
starts from there and can be cut off anywhere: the next one, or the caretaker,
goes on. No call touches a mount, below its root or at it.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc

from csi.daemons.client import Daemons, FdStoreClient
from csi.errors import (
    AbortedError,
    AlreadyExistsError,
    CsiError,
    FailedPreconditionError,
    InvalidArgumentError,
    UnavailableError,
    VolumeNotFoundError,
)
from csi.generated import csi_pb2, csi_pb2_grpc
from csi.identities.cache_domains import Domains
from csi.identities.cache_gc import Sweeper
from csi.identities.credentials import DRIVER, CredentialFiles, Identity, choose
from csi.in_flight import Claims
from csi.node import bind_mount
from csi.node.bind_mount import Table
from csi.node.config import NodeConfiguration, add_flags, configuration_of
from csi.node.drain import Draining, UploadingError
from csi.node.mount_record import MountRecord, MountRecords
from csi.node.mounts import Mounts
from csi.node.publish_request import Publication, read_request, target_of
from csi.node.reconciler import Caretaker
from csi.node.stats import Stats
from csi.node.warmup import Warming
from csi.server import end_of
from csi.volume.location import Location, location_of
from csi.volume.options import Options, Place, Warm, finished, mount_layer, read_options
from csi.volume.stores import Stores
from fusefs.api import MountSource, use_runtime_directory

__all__ = ["NodeService", "add_flags", "make_service"]

log = logging.getLogger(__name__)

TARGET_MODE = 0o750
# Without a daemon. Kubelet waits for up to five minutes before it starts a container again.
LONGEST_PAUSE = "15m"
CLAIM_POLL_S = 0.02
UPLOADS_POLL_S = 0.5

Request = csi_pb2.NodePublishVolumeRequest
Capability = csi_pb2.NodeServiceCapability
CAPABILITIES = (
    Capability.RPC.GET_VOLUME_STATS,
    Capability.RPC.VOLUME_MOUNT_GROUP,
    Capability.RPC.SINGLE_NODE_MULTI_WRITER,
)


def make_service(arguments: argparse.Namespace, stores: Stores) -> NodeService:
    """The service that the command line asks for.

    Raises:
        CsiError, OSError: a directory cannot be used.
    """
    return NodeService(configuration_of(arguments), stores)


class NodeService(csi_pb2_grpc.NodeServicer):
    """The Node service of CSI. `close` when no more calls come."""

    def __init__(self, configuration: NodeConfiguration, stores: Stores) -> None:
        """Raises CsiError or OSError where a directory cannot be used."""
        self._configuration = configuration
        self._stores = stores
        configuration.prepare()
        state = configuration.state_directory
        use_runtime_directory(state / "fusefs")
        self._files = CredentialFiles(state / "credentials")
        self._domains = Domains(configuration.cache_directory, *configuration.uids)
        self._mounts = Mounts(
            MountRecords(state / "mounts"),
            self._files,
            configuration.mounts_directory,
            FdStoreClient(configuration.descriptor_store),
            Daemons(configuration.supervisor),
        )
        self._stats = Stats(self._mounts)
        self._draining = Draining(self._mounts)
        self._claims = Claims()
        self._warming = Warming(state / "warming")
        self._caretaker = Caretaker(self._mounts, self._claims, self._draining, self._warming)
        self._caretaker.start()
        self._sweeper = Sweeper(
            self._domains,
            lambda: [record.settings for record in self._mounts.records.all()],
            configuration.shares,
        )
        self._sweeper.start()

    def close(self) -> None:
        """Stop what goes on beside the calls. The mounts go on."""
        self._caretaker.stop()
        self._sweeper.stop()

    @contextmanager
    def _claimed(self, volume_id: str, ends: float) -> Iterator[None]:
        """Have a volume to oneself; the caretaker, the only other one, is soon done."""
        with ExitStack() as stack:
            while True:
                try:
                    stack.enter_context(self._claims.claim(volume_id))
                    break
                except AbortedError:
                    if time.monotonic() + CLAIM_POLL_S > ends:
                        raise
                    time.sleep(CLAIM_POLL_S)
            yield

    # --- publish ---

    def NodePublishVolume(
        self, request: Request, context: grpc.ServicerContext
    ) -> csi_pb2.NodePublishVolumeResponse:
        ends = end_of(context)
        asked = read_request(request, self._configuration.kubelet_directory, self._own)
        while True:
            with self._claimed(asked.volume_id, ends):
                cold = self._publish_if_warm(request, asked, ends)
            if cold is None:
                return csi_pb2.NodePublishVolumeResponse()
            # Without the claim: pods of the volume that run already are not to wait.
            self._warming.wait(*cold, asked.target, ends)

    def _publish_if_warm(
        self, request: Request, asked: Publication, ends: float
    ) -> tuple[MountRecord, Warm] | None:
        """Publish, or return the mount whose warming is to be waited for first."""
        table = Table()
        if self._is_published(request, asked, table):
            return None
        self._refuse_second_target(asked, table)
        return self._publish(request, asked, ends)

    def _is_published(self, request: Request, asked: Publication, table: Table) -> bool:
        """Whether it is there and alive; its credentials are fresh then.

        Raises:
            AlreadyExistsError: something else is there.
        """
        top = table.top(asked.target)
        if top is None:
            return False
        if not top.is_fusefs:
            raise AlreadyExistsError(f"{asked.target}: {top.filesystem} is mounted there")
        record = self._mounts.behind(top, table)
        if record is None:
            return False  # its mount has died and was made anew
        root = table.top(Path(record.root))
        is_read_only = asked.is_read_only or (root is not None and root.is_read_only)
        if record.arguments != asked.arguments or top.is_read_only != is_read_only:
            raise AlreadyExistsError(f"{asked.target}: published with other arguments")
        if not self._mounts.is_alive(record, table):
            return False
        try:
            identity, _, _ = self._who(request, asked)
            if (identity.who == DRIVER) != (record.who == DRIVER):
                raise InvalidArgumentError("its Secret is empty now")
            self._files.store(record.key, identity, record.uid)
        except (CsiError, OSError) as error:
            # Kubelet would take the running pod's volume away.
            log.warning("%s: its credentials stay as they are: %s", asked.volume_id, error)
        return True

    def _refuse_second_target(self, asked: Publication, table: Table) -> None:
        if not asked.has_one_target:
            return
        for record in self._mounts.records.of_volume(asked.volume_id):
            for path in self._mounts.references(record, table):
                if path != asked.target and "volume-subpaths" not in path.parts:
                    raise FailedPreconditionError(
                        f"{asked.volume_id} is published at {path}, and its access mode"
                        f" {asked.mode} allows one path on a node"
                    )

    def _publish(
        self, request: Request, asked: Publication, ends: float
    ) -> tuple[MountRecord, Warm] | None:
        if not asked.target.parent.is_dir():
            raise InvalidArgumentError(f"target_path: there is no {asked.target.parent}")
        identity, record, warm = self._plan(request, asked)
        if self._mounts.is_alive(record, Table()):
            self._mounts.records.write(record)  # it may have been lost
            self._files.store(record.key, identity, record.uid)
        else:
            self._begin(record, identity, ends)
        if self._warming.is_awaited(record, warm):
            return record, warm
        self._bind(record, asked)
        self._draining.is_used_again(record)
        self._warming.is_not_waited_for(record.key, asked.target)
        self._warming.begin(record, warm)
        self._sweep(asked.volume_id)
        return None

    def _bind(self, record: MountRecord, asked: Publication) -> None:
        table = Table()
        at_target, root = table.top(asked.target), table.top(Path(record.root))
        if at_target is None:
            bind_mount.make_directory(asked.target, TARGET_MODE)
        elif root is not None and at_target.device == root.device:
            return  # it was gone on with
        bind_mount.bind(Path(record.root), asked.target, is_read_only=asked.is_read_only)

    def _begin(self, record: MountRecord, identity: Identity, ends: float) -> None:
        self._files.store(record.key, identity, record.uid)
        try:
            self._mounts.start(record, ends)
        except CsiError:
            self._mounts.end(record, time.monotonic(), is_forced=True)
            raise

    def _who(self, request: Request, asked: Publication) -> tuple[Identity, Location, Options]:
        location = location_of(asked.location, self._stores)
        options = read_options(asked.attributes, asked.mount_flags, is_inline=asked.is_inline)
        identity = choose(
            request.secrets,
            request.volume_context,
            options,
            location.store,
            is_inline=asked.is_inline,
        )
        return identity, location, options

    def _plan(self, request: Request, asked: Publication) -> tuple[Identity, MountRecord, Warm]:
        """The mount that a volume needs, whether it is there or not, and what of it to warm."""
        identity, location, options = self._who(request, asked)
        store = location.store
        place = Place(
            MountSource(location.bucket, location.prefix),
            store.endpoint_url,
            location.region,
            store.addressing,
            store.ca_bundle,
        )
        layer = mount_layer(
            options,
            place,
            self._configuration.shares,
            is_read_only=asked.is_reader_mode,
            fs_group=asked.fs_group,
        )
        where = (store.name, store.endpoint_url or "", location.bucket)
        shared = ("shared", options.cache_domain) if options.cache_domain else identity.proof
        name = self._domains.name_of("domain", *where, *shared)
        texts = sorted(f"{setting}={given.text}" for setting, given in layer.items())
        key = self._domains.name_of("mount", name, asked.arguments, *identity.proof, "", *texts)
        known = self._mounts.records.read(key)
        if known is not None:
            return identity, known, options.warm
        self._warming.forget(key)  # an earlier mount's
        store.check_address()
        with self._mounts.records.one_more(self._configuration.most_volumes):
            domain = self._domains.claim(name)
            settings = finished(
                layer,
                mountpoint=os.fspath(self._mounts.root_of(key)),
                cache_dir=os.fspath(domain.directory),
                user=str(domain.uid),
                descriptor_store=os.fspath(self._configuration.descriptor_store),
                max_pause=LONGEST_PAUSE,
            )
            record = MountRecord(
                key,
                asked.volume_id,
                os.fspath(settings.mountpoint),
                str(settings.source),
                identity.who,
                domain.uid,
                asked.arguments,
                settings.to_json(),
                options.drain_timeout_s,
                self._files.environment(key, identity, store),
            )
            self._mounts.records.write(record)
        return identity, record, options.warm

    # --- unpublish ---

    def NodeUnpublishVolume(
        self, request: csi_pb2.NodeUnpublishVolumeRequest, context: grpc.ServicerContext
    ) -> csi_pb2.NodeUnpublishVolumeResponse:
        ends = end_of(context)
        if not request.volume_id:
            raise InvalidArgumentError("volume_id: missing")
        target = self._published_path("target_path", request.target_path)
        while True:
            try:
                with self._claimed(request.volume_id, ends):
                    self._unpublish(request.volume_id, target, ends)
                return csi_pb2.NodeUnpublishVolumeResponse()
            except UploadingError:
                if time.monotonic() + UPLOADS_POLL_S > ends:
                    raise
            # Without the claim: the volume's next pod is not to wait for this one's uploads.
            time.sleep(UPLOADS_POLL_S)

    def _unpublish(self, volume_id: str, target: Path, ends: float) -> None:
        table = Table()
        stack = table.stack(target)
        if any(not mount.is_fusefs for mount in stack):
            raise FailedPreconditionError(f"{target}: what is mounted there is not a volume")
        lost = set()
        for mount in stack:
            record = self._mounts.behind(mount, table)
            if record is not None and record.volume_id != volume_id:
                return  # that of another volume; this one is not here
            key = self._mounts.key_behind(mount, table)
            if record is None and key is not None:
                lost.add(key)
        records = self._mounts.records.of_volume(volume_id)
        for record in records:
            self._warming.is_not_waited_for(record.key, target)
            if self._warming.is_expected(record.key):
                continue
            if all(path == target for path in self._mounts.references(record, table)):
                self._draining.check(record)
        try:
            bind_mount.pop_all(target)
            bind_mount.remove_directory(target)
        except OSError as error:
            raise UnavailableError(f"{target}: {error.strerror}") from error
        for record in records:
            if not self._is_needed(record):
                self._draining.end(record, ends)
                self._stats.forget(record.key)
                self._warming.forget(record.key)
        for key in lost:  # mounts whose records are no more
            if not self._mounts.is_used(key, Table()):
                self._mounts.end_key(key, ends)

    def _sweep(self, volume_id: str) -> None:
        """End mounts of a volume that are used no more, as another identity has come."""
        for record in self._mounts.records.of_volume(volume_id):
            if not self._is_needed(record):
                try:
                    self._draining.check(record)
                    self._draining.end(record, time.monotonic())
                except (CsiError, OSError) as error:
                    log.info("later: %s", error)  # the caretaker's

    def _is_needed(self, record: MountRecord) -> bool:
        """Whether anybody uses a mount, or waits for its warming."""
        is_used = bool(self._mounts.references(record, Table()))
        return is_used or self._warming.is_expected(record.key)

    # --- what is asked ---

    def NodeGetVolumeStats(
        self, request: csi_pb2.NodeGetVolumeStatsRequest, context: grpc.ServicerContext
    ) -> csi_pb2.NodeGetVolumeStatsResponse:
        if not request.volume_id:
            raise InvalidArgumentError("volume_id: missing")
        path = self._published_path("volume_path", request.volume_path)
        table = Table()
        top = table.top(path)
        record = self._mounts.behind(top, table) if top is not None else None
        if record is None or record.volume_id != request.volume_id:
            raise VolumeNotFoundError(f"volume {request.volume_id} is not at {path}")
        return self._stats.of(record)

    def NodeGetInfo(
        self, request: csi_pb2.NodeGetInfoRequest, context: grpc.ServicerContext
    ) -> csi_pb2.NodeGetInfoResponse:
        return csi_pb2.NodeGetInfoResponse(
            node_id=self._configuration.node_id,
            max_volumes_per_node=self._configuration.most_volumes,
        )

    def NodeGetCapabilities(
        self, request: csi_pb2.NodeGetCapabilitiesRequest, context: grpc.ServicerContext
    ) -> csi_pb2.NodeGetCapabilitiesResponse:
        return csi_pb2.NodeGetCapabilitiesResponse(
            capabilities=[
                Capability(rpc=Capability.RPC(type=capability)) for capability in CAPABILITIES
            ]
        )

    def _published_path(self, field: str, text: str) -> Path:
        """Where a volume is said to be.

        Raises:
            InvalidArgumentError: the field is missing.
            VolumeNotFoundError: no volume can be there, whatever is wrong with the path.
        """
        directory = self._configuration.kubelet_directory
        try:
            return target_of(text, directory, self._own, name=field)
        except InvalidArgumentError as error:
            if not text:
                raise
            raise VolumeNotFoundError(str(error)) from error

    @property
    def _own(self) -> Path:
        return self._configuration.mounts_directory
