"""The control plane of the first node, and its certificates."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

from tests.cluster.node import CONTROL, SERVICES, SSH_KEY, Node
from tests.support.csi.oidc import iam_config

STORE = f"http://{CONTROL}:8333"
BUCKETS = ("volumes", "inline")
CONTROLLER_KEYS = ("controller", "controller-secret")
POD_KEYS = ("pods", "pods-secret")
NEXT_KEYS = ("pods-next", "pods-next-secret")
# The tokens of this account let it be the role of tests.support.csi.oidc.
ACCOUNT = "scenario-tokens:trainer"
AUDIENCE = "store.tests"
_ISSUER = "https://kubernetes.default.svc.cluster.local"
_PUBLIC_KEYS = "http://127.0.0.1:8334/keys"
_NEW_KEY = "-nodes -newkey ec -pkeyopt ec_paramgen_curve:prime256v1"


def make_certificates(pki: Path, nodes: list[Node]) -> None:
    """Make the authority, and certificates with kubeconfigs for all parts of the cluster."""
    pki.mkdir(parents=True)
    _openssl(pki, f"req -x509 {_NEW_KEY} -keyout ca.key -out ca.crt -days 30", "ca")
    _openssl(pki, "genrsa -out sa.key 2048")
    _openssl(pki, "rsa -in sa.key -pubout -out sa.pub")
    key = ("dropbearkey", "-t", "ecdsa", "-f", SSH_KEY)
    subprocess.run(key, cwd=pki, check=True, capture_output=True)
    convert = ("dropbearconvert", "dropbear", "openssh", SSH_KEY, f"{SSH_KEY}.pem")
    subprocess.run(convert, cwd=pki, check=True, capture_output=True)
    names = "DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc"
    _certificate(pki, "apiserver", "apiserver", f"IP:10.96.0.1,IP:{CONTROL},IP:127.0.0.1,{names}")
    _certificate(pki, "to-kubelets", "apiserver/O=system:masters")
    _certificate(pki, "front-proxy", "front-proxy")
    subjects = {
        "admin": "admin/O=system:masters",
        "controllers": "system:kube-controller-manager",
        "scheduler": "system:kube-scheduler",
    }
    for node in nodes:
        subjects[node.name] = f"system:node:{node.name}/O=system:nodes"
        addresses = f"IP:{node.address},DNS:{node.name}"
        _certificate(pki, f"{node.name}-serving", node.name, addresses)
    for name, subject in subjects.items():
        _certificate(pki, name, subject)
        (pki / f"{name}.conf").write_text(json.dumps(_kubeconfig(pki, name)))


def _openssl(pki: Path, arguments: str, subject: str = "") -> None:
    named = ["-subj", f"/CN={subject}"] if subject else []
    command = ["openssl", *arguments.split(), *named]
    subprocess.run(command, cwd=pki, check=True, capture_output=True)


def _certificate(pki: Path, name: str, subject: str, addresses: str = "") -> None:
    extensions = "extendedKeyUsage=serverAuth,clientAuth\n"
    if addresses:
        extensions += f"subjectAltName={addresses}\n"
    (pki / f"{name}.ext").write_text(extensions)
    _openssl(pki, f"req {_NEW_KEY} -keyout {name}.key -out {name}.csr", subject)
    signed = f"x509 -req -in {name}.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 30"
    _openssl(pki, f"{signed} -out {name}.crt -extfile {name}.ext")


def _kubeconfig(pki: Path, name: str) -> dict[str, object]:
    server = {"server": f"https://{CONTROL}:443", "certificate-authority": f"{pki}/ca.crt"}
    user = {"client-certificate": f"{pki}/{name}.crt", "client-key": f"{pki}/{name}.key"}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "tests", "cluster": server}],
        "users": [{"name": name, "user": user}],
        "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": name}}],
        "current-context": "tests",
    }


def start(node: Node, pki: Path, programs: Path) -> None:
    """Start etcd, the API server, the controllers and the scheduler; returns when they answer."""
    etcd = "http://127.0.0.1:2379"
    node.spawn(
        "etcd",
        "etcd",
        "--data-dir=/run/etcd",
        f"--listen-client-urls={etcd}",
        f"--advertise-client-urls={etcd}",
        "--listen-peer-urls=http://127.0.0.1:2380",
    )
    node.spawn("apiserver", str(programs / "kube-apiserver"), *_api_server(pki, etcd))
    kubectl = [str(programs / "kubectl"), f"--kubeconfig={pki / 'admin.conf'}"]
    node.wait_for(*kubectl, "get", "--raw=/readyz", limit_s=300)
    keys = pki / "public/keys"
    keys.parent.mkdir()
    node.shell(f"{shlex.join(kubectl)} get --raw=/openid/v1/jwks > {keys}")
    served = ["-m", "http.server", "--bind=127.0.0.1", f"--directory={keys.parent}", "8334"]
    node.spawn("public-keys", sys.executable, *served)
    for name, program, more in (
        (
            "controllers",
            "kube-controller-manager",
            [
                f"--service-account-private-key-file={pki}/sa.key",
                f"--root-ca-file={pki}/ca.crt",
                f"--cluster-signing-cert-file={pki}/ca.crt",
                f"--cluster-signing-key-file={pki}/ca.key",
                "--use-service-account-credentials=true",
                # A node that disappears is given up soon.
                "--node-monitor-grace-period=20s",
            ],
        ),
        ("scheduler", "kube-scheduler", []),
    ):
        config = f"{pki / name}.conf"
        options = ("kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig")
        files = [f"--{option}={config}" for option in options]
        common = ["--leader-elect=false", "--bind-address=127.0.0.1"]
        node.spawn(name, str(programs / program), *files, *common, *more)


def _api_server(pki: Path, etcd: str) -> list[str]:
    return [
        f"--etcd-servers={etcd}",
        "--secure-port=443",
        "--bind-address=0.0.0.0",
        f"--advertise-address={CONTROL}",
        f"--service-cluster-ip-range={SERVICES}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--kubelet-preferred-address-types=InternalIP",
        "--allow-privileged=true",
        f"--client-ca-file={pki}/ca.crt",
        f"--tls-cert-file={pki}/apiserver.crt",
        f"--tls-private-key-file={pki}/apiserver.key",
        f"--service-account-issuer={_ISSUER}",
        f"--service-account-key-file={pki}/sa.pub",
        f"--service-account-signing-key-file={pki}/sa.key",
        f"--kubelet-client-certificate={pki}/to-kubelets.crt",
        f"--kubelet-client-key={pki}/to-kubelets.key",
        f"--requestheader-client-ca-file={pki}/ca.crt",
        "--requestheader-allowed-names=front-proxy",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--proxy-client-cert-file={pki}/front-proxy.crt",
        f"--proxy-client-key-file={pki}/front-proxy.key",
    ]


def start_store(node: Node, directory: Path) -> None:
    """Start SeaweedFS on the node, with its buckets; of `inline` anybody may read and write."""
    directory.mkdir(parents=True, exist_ok=True)
    verbs = ("Read", "Write", "List", "Tagging")
    volumes, inline = ([f"{verb}:{bucket}" for verb in verbs] for bucket in BUCKETS)
    identities = [
        _identity("controller", ["Admin", *verbs], CONTROLLER_KEYS),
        _identity("pods", volumes, POD_KEYS, NEXT_KEYS),
        {"name": "anonymous", "actions": inline},
    ]
    config = directory / "identities.json"
    config.write_text(json.dumps({"identities": identities}))
    roles = directory / "roles.json"
    # So soon that each of a daemon's requests needs newer keys.
    iam = iam_config(_ISSUER, _PUBLIC_KEYS, AUDIENCE, ACCOUNT, duration="5m")
    roles.write_text(json.dumps(iam))
    weed = str(Path(sys.prefix) / "bin/weed")
    node.spawn(
        "weed",
        weed,
        "-logdir=/run",
        "server",
        f"-dir={directory}",
        "-ip=127.0.0.1",
        "-ip.bind=0.0.0.0",
        "-volume.max=200",
        "-master.volumeSizeLimitMB=1024",
        "-volume.minFreeSpace=0",
        "-master.telemetry=false",
        "-s3",
        "-s3.port=8333",
        f"-s3.config={config}",
        f"-s3.iam.config={roles}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        HOME="/run",
        WEED_MASTER_VOLUME_GROWTH_COPY_1="1",
    )
    for bucket in BUCKETS:
        make = f"echo s3.bucket.create -name {bucket} | {weed} shell -master=127.0.0.1:9333"
        seen = f"{weed} shell -master=127.0.0.1:9333 | grep -qw {bucket}"
        node.wait_for("sh", "-c", f"{make}; echo s3.bucket.list | {seen}")


def _identity(name: str, actions: list[str], *keys: tuple[str, str]) -> dict[str, object]:
    credentials = [{"accessKey": key, "secretKey": secret} for key, secret in keys]
    return {"name": name, "credentials": credentials, "actions": actions}
