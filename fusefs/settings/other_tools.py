"""Options of other tools that mount buckets, and their names here: one table.

The commands suggest from it where somebody writes another tool's option, and
docs/guides/from-other-tools.md shows it: its rows are those of that page, word for word.
"""

from __future__ import annotations

import re

# By tool; a row of the table without one names it itself.
ROWS: dict[str, tuple[str, ...]] = {
    "mount-s3": (
        "| `mount-s3 BUCKET DIR` | `fusefs mount s3://BUCKET DIR` |",
        "| `--prefix P/` | in the URL: `s3://BUCKET/P` |",
        "| `--cache DIR` | always on: `--cache-dir DIR` |",
        "| `--max-cache-size MiB` | `--cache-size 10GiB` |",
        "| `--metadata-ttl SECONDS`, `indefinite` | `--metadata-ttl 60s`, `indefinite` |",
        "| `--allow-delete`, `--allow-overwrite` | both are allowed; `--no-delete` refuses them |",
        "| `--no-sign-request` | `--anonymous` |",
        "| `--force-path-style` | `--addressing path` |",
        "| `--region`, `--endpoint-url`, `--profile`, `--read-only`, `--allow-other`, "
        "`--uid`, `--gid`, `--file-mode`, `--dir-mode`, `--storage-class`, `--foreground` | "
        "the same |",
        "| `--sse`, `--sse-kms-key-id` | `--encryption`, `--kms-key` |",
        "| `--requester-pays` | the same |",
        "| `--dual-stack` | the same |",
        "| `--log-directory DIR` | `--log-file FILE` |",
        "| `--maximum-throughput-gbps`, `--max-threads` | `--max-connections`, if at all |",
    ),
    "rclone": (
        "| `rclone mount remote:bucket DIR` | `fusefs mount s3://bucket DIR` |",
        "| `--vfs-cache-mode full`, `writes` | always so; a file is in the bucket when "
        "`close` returns |",
        "| `--vfs-write-back` | `--durability local`: on the local disk at `close` |",
        "| `--cache-dir`, `--vfs-cache-max-size` | `--cache-dir`, `--cache-size` |",
        "| `--vfs-cache-min-free-space` | `--min-free` |",
        "| `--vfs-cache-max-age` | no limit of age: the cache removes what is used least |",
        "| `--dir-cache-time`, `--attr-timeout` | `--metadata-ttl` |",
        "| `--vfs-read-ahead`, `--buffer-size`, `--vfs-read-chunk-size` | found by itself |",
        "| `--daemon` | the default; `--foreground` is the opposite |",
        "| `--umask` | `--file-mode`, `--dir-mode` |",
        "| `--transfers` | `--max-connections` |",
        "| `--rc`, `rc vfs/forget` | `fusefs drop`; a shorter `--metadata-ttl` |",
    ),
    "s3fs": (
        "| `s3fs bucket:/path DIR` | `fusefs mount s3://bucket/path DIR` |",
        "| `passwd_file=FILE` | `credentials=FILE` in fstab, in AWS's format; else the [AWS "
        "sources](credentials.md) |",
        "| `url=URL` | `--endpoint-url URL` |",
        "| `use_path_request_style` | `--addressing path` |",
        "| `use_cache=DIR` | always on: `--cache-dir DIR` |",
        "| `ensure_diskfree=MB` | `--min-free` |",
        "| `stat_cache_expire=S` | `--metadata-ttl` |",
        "| `public_bucket=1` | `--anonymous` |",
        "| `umask`, `mp_umask` | `--file-mode`, `--dir-mode` |",
        "| `use_sse`, `default_acl`, `storage_class` | `--encryption`, `--acl`, "
        "`--storage-class` |",
        "| `parallel_count`, `multipart_size` | `--max-connections`; parts are chosen by size |",
    ),
    "": (
        "| gcsfuse `--only-dir DIR`, goofys `bucket:prefix` | in the URL |",
        "| gcsfuse `--implicit-dirs` | always so: a directory is a common prefix |",
        "| gcsfuse `file-cache: max-size-mb`, `cache-dir` | `--cache-size`, `--cache-dir` |",
        "| gcsfuse `metadata-cache: ttl-secs` | `--metadata-ttl` |",
        "| goofys `--endpoint`, `--stat-cache-ttl`, `--type-cache-ttl` | `--endpoint-url`, "
        "`--metadata-ttl` |",
        "| goofys `-o allow_other` | `--allow-other` |",
        "| geesefs `--memory-limit` | the same; cached data are on the disk and in the page "
        "cache |",
        "| geesefs `--fsync-on-close` | always so |",
    ),
    "juicefs": (
        "| `--cache-dir`, `--cache-size`, `--free-space-ratio` | `--cache-dir`, "
        "`--cache-size`, `--min-free` |",
        "| `--attr-cache`, `--entry-cache`, `--dir-entry-cache`, `--open-cache` | "
        "`--metadata-ttl` |",
        "| `--writeback` | `--durability local` |",
        "| `--cache-group` | `--cluster-cache` ([cluster cache](cluster-cache.md)) |",
        "| `juicefs warmup` | `fusefs warm` |",
        "| `-d` | the default |",
    ),
}
_CODE = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")
_TOOL = re.compile(r"(gcsfuse|goofys|geesefs) ")


def hint(option: str) -> str:
    """The hint for an error message that another tool's option gives; "" if it is none."""
    wanted = _plain(option)
    for tool, rows in ROWS.items():
        for row in rows:
            _, theirs, here, _ = (cell.strip() for cell in row.split("|"))
            is_it = wanted in map(_plain, _CODE.findall(theirs))
            if is_it and not here.startswith("the same"):
                named = tool or (_TOOL.search(theirs) or [""])[0].strip()
                text = _LINK.sub(r"\1", here).replace("`", "")
                return f", which is {named}'s; here: {text}"
    return ""


def _plain(option: str) -> str:
    """The name of an option without dashes and value, as all tools write it."""
    name = re.split(r"[ =:]", option.lstrip("-"), maxsplit=1)[0]
    return name.replace("_", "-")
