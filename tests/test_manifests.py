"""What a cluster installs: valid, consistent with itself, and with the program that it runs.

What no test here can show is how kubelet and the API server take it; see docs/csi.md.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import grpc
import pytest

from csi import caretaker, controller, node, server, stores, volumes
from csi.generated import csi_pb2
from csi.identity import IdentityService
from csi.options import check_attributes
from tests.support.manifests import (
    MANIFESTS,
    OVERLAYS,
    VERSIONS,
    Object,
    check,
    container,
    containers,
    every,
    find,
    flag,
    host_path,
    name_of,
    on_host,
    pod_templates,
    read,
    render,
)

KUSTOMIZATIONS = [MANIFESTS, *OVERLAYS]
WORKLOADS = ("Deployment", "DaemonSet")
# What the API server rejects on its own is not repeated here: names, quantities, ports.
PINNED = re.compile(r"[\w.-]+(:\d+)?/[\w./-]+:v?\d+\.\d+\.\d+")

each_kustomization = pytest.mark.parametrize(
    "directory", KUSTOMIZATIONS, ids=lambda path: path.name
)


@pytest.fixture
def base() -> list[Object]:
    return render(MANIFESTS)


def template(documents: list[Object], name: str) -> Object:
    [found] = (
        document["spec"]["template"]
        for kind in WORKLOADS
        for document in every(documents, kind)
        if name_of(document) == name
    )
    return found


@pytest.fixture
def node_pod(base: list[Object]) -> Object:
    return template(base, "fusefs-csi-node")


@pytest.fixture
def daemons_pod(base: list[Object]) -> Object:
    return template(base, "fusefs-csi-daemons")


@pytest.fixture
def controller_pod(base: list[Object]) -> Object:
    return template(base, "fusefs-csi-controller")


# --- valid ------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
@each_kustomization
def test_every_object_is_valid(directory: Path, version: str) -> None:
    for document in render(directory):
        check(document, version)


def test_tokens_in_secrets_are_valid_where_kubernetes_has_them(tmp_path: Path) -> None:
    documents = render_with(tmp_path, "service-account-tokens", "tokens-in-secrets")
    driver = find(documents, "CSIDriver")
    assert driver["spec"]["serviceAccountTokenInSecrets"] is True
    check(driver, "1.35")


def test_all_components_go_together(tmp_path: Path) -> None:
    names = sorted(path.name for path in (MANIFESTS / "components").iterdir())
    for document in render_with(tmp_path, *names):
        check(document, VERSIONS[-1])


def render_with(directory: Path, *components: str) -> list[Object]:
    """The base with these components, as a cluster's own kustomization would have it."""
    lines = [
        "apiVersion: kustomize.config.k8s.io/v1beta1",
        "kind: Kustomization",
        "resources: [manifests/base]",
        "components:",
        *(f"  - manifests/components/{name}" for name in components),
    ]
    (directory / "manifests").symlink_to(MANIFESTS)
    (directory / "kustomization.yaml").write_text("\n".join(lines))
    return render(directory)


def test_the_kustomization_that_is_shown_does_what_it_says(tmp_path: Path) -> None:
    text = (MANIFESTS / "README.md").read_text()
    [shown] = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    [operation] = re.findall(r"`(- \{op: add.*?\})`", text)
    more = "  - target: {kind: DaemonSet, name: fusefs-csi-node}\n    patch: |-\n      "
    (tmp_path / "kustomization.yaml").write_text(shown + more + operation)
    (tmp_path / "stores.toml").write_text("")
    (tmp_path / "minio-ca.pem").write_text("certificates")
    (tmp_path / "fusefs").symlink_to(MANIFESTS.parent)
    documents = render(tmp_path)
    driver = container(template(documents, "fusefs-csi-node"), "driver")
    assert driver["image"] == "registry.internal/fusefs-csi:0.1.0"
    assert flag(driver, "memory-limit") == "512MiB"
    contents = [each["data"] for each in every(documents, "ConfigMap")]
    assert {"cluster-id": "production-eu"} in contents
    assert {"stores.toml": "", "minio-ca.pem": "certificates"} in contents
    for storage_class in every(documents, "StorageClass"):
        assert storage_class["parameters"]["bucket"] == "my-bucket"
    assert find(documents, "CSIDriver")["spec"]["tokenRequests"]


# --- consistent with itself -------------------------------------------------------


@each_kustomization
def test_selectors_select_the_pods_of_their_workload(directory: Path) -> None:
    documents = render(directory)
    for kind in WORKLOADS:
        for workload in every(documents, kind):
            spec = workload["spec"]
            labels = spec["template"]["metadata"]["labels"]
            assert spec["selector"]["matchLabels"].items() <= labels.items()
    budget = find(documents, "PodDisruptionBudget")
    labels = template(documents, name_of(budget))["metadata"]["labels"]
    assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()


@each_kustomization
def test_volumes_and_their_mounts_match(directory: Path) -> None:
    for pod in pod_templates(render(directory)):
        used = {mount["name"] for each in containers(pod) for mount in each["volumeMounts"]}
        assert used == {volume["name"] for volume in pod["spec"]["volumes"]}


@each_kustomization
def test_probes_ask_ports_that_are_there(directory: Path) -> None:
    for pod in pod_templates(render(directory)):
        for each in containers(pod):
            ports = {port["name"]: port["containerPort"] for port in each.get("ports", [])}
            if "livenessProbe" in each:
                assert each["livenessProbe"]["httpGet"]["port"] in ports
            if "http-endpoint" in str(each.get("args")) and ports:
                assert flag(each, "http-endpoint") == f":{next(iter(ports.values()))}"


@pytest.mark.parametrize("name", ["fusefs-csi-node", "fusefs-csi-controller"])
def test_the_liveness_sidecar_serves_the_drivers_port(base: list[Object], name: str) -> None:
    pod = template(base, name)
    [port] = container(pod, "driver")["ports"]
    sidecar = container(pod, "liveness-probe")
    assert flag(sidecar, "http-endpoint") == f":{port['containerPort']}"


@each_kustomization
def test_accounts_and_roles_that_are_named_exist(directory: Path) -> None:
    documents = render(directory)
    accounts = {name_of(account) for account in every(documents, "ServiceAccount")}
    for pod in pod_templates(documents):
        assert pod["spec"]["serviceAccountName"] in accounts
    for kind in ("RoleBinding", "ClusterRoleBinding"):
        for binding in every(documents, kind):
            role = binding["roleRef"]
            assert find(documents, role["kind"], role["name"])
            for subject in binding["subjects"]:
                assert subject["name"] in accounts
                assert subject["namespace"] == "fusefs-csi"


@each_kustomization
def test_everything_with_a_namespace_is_in_the_drivers_own(directory: Path) -> None:
    for document in render(directory):
        assert document["metadata"].get("namespace", "fusefs-csi") == "fusefs-csi"


def test_images_are_named_in_one_place_and_pinned(base: list[Object]) -> None:
    [kustomization] = read((MANIFESTS / "base/kustomization.yaml").read_text())
    declared = {image["name"]: image for image in kustomization["images"]}
    used = {each["image"] for pod in pod_templates(base) for each in containers(pod)}
    assert used == {f"{image['newName']}:{image['newTag']}" for image in declared.values()}
    assert all(PINNED.fullmatch(image) for image in used)
    for path in MANIFESTS.rglob("*.yaml"):
        for line in path.read_text().splitlines():
            if found := re.match(r"\s*(?:- )?image: (.*)", line):
                assert found[1] in declared, path


# --- what each pod may do ---------------------------------------------------------


@each_kustomization
def test_one_container_is_privileged_and_it_alone_shares_mounts(directory: Path) -> None:
    for pod in pod_templates(render(directory)):
        for each in containers(pod):
            is_node = (pod["spec"]["serviceAccountName"], each["name"]) == (
                "fusefs-csi-node",
                "driver",
            )
            context = each["securityContext"]
            assert context.get("privileged", False) is is_node
            shared = [mount for mount in each["volumeMounts"] if "mountPropagation" in mount]
            assert [mount["mountPropagation"] for mount in shared] == ["Bidirectional"] * is_node


@each_kustomization
def test_all_others_have_no_capability_and_gain_none(directory: Path) -> None:
    for pod in pod_templates(render(directory)):
        assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for each in containers(pod):
            context = each["securityContext"]
            assert context["readOnlyRootFilesystem"]
            if not context.get("privileged"):
                assert context["capabilities"] == {"drop": ["ALL"]}
                assert context["allowPrivilegeEscalation"] is False


@each_kustomization
def test_no_pod_is_in_the_hosts_namespaces(directory: Path) -> None:
    for pod in pod_templates(render(directory)):
        assert not {"hostPID", "hostIPC", "hostNetwork"} & pod["spec"].keys()


def test_the_controller_is_nobody_and_sees_nothing_of_its_host(controller_pod: Object) -> None:
    context = controller_pod["spec"]["securityContext"]
    assert context["runAsNonRoot"]
    assert context["runAsUser"] == context["fsGroup"]
    assert not [volume for volume in controller_pod["spec"]["volumes"] if "hostPath" in volume]


@each_kustomization
def test_what_runs_on_nodes_has_no_token_and_no_role(directory: Path) -> None:
    documents = render(directory)
    on_nodes = {"fusefs-csi-node", "fusefs-csi-daemons"}
    for name in on_nodes:
        assert find(documents, "ServiceAccount", name)["automountServiceAccountToken"] is False
        assert template(documents, name)["spec"]["automountServiceAccountToken"] is False
    for kind in ("RoleBinding", "ClusterRoleBinding"):
        for binding in every(documents, kind):
            assert not on_nodes & {subject["name"] for subject in binding["subjects"]}


def test_roles_allow_what_the_sidecars_ask_and_no_more(base: list[Object]) -> None:
    events = {("", "events"): {"list", "watch", "create", "update", "patch"}}
    assert rules(find(base, "ClusterRole", "fusefs-csi-provisioner")) == events | {
        ("", "persistentvolumes"): {"get", "list", "watch", "create", "patch", "delete"},
        ("", "persistentvolumeclaims"): {"get", "list", "watch", "update"},
        ("storage.k8s.io", "storageclasses"): {"get", "list", "watch"},
    }
    assert rules(find(base, "ClusterRole", "fusefs-csi-resizer")) == events | {
        ("", "persistentvolumes"): {"get", "list", "watch", "patch"},
        ("", "persistentvolumeclaims"): {"get", "list", "watch"},
        ("", "persistentvolumeclaims/status"): {"patch"},
    }
    assert rules(find(base, "Role")) == {
        ("coordination.k8s.io", "leases"): {"get", "list", "watch", "create", "update", "delete"}
    }


def rules(role: Object) -> dict[tuple[str, str], set[str]]:
    return {
        (group, resource): set(rule["verbs"])
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }


@each_kustomization
def test_only_one_secret_is_ever_readable(directory: Path) -> None:
    for kind in ("Role", "ClusterRole"):
        for role in every(render(directory), kind):
            for rule in role["rules"]:
                if "secrets" in rule["resources"]:
                    assert (kind, rule["verbs"]) == ("Role", ["get"])
                    assert rule["resourceNames"] == ["fusefs-csi-s3"]


def test_the_namespace_admits_what_the_pods_need(base: list[Object]) -> None:
    labels = find(base, "Namespace")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "privileged"
    quota = find(base, "ResourceQuota")
    [scope] = quota["spec"]["scopeSelector"]["matchExpressions"]
    used = {pod["spec"]["priorityClassName"] for pod in pod_templates(base)}
    assert used == set(scope["values"])


def test_no_mesh_puts_a_proxy_into_a_pod(base: list[Object]) -> None:
    namespace = find(base, "Namespace")["metadata"]
    assert namespace["labels"]["istio.io/dataplane-mode"] == "none"
    for pod in pod_templates(base):
        assert pod["metadata"]["labels"]["sidecar.istio.io/inject"] == "false"
        assert pod["metadata"]["annotations"]["linkerd.io/inject"] == "disabled"


def test_pods_on_nodes_run_wherever_others_do(node_pod: Object, daemons_pod: Object) -> None:
    for pod in (node_pod, daemons_pod):
        assert pod["spec"]["tolerations"] == [{"operator": "Exists"}]
        assert pod["spec"]["priorityClassName"] == "system-node-critical"


def test_nothing_that_serves_mounts_has_a_memory_limit(
    node_pod: Object, daemons_pod: Object
) -> None:
    for pod, name in ((node_pod, "driver"), (daemons_pod, "daemons")):
        resources = container(pod, name)["resources"]
        assert "limits" not in resources
        assert resources["requests"].keys() == {"cpu", "memory"}


def test_a_mounts_second_holder_is_replaced_before_it_goes(base: list[Object]) -> None:
    spec = find(base, "DaemonSet", "fusefs-csi-daemons")["spec"]
    assert spec["updateStrategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    # The driver has looked round twice meanwhile, and brought it what it is to hold.
    assert spec["minReadySeconds"] >= 2 * caretaker.EVERY_S


# --- consistent with the program --------------------------------------------------


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    from csi import cli

    return cli.make_parser()


@each_kustomization
def test_the_program_understands_its_arguments(
    directory: Path, parser: argparse.ArgumentParser
) -> None:
    commands = []
    for pod in pod_templates(render(directory)):
        for each in containers(pod):
            if "fusefs-csi:" in each["image"]:
                known = {variable["name"] for variable in each.get("env", [])}
                assert set(re.findall(r"\$\((\w+)\)", " ".join(each["args"]))) == known
                commands.append(parser.parse_args(each["args"]).command)
    assert sorted(commands) == ["controller", "daemons", "node"]


def test_the_drivers_name_is_the_same_everywhere(base: list[Object], node_pod: Object) -> None:
    assert name_of(find(base, "CSIDriver")) == server.DRIVER_NAME
    for storage_class in every(base, "StorageClass"):
        assert storage_class["provisioner"] == server.DRIVER_NAME
    socket_directory = host_path(node_pod, "socket-dir")
    assert socket_directory is not None
    assert socket_directory.parts[-3:-1] == ("plugins", server.DRIVER_NAME)


@pytest.mark.parametrize("name", ["fusefs-csi-node", "fusefs-csi-controller"])
def test_sidecars_call_the_socket_that_the_driver_serves(base: list[Object], name: str) -> None:
    pod = template(base, name)
    served = place(pod, container(pod, "driver"), server.socket_path(endpoint(pod)))
    sidecars = [each for each in containers(pod) if each["name"] != "driver"]
    for sidecar in sidecars:
        assert place(pod, sidecar, Path(flag(sidecar, "csi-address"))) == served


def place(pod: Object, where: Object, path: Path) -> tuple[str, Path]:
    """The volume that holds a path, and the path in it."""
    [mount] = (each for each in where["volumeMounts"] if path.is_relative_to(each["mountPath"]))
    return mount["name"], path.relative_to(mount["mountPath"])


def endpoint(pod: Object) -> str:
    return flag(container(pod, "driver"), "endpoint")


def test_kubelet_is_told_the_sockets_path_on_the_host(node_pod: Object) -> None:
    socket = server.socket_path(endpoint(node_pod))
    told = flag(container(node_pod, "node-driver-registrar"), "kubelet-registration-path")
    assert on_host(node_pod, container(node_pod, "driver"), socket) == Path(told)
    assert len(told) < 108  # what the address of a Unix socket holds


def test_target_paths_are_the_hosts_own(node_pod: Object) -> None:
    driver = container(node_pod, "driver")
    for name in ("kubelet-dir", "mounts-dir", "state-dir"):
        path = Path(flag(driver, name))
        assert on_host(node_pod, driver, path) == path


def test_mounts_are_made_where_they_reach_the_host(node_pod: Object) -> None:
    driver = container(node_pod, "driver")
    volume, _ = place(node_pod, driver, Path(flag(driver, "mounts-dir")))
    [mount] = (each for each in driver["volumeMounts"] if each["name"] == volume)
    assert mount["mountPropagation"] == "Bidirectional"


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


def test_the_cache_survives_a_reboot_and_the_state_does_not(node_pod: Object) -> None:
    driver = container(node_pod, "driver")
    cache, state = (
        on_host(node_pod, driver, Path(flag(driver, name))) for name in ("cache-dir", "state-dir")
    )
    assert cache is not None
    assert cache.is_relative_to("/var/lib")
    assert state is not None
    assert state.is_relative_to("/run")


def test_readiness_looks_at_the_file_that_the_program_writes(daemons_pod: Object) -> None:
    daemons = container(daemons_pod, "daemons")
    command = daemons["readinessProbe"]["exec"]["command"]
    assert command == ["test", "-e", flag(daemons, "ready-file")]


def test_the_driver_object_says_what_the_services_can(base: list[Object]) -> None:
    spec = find(base, "CSIDriver")["spec"]
    capabilities = rpc_types(
        controller.ControllerService(stores.read_stores(None), "").ControllerGetCapabilities(
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


def test_a_pod_is_given_the_time_that_the_server_takes_to_end(
    node_pod: Object, controller_pod: Object
) -> None:
    for pod in (node_pod, controller_pod):
        assert pod["spec"]["terminationGracePeriodSeconds"] > server.GRACE_S


# --- classes and stores -----------------------------------------------------------


@each_kustomization
def test_shipped_classes_keep_the_data_and_are_understood(directory: Path, tmp_path: Path) -> None:
    documents = render(directory)
    known = stores.read_stores(stores_file(documents, tmp_path))
    for storage_class in every(documents, "StorageClass"):
        parameters = {
            name: value
            for name, value in storage_class["parameters"].items()
            if not name.startswith("csi.storage.k8s.io/")
        }
        assert parameters.pop("onDelete") == "retain"
        prefix = volumes.fill_in(
            parameters["prefix"],
            {"pvc.namespace": "team", "pvc.name": "data", "pv.name": "pvc-1"},
        )
        location = {
            name: value for name, value in parameters.items() if name in volumes.LOCATION_KEYS
        }
        volumes.location_of({**location, "bucket": "bucket", "prefix": prefix}, known)
        own = {name: value for name, value in parameters.items() if name not in location}
        check_attributes(own, storage_class.get("mountOptions", []), is_inline=False)


def stores_file(documents: list[Object], directory: Path) -> Path:
    [text] = (
        each["data"]["stores.toml"]
        for each in every(documents, "ConfigMap")
        if "stores.toml" in each["data"]
    )
    path = directory / "stores.toml"
    path.write_text(text)
    return path


def test_nobody_can_own_the_bucket_that_has_to_be_set(base: list[Object]) -> None:
    for storage_class in every(base, "StorageClass"):
        assert not volumes.is_bucket(storage_class["parameters"]["bucket"])


def test_prefixes_of_different_classes_never_overlap(base: list[Object]) -> None:
    values = {"pvc.namespace": "same", "pvc.name": "same", "pv.name": "same"}
    one, other = (
        volumes.fill_in(storage_class["parameters"]["prefix"], values)
        for storage_class in every(base, "StorageClass")
    )
    assert not volumes.overlap(one, other)


def test_the_file_of_stores_shows_a_store_that_can_be_read(tmp_path: Path) -> None:
    text = (MANIFESTS / "base/stores.toml").read_text()
    example = text[text.index("# [stores.") :]
    path = tmp_path / "stores.toml"
    certificates = Path(__file__)  # any file that is there
    example = re.sub(r"^# ?", "", example, flags=re.MULTILINE)
    path.write_text(example.replace("/etc/fusefs-csi/minio-ca.pem", str(certificates)))
    assert stores.read_stores(path).named("minio").endpoint_url


# --- components -------------------------------------------------------------------


def test_tokens_are_for_the_audience_that_aws_expects() -> None:
    [request] = find(render(MANIFESTS / "overlays/aws"), "CSIDriver")["spec"]["tokenRequests"]
    assert request["audience"] == stores.read_stores(None).named("aws").audience
    assert request["expirationSeconds"] >= 600


def test_a_store_in_the_cluster_is_known_reachable_and_has_its_keys(tmp_path: Path) -> None:
    documents = render(MANIFESTS / "overlays/in-cluster-store")
    known = stores.read_stores(stores_file(documents, tmp_path))
    role = find(documents, "Role", "fusefs-csi-store-secret")
    for storage_class in every(documents, "StorageClass"):
        parameters = storage_class["parameters"]
        for use in ("provisioner", "controller-expand"):
            secret = parameters[f"csi.storage.k8s.io/{use}-secret-name"]
            assert secret in role["rules"][0]["resourceNames"]
            assert parameters[f"csi.storage.k8s.io/{use}-secret-namespace"] == "fusefs-csi"
        store = known.named(parameters["store"])
    policy = find(documents, "NetworkPolicy", "fusefs-csi-store")["spec"]
    [way] = policy["egress"]
    [peer] = way["to"]
    host, port = urlsplit(store.endpoint_url).hostname, urlsplit(store.endpoint_url).port
    assert [each["port"] for each in way["ports"]] == [port]
    namespace = peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
    assert str(host).split(".")[1] == namespace


def test_inline_volumes_are_a_choice() -> None:
    def modes(directory: Path) -> list[str]:
        return list(find(render(directory), "CSIDriver")["spec"]["volumeLifecycleModes"])

    assert modes(MANIFESTS) == ["Persistent"]
    assert modes(MANIFESTS / "overlays/ephemeral") == ["Persistent", "Ephemeral"]


def test_an_nvme_disk_that_is_not_mounted_is_not_replaced_by_the_systems() -> None:
    pod = template(render(MANIFESTS / "overlays/local-nvme"), "fusefs-csi-node")
    [cache] = (volume for volume in pod["spec"]["volumes"] if volume["name"] == "cache")
    assert cache["hostPath"] == {"path": "/mnt/nvme/fusefs", "type": "Directory"}


def test_link_local_addresses_are_closed_but_for_the_one_that_is_needed() -> None:
    [policy] = every(render(MANIFESTS), "NetworkPolicy")
    blocks = [peer["ipBlock"] for way in policy["spec"]["egress"] for peer in way.get("to", [])]
    assert any("169.254.0.0/16" in block["except"] for block in blocks)
    agent = find(
        render(MANIFESTS / "overlays/aws-pod-identity"), "NetworkPolicy", "fusefs-csi-pod-identity"
    )
    [way] = agent["spec"]["egress"]
    assert way["to"][0]["ipBlock"]["cidr"] == "169.254.170.23/32"
