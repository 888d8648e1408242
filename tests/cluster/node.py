"""Nodes in namespaces of their own: mounts, processes, network, host name, cgroups.

The first process of a node is `tini`. With it end all processes of the node, its mounts and its
network; it ends with this process, however that ends. Nothing of a node listens or mounts
outside of it. The first node has the control plane and the S3 server; the bridge of the second one
is a cable away from the first one's. kube-router carries out the network policies. There is no
kube-proxy: the Service `kubernetes` is an address
of the first node's `lo`; and no DNS: volumes reach S3 by its address.
"""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import yaml

PAUSE = "tests.example.com/pause:1"
CONTROL = "10.88.0.1"
# In dropbear's format, for the nodes and the suite alike.
SSH_KEY = "ssh.key"
SERVICES = "10.96.0.0/16"
_SERVICE = "10.96.0.1"
_CGROUPS = Path("/sys/fs/cgroup")
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)
# In the node's namespaces. D is its folder, IP its address, BRIDGE the fixed MAC address of its
# bridge: one without has that of a pod, and loses connections when that pod ends.
_SET_UP = """
mount --make-rshared /
mount -t proc proc /proc
hostname "$NAME"
mount -t tmpfs tmpfs /run
mount -t tmpfs -o mode=1777 tmpfs /tmp    # weed has sockets there, by port
mkdir -p /run/lock /run/cni
for d in kubelet containerd fusefs-csi; do
    mkdir -p "$D/$d" "/var/lib/$d" && mount --bind "$D/$d" "/var/lib/$d"
    mount --make-private "/var/lib/$d"
done
for d in pods containers; do
    mkdir -p "$D/log-$d" "/var/log/$d" && mount --bind "$D/log-$d" "/var/log/$d"
done
mkdir -p /etc/cni/net.d && mount --bind "$D/cni" /etc/cni/net.d
echo "nameserver $IP" > /run/resolv.conf && mount --bind /run/resolv.conf /etc/resolv.conf
mount --make-rshared /
ip link set lo up
ip link add cni0 address "$BRIDGE" type bridge
ip addr add "$IP/16" dev cni0
ip link set cni0 up
sysctl -q -w net.ipv4.ip_forward=1 net.bridge.bridge-nf-call-iptables=1
"""
# For Kubernetes' suite: a node's ssh, for which root's home is another here, and the commands that
# it gives by that, or in a node's namespace of mounts.
_SSH = """
sed '/^root:/s,:/root:,:/run/root:,' /etc/passwd > /run/passwd
mount --bind /run/passwd /etc/passwd
mkdir -p -m 700 /run/root/.ssh /run/bin
mount --bind /run/bin /usr/local/sbin
cp "$CRICTL" /run/bin
dropbearkey -y -f "$KEY" | grep ^ecdsa > /run/root/.ssh/authorized_keys
cat > /run/bin/systemctl <<'END'
#!/bin/sh
case $1 in
    stop) pkill -x kubelet; while pgrep -x kubelet > /dev/null; do sleep 0.1; done ;;
    start) pgrep -x kubelet > /dev/null || setsid /run/bin/kubelet > /dev/null 2>&1 < /dev/null & ;;
    restart) $0 stop; $0 start ;;
    show) pgrep -x kubelet > /dev/null && echo active || echo inactive ;;
    status) echo "Main PID: $(pgrep -x kubelet)" ;;
esac
END
chmod +x /run/bin/systemctl
"""
_CABLE = """
ip link add to-{name} type veth peer name cable netns {pid}
ip link set to-{name} master cni0
ip link set to-{name} up
"""
_ROUTE = f"ip route add default via {CONTROL}"
_CONTAINERD = """
version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
[grpc]
  address = "/run/containerd/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "%s"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "/etc/cni/net.d"
"""


def _end_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Node:
    """One node, from `start` to `stop`. `number` counts from 1, which has the control plane."""

    def __init__(
        self, number: int, directory: Path, logs: Path, programs: Path, tools: Path
    ) -> None:
        self.number = number
        self.name = f"node{number}"
        self.address = CONTROL if number == 1 else f"10.88.255.{250 - number}"
        self.directory = directory / self.name
        self._pki = directory / "pki"
        self._logs = logs
        self._programs = programs
        self._tools = tools
        self._first: subprocess.Popen[bytes] | None = None
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        # Two kubelets below one root would remove each other's pods.
        self._cgroup = f"fusefs-{os.getpid()}-{self.name}"

    @property
    def pid(self) -> int:
        """The node's first process, as the machine sees it."""
        assert self._first is not None
        children = Path(f"/proc/{self._first.pid}/task/{self._first.pid}/children")
        return int(children.read_text().split()[0])

    def start(self, first: Node | None = None) -> None:
        """Make the namespaces and what is on the node before any program runs."""
        (self.directory / "cni").mkdir(parents=True, exist_ok=True)
        self._write_network()
        for controller in self._controllers():
            (controller / self._cgroup).mkdir(exist_ok=True)
            if (controller / "cpuset.cpus").exists() and controller != _CGROUPS:
                for file in ("cpuset.cpus", "cpuset.mems"):
                    value = (controller / file).read_text()
                    (controller / self._cgroup / file).write_text(value)
        spaces = ("--mount", "--pid", "--net", "--uts", "--ipc", "--fork", "--kill-child=SIGKILL")
        # What the machine unmounts is unmounted here, too; what is mounted here stays here.
        self._first = subprocess.Popen(
            ["unshare", *spaces, "--propagation=slave", "tini", "--", "sleep", "infinity"],
            preexec_fn=_end_with_parent,
            start_new_session=True,
        )
        while not self._has_child():
            time.sleep(0.05)
        self._shell(_SET_UP + _SSH)
        key = ("-r", str(self._pki / SSH_KEY))
        given = ("-c", 'PATH=/run/bin:$PATH; eval "$SSH_ORIGINAL_COMMAND"')
        self.spawn("ssh", "dropbear", "-F", "-E", "-s", *key, *given, "-P", "/run/ssh.pid")
        if first is not None:
            # The network alone is the first node's: it does not see this process's number.
            command = ["nsenter", f"--target={first.pid}", "--net", "sh", "-euc"]
            subprocess.run([*command, _CABLE.format(name=self.name, pid=self.pid)], check=True)
            self._shell(f"ip link set cable master cni0 && ip link set cable up\n{_ROUTE}")
        else:
            self._shell(f"ip addr add {_SERVICE}/32 dev lo && ip route add default dev cni0")

    def _has_child(self) -> bool:
        try:
            return Path(f"/proc/{self.pid}/exe").resolve().name == "tini"
        except IndexError:
            return False

    def _write_network(self) -> None:
        """The plugin's configuration. Each node has a half of the addresses."""
        half = {"rangeEnd": "10.88.127.254"} if self.number == 1 else {"rangeStart": "10.88.128.1"}
        bridge = {
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": self.number == 1,
            "hairpinMode": True,
            "ipam": {
                "type": "host-local",
                "dataDir": "/run/cni",
                "ranges": [[{"subnet": "10.88.0.0/16", "gateway": CONTROL, **half}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        }
        network = {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge]}
        (self.directory / "cni/10-pods.conflist").write_text(json.dumps(network))

    def _controllers(self) -> list[Path]:
        """The roots of cgroups: one, or with the first version one of each controller."""
        if (_CGROUPS / "cgroup.controllers").exists():
            return [_CGROUPS]
        return [path for path in _CGROUPS.iterdir() if path.is_dir() and not path.is_symlink()]

    # --- programs -----------------------------------------------------------------

    def command(self, *arguments: str) -> list[str]:
        """What runs a command on the node."""
        return ["nsenter", f"--target={self.pid}", "--all", f"--wd={os.getcwd()}", *arguments]

    def shell(self, script: str, **variables: str) -> None:
        command = self.command("sh", "-euc", script)
        subprocess.run(command, env={**os.environ, **variables}, check=True)

    def output(self, script: str) -> str:
        """What a shell script prints on the node, whether it fails or not."""
        command = self.command("sh", "-c", script)
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    def _shell(self, script: str) -> None:
        bridge = f"02:00:0a:58:00:{self.number:02x}"
        names = {"NAME": self.name, "IP": self.address, "BRIDGE": bridge}
        paths = {"CRICTL": self._tools / "crictl", "D": self.directory, "KEY": self._pki / SSH_KEY}
        self.shell(script, **names, **{name: str(path) for name, path in paths.items()})

    def spawn(self, name: str, *arguments: str, **variables: str) -> None:
        """Have a program run on the node, with its output in the logs' folder."""
        with (self._logs / f"{self.name}-{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                self.command(*arguments),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **variables},
                start_new_session=True,
            )

    def start_containers(self, archive: Path | None) -> None:
        """Start containerd, and give it the images; None for those that it has."""
        config = self.directory / "containerd.toml"
        config.write_text(_CONTAINERD % PAUSE)
        self.spawn("containerd", "containerd", f"--config={config}")
        self.wait_for("ctr", "version")
        if archive is not None:
            command = self.command("ctr", "-n", "k8s.io", "images", "import", str(archive))
            with (self._logs / f"{self.name}-import.log").open("ab") as log:
                subprocess.run(command, stdout=log, stderr=log, check=True)

    def start_kubelet(self) -> None:
        certificates = self._pki / f"{self.name}-serving"
        config = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(self._pki / "ca.crt")},
            },
            "authorization": {"mode": "Webhook"},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self._cgroup}",
            "failCgroupV1": False,
            "failSwapOn": False,
            "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
            "resolvConf": "/etc/resolv.conf",
            "clusterDNS": [CONTROL],  # nothing answers there
            "maxPods": 250,
            "serializeImagePulls": False,
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
            # The disk is the machine's, and how full that is nobody here decides.
            "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%"},
        }
        path = self.directory / "kubelet.yaml"
        path.write_text(yaml.safe_dump(config))
        command = [
            str(self._programs / "kubelet"),
            f"--config={path}",
            f"--kubeconfig={self._pki / self.name}.conf",
            f"--hostname-override={self.name}",
            f"--node-ip={self.address}",
            f"--tls-cert-file={certificates}.crt",
            f"--tls-private-key-file={certificates}.key",
        ]
        log = self._logs / f"{self.name}-kubelet.log"
        script = f"#!/bin/sh\nexec {shlex.join(command)} >> {shlex.quote(str(log))} 2>&1\n"
        write = 'printf %s "$SCRIPT" > /run/bin/kubelet; chmod +x /run/bin/kubelet'
        self.shell(f"{write}; /run/bin/systemctl start", SCRIPT=script)

    def start_policies(self) -> None:
        """Start what carries out network policies."""
        self.spawn(
            "policies",
            str(self._tools / "kube-router"),
            "--run-firewall=true",
            "--run-router=false",
            "--run-service-proxy=false",
            f"--kubeconfig={self._pki / 'admin.conf'}",
            f"--hostname-override={self.name}",
            f"--service-cluster-ip-range={SERVICES}",
        )

    def wait_for(self, *arguments: str, limit_s: float = 120) -> None:
        """Wait until a command succeeds on the node.

        Raises:
            TimeoutError: it did not in that time.
        """
        deadline = time.monotonic() + limit_s
        quiet = subprocess.DEVNULL
        while subprocess.run(self.command(*arguments), stdout=quiet, stderr=quiet).returncode:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name}: {' '.join(arguments)}: not in {limit_s:.0f} s")
            time.sleep(0.5)

    # --- its end ------------------------------------------------------------------

    def stop(self) -> None:
        """End everything on the node, as a power cut would. Its folder stays."""
        if self._first is not None:
            self._first.kill()
            self._first.wait()
        for process in self._running.values():
            process.wait()
        self._running.clear()
        for controller in self._controllers():
            for directory, _, _ in os.walk(controller / self._cgroup, topdown=False):
                _remove_cgroup(Path(directory))


def _remove_cgroup(directory: Path) -> None:
    """Remove a cgroup whose last process has been killed, and may not have been collected yet."""
    for _ in range(100):
        try:
            directory.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.1)
        else:
            return
    print(f"{directory}: is still in use", file=sys.stderr)
