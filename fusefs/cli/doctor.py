"""`fusefs doctor`: shows each finding of diagnosis/doctor.py as soon as it is made.

Exit status: 0 without a problem, even if there is advice; 1 with a problem; 2 if the command line
or a setting cannot be read.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path

from fusefs.diagnosis import doctor, findings
from fusefs.launch import registry
from fusefs.settings.mount import Layer, MountSettings, RawValue, build
from fusefs.settings.sources import config_of, from_environment

SCHEME = "s3://"
# Placeholders, because settings need a source and a mountpoint even to check only the machine.
_NO_SOURCE = "s3://none"
_NO_MOUNTPOINT = "/nonexistent"


def run(options: argparse.Namespace, flags: Layer, config: str | None) -> int:
    target: str | None = options.target
    settings = settings_of(target, flags, config)
    found = []
    is_source = target is not None and _is_source(target)
    for finding in doctor.check(
        settings,
        None if target is None or is_source else registry.resolve(Path(target)),
        has_bucket=is_source,
        tries_permissions=options.permissions,
    ):
        found.append(finding)
        if not options.json:
            print(finding.as_text(), flush=True)
    if options.json:
        is_wrong = findings.has_problem(found)
        plain = [asdict(finding) for finding in found]
        print(json.dumps({"is_wrong": is_wrong, "findings": plain}, indent=2))
    else:
        print(findings.summary(found))
    return int(findings.has_problem(found))


def settings_of(target: str | None, flags: Layer, config: str | None) -> MountSettings:
    """Build settings from `target` (if that is a bucket), flags, environment and settings file."""
    layer = {
        "source": RawValue(target if target and _is_source(target) else _NO_SOURCE, "the source"),
        "mountpoint": RawValue(_NO_MOUNTPOINT, "the mountpoint"),
    }
    file = config_of(config, os.environ)
    return build({**layer, **flags}, from_environment(os.environ), file)


def _is_source(target: str) -> bool:
    """True if `target` is a bucket (s3://…), False if it is a mountpoint."""
    return target[: len(SCHEME)].lower() == SCHEME
