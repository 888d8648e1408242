"""Signals that a program handles do not fail its calls: no local disk answers EINTR."""

import signal
import subprocess
from pathlib import Path

from tests.support.mounting import Mounter
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.sharing import content
from tests.support.waiting import until

SOURCE = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>
#include <unistd.h>
static void handle(int number) { (void)number; }
int main(int count, char **paths) {
    struct sigaction action = {.sa_handler = handle, .sa_flags = SA_RESTART};
    struct itimerval timer = {{0, 1000}, {0, 1000}};
    sigaction(SIGALRM, &action, 0);
    setitimer(ITIMER_REAL, &timer, 0);
    char *buffer = aligned_alloc(4096, 65536);
    for (int index = 1; index < count; index++) {
        int fd = open(paths[index], O_RDONLY | (index % 2 ? O_DIRECT : 0));
        if (fd < 0) { perror("open"); return 1; }
        ssize_t size;
        while ((size = read(fd, buffer, 65536)) > 0) {}
        if (size < 0) { perror("read"); return 1; }
        close(fd);
    }
    return 0;
}
"""


@states(
    "A signal that a program handles fails none of its calls with EINTR;"
    " a process that is being killed does not wait for the bucket."
)
def test_signals_that_a_program_handles_do_not_fail_its_calls(
    mounter: Mounter, bucket: Bucket, tmp_path: Path
) -> None:
    (tmp_path / "signals.c").write_text(SOURCE)
    program = tmp_path / "signals"
    subprocess.run(["cc", "-o", program, tmp_path / "signals.c"], check=True)
    for n in range(16):
        bucket.put(f"f{n}", content(str(n), 200_000 if n % 4 else 5 << 20))
    here = mounter("--passthrough", "off")
    result = subprocess.run(
        [program, *(here.path / f"f{n}" for n in range(16))],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (result.returncode, result.stderr) == (0, "")


@states(
    "A signal that a program handles fails none of its calls with EINTR;"
    " a process that is being killed does not wait for the bucket."
)
def test_a_killed_reader_does_not_wait_for_a_server_that_is_silent(
    mounter: Mounter, bucket: Bucket, faulty: FaultyS3
) -> None:
    data = content("slow", 3 << 20)
    bucket.put("slow", data)
    here = mounter("--retry-time", "10m", endpoint_url=faulty.endpoint_url)
    rule = faulty.add("GET", "slow", stall=True)
    try:
        reader = subprocess.Popen(["cat", here.path / "slow"], stdout=subprocess.DEVNULL)
        until(lambda: rule.used > 0, "the request that hangs")
        reader.kill()
        assert reader.wait(timeout=30) == -signal.SIGKILL
    finally:
        faulty.clear()
    assert (here.path / "slow").read_bytes() == data
