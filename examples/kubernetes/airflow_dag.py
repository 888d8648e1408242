"""An Airflow task whose pod has a claim at /data: what one task writes the next one reads.

The claim is the one of dynamic-claim.yaml, in the namespace where the tasks run.
"""

from __future__ import annotations

from datetime import datetime

from airflow import DAG
from airflow.providers.cncf.kubernetes.operators.pod import KubernetesPodOperator
from kubernetes.client import models as k8s

NAMESPACE = "default"
volume = k8s.V1Volume(
    name="data",
    persistent_volume_claim=k8s.V1PersistentVolumeClaimVolumeSource(claim_name="experiments"),
)
mount = k8s.V1VolumeMount(name="data", mount_path="/data")
# Without the group a task could not write: files belong to it.
user = k8s.V1PodSecurityContext(run_as_user=1000, run_as_group=1000, fs_group=1000)


def task(task_id: str, command: str) -> KubernetesPodOperator:
    return KubernetesPodOperator(
        task_id=task_id,
        name=task_id,
        namespace=NAMESPACE,
        image="debian:12.11-slim",
        cmds=["sh", "-c"],
        arguments=[command],
        volumes=[volume],
        volume_mounts=[mount],
        security_context=user,
        get_logs=True,
    )


with DAG("features", start_date=datetime(2026, 1, 1), schedule=None, catchup=False):
    extract = task("extract", "seq 1000 > /data/features.csv")
    check = task("check", "test $(wc -l < /data/features.csv) -eq 1000")
    extract >> check
