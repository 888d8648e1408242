"""Writes manual pages and shell completions, all from the parser of `fusefs`.

The site's reference of commands, settings and metrics (`site_pages`) is from the same tables.

    python packaging/make_docs.py DIRECTORY

The parser itself takes the options of mounts from the one definition of settings
(fusefs/settings/mount.py), so a setting is documented wherever it can be given.
DIRECTORY gets the layout of /usr/share: man/man1, man/man8, bash-completion/completions,
zsh/site-functions, fish/vendor_completions.d.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import shtab
from argparse_manpage.manpage import Manpage

from fusefs import __version__
from fusefs.cli.parser import make_parser
from fusefs.mount_helper import IGNORED, VARIABLES
from fusefs.settings.mount import FIXED, SETTINGS
from fusefs.settings.types import Setting
from fusefs.telemetry.metrics import METRICS

FSTAB = """\\
.TH MOUNT.FUSEFS 8 "{date}" "fusefs {version}" "System Administration"
.SH NAME
mount.fusefs \\- mount an S3 bucket from /etc/fstab
.SH SYNOPSIS
.B mount \\-t fusefs
.RI s3:// BUCKET [/ PREFIX ]
.I MOUNTPOINT
.RB [ \\-o
.IR OPTIONS ]
.SH DESCRIPTION
.BR mount (8)
calls this helper for the file system type
.BR fusefs .
A line of
.BR fstab (5):
.PP
.RS
.nf
s3://bucket/prefix  /data  fusefs  _netdev,allow_other,cache_size=100GiB  0  0
.fi
.RE
.PP
.B _netdev
has the mount wait for the network.
.SH OPTIONS
Every setting of
.BR fusefs\\-mount (1)
is an option under its name, with underscores or dashes. Switches are given alone, or as
.IR name =false;
those whose names begin with no_ only alone.
{settings}
.TP
.B ro
As read_only.
.TP
.BI config= FILE
A file of settings (TOML).
{variables}
.PP
These are accepted and change nothing, as mount(8) or systemd handle them, or every mount of fusefs
is so: {ignored}, and names that begin with x\\-. What is not listed is refused.
.SH SEE ALSO
.BR fusefs (1),
.BR fstab (5),
.BR mount (8)
"""


_TABLE = "/proc/self/mounts"
# The table has blanks as \040.
_AWK = f'awk \'$3 == "fuse.fusefs" {{gsub(/\\\\040/, " ", $2); print $2}}\' {_TABLE}'
# The mountpoints of fusefs, for bash; it would take a blank for the end of a name.
MOUNTED = {"bash": "_fusefs_mounts"}
MOUNTS = {
    "bash": f"""_fusefs_mounts() {{
  compgen -W "$({_AWK} | grep -v ' ')" -- "$1"
}}
"""
}
ZSH = f"""#compdef fusefs
_fusefs_mounts() {{
  compadd -- ${{(f)"$({_AWK})"}}
}}
_fusefs() {{
  local curcontext="$curcontext" state line
  local -a commands=(
    @COMMANDS@
  )
  _arguments -C @OPTIONS@ ': :->command' '*:: :->arguments'
  case $state in
    command) _describe command commands ;;
    arguments)
      case $words[1] in
        @CASES@
      esac
  esac
}}
if [[ $zsh_eval_context[-1] == eval ]]; then compdef _fusefs fusefs; else _fusefs "$@"; fi
"""


def main(arguments: list[str]) -> int:
    """Write all files below the directory that is named."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("directory", type=Path)
    directory: Path = options.parse_args(arguments).directory
    for path, text in contents().items():
        target = directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return 0


def contents() -> dict[str, str]:
    """All files, by their paths below /usr/share."""
    # Files that are made from the same sources are the same.
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH", time.time()))
    date = time.strftime("%Y-%m-%d", time.gmtime(epoch))
    parser = make_parser()
    for command in commands(parser).values():
        _describe_values(command)
    files = {
        "bash-completion/completions/fusefs": shtab.complete(parser, "bash", preamble=MOUNTS),
        "zsh/site-functions/_fusefs": zsh_completion(parser),
        "fish/vendor_completions.d/fusefs.fish": fish_completion(parser),
        "man/man1/fusefs.1": page(parser, date),
        "man/man8/mount.fusefs.8": fstab_page(date),
    }
    for name, command in commands(parser).items():
        files[f"man/man1/fusefs-{name}.1"] = page(command, date)
    return files


def _describe_values(parser: argparse.ArgumentParser) -> None:
    """Have completion know which arguments are paths, mountpoints, or one of a few words."""
    for action in parser._actions:
        metavar = action.metavar if isinstance(action.metavar, str) else ""
        if metavar.startswith("MOUNTPOINT") and parser.prog != "fusefs mount":
            action.complete = MOUNTED  # type: ignore[attr-defined]
        elif metavar in ("PATH", "FILE", "MOUNTPOINT"):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif re.fullmatch(r"[\w:-]+(\|[\w:-]+)+", metavar) and not metavar.isupper():
            action.choices = metavar.split("|")


def zsh_completion(parser: argparse.ArgumentParser) -> str:
    """The completion for zsh. (shtab's takes no `--option=value` and one path only.)"""
    named = commands(parser)
    cases = []
    for name, command in named.items():
        specs = " ".join(spec for action in command._actions for spec in _zsh_specs(action))
        cases.append(f"{name}) _arguments {specs} ;;")
    texts = [shlex.quote(f"{name}:{_about(command)}") for name, command in named.items()]
    options = [spec for action in parser._actions[:-1] for spec in _zsh_specs(action)]
    text = ZSH.replace("@COMMANDS@", "\n    ".join(texts))
    text = text.replace("@OPTIONS@", " ".join(options))
    return text.replace("@CASES@", "\n        ".join(cases))


def _zsh_specs(action: argparse.Action) -> list[str]:
    """An option or argument as zsh's _arguments takes it, quoted."""

    def escaped(text: object) -> str:
        return re.sub(r"([][:\\])", r"\\\1", str(text))

    if action.choices:
        values = f"({' '.join(map(escaped, action.choices))})"
    else:
        ways = {id(MOUNTED): "_fusefs_mounts", id(shtab.FILE): "_files"}
        # Where nothing is known of the values: a message instead would keep zsh from inserting
        # an option that is the only match.
        values = ways.get(id(getattr(action, "complete", None)), "{false}")
    value = f":{escaped(action.metavar or action.dest)}:{values}"
    if not action.option_strings:
        return [shlex.quote(f"*{value}" if action.nargs in ("+", "*") else value)]
    about = f"[{escaped((action.help or '').replace('%%', '%'))}]"
    end = about if action.nargs == 0 else f"={about}{value}"
    return [shlex.quote(f"{flag}{end}") for flag in action.option_strings if flag[:2] == "--"]


def fish_completion(parser: argparse.ArgumentParser) -> str:
    """The completion for fish, which shtab does not write."""
    lines = [
        f"function __fusefs_mounts\n  {_AWK}\nend",
        "complete -c fusefs -n __fish_use_subcommand -f",
        "complete -c fusefs -n __fish_use_subcommand -l help -s h",
        "complete -c fusefs -n __fish_use_subcommand -l version -s V",
    ]
    for name, command in commands(parser).items():
        about = _about(command).replace("'", "\\'")
        lines.append(f"complete -c fusefs -n __fish_use_subcommand -a {name} -d '{about}'")
        seen = f"'__fish_seen_subcommand_from {name}'"
        has_files = False
        for action in command._actions:
            flags = [flag[2:] for flag in action.option_strings if flag.startswith("--")]
            words = " ".join(map(str, action.choices or ()))
            if getattr(action, "complete", None) is MOUNTED:
                words = "(__fusefs_mounts)"
            given = f" -x -a '{words}'" if words else ("" if action.nargs == 0 else " -r")
            lines += [f"complete -c fusefs -n {seen} -l {flag}{given}" for flag in flags]
            if not flags and words:
                lines.append(f"complete -c fusefs -n {seen} -a '{words}'")
            has_files |= not flags and getattr(action, "complete", None) is shtab.FILE
        if not has_files:
            lines.append(f"complete -c fusefs -n {seen} -f")
    return "\n".join(lines) + "\n"


def _about(command: argparse.ArgumentParser) -> str:
    return (command.description or "").partition(".")[0]


def commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of the subcommands, by name."""
    [choices] = (
        action.choices
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return dict(choices)


def page(parser: argparse.ArgumentParser, date: str) -> str:
    """A parser's manual page. Its subcommands have pages of their own."""
    parser.man_short_description = (parser.description or "").partition(".")[0]  # type: ignore[attr-defined]
    title = parser.prog.replace(" ", "-")
    data = {
        "date": date,
        "project_name": "fusefs",
        "version": __version__,
        "manual_section": 1,
        "manual_title": "User Commands",
        "prog": title,
        "single_commands_section": True,
    }
    text = str(Manpage(parser, format="single-commands-section", _data=data))
    # whatis(1) takes the name up to the first blank.
    text = text.replace(f".SH NAME\n{parser.prog} ", f".SH NAME\n{title} ")
    # A blank would end the title, and troff's own input has no such character.
    return re.sub(r'^\.TH [^"]* "', f'.TH {title.upper()} "', text).replace("…", "...")


def fstab_page(date: str) -> str:
    """The manual page of mount.fusefs, with all settings."""
    settings = "\n".join(_entry(each) for each in SETTINGS if each.name != "foreground")
    variables = "\n".join(
        f".TP\n.BI {name}= PATH\nSets {_roff(variable)} for the mount."
        for name, variable in VARIABLES.items()
    )
    return FSTAB.format(
        date=date,
        version=__version__,
        settings=settings,
        variables=variables,
        ignored=", ".join(sorted(IGNORED)),
    )


def _entry(setting: Setting) -> str:
    value = "" if setting.is_switch else "=" + _roff(setting.type.metavar)
    default = _roff(setting.default)
    return f".TP\n.B {_roff(setting.name)}{value}\n{_roff(setting.help)} (default: {default})"


# --- the site's reference -------------------------------------------------------


def site_pages() -> dict[str, str]:
    """The pages of the site that are made of the code, by their paths below docs/."""
    others = commands(make_parser()).keys() - set(DIAGNOSIS)
    to_diagnosis = "[watch and diagnose](commands-diagnosis.md)"
    return {
        "reference/commands.md": _commands_page("Commands", others, to_diagnosis),
        "reference/commands-diagnosis.md": _commands_page(
            "Commands to watch and diagnose", DIAGNOSIS, "[commands](commands.md)"
        ),
        "reference/settings.md": _settings_page(),
        "reference/metrics.md": _metrics_page(),
    }


# The commands that have a page of their own, so that none of the two pages is too long.
DIAGNOSIS = ("status", "top", "doctor", "report", "metrics")


def _commands_page(title: str, names: Collection[str], other: str) -> str:
    lines = [
        f"# {title}",
        "Every command has a manual page (`man fusefs-mount`) and `--help` with the same text. The"
        " options of `fusefs mount` are the [settings](settings.md). The other commands are in "
        f"{other}.",
    ]
    lines += [
        _command_section(name, command)
        for name, command in commands(make_parser()).items()
        if name in names
    ]
    return "\n\n".join(lines) + "\n"


def _command_section(name: str, command: argparse.ArgumentParser) -> str:
    """A command's usage, description and own options; settings are on a page of their own."""
    usage = command.format_usage().removeprefix("usage: ")
    usage = re.sub(r"\n +(fusefs )", r"\n\1", usage.replace("[-h] ", ""))
    usage = re.sub(r"\n +", " ", usage)
    settings = {each.flag for each in SETTINGS}
    actions = [action for action in command._actions if action.dest != "help"]
    own = [action for action in actions if settings.isdisjoint(action.option_strings)]
    description = command.description or ""
    if own != actions:
        names = [f"{action.metavar or action.dest}" for action in own if not action.option_strings]
        usage = " ".join((f"fusefs {name} [OPTION...]", *names)) + "\n"
        description += " Takes [settings](settings.md)."
    rows = [
        (
            ", ".join(
                f"`{flag}`"
                for flag in action.option_strings or [f"{action.metavar or action.dest}"]
            ),
            action.help or "",
        )
        for action in own
    ]
    table = _table(("option or argument", "meaning"), rows)
    return "\n\n".join((f"## fusefs {name}", f"```text\n{usage}```", _text(description), table))


def _settings_page() -> str:
    lines = [
        "# Settings",
        "A setting can be given in four ways; the first that has it wins. `--cache-size 50GiB` is"
        " an option of `fusefs mount`, `FUSEFS_CACHE_SIZE=50GiB` an environment variable,"
        ' `cache-size = "50GiB"` a line of a [settings file](../guides/settings-file.md), and'
        " `cache_size=50GiB` an option in [/etc/fstab](../guides/boot.md).",
        "Sizes are written `50GiB`, `1.5TB` or `4096`, times `60s`, `500ms`, `5m` or `2h`."
        " *Fixed* settings cannot be changed by `fusefs upgrade` while mounted.",
    ]
    for group in dict.fromkeys(each.group for each in SETTINGS):
        rows = [
            (
                f"`{each.flag}`",
                each.default,
                each.help + (" (fixed)" if each.name in FIXED else ""),
            )
            for each in SETTINGS
            if each.group == group
        ]
        lines += [f"## {group}", _table(("setting", "default", "meaning"), rows)]
    return "\n\n".join(lines) + "\n"


def _metrics_page() -> str:
    rows = [
        (f"`fusefs_{name}`", each.type, ", ".join(each.labels), each.help)
        for name, each in METRICS.items()
    ]
    return (
        "\n\n".join(
            (
                "# Metrics",
                "`fusefs metrics` and the CSI driver serve these names to Prometheus"
                " ([metrics and dashboard](../operate/metrics.md)). Each has the label `volume`."
                " Times are in seconds, sizes in bytes.",
                _table(("name", "type", "labels", "meaning"), rows),
            )
        )
        + "\n"
    )


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A table of Markdown; nothing in it for no rows."""
    lines = [head, ("---",) * len(head), *rows] if rows else []
    return "\n".join(f"| {' | '.join(map(_text, line))} |" for line in lines)


def _text(text: str) -> str:
    """A help text as Markdown: nothing in it is a table's border, HTML or emphasis."""
    return re.sub(r"(?<![`\\])([|<>*])(?!`)", r"\\\1", " ".join(text.split())).replace("%%", "%")


def _roff(text: str) -> str:
    """Text as roff takes it: nothing in it is a request."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("…", "...")
    return re.sub(r"^([.'])", r"\\&\1", escaped)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
