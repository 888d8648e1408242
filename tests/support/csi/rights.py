"""Who may read what on the tests' S3 server, and a node's reboot."""

import json
import shutil
import signal

from fusefs.linux import libc
from tests.support.csi.node import Node
from tests.support.servers.s3_server import S3Server
from tests.support.waiting import until


def allow(s3: S3Server, name: str, bucket: str, prefix: str) -> dict[str, str]:
    """A Secret whose keys may read one prefix's objects."""
    path = s3.data.parent / "identities.json"
    record = json.loads(path.read_text())
    keys = {"accessKey": f"KEY{name}", "secretKey": f"secret-{name}"}
    actions = [f"{verb}:{bucket}/{prefix}*" for verb in ("Read", "List", "Write")]
    record["identities"] = [one for one in record["identities"] if one["name"] != name]
    record["identities"].append({"name": name, "credentials": [keys], "actions": actions})
    path.write_text(json.dumps(record))
    s3._process.send_signal(signal.SIGHUP)
    secret = {"accessKeyId": keys["accessKey"], "secretAccessKey": keys["secretKey"]}
    until(lambda: may_read(s3, secret, bucket, prefix), "the server knows the keys")
    return secret


def may_read(s3: S3Server, secret: dict[str, str], bucket: str, prefix: str) -> bool:
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=s3.endpoint_url,
        region_name="us-east-1",
        aws_access_key_id=secret["accessKeyId"],
        aws_secret_access_key=secret["secretAccessKey"],
    )
    try:
        client.get_object(Bucket=bucket, Key=f"{prefix}hello")
    except client.exceptions.ClientError:
        return False
    return True


def retire(s3: S3Server, name: str) -> None:
    """Have the server know somebody's keys no more."""
    path = s3.data.parent / "identities.json"
    record = json.loads(path.read_text())
    for one in record["identities"]:
        if one["name"] == name:
            one["credentials"] = []  # whoever is missing altogether, the server keeps as he was
    path.write_text(json.dumps(record))
    s3._process.send_signal(signal.SIGHUP)


def reboot(node: Node) -> None:
    """Everything ends, what is mounted is gone, and so is /run; the disk stays."""
    node.kill()
    node.kill_all()
    for mount in reversed(node.mounted()):
        libc.umount(str(mount.mountpoint), libc.UMOUNT_NOFOLLOW | libc.MNT_DETACH)
    for entry in node.state.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
