"""What a container runtime gets for one of our containers: its manifest, as an OCI bundle."""

import shutil
from pathlib import Path
from typing import Any

from tests.support.packaging.manifests import Object

RUNC = shutil.which("runc")
PATH = "PATH=/opt/fusefs/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# By their numbers.
_CAPABILITIES = """
    CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE
    NET_BIND_SERVICE NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO
    SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME
    SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP
    """
_PROPAGATION = {None: "rprivate", "HostToContainer": "rslave", "Bidirectional": "rshared"}


def runc_config(
    each: Object, command: list[str], root: Path, sources: dict[str, Path]
) -> dict[str, Any]:
    """The config.json of a container. `sources` are its volumes' directories, by name."""
    context = each["securityContext"]
    is_privileged = bool(context.get("privileged"))
    added = context.get("capabilities", {}).get("add", [])
    rights = [f"CAP_{name}" for name in (_own_capabilities() if is_privileged else added)]
    volumes = [
        {
            "destination": mount["mountPath"],
            "type": "bind",
            "source": str(sources[mount["name"]]),
            "options": [
                "rbind",
                _PROPAGATION[mount.get("mountPropagation")],
                "ro" if mount.get("readOnly") else "rw",
            ],
        }
        for mount in each["volumeMounts"]
    ]
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": context["runAsUser"], "gid": context["runAsGroup"]},
            "args": command,
            "cwd": "/",
            "env": [PATH],
            "noNewPrivileges": context.get("allowPrivilegeEscalation") is False,
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), rights),
        },
        "root": {"path": str(root), "readonly": bool(context["readOnlyRootFilesystem"])},
        "mounts": [*_system_mounts(is_privileged=is_privileged), *volumes],
        "linux": {
            # As containerd does for a volume that is shared.
            "rootfsPropagation": "rshared" if is_privileged else "rslave",
            "namespaces": [{"type": kind} for kind in ("pid", "mount", "ipc", "uts")],
            "resources": {"devices": [{"allow": True, "access": "rwm"}] if is_privileged else []},
        },
    }


def _system_mounts(*, is_privileged: bool) -> list[dict[str, Any]]:
    """The host's devices for who is privileged; for others a few that are harmless."""
    proc = {"destination": "/proc", "type": "proc", "source": "proc"}
    if is_privileged:
        return [
            proc,
            *(
                {
                    "destination": path,
                    "type": "bind",
                    "source": path,
                    "options": ["rbind", "rprivate"],
                }
                for path in ("/dev", "/sys")
            ),
        ]
    options = ["nosuid", "mode=755"]
    return [proc, {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": options}]


def _own_capabilities() -> list[str]:
    """What there is to give: this may be a container itself."""
    status = Path("/proc/self/status").read_text()
    [bounding] = (line.split()[1] for line in status.splitlines() if line.startswith("CapBnd:"))
    bits = int(bounding, 16)
    return [name for number, name in enumerate(_CAPABILITIES.split()) if bits >> number & 1]
