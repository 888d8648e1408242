"""Settings from the environment and from a TOML file, each as a `Layer` of texts.

mount.py declares the settings and reads their texts.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from fusefs.settings.arguments import did_you_mean
from fusefs.settings.mount import SETTINGS, Layer, RawValue, SettingsError
from fusefs.settings.types import SWITCH, Setting, plain_number

# The variable that names the TOML file if no option does; the default is DEFAULT_CONFIG.
CONFIG_VARIABLE = "FUSEFS_CONFIG"
DEFAULT_CONFIG = Path("/etc/fusefs/config.toml")
_PREFIX = "FUSEFS_"
# The least similarity of two names, with their prefix, for a warning: they may differ in one or
# two letters.
_NEAR = 0.9
# Variables that have the prefix but are not settings.
_OTHERS = (CONFIG_VARIABLE, "FUSEFS_RUNTIME_DIRECTORY")


def split_options(text: str) -> list[str]:
    """Split the text of one flag `-o` (A,B=C) at commas, except commas within settings' values."""
    further = {setting.name: setting.type.further for setting in SETTINGS}
    options: list[str] = []
    for part in text.split(","):
        name = options[-1].partition("=")[0].replace("-", "_") if options else ""
        more = further.get(name)
        if more is not None and more.match(part):
            options[-1] += f",{part}"
        else:
            options.append(part)
    return options


def from_environment(environment: Mapping[str, str]) -> Layer:
    """Return the settings in environment variables; an empty variable counts as unset."""
    return {
        setting.name: RawValue(environment[setting.variable], setting.variable)
        for setting in SETTINGS
        if environment.get(setting.variable)
    }


def mistyped(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for each unknown variable whose name is similar to a setting's variable."""
    variables = [setting.variable for setting in SETTINGS]
    for name in sorted(environment):
        if name.startswith(_PREFIX) and name not in variables and name not in _OTHERS:
            import difflib  # only needed after mistakes

            for near in difflib.get_close_matches(name, variables, n=1, cutoff=_NEAR):
                yield f"{name} is no setting, and ignored; did you mean {near}?"


def config_of(given: str | None, environment: Mapping[str, str], mountpoint: str = "") -> Layer:
    """Return the settings in the TOML file at the path `given`, a flag's value or None.

    For None the variable FUSEFS_CONFIG names the file, else DEFAULT_CONFIG is read if it is
    readable. A table for `mountpoint` overrides the other settings. Raises SettingsError.
    """
    named = given or environment.get(CONFIG_VARIABLE)
    if not named and not os.access(DEFAULT_CONFIG, os.R_OK):
        return {}
    return from_config(Path(named) if named else DEFAULT_CONFIG, mountpoint)


def from_config(path: Path, mountpoint: str = "") -> Layer:
    """Return a TOML file's settings; a table for `mountpoint` overrides top-level settings.

    Raises:
        SettingsError: the file cannot be read, is not TOML or has an unknown key.
    """
    try:
        content = tomllib.loads(path.read_text("utf-8"))  # in any locale
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # also for an integer with thousands of digits
        raise SettingsError(f"{path}: is not TOML: {error}") from error
    by_key = {setting.key: setting for setting in SETTINGS}
    layer = {}
    tables = {key: table for key, table in content.items() if key.startswith("/")}
    own = tables.get(mountpoint, {})
    if not isinstance(own, dict):
        raise SettingsError(f"{path}: {mountpoint}: write a table, [{json.dumps(mountpoint)}]")
    # `source` is in the output of `fusefs status --settings`, but the command line gives it.
    wanted = {key: value for key, value in (content | own).items() if key != "source"}
    for key, value in wanted.items():
        if key in tables:
            continue
        if key not in by_key:
            near = did_you_mean(key.replace("_", "-"), by_key)
            hint = near or "; fusefs mount --help lists them all"
            raise SettingsError(f"{path}: {key}: there is no such setting{hint}")
        origin = f"{path}: {key}"
        layer[by_key[key].name] = RawValue(_toml_text(by_key[key], value, origin), origin)
    return layer


def _toml_text(setting: Setting, value: object, origin: str) -> str:
    match value:
        case str():
            return value
        case bool() if setting.is_switch:
            return SWITCH.show(value)
        case int() | float() if setting.type.takes_numbers and not isinstance(value, bool):
            try:
                return plain_number(value)
            except ValueError as error:  # from thousands of digits in base 16
                raise SettingsError(f"{origin}: {error}") from None
    wanted = "true or false" if setting.is_switch else "text in quotes"
    raise SettingsError(f"{origin}: {value!r} has the wrong type; write {wanted}")
