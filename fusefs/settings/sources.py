"""Settings from the environment and from a TOML file, each as a `Layer` of texts.

mount.py declares the settings and reads their texts.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

from fusefs.settings.arguments import did_you_mean
from fusefs.settings.mount import SETTINGS, Layer, RawValue, SettingsError
from fusefs.settings.types import SWITCH, Setting, plain_number

# Names the TOML file where no option does.
CONFIG_VARIABLE = "FUSEFS_CONFIG"


def from_environment(environment: Mapping[str, str]) -> Layer:
    """The settings among the environment's variables; an empty variable counts as unset."""
    return {
        setting.name: RawValue(environment[setting.variable], setting.variable)
        for setting in SETTINGS
        if environment.get(setting.variable)
    }


def from_config(path: Path) -> Layer:
    """The settings of a TOML file.

    Raises:
        SettingsError: the file cannot be read, is not TOML or has an unknown key.
    """
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # also of an integer with thousands of digits
        raise SettingsError(f"{path}: is not TOML: {error}") from error
    by_key = {setting.key: setting for setting in SETTINGS}
    layer = {}
    for key, value in content.items():
        if key not in by_key:
            raise SettingsError(f"{path}: {key}: {_unknown(key, list(by_key))}")
        origin = f"{path}: {key}"
        layer[by_key[key].name] = RawValue(_toml_text(by_key[key], value, origin), origin)
    return layer


def _unknown(key: str, known: list[str]) -> str:
    hint = did_you_mean(key.replace("_", "-"), known) or "; fusefs mount --help lists them all"
    return f"there is no such setting{hint}"


def _toml_text(setting: Setting, value: object, origin: str) -> str:
    match value:
        case str():
            return value
        case bool() if setting.is_switch:
            return SWITCH.show(value)
        case int() | float() if setting.type.takes_numbers and not isinstance(value, bool):
            return plain_number(value)
    wanted = "true or false" if setting.is_switch else "text in quotes"
    raise SettingsError(f"{origin}: {value!r} has the wrong type; write {wanted}")
