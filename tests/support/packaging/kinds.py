"""The kinds of other operators that the examples use: which fields there are, and of which type.

Written from the operators' Go types, as they were stored in 2026: Kubeflow's training operator
(kubeflow.org/v1), its MPI operator (kubeflow.org/v2beta1), KubeRay (ray.io/v1) and the Prometheus
operator (monitoring.coreos.com/v1). Only fields
that a user sets, and fewer than newer versions have: a field that is not here is an error. Pod
templates are left open, for Kubernetes' own schema checks them.
"""

from __future__ import annotations

from typing import Any

import jsonschema

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_NUMBER: Schema = {"type": "integer"}
_SWITCH: Schema = {"type": "boolean"}
_TEXTS: Schema = {"type": "object", "additionalProperties": _TEXT}
_TEMPLATE: Schema = {"type": "object", "required": ["spec"]}


def _object(fields: dict[str, Schema], required: tuple[str, ...] = ()) -> Schema:
    return {
        "type": "object",
        "properties": fields,
        "required": list(required),
        "additionalProperties": False,
    }


def _one_of(*values: str) -> Schema:
    return {"enum": list(values)}


def _kind(spec: Schema) -> Schema:
    metadata: Schema = {"type": "object", "required": ["name"]}
    fields = {"apiVersion": _TEXT, "kind": _TEXT, "metadata": metadata, "spec": spec}
    return _object(fields, tuple(fields))


_RUN_POLICY = _object(
    {
        "cleanPodPolicy": _one_of("All", "Running", "None"),
        "ttlSecondsAfterFinished": _NUMBER,
        "activeDeadlineSeconds": _NUMBER,
        "backoffLimit": _NUMBER,
        "schedulingPolicy": {"type": "object"},
    }
)
_REPLICAS = _object(
    {
        "replicas": _NUMBER,
        "template": _TEMPLATE,
        "restartPolicy": _one_of("Always", "OnFailure", "Never", "ExitCode"),
    }
)
_HEAD = {
    "serviceType": _TEXT,
    "headService": {"type": "object"},
    "enableIngress": _SWITCH,
    "rayStartParams": _TEXTS,
    "template": _TEMPLATE,
}
_WORKERS = {
    "groupName": _TEXT,
    "replicas": _NUMBER,
    "minReplicas": _NUMBER,
    "maxReplicas": _NUMBER,
    "numOfHosts": _NUMBER,
    "rayStartParams": _TEXTS,
    "template": _TEMPLATE,
}

_SELECTOR = {"type": "object", "minProperties": 1}
_RELABELING = _object(
    {
        "sourceLabels": {"type": "array", "items": _TEXT},
        "targetLabel": _TEXT,
        "regex": _TEXT,
        "replacement": _TEXT,
        "action": _TEXT,
    }
)
_ENDPOINT = _object(
    {
        "port": _TEXT,
        "path": _TEXT,
        "interval": _TEXT,
        "honorLabels": _SWITCH,
        "relabelings": {"type": "array", "items": _RELABELING},
    }
)
_RULE = _object(
    {
        "record": _TEXT,
        "alert": _TEXT,
        "expr": _TEXT,
        "for": _TEXT,
        "labels": _TEXTS,
        "annotations": _TEXTS,
    },
    ("expr",),
)
_GROUP = _object(
    {"name": _TEXT, "interval": _TEXT, "rules": {"type": "array", "items": _RULE}},
    ("name", "rules"),
)

KINDS: dict[tuple[str, str], Schema] = {
    ("monitoring.coreos.com/v1", "PodMonitor"): _kind(
        _object(
            {
                "selector": _SELECTOR,
                "namespaceSelector": {"type": "object"},
                "podMetricsEndpoints": {"type": "array", "items": _ENDPOINT},
            },
            ("selector", "podMetricsEndpoints"),
        )
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): _kind(
        _object({"groups": {"type": "array", "items": _GROUP}}, ("groups",))
    ),
    ("kubeflow.org/v1", "PyTorchJob"): _kind(
        _object(
            {
                "runPolicy": _RUN_POLICY,
                "elasticPolicy": {"type": "object"},
                "pytorchReplicaSpecs": _object({"Master": _REPLICAS, "Worker": _REPLICAS}),
                "nprocPerNode": _TEXT,
            },
            ("pytorchReplicaSpecs",),
        )
    ),
    ("kubeflow.org/v1", "TFJob"): _kind(
        _object(
            {
                "runPolicy": _RUN_POLICY,
                "successPolicy": _one_of("", "AllWorkers"),
                "enableDynamicWorker": _SWITCH,
                "tfReplicaSpecs": _object(
                    dict.fromkeys(("Chief", "Worker", "PS", "Evaluator"), _REPLICAS)
                ),
            },
            ("tfReplicaSpecs",),
        )
    ),
    ("kubeflow.org/v2beta1", "MPIJob"): _kind(
        _object(
            {
                "slotsPerWorker": _NUMBER,
                "runPolicy": _RUN_POLICY,
                "mpiReplicaSpecs": _object({"Launcher": _REPLICAS, "Worker": _REPLICAS}),
                "sshAuthMountPath": _TEXT,
                "mpiImplementation": _one_of("OpenMPI", "Intel", "MPICH"),
            },
            ("mpiReplicaSpecs",),
        )
    ),
    ("ray.io/v1", "RayCluster"): _kind(
        _object(
            {
                "headGroupSpec": _object(_HEAD, ("rayStartParams", "template")),
                "workerGroupSpecs": {
                    "type": "array",
                    "items": _object(
                        _WORKERS,
                        ("groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"),
                    ),
                },
                "rayVersion": _TEXT,
                "enableInTreeAutoscaling": _SWITCH,
            },
            ("headGroupSpec",),
        )
    ),
}


def check_kind(document: Schema) -> bool:
    """Whether the kind is one of these; raises jsonschema.ValidationError if it is wrong."""
    schema = KINDS.get((document["apiVersion"], document["kind"]))
    if schema is not None:
        jsonschema.validate(document, schema)
    return schema is not None
