"""What a cluster installs: valid, consistent with itself, and with no more rights than it needs.

What no test here can show is how kubelet and the API server take it; see docs/csi.md.
"""

import re
from pathlib import Path

import pytest

from csi.node import reconciler
from tests.support.packaging.manifests import (
    MANIFESTS,
    VERSIONS,
    WORKLOADS,
    Object,
    check,
    check_keys,
    container,
    containers,
    each_kustomization,
    every,
    find,
    flag,
    name_of,
    pod_templates,
    read,
    render,
    render_with,
    stores_file,
    template,
)

PINNED = re.compile(r"[\w.-]+(:\d+)?/[\w./-]+:v?\d+\.\d+\.\d+")


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
    first = "service-account-tokens"
    names = {path.name for path in (MANIFESTS / "components").iterdir()} - {first}
    for document in render_with(tmp_path, first, *sorted(names)):
        check(document, VERSIONS[-1])


def test_an_order_that_would_lose_an_audience_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="testing value /spec/tokenRequests failed"):
        render_with(tmp_path, "pod-identity-tokens", "service-account-tokens")


def test_the_kustomization_that_is_shown_does_what_it_says(tmp_path: Path) -> None:
    text = (MANIFESTS / "README.md").read_text()
    [shown] = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    [operation] = re.findall(r"`(- \{op: add.*?\})`", text)
    more = "  - target: {kind: DaemonSet, name: fusefs-csi-node}\n    patch: |-\n      "
    (tmp_path / "kustomization.yaml").write_text(shown + more + operation)
    minio = '[stores.minio]\nendpoint-url = "https://minio.example.com:9000"\n'
    (tmp_path / "stores.toml").write_text(minio)
    (tmp_path / "minio-ca.pem").write_text("certificates")
    (tmp_path / "fusefs").symlink_to(MANIFESTS.parent)
    documents = render(tmp_path)
    driver = container(template(documents, "fusefs-csi-node"), "driver")
    assert driver["image"] == "registry.internal/fusefs-csi:0.2.0"
    assert flag(driver, "memory-limit") == "512MiB"
    contents = [each["data"] for each in every(documents, "ConfigMap")]
    assert {"cluster-id": "production-eu"} in contents
    assert {"stores.toml": minio, "minio-ca.pem": "certificates"} in contents
    for storage_class in every(documents, "StorageClass"):
        assert storage_class["parameters"]["bucket"] == "my-bucket"
    (tmp_path / "read").mkdir()
    check_keys(documents, stores_file(documents, tmp_path / "read"))
    assert "for secret in fusefs-csi/fusefs-csi-s3 default/fusefs-s3" in text


def test_stores_of_ones_own_stay_beside_every_component(tmp_path: Path) -> None:
    (tmp_path / "stores.toml").write_text("# mine\n")
    own = (
        "\nconfigMapGenerator: [{name: fusefs-csi-stores, namespace: fusefs-csi, behavior: merge,"
        " files: [stores.toml]}]"
    )
    names = sorted(path.name for path in (MANIFESTS / "components").iterdir())
    names.remove("pod-identity-tokens")  # after service-account-tokens
    documents = render_with(tmp_path, *names, "pod-identity-tokens", more=own)
    texts = [each["data"].get("stores.toml") for each in every(documents, "ConfigMap")]
    assert "# mine\n" in texts


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
def test_a_container_that_hangs_is_found_within_a_minute_or_so(directory: Path) -> None:
    for pod in pod_templates(render(directory)):
        for each in containers(pod):
            probe = each.get("livenessProbe", {})
            assert probe.get("periodSeconds", 10) == 10
            # Nor is one that is slow to start taken for one that hangs.
            if each["name"] == "driver":
                start = each["startupProbe"]
                assert start["periodSeconds"] * start["failureThreshold"] >= 120
                assert start["httpGet"] == probe["httpGet"]


@each_kustomization
def test_accounts_and_roles_that_are_named_exist(directory: Path) -> None:
    documents = render(directory)
    accounts = {name_of(account) for account in every(documents, "ServiceAccount")}
    for pod in pod_templates(documents):
        assert pod["spec"]["serviceAccountName"] in accounts
    for kind in ("RoleBinding", "ClusterRoleBinding"):
        for binding in every(documents, kind):
            role = binding["roleRef"]
            # OpenShift has a role for the use of each constraint.
            is_theirs = role["name"].startswith("system:openshift:scc:")
            assert is_theirs or find(documents, role["kind"], role["name"])
            for subject in binding["subjects"]:
                assert subject["name"] in accounts
                assert subject["namespace"] == "fusefs-csi"


def test_images_are_named_in_one_place_and_pinned(base: list[Object]) -> None:
    [kustomization] = read((MANIFESTS / "base/kustomization.yaml").read_text())
    declared = {image["name"]: image for image in kustomization["images"]}
    used = {each["image"] for pod in pod_templates(base) for each in containers(pod)}
    assert used == {f"{image['newName']}:{image['newTag']}" for image in declared.values()}
    assert all(PINNED.fullmatch(image) for image in used)
    [cache] = read((MANIFESTS / "seaweedfs/kustomization.yaml").read_text())
    declared |= {image["name"]: image for image in cache["images"]}
    for path in MANIFESTS.rglob("*.yaml"):
        for line in path.read_text().splitlines():
            if found := re.match(r"\s*(?:- )?image: (.*)", line):
                assert found[1] in declared, path


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
def test_of_all_others_one_may_change_its_user_and_none_gains_a_capability(directory: Path) -> None:
    for pod in pod_templates(render(directory)):
        assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for each in containers(pod):
            context = each["securityContext"]
            assert context["readOnlyRootFilesystem"]
            if not context.get("privileged"):
                added = {"add": ["SETUID", "SETGID"]} if each["name"] == "daemons" else {}
                assert context["capabilities"] == {"drop": ["ALL"], **added}
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
            if not binding["roleRef"]["name"].startswith("system:openshift:scc:"):
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


def test_nothing_that_serves_mounts_has_a_memory_limit(
    node_pod: Object, daemons_pod: Object
) -> None:
    for pod, name in ((node_pod, "driver"), (daemons_pod, "daemons")):
        assert "limits" not in container(pod, name)["resources"]


@each_kustomization
def test_a_roll_out_evicts_no_workload(directory: Path) -> None:
    """A second pod of the highest priority would, on a node whose requests are full.

    But on OpenShift, whose Linux is older than 6.9, a mount would end without it.
    """
    documents = render(directory)
    for workload in every(documents, "DaemonSet"):
        is_surging = directory.name == "openshift" and name_of(workload) == "fusefs-csi-daemons"
        most = workload["spec"]["updateStrategy"]["rollingUpdate"].get("maxSurge", 0)
        assert most == int(is_surging)
    classes = {name_of(each): each for each in every(documents, "PriorityClass")}
    for workload in every(documents, "Deployment"):
        spec = workload["spec"]["template"]["spec"]
        assert classes[spec["priorityClassName"]]["preemptionPolicy"] == "Never"


def test_older_kernels_have_the_next_pod_before_the_old_one_goes(tmp_path: Path) -> None:
    daemons = find(render_with(tmp_path, "surge"), "DaemonSet", "fusefs-csi-daemons")["spec"]
    assert daemons["updateStrategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    # The driver has looked round twice meanwhile, and brought it what it is to hold.
    assert daemons["minReadySeconds"] >= 2 * reconciler.EVERY_S
    assert daemons["template"]["spec"]["terminationGracePeriodSeconds"] >= 120
    assert flag(container(daemons["template"], "daemons"), "successor") == "beside"


def test_metrics_are_served_at_the_port_that_is_named_let_in_and_scraped(tmp_path: Path) -> None:
    documents = render_with(tmp_path, "network-policy", "metrics", "pod-monitor")
    monitor = find(documents, "PodMonitor")["spec"]
    [endpoint] = monitor["podMetricsEndpoints"]
    policy = find(documents, "NetworkPolicy", "fusefs-csi-metrics")["spec"]
    assert policy["podSelector"] == monitor["selector"]
    pod = template(documents, "fusefs-csi-node")
    assert monitor["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    driver = container(pod, "driver")
    ports = {port["name"]: port["containerPort"] for port in driver["ports"]}
    assert flag(driver, "metrics") == f":{ports[endpoint['port']]}"
    assert policy["ingress"] == [{"ports": [{"protocol": "TCP", "port": ports[endpoint["port"]]}]}]
