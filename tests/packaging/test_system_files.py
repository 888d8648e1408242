"""Manual pages, completions and systemd's unit: from the one definition of settings, and valid."""

import os
import pty
import re
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fusefs.settings.mount import SETTINGS
from tests.support.sharing import PATIENCE_S

PACKAGING = Path(__file__).parents[2] / "packaging"
UNIT = PACKAGING / "systemd/fusefs@.service"


@pytest.fixture(scope="module")
def share(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("share")
    subprocess.run([sys.executable, PACKAGING / "make_docs.py", directory], check=True)
    return directory


def test_every_setting_is_documented_wherever_it_can_be_given(share: Path) -> None:
    def text(path: str) -> str:
        return (share / path).read_text().replace("\\-", "-")

    mount, fstab = text("man/man1/fusefs-mount.1"), text("man/man8/mount.fusefs.8")
    bash, zsh = text("bash-completion/completions/fusefs"), text("zsh/site-functions/_fusefs")
    for setting in SETTINGS:
        for words in (mount, bash, zsh):
            assert setting.flag in words
        assert setting.help.split(";")[0][:40] in mount
        if setting.name != "foreground":  # mount(8) waits for its helper
            assert f".B {setting.name}" in fstab


def test_every_command_has_a_page(share: Path) -> None:
    pages = {path.name for path in (share / "man/man1").iterdir()}
    shown = subprocess.run(
        [Path(sys.prefix) / "bin/fusefs", "--help"], capture_output=True, text=True, check=True
    )
    commands = re.findall(r"^    ([a-z-]+)(?:  |$)", shown.stdout, re.MULTILINE)
    assert "mount" in commands
    assert pages == {"fusefs.1", *(f"fusefs-{name}.1" for name in commands)}


@pytest.mark.skipif(shutil.which("groff") is None, reason="there is no groff")
def test_pages_are_set_without_a_warning(share: Path) -> None:
    pages = [str(path) for path in (share / "man").glob("*/*")]
    done = subprocess.run(
        # That a line can't be spread to the margin is no fault of a page.
        ["groff", "-man", "-Tutf8", "-ww", "-Wbreak", "-z", *pages],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_bash_completes_commands_and_options(share: Path) -> None:
    script = f"""
    before=$COMP_WORDBREAKS
    source {share}/bash-completion/completions/fusefs
    [[ $before == "$COMP_WORDBREAKS" ]] && ! complete -p ls || exit 1
    function_of() {{ complete -p fusefs | sed 's/.*-F \\([^ ]*\\).*/\\1/'; }}
    COMP_WORDS=(fusefs mount --cache-s) COMP_CWORD=2; $(function_of); echo "${{COMPREPLY[@]}}"
    COMP_WORDS=(fusefs umo) COMP_CWORD=1; COMPREPLY=(); $(function_of); echo "${{COMPREPLY[@]}}"
    COMP_WORDS=(fusefs mount s3://b /m --addressing "") COMP_CWORD=5; COMPREPLY=()
    $(function_of); echo "${{COMPREPLY[@]}}"
    COMP_WORDS=(fusefs warm {share}/ma) COMP_CWORD=2; COMPREPLY=()
    $(function_of); echo "${{COMPREPLY[@]}}"
    awk() {{ printf '%s\\n' /mnt/one /mnt/two; }}
    COMP_WORDS=(fusefs umount /mnt/o) COMP_CWORD=2; COMPREPLY=()
    $(function_of); echo "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    options, commands, values, paths, mounts = done.stdout.splitlines()
    assert options.split() == ["--cache-size"]
    assert commands.split() == ["umount"]
    assert values.split() == ["auto", "path", "virtual"]
    assert paths.split() == [f"{share}/man"]
    assert mounts.split() == ["/mnt/one"]


def _completions(share: Path) -> dict[str, str]:
    """Beginnings of command lines, and what they become by the Tab key alone.

    The mountpoints are those of the stand-in for awk, /mnt/one and /mnt/two.
    """
    whole = {
        "fusefs umo": "fusefs umount",
        "fusefs mount --metadata": "fusefs mount --metadata-ttl",
        "fusefs top --pl": "fusefs top --plain",
        "fusefs mount s3://b /m --addressing v": "fusefs mount s3://b /m --addressing virtual",
        "fusefs mount --encryption=aws:kms:d": "fusefs mount --encryption=aws:kms:dsse",
        "fusefs umount /mnt/o": "fusefs umount /mnt/one",
        "fusefs doctor /mnt/o": "fusefs doctor /mnt/one",
    }
    # The last is not ours: the shell's own completion goes on.
    for words in ("warm a", "mount s3://b", "mount --config", "drop --unsent"):
        whole[f"fusefs {words} {share}/ma"] = f"fusefs {words} {share}/man/"
    return whole | {f"ls {share}/ma": f"ls {share}/man/"}


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish")
def test_fish_completes_commands_options_values_paths_and_mountpoints(share: Path) -> None:
    wanted = _completions(share)
    lines = [
        f"source {share}/fish/vendor_completions.d/fusefs.fish",
        r"function awk; printf '/mnt/one\n/mnt/two\n'; end",
        *(f"complete -C '{words}'; echo" for words in wanted),
    ]
    script = "\n".join(lines)
    command = ["fish", "--no-config", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = [text.partition("\t")[0] for text in done.stdout.split("\n\n")[: len(wanted)]]
    # fish names the last word as it becomes.
    assert found == [text.split()[-1] for text in wanted.values()]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh")
def test_zsh_completes_commands_options_values_paths_and_mountpoints(
    share: Path, tmp_path: Path
) -> None:
    (tmp_path / ".zshrc").write_text(f"""
    fpath=({share}/zsh/site-functions $fpath)
    autoload -U compinit; compinit -D -u
    awk() {{ print -l /mnt/one /mnt/two }}
    note() {{ print -r -- "<$BUFFER>"; BUFFER= }}
    zle -N note; bindkey '^X' note; PS1='<>'
    """)
    wanted = _completions(share)
    ours, theirs = pty.openpty()
    environment = {**os.environ, "ZDOTDIR": str(tmp_path), "TERM": "dumb", "COLUMNS": "500"}
    shell = subprocess.Popen(
        ["zsh", "-i"], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    shown = ""

    def read_until(pattern: str) -> str:
        """The text of the first match; a shell that ends or says nothing fails the test."""
        nonlocal shown
        while not (found := re.search(pattern, shown)):
            assert select.select([ours], [], [], PATIENCE_S)[0], shown
            shown += os.read(ours, 4096).decode()
        shown = shown[found.end() :]
        return found[1]

    noted = []
    try:
        read_until("(<>)")
        for words in wanted:
            os.write(ours, f"{words}\t\x18".encode())
            noted.append(read_until("<([^<>]+)>"))
    finally:
        shell.kill()
        shell.wait()
        os.close(ours)
    # zsh adds what may follow: a blank, or the sign before a value.
    assert [text.rstrip(" =") for text in noted] == list(wanted.values())


def test_the_unit_says_ready_lives_and_is_upgraded_without_unmounting() -> None:
    lines = UNIT.read_text().splitlines()
    unit = dict(line.split("=", 1) for line in lines if "=" in line and line[0] not in "#[")
    assert unit["Type"] == "notify"
    assert "--foreground" in unit["ExecStart"]
    assert unit["ExecReload"].split()[1] == "upgrade"
    assert unit["EnvironmentFile"] == "/etc/fusefs/%i.env"
    assert "WatchdogSec" in unit
    # After `fusefs umount` there is nothing to unmount, which is no failure.
    assert unit["ExecStop"].startswith("-")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    command = Path(sys.prefix) / "bin/fusefs"
    text = UNIT.read_text().replace("/usr/bin/fusefs", str(command))
    (tmp_path / "fusefs@data.service").write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", tmp_path / "fusefs@data.service"],
        capture_output=True,
        text=True,
    )
    ours = [line for line in done.stderr.splitlines() if "fusefs" in line]
    assert ours == []


PROJECT = Path(__file__).parents[2]


def test_a_missing_compiler_is_one_clear_line(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "-q", "build_ext", "--force"]
    command += ["--build-temp", str(tmp_path / "temp"), "--build-lib", str(tmp_path / "lib")]
    environment = {**os.environ, "CC": str(tmp_path / "no-gcc")}
    build = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True)
    assert build.returncode != 0
    assert "Traceback" not in build.stderr
    assert build.stderr.splitlines()[-1] == (
        "setup: fusefs needs gcc and the headers of Python, zlib and libcurl 7.87 or newer"
        " (Debian: gcc libc6-dev python3-dev libcurl4-openssl-dev)"
    )
