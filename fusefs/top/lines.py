"""`fusefs top --plain`: a line for each mount, for logs and terminals without a screen."""

from __future__ import annotations

from fusefs.settings.display import human_duration, human_size, shown
from fusefs.top.rates import Rates

CAUSES = {
    "connection": "a connection",
    "throttled": "throttling",
    "s3_first_byte": "first byte",
    "s3_transfer": "transfer",
    "metadata": "metadata",
    "cache_disk": "cache disk",
    "cache_full": "cache room",
    "credentials": "credentials",
    "cluster_cache": "cluster cache",
}
# What the kernel reads by itself is estimated by the sizes of the files that are opened for it.
SOURCES = {"cache": "cache", "s3": "S3", "kernel": "kernel, estimated"}
# Less is noise of the clocks.
LEAST_SHARE = 0.005


def line(mount: Rates) -> str:
    """One mount, without a line's end."""
    if not mount.is_up:
        return shown(f"{mount.volume}: {trouble(mount)} ({mount.why})")
    parts = [
        f"read {rate_text(mount.read_s)}{origins(mount)}",
        f"sent to S3 {rate_text(mount.sent_s)}",
    ]
    parts += [f"waited {waits(mount)}", s3_text(mount)]
    if mount.pending_files:
        parts.append(pending_text(mount))
    if mount.wasted_share >= LEAST_SHARE:
        parts.append(f"fetched ahead and not read {mount.wasted_share:.0%}")
    if mount.warm_target_bytes:
        parts.append(warm_text(mount))
    return shown(f"{mount.volume}: {'; '.join(parts)}")


def trouble(mount: Rates) -> str:
    """The trouble of a mount of which there are no rates."""
    return "its metrics can't be read" if mount.is_malformed else "does not answer"


def rate_text(rate: float) -> str:
    return f"{human_size(rate)}/s"


def waits(mount: Rates) -> str:
    """The share of time in which requests waited, and for what, as in `38%: 31% first byte`."""
    causes = [
        f"{share:.0%} {CAUSES.get(cause, cause)}"
        for cause, share in mount.causes
        if share >= LEAST_SHARE
    ]
    return f"{mount.waited:.0%}" + (f": {', '.join(causes)}" if causes else "")


def transfer_text(mount: Rates) -> str:
    return f"{rate_text(mount.received_s)} received, {rate_text(mount.sent_s)} sent"


def s3_text(mount: Rates) -> str:
    text = f"S3 {mount.s3_s:.0f}/s"
    for rate, label in (
        (mount.s3_errors_s, "errors"),
        (mount.s3_throttled_s, "throttled"),
        (mount.s3_retries_s, "retried"),
    ):
        if rate:
            text += f", {rate:.1f}/s {label}"
    return text


def pending_text(mount: Rates) -> str:
    size, age = human_size(mount.pending_bytes), human_duration(mount.oldest_pending_s)
    return f"{mount.pending_files:.0f} files ({size}) to upload, the oldest for {age}"


def warm_text(mount: Rates) -> str:
    share = mount.warm_done_bytes / mount.warm_target_bytes
    return f"warming {share:.0%} of {human_size(mount.warm_target_bytes)}"


def origins(mount: Rates) -> str:
    """The shares of what was read by where it came from, in brackets; "" if nothing was."""
    if not mount.read_s:
        return ""
    shares = [
        f"{rate / mount.read_s:.0%} {SOURCES.get(source, source)}"
        for source, rate in mount.read_from.items()
        if rate / mount.read_s >= LEAST_SHARE
    ]
    return f" ({', '.join(shares)})" if shares else ""
