"""Writes manual pages and shell completions, all from the parser of `fusefs`.

    python packaging/make_docs.py DIRECTORY

The parser itself takes the options of mounts from the one definition of settings
(fusefs/settings/mount.py), so a setting is documented wherever it can be given.
DIRECTORY gets the layout of /usr/share: man/man1, man/man8, bash-completion/completions,
zsh/site-functions.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from pathlib import Path

import shtab
from argparse_manpage.manpage import Manpage

from fusefs import __version__
from fusefs.cli.parser import make_parser
from fusefs.mount_helper import IGNORED, VARIABLES
from fusefs.settings.mount import SETTINGS
from fusefs.settings.types import Setting

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
    files = {
        "bash-completion/completions/fusefs": shtab.complete(parser, "bash"),
        "zsh/site-functions/_fusefs": shtab.complete(parser, "zsh"),
        "man/man1/fusefs.1": page(parser, date),
        "man/man8/mount.fusefs.8": fstab_page(date),
    }
    for name, command in commands(parser).items():
        files[f"man/man1/fusefs-{name}.1"] = page(command, date)
    return files


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


def _roff(text: str) -> str:
    """Text as roff takes it: nothing in it is a request."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("…", "...")
    return re.sub(r"^([.'])", r"\\&\1", escaped)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
