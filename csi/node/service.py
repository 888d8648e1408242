"""The Node service: publishes a volume at a path for kubelet, and unpublishes it.

There is no staging, because only publish has the pod's identity, fresh tokens and fsGroup.
Publishing finds or makes the mount for the volume (see `mounts`) and binds it to the target path;
`_plan` decides which mount, cache and cluster cache. Kubelet repeats each publish call about every
minute, to bring fresh credentials; then the credentials are only stored. If the mount is dead, a
new mount is stacked on top of it, since running containers would not see a mount in its place.

mountinfo and the mount records are the whole state of a volume. Each call starts from that state
and can be cut off anywhere: the next call, or the reconciler, continues. No call accesses files of
a mount.
"""

from __future__ import annotations

import argparse
import errno
import logging
import os
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import grpc

from csi.daemons.client import SupervisorClient
from csi.errors import (
    AlreadyExistsError,
    CsiError,
    FailedPreconditionError,
    InvalidArgumentError,
    UnavailableError,
    VolumeNotFoundError,
)
from csi.generated import csi_pb2, csi_pb2_grpc
from csi.identities.cache_domains import CacheDomains
from csi.identities.cache_gc import CacheCollector
from csi.identities.cluster_caches import CacheSecrets, ClusterCacheConfig
from csi.identities.credentials import DRIVER, CredentialFiles, Identity, choose
from csi.in_flight import Claims
from csi.node import bind_mount
from csi.node.bind_mount import MountTable
from csi.node.config import (
    MOUNT_RECORDS,
    POD_RECORDS,
    RUNTIME,
    NodeConfiguration,
    be_the_only_driver,
    configuration_of,
)
from csi.node.drain import Drains, UploadingError
from csi.node.mount_record import MountRecord, MountRecords
from csi.node.mounts import Mounts
from csi.node.pod_records import PodRecord, PodRecords
from csi.node.publish_request import PublishRequest, read_request, target_of
from csi.node.reconciler import Reconciler
from csi.node.warmup import Warmups
from csi.server import end_of
from csi.volume.location import Location, location_of
from csi.volume.options import Options, WarmOption, finished, mount_layer, read_options
from csi.volume.stores import Stores
from fusefs.exporter.queries import Target as MetricsTarget
from fusefs.exporter.queries import target_at as metrics_target
from fusefs.launch.registry import directory_of, use_runtime_directory

log = logging.getLogger(__name__)

TARGET_MODE = 0o750
# The number of characters of a mount's key that distinguish a volume's mounts in metrics.
KEY_LENGTH = 8
# The longest pause without a daemon; kubelet starts a container again after up to five minutes.
LONGEST_PAUSE = "15m"
UPLOADS_POLL_S = 0.5
# Time limit, before the driver ends, for the daemons' container to start again and to get the
# mounts' descriptors.
HELD_S = 30.0
HELD_POLL_S = 0.2

Request = csi_pb2.NodePublishVolumeRequest
Capability = csi_pb2.NodeServiceCapability
CAPABILITIES = (Capability.RPC.VOLUME_MOUNT_GROUP, Capability.RPC.SINGLE_NODE_MULTI_WRITER)


def make_service(arguments: argparse.Namespace, stores: Stores) -> NodeService:
    """Make the Node service from its flags; CsiError or OSError for an unusable directory."""
    configuration = configuration_of(arguments)
    configuration.prepare()
    be_the_only_driver(configuration.state_directory)
    return NodeService(configuration, stores)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The mount that a volume needs, its secrets, and the paths of the volume to warm."""

    identity: Identity
    record: MountRecord
    warm: WarmOption
    cache_secrets: CacheSecrets | None


class NodeService(csi_pb2_grpc.NodeServicer):
    """The Node service of CSI. Call `close` after the last call."""

    register = staticmethod(csi_pb2_grpc.add_NodeServicer_to_server)

    def __init__(self, configuration: NodeConfiguration, stores: Stores) -> None:
        """Start the background threads; raise CsiError or OSError for an unusable directory."""
        self._configuration = configuration
        self._stores = stores
        configuration.prepare()
        state = configuration.state_directory
        use_runtime_directory(state / RUNTIME)
        self._files = CredentialFiles(state / "credentials", configuration.pod_identity_agent)
        records = MountRecords(state / MOUNT_RECORDS)
        self._domains = CacheDomains(
            configuration.cache_directory, *configuration.uids, records.uids_of_domains
        )
        self._mounts = Mounts(
            records,
            self._files,
            configuration.mounts_directory,
            SupervisorClient(configuration.supervisor, configuration.node_id),
        )
        self._pods = PodRecords(state / POD_RECORDS)
        self._drains = Drains(self._mounts)
        self._claims = Claims()
        self._warmups = Warmups(state / "warming")
        self._reconciler = Reconciler(self._mounts, self._claims, self._drains, self._warmups)
        self._reconciler.start()
        self._collector = CacheCollector(self._domains, configuration.shares)
        self._collector.start()

    def close(self) -> None:
        """Stop the background threads. The mounts stay.

        Before, wait for up to `HELD_S` until the daemons' container holds every mount's
        descriptor, because the keepers end with this process' container.
        """
        if self._mounts.supervisor.address.is_needed:
            if self._mounts.not_held():
                log.info("waiting until all mounts are held by the daemons' container")
            deadline = time.monotonic() + HELD_S
            while missing := self._mounts.not_held():
                if time.monotonic() > deadline:
                    log.error("the end of the keepers may end %s", ", ".join(missing))
                    break
                time.sleep(HELD_POLL_S)
        self._reconciler.stop()
        self._collector.stop()

    # --- publish ---

    def NodePublishVolume(
        self, request: Request, context: grpc.ServicerContext
    ) -> csi_pb2.NodePublishVolumeResponse:
        ends = end_of(context)
        directories = self._configuration.kubelet_directory, self._configuration.mounts_directory
        publish = read_request(request, *directories)
        while True:
            with self._claims.claim(publish.volume_id, ends):
                cold = self._publish_if_warm(request, publish, ends)
            if cold is None:
                return csi_pb2.NodePublishVolumeResponse()
            # Without the claim, so that calls for other pods of the volume need not wait.
            self._warmups.wait(*cold, publish.target, ends)

    def _publish_if_warm(
        self, request: Request, publish: PublishRequest, ends: float
    ) -> tuple[MountRecord, WarmOption] | None:
        """Publish the volume and return None; or return its mount and the warm-up to wait for."""
        table = MountTable()
        pod = PodRecord.of(publish.target, request.volume_context, is_inline=publish.is_inline)
        if self._refresh_if_published(request, publish, table, ends):
            self._pods.note(pod)
            return None
        self._refuse_second_target(publish, table)
        with self._pods.publishing(pod, self._configuration.inline_bounds):
            return self._publish(request, publish, pod.name, ends)

    def _refresh_if_published(
        self, request: Request, publish: PublishRequest, table: MountTable, ends: float
    ) -> bool:
        """Renew a published volume's credentials; False if not published, or the mount is dead.

        A mount without a keeper is resumed here: otherwise, with rotated keys or other mount
        options, the volume would get a second mount on top of the first one.

        Raises:
            AlreadyExistsError: the path has another file system, or the arguments have changed.
        """
        top = table.top(publish.target)
        if top is None:
            return False
        if not top.is_fusefs:
            raise AlreadyExistsError(f"{publish.target}: {top.filesystem} is mounted there")
        record = self._mounts.behind(top, table)
        if record is None:
            return False  # the mount had died and was made anew
        root = table.top(Path(record.root))
        is_read_only = publish.is_read_only or (root is not None and root.is_read_only)
        is_same = publish.with_group(record.fs_group).arguments == record.arguments
        is_swapped = publish.fs_group != record.fs_group
        if not is_same or top.is_idmapped != is_swapped or top.is_read_only != is_read_only:
            raise AlreadyExistsError(f"{publish.target}: published with other arguments")
        self._renew_credentials(request, publish, record)
        return self._mounts.is_alive(record, table) or self._mounts.resume(record, ends)

    def _renew_credentials(
        self, request: Request, publish: PublishRequest, record: MountRecord
    ) -> None:
        try:
            identity, _, _ = self._who(request, publish)
            if (identity.who == DRIVER) != (record.who == DRIVER):
                raise InvalidArgumentError("its Secret is empty now")
            self._files.store(record.key, identity, record.uid)
        except (CsiError, OSError) as error:
            # Logged only: an error would make kubelet remove the running pod's volume.
            log.warning("%s: its credentials stay as they are: %s", publish.volume_id, error)

    def _refuse_second_target(self, publish: PublishRequest, table: MountTable) -> None:
        if not publish.has_one_target:
            return
        for record in self._mounts.records.of_volume(publish.volume_id):
            for path in self._mounts.references(record.key, table):
                if path != publish.target and "volume-subpaths" not in path.parts:
                    raise FailedPreconditionError(
                        f"{publish.volume_id} is published at {path}, and its access mode"
                        f" {publish.mode} allows one path on a node"
                    )

    def _publish(
        self, request: Request, publish: PublishRequest, pod: str, ends: float
    ) -> tuple[MountRecord, WarmOption] | None:
        if not publish.target.parent.is_dir():
            raise InvalidArgumentError(f"target_path: there is no {publish.target.parent}")
        plan = self._plan(request, publish, ends)
        record, warm = plan.record, plan.warm.of_pod(pod)
        if plan.warm.paths and not warm.paths:
            log.info("%s: no part is fetched for pod %r: it has no number", publish.volume_id, pod)
        is_alive = self._mounts.is_alive(record, MountTable())
        if is_alive:
            self._store_secrets(plan)
        else:
            self._begin(plan, ends)
        if self._warmups.blocks_publish(record, warm):
            # While the claim is held: without a target that waits, the mount would be ended.
            self._warmups.add_waiter(record.key, warm, publish.target)
            return record, warm
        self._bind(record, publish)
        if record.drain_began:
            self._mounts.records.write(record.key, replace(record, drain_began=0.0))
        self._warmups.remove_waiter(record.key, publish.target)
        self._warmups.begin(record, warm, is_new=not is_alive)
        return None

    def _bind(self, record: MountRecord, publish: PublishRequest) -> None:
        table = MountTable()
        at_target, root = table.top(publish.target), table.top(Path(record.root))
        if at_target is None:
            bind_mount.make_directory(publish.target, TARGET_MODE)
        elif root is not None and at_target.device == root.device:
            return  # the mount is bound already
        source, is_read_only = Path(record.root), publish.is_read_only
        own, shown = publish.fs_group, record.fs_group
        if own is None or shown is None or own == shown:
            bind_mount.bind(source, publish.target, is_read_only=is_read_only)
            return
        try:
            swapped = (own, shown)
            bind_mount.bind(source, publish.target, is_read_only=is_read_only, swapped=swapped)
        except OSError as error:
            if at_target is None:
                bind_mount.remove_directory(publish.target)
            raise FailedPreconditionError(
                f"{publish.volume_id} is mounted on this node with fsGroup {shown}, and can't be"
                f" shown with fsGroup {own} as well: {error.strerror} (Linux 6.12 and newer can)."
                " Give the pods one fsGroup, or keep them on different nodes"
            ) from error

    def _begin(self, plan: _Plan, ends: float) -> None:
        self._store_secrets(plan)
        record = plan.record
        left, _ = self._drains.pending(record)  # a new daemon removes the link to them
        if left:
            self._mounts.supervisor.check()  # without it the mount would be ended below
        try:
            self._mounts.start(record, ends)
        except (CsiError, OSError) as error:
            if self._mounts.references(record.key, MountTable()):
                # Not final: running pods use the mount, and the reconciler may still resume it.
                raise UnavailableError(str(error)) from error
            if left:
                log.error("given up: %s; the files are kept below %s", left, record.cache_directory)
            self._mounts.end(record, time.monotonic(), is_forced=True)
            raise

    def _store_secrets(self, plan: _Plan) -> None:
        record = plan.record
        self._files.store(record.key, plan.identity, record.uid)
        self._files.store_kept(record.key, plan.identity, plan.cache_secrets, record.uid)

    def _who(self, request: Request, publish: PublishRequest) -> tuple[Identity, Location, Options]:
        location = location_of(publish.location, self._stores)
        options = read_options(publish.attributes, publish.mount_flags, is_inline=publish.is_inline)
        identity = choose(
            request.secrets,
            request.volume_context,
            options,
            location.store,
            is_inline=publish.is_inline,
        )
        return identity, location, options

    def _plan(self, request: Request, publish: PublishRequest, ends: float) -> _Plan:
        """Plan the mount that a volume needs; write a record of the mount if there is none."""
        identity, location, options = self._who(request, publish)
        cluster_cache = self._cluster_cache(identity, options, publish)
        layer = mount_layer(
            options,
            location,
            self._configuration.shares,
            cluster_cache.settings if cluster_cache else {},
            is_read_only=publish.is_reader_mode,
            fs_group=publish.fs_group,
        )
        cache_secrets = cluster_cache.secrets() if cluster_cache else None
        own = {"gid"} if publish.fs_group is not None else set()
        texts = sorted(f"{setting}={layer[setting].text}" for setting in layer.keys() - own)
        if cache_secrets is not None:
            # A mount keeps its first secrets, so other secrets need another mount.
            texts.append(cache_secrets.proof)
        name = self._domain_name(identity, location, options)
        mode = str(publish.is_reader_mode or options.wanted.read_only)  # a reader uploads nothing
        data = (publish.volume_id, str(location), mode, *identity.proof)
        arguments = publish.with_group(0).arguments  # pods of all fsGroups share a mount
        common = self._domains.name_of("data", name, *data)
        variant = self._domains.name_of("mount", name, arguments, *identity.proof, "", *texts)
        key, known = self._key_of(variant, common, name, publish.target)
        if known is not None:
            return _Plan(identity, known, options.warm, cache_secrets)
        self._warmups.forget(key)  # records of an earlier mount
        location.store.check_address()
        # The claim waits for the reconciler, which removes directories of earlier mounts.
        with (
            self._claims.claim(key, ends),
            self._mounts.records.one_more(self._configuration.most_volumes),
        ):
            domain = self._domains.claim(name)
            settings = finished(
                layer,
                mountpoint=os.fspath(self._mounts.root_of(key)),
                cache_dir=os.fspath(domain.directory),
                user=str(domain.uid),
                max_pause=LONGEST_PAUSE,
                **self._files.settings_of(
                    key, identity, has_cluster_cache=cluster_cache is not None
                ),
            )
            record = MountRecord(
                key,
                publish.volume_id,
                os.fspath(settings.mountpoint),
                str(settings.source),
                identity.who,
                domain.uid,
                publish.arguments,
                settings.as_texts(),
                options.drain_timeout_s,
                self._files.environment(key, identity, location.store, is_fips=settings.fips),
                variant=variant,
            )
            self._mounts.records.write(record.key, record)
        return _Plan(identity, record, options.warm, cache_secrets)

    def _cluster_cache(
        self, identity: Identity, options: Options, publish: PublishRequest
    ) -> ClusterCacheConfig | None:
        if identity.customer_key is not None:
            return None  # only S3 and the local cache have data with such a key
        caches = self._configuration.cluster_caches
        return caches.of(options.cache_domain, is_inline=publish.is_inline)

    def _key_of(
        self, variant: str, common: str, domain: str, target: Path
    ) -> tuple[str, MountRecord | None]:
        """Return the key for a mount, and its record if there is one.

        The key decides where files wait for their upload. `common` has no settings in it, so that
        the next mount finds the files whatever its settings are. The key is `variant`, a digest of
        the settings too, if `common` is in use with other settings, or if files wait at `variant`.
        """
        records, table = self._mounts.records, MountTable()
        known, other = records.read(variant), records.read(common)
        own, root = (table.top(self._mounts.root_of(key)) for key in (variant, common))
        if known is not None or own is not None:
            return variant, known
        if other is not None and other.variant == variant:
            return common, other
        state = directory_of(self._mounts.root_of(variant)).name
        kinds = ("late", "renames", "staging")
        is_left = any(self._domains.has_files(domain, "mounts", state, kind) for kind in kinds)
        # A mount whose record is lost may have any settings: only its targets go on with it.
        is_lost = root is not None and target not in self._mounts.references(common, table)
        is_taken = is_lost if other is None else not self._mounts.is_dead(other)
        return variant if is_left or is_taken else common, None

    def _domain_name(self, identity: Identity, location: Location, options: Options) -> str:
        """Return the name of the cache domain that a volume uses."""
        store = location.store
        where = (store.name, store.endpoint_url or "", location.bucket)
        shared = identity.proof
        if options.cache_domain:
            shared = ("shared", options.cache_domain, *identity.key_proof)
        return self._domains.name_of("domain", *where, *shared)

    # --- unpublish ---

    def NodeUnpublishVolume(
        self, request: csi_pb2.NodeUnpublishVolumeRequest, context: grpc.ServicerContext
    ) -> csi_pb2.NodeUnpublishVolumeResponse:
        ends = end_of(context)
        if not request.volume_id:
            raise InvalidArgumentError("volume_id: missing")
        target = self._published_path(request.target_path)
        while True:
            try:
                with self._claims.claim(request.volume_id, ends):
                    self._unpublish(request.volume_id, target, ends)
                return csi_pb2.NodeUnpublishVolumeResponse()
            except UploadingError:
                if time.monotonic() + UPLOADS_POLL_S > ends:
                    raise
            # Without the claim, so that the volume's next pod need not wait for these uploads.
            time.sleep(UPLOADS_POLL_S)

    def _unpublish(self, volume_id: str, target: Path, ends: float) -> None:
        table = MountTable()
        stack = table.stack(target)
        if any(not mount.is_fusefs for mount in stack):
            raise FailedPreconditionError(f"{target}: what is mounted there is not a volume")
        keys = set[str]()
        for mount in stack:
            record = self._mounts.behind(mount, table)
            if record is not None and record.volume_id != volume_id:
                return  # another volume is mounted at the target
            if (key := self._mounts.key_behind(mount, table)) is not None:
                keys.add(key)
        records = self._mounts.records.of_volume(volume_id)
        for record in records:
            self._warmups.remove_waiter(record.key, target)
            if self._warmups.is_awaited(record.key):
                continue
            if all(path == target for path in self._mounts.references(record.key, table)):
                self._drains.check(record)
        try:
            bind_mount.pop_all(target)
            bind_mount.remove_directory(target)
        except OSError as error:
            where = f"on node {self._configuration.node_id}"
            if error.errno == errno.ENOTEMPTY:
                raise UnavailableError(
                    f"{target} {where} has files of its own, which are not the volume's: they were"
                    " written there while nothing was mounted, and no driver removes them. Move"
                    " them away on the node, and the pod ends"
                ) from error
            raise UnavailableError(f"{target} {where}: {error.strerror}") from error
        self._pods.forget(target)
        for record in records:
            if keys and record.key not in keys:
                continue  # another mount of the volume; the target's end does not wait for it
            is_used = self._mounts.references(record.key, MountTable())
            if not is_used and not self._warmups.is_awaited(record.key):
                if self._drains.end(record, ends):
                    self._warmups.forget(record.key)
                else:
                    log.info("%s: the mount goes on for a copy of %s", record.source, target)
        for key in keys.difference(record.key for record in records):  # without a record
            if not self._mounts.references(key, MountTable()):
                self._mounts.end_key(key, ends)

    # --- queries ---

    def metrics_targets(self) -> list[MetricsTarget]:
        """Return this node's mounts, with labels for their metrics and the pods that use them.

        The label is the volume's id; if a volume has several mounts on this node, the end of the
        mount's key is added, so that no two mounts have the same label.
        """
        records, table, pods = self._mounts.records.all(), MountTable(), self._pods.all()
        counts = Counter(record.volume_id for record in records)
        found = []
        for record in records:
            name = record.volume_id
            if counts[name] > 1:
                name = f"{name}/{record.key[-KEY_LENGTH:]}"
            using = map(pods.get, self._mounts.references(record.key, table))
            labels = {(pod.namespace, pod.name) for pod in using if pod is not None}
            found.append(metrics_target(Path(record.root), name, sorted(labels)))
        return found

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

    def _published_path(self, text: str) -> Path:
        """Return a target path; raise VolumeNotFoundError if no volume can be published there."""
        directories = self._configuration.kubelet_directory, self._configuration.mounts_directory
        try:
            return target_of(text, *directories)
        except InvalidArgumentError as error:
            if not text:
                raise
            raise VolumeNotFoundError(str(error)) from error
