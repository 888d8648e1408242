"""What a cluster installs and the program that it runs: the same flags, paths, names, limits."""

import argparse
import contextlib
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import pytest
import yaml

from csi import main, server
from csi.controller import service
from csi.daemons import supervisor
from csi.errors import FailedPreconditionError
from csi.generated import csi_pb2
from csi.identities.credentials import POD_IDENTITY_AGENT, POD_IDENTITY_AUDIENCE
from csi.identity import IdentityService
from csi.node import config, reconciler
from csi.node import service as node
from csi.volume import stores
from fusefs.launch.registry import RUNTIME_VARIABLE
from tests.support.packaging.manifests import (
    MANIFESTS,
    POLICIES,
    Object,
    check_classes,
    check_keys,
    container,
    containers,
    each_kustomization,
    every,
    find,
    flag,
    host_path,
    lets_out,
    name_of,
    on_host,
    pod_templates,
    read,
    render,
    render_with,
    stores_file,
    template,
)


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    return main.make_parser()


@each_kustomization
def test_the_program_understands_its_arguments(
    directory: Path, parser: argparse.ArgumentParser
) -> None:
    commands = []
    for pod in pod_templates(render(directory)):
        for each in containers(pod):
            if "fusefs-csi:" in each["image"]:
                known = {variable["name"] for variable in each.get("env", [])}
                used = set(re.findall(r"\$\((\w+)\)", " ".join(each["args"])))
                assert used == known - {RUNTIME_VARIABLE}
                commands.append(parser.parse_args(each["args"]).command)
    assert sorted(commands) == ["controller", "daemons", "node"]


def test_the_drivers_name_is_the_same_everywhere(base: list[Object], node_pod: Object) -> None:
    assert name_of(find(base, "CSIDriver")) == server.DRIVER_NAME
    for storage_class in every(base, "StorageClass"):
        assert storage_class["provisioner"] == server.DRIVER_NAME
    socket_directory = host_path(node_pod, "socket-dir")
    assert socket_directory.parts[-3:-1] == ("plugins", server.DRIVER_NAME)


@pytest.mark.parametrize("name", ["fusefs-csi-node", "fusefs-csi-controller"])
def test_sidecars_call_the_socket_that_the_driver_serves(base: list[Object], name: str) -> None:
    pod = template(base, name)
    served = place(pod, container(pod, "driver"), server.socket_path(endpoint(pod)))
    sidecars = [each for each in containers(pod) if each["name"] != "driver"]
    for sidecar in sidecars:
        assert place(pod, sidecar, Path(flag(sidecar, "csi-address"))) == served


def test_target_paths_are_the_hosts_own(node_pod: Object) -> None:
    driver = container(node_pod, "driver")
    for name in ("kubelet-dir", "mounts-dir", "state-dir"):
        path = Path(flag(driver, name))
        assert on_host(node_pod, driver, path) == path


def place(pod: Object, where: Object, path: Path) -> tuple[str, Path]:
    """The volume that holds a path, and the path in it."""
    [mount] = (each for each in where["volumeMounts"] if path.is_relative_to(each["mountPath"]))
    return mount["name"], path.relative_to(mount["mountPath"])


def endpoint(pod: Object) -> str:
    return flag(container(pod, "driver"), "endpoint")


@each_kustomization
def test_no_other_container_has_a_directory_with_mounts_in_it(directory: Path) -> None:
    """A private copy of a mount keeps it alive after everybody has unmounted it."""
    documents = render(directory)
    driver = container(template(documents, "fusefs-csi-node"), "driver")
    kubelet, ours = (Path(flag(driver, name)) for name in ("kubelet-dir", "mounts-dir"))
    for pod in pod_templates(documents):
        for each in containers(pod):
            if each is driver:
                continue
            for mount in each["volumeMounts"]:
                path = host_path(pod, mount["name"])
                for mounts in (ours, kubelet / "pods"):
                    assert path is None or not mounts.is_relative_to(path)
                    assert path is None or not path.is_relative_to(mounts)


def test_both_daemon_sets_meet_in_the_state_directory(
    node_pod: Object, daemons_pod: Object
) -> None:
    found = [
        on_host(pod, container(pod, name), Path(flag(container(pod, name), "state-dir")))
        for pod, name in ((node_pod, "driver"), (daemons_pod, "daemons"))
    ]
    assert found == [Path("/run/fusefs-csi")] * 2


def test_commands_in_the_drivers_container_find_its_mounts(node_pod: Object) -> None:
    driver = container(node_pod, "driver")
    [value] = (each["value"] for each in driver["env"] if each["name"] == RUNTIME_VARIABLE)
    assert Path(value) == Path(flag(driver, "state-dir")) / config.RUNTIME


@each_kustomization
def test_daemons_find_what_the_driver_names(directory: Path) -> None:
    documents = render(directory)
    places = []
    for workload, name in (("fusefs-csi-node", "driver"), ("fusefs-csi-daemons", "daemons")):
        pod = template(documents, workload)
        mounts = {mount["name"]: mount for mount in container(pod, name)["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        places.append([(volumes[each], mounts[each]) for each in ("state", "cache", "stores")])
    assert places[0] == places[1]


def test_readiness_looks_at_the_file_that_the_program_writes(daemons_pod: Object) -> None:
    daemons = container(daemons_pod, "daemons")
    path = flag(daemons, "ready-file").replace("$(POD_NAME)", "$POD_NAME")
    assert daemons["readinessProbe"]["exec"]["command"] == ["sh", "-c", f'test -e "{path}"']
    # Starting a process in the container takes seconds where the node is busy.
    assert daemons["readinessProbe"]["timeoutSeconds"] >= 10


def test_the_driver_object_says_what_the_services_can(base: list[Object]) -> None:
    spec = find(base, "CSIDriver")["spec"]
    capabilities = rpc_types(
        service.ControllerService(stores.read_stores(None), "").ControllerGetCapabilities(
            csi_pb2.ControllerGetCapabilitiesRequest(), no_context()
        )
    )
    kind = csi_pb2.ControllerServiceCapability.RPC
    assert spec["attachRequired"] is (kind.PUBLISH_UNPUBLISH_VOLUME in capabilities)
    assert spec["storageCapacity"] is (kind.GET_CAPACITY in capabilities)
    assert kind.EXPAND_VOLUME in capabilities
    assert kind.MODIFY_VOLUME not in capabilities
    assert spec["podInfoOnMount"]
    assert spec["requiresRepublish"]


def test_expansion_has_its_sidecar_and_its_classes(
    base: list[Object], controller_pod: Object
) -> None:
    answer = IdentityService().GetPluginCapabilities(
        csi_pb2.GetPluginCapabilitiesRequest(), no_context()
    )
    assert any(each.HasField("volume_expansion") for each in answer.capabilities)
    assert flag(container(controller_pod, "csi-resizer"), "csi-address")
    assert all(each["allowVolumeExpansion"] for each in every(base, "StorageClass"))


def test_a_pods_group_reaches_the_driver(base: list[Object]) -> None:
    kind = csi_pb2.NodeServiceCapability.RPC
    answer = node.NodeService.NodeGetCapabilities(
        mock.Mock(), csi_pb2.NodeGetCapabilitiesRequest(), no_context()
    )
    assert kind.VOLUME_MOUNT_GROUP in rpc_types(answer)
    assert kind.STAGE_UNSTAGE_VOLUME not in rpc_types(answer)
    assert find(base, "CSIDriver")["spec"]["fsGroupPolicy"] == "None"


def rpc_types(answer: Any) -> set[int]:
    return {capability.rpc.type for capability in answer.capabilities}


def no_context() -> grpc.ServicerContext:
    return mock.Mock(spec=grpc.ServicerContext)


def test_the_provisioner_calls_no_more_at_once_than_are_answered(controller_pod: Object) -> None:
    sidecar = container(controller_pod, "csi-provisioner")
    # Creating and deleting have as many workers each.
    assert 2 * int(flag(sidecar, "worker-threads")) <= server.MAX_CALLS
    timeout = int(flag(sidecar, "timeout").removesuffix("s"))
    assert timeout < controller_pod["spec"]["terminationGracePeriodSeconds"]
    assert "--extra-create-metadata" in sidecar["args"]


def test_a_pod_is_given_the_time_that_its_end_takes(
    node_pod: Object, daemons_pod: Object, controller_pod: Object
) -> None:
    def grace(pod: Object) -> float:
        return float(pod["spec"]["terminationGracePeriodSeconds"])

    calls = server.GRACE_S + server.CUT_OFF_S
    assert grace(controller_pod) > calls
    assert grace(node_pod) > calls + node.HELD_S
    # Until the driver's pod, which is replaced as well, has its next keepers.
    assert grace(daemons_pod) > supervisor.LINGER_S + reconciler.EVERY_S + calls


@each_kustomization
def test_shipped_classes_keep_the_data_and_are_understood(directory: Path, tmp_path: Path) -> None:
    documents = render(directory)
    check_classes(documents, stores_file(documents, tmp_path))


def test_the_file_of_stores_shows_a_store_that_can_be_read(tmp_path: Path) -> None:
    text = (MANIFESTS / "base/stores.toml").read_text()
    example = text[text.index("# [stores.") :]
    path = tmp_path / "stores.toml"
    certificates = Path(__file__)  # any file that is there
    example = re.sub(r"^# ?", "", example, flags=re.MULTILINE)
    path.write_text(example.replace("/etc/fusefs-csi/minio-ca.pem", str(certificates)))
    assert stores.read_stores(path).choose("minio").endpoint_url


def test_tokens_are_for_the_audience_that_aws_expects() -> None:
    [request] = find(render(MANIFESTS / "overlays/aws"), "CSIDriver")["spec"]["tokenRequests"]
    assert request["audience"] == stores.read_stores(None).choose("aws").audience
    assert request["expirationSeconds"] >= 600


def test_pods_have_tokens_for_the_agent_of_pod_identity() -> None:
    documents = render(MANIFESTS / "overlays/aws-pod-identity")
    requests = find(documents, "CSIDriver")["spec"]["tokenRequests"]
    aws = stores.read_stores(None).choose("aws")
    assert [each["audience"] for each in requests] == [aws.audience, POD_IDENTITY_AUDIENCE]
    [policy] = policies(documents)
    way = policy["spec"]["egress"][-1]
    assert policy["spec"]["podSelector"] == {}  # the daemons exchange the tokens
    assert f"http://{way['to'][0]['ipBlock']['cidr'].removesuffix('/32')}/" in POD_IDENTITY_AGENT


def test_a_store_in_the_cluster_is_known_reachable_and_has_its_keys(tmp_path: Path) -> None:
    documents = render(MANIFESTS / "overlays/in-cluster-store")
    check_keys(documents, stores_file(documents, tmp_path))


@each_kustomization
def test_policies_let_out_what_is_called(directory: Path, tmp_path: Path) -> None:
    documents = render(directory)
    for policy in policies(documents):
        for url in called(documents, tmp_path):
            assert lets_out(policy, url), (policy["kind"], url)


@pytest.mark.parametrize("component", ["network-policy", "network-policy-cilium"])
def test_a_policy_takes_ports_and_knows_a_store_in_the_cluster(
    component: str, tmp_path: Path
) -> None:
    shown = (MANIFESTS / "components" / component / "kustomization.yaml").read_text()
    patch = "\n".join(line[4:] for line in shown.splitlines() if line.startswith("#   "))
    documents = render_with(tmp_path, component, "in-cluster-store", more=patch)
    [policy] = policies(documents)
    store = "http://seaweedfs-s3.seaweedfs.svc.cluster.local:8333"
    for url in [*called(documents, tmp_path), store, "https://minio.example.com:9000"]:
        assert lets_out(policy, url), url
    assert not lets_out(policy, "https://minio.example.com:9001")
    assert not lets_out(policy, "http://minio.elsewhere.svc.cluster.local:8333")


def policies(documents: list[Object]) -> list[Object]:
    return [each for kind in POLICIES for each in every(documents, kind)]


def called(documents: list[Object], directory: Path) -> list[str]:
    """What the pods connect to: AWS, the stores of the configuration, and their STS."""
    found = stores.read_stores(stores_file(documents, directory)).by_name.values()
    urls = [url for store in found for url in (store.endpoint_url, store.sts_url) if url]
    return ["https://s3.amazonaws.com", *urls]


def test_a_cache_that_is_no_mountpoint_is_on_no_disk_of_its_own(
    tmp_path: Path, parser: argparse.ArgumentParser
) -> None:
    with pytest.raises(FailedPreconditionError, match="is no mountpoint"):
        config.check_disk(tmp_path, Path("/mnt/nvme/fusefs"))
    arguments = ["daemons", f"--cache-dir={tmp_path}", "--cache-host-path=/mnt/nvme/fusefs"]
    given = parser.parse_args(arguments)
    with pytest.raises(FailedPreconditionError, match="is no mountpoint"):
        given.run(given)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
@pytest.mark.parametrize("is_mounted", [True, False])
def test_the_driver_starts_with_a_disk_of_the_caches_own_alone(
    tmp_path: Path, is_mounted: bool
) -> None:
    host, cache = tmp_path / "mnt/nvme", tmp_path / "cache"
    for path in (host, cache):
        path.mkdir(parents=True)
    if is_mounted:
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", host], check=True)
    (host / "fusefs").mkdir()
    subprocess.run(["mount", "--bind", host / "fusefs", cache], check=True)
    try:
        # The root of a file system has its own paths; the end is what counts.
        expected = (
            contextlib.nullcontext()
            if is_mounted
            else pytest.raises(FailedPreconditionError, match="no disk is mounted")
        )
        with expected:
            config.check_disk(cache, Path("/mnt/nvme/fusefs"))
    finally:
        subprocess.run(["umount", cache], check=True)
        if is_mounted:
            subprocess.run(["umount", host], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
@pytest.mark.parametrize("name", ["a\vb", "a\u2028b", "a\x1cb", "a b\u3000c"])
def test_what_a_pod_calls_a_directory_does_not_keep_the_driver_from_its_disk(
    tmp_path: Path, name: str
) -> None:
    # As of a subPath, which the driver's container sees below kubelet's directory.
    of_pod, sub_path = tmp_path / name, tmp_path / "volume-subpaths"
    disk, cache = tmp_path / "mnt/a disk", tmp_path / "cache"
    for path in (of_pod, sub_path, disk, cache):
        path.mkdir(parents=True)
    subprocess.run(["mount", "--bind", of_pod, sub_path], check=True)
    subprocess.run(["mount", "--bind", disk, cache], check=True)
    try:
        config.check_disk(cache, Path("/mnt/nvme/fusefs"))
        with pytest.raises(FailedPreconditionError, match="no disk is mounted"):
            config.check_disk(cache, Path("/mnt/a disk"))
    finally:
        subprocess.run(["umount", cache], check=True)
        subprocess.run(["umount", sub_path], check=True)


@each_kustomization
def test_kubelets_directory_is_changed_in_one_step(directory: Path, tmp_path: Path) -> None:
    """By the command of README.md, over what kustomize renders."""
    [command] = re.findall(r"\| (sed .*?) \|", (MANIFESTS / "README.md").read_text())
    done = subprocess.run(
        shlex.split(command),
        input=yaml.safe_dump_all(render(directory)),
        capture_output=True,
        text=True,
        check=True,
    )
    moved = read(done.stdout)
    pod = template(moved, "fusefs-csi-node")
    driver = container(pod, "driver")
    for name in ("kubelet-dir", "mounts-dir"):
        path = Path(flag(driver, name))
        assert path.is_relative_to("/var/lib/k0s/kubelet")
        assert on_host(pod, driver, path) == path
    registered = flag(container(pod, "node-driver-registrar"), "kubelet-registration-path")
    assert on_host(pod, driver, server.socket_path(endpoint(pod))) == Path(registered)
    assert host_path(pod, "registration-dir") == Path("/var/lib/k0s/kubelet/plugins_registry")
    assert "/var/lib/kubelet" not in done.stdout
