"""A stand-in for the daemon: as little of a file system as the keeper's tests need.

Files: `plain` is answered by this process, `held` is answered once the file
that the settings name as `hold` is gone, `through` is passed through to the
cache file of the same name. What each daemon received is left as JSON in the
directory `facts`, one file per process. `behaviour` in the settings says what
to do wrong; it may name one of the attacks in `standin_attacks`.
"""

import contextlib
import errno
import faulthandler
import json
import os
import select
import signal
import socket
import stat
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from fusefs.fuse import protocol as wire
from fusefs.fuse.protocol import Fopen, Init, Opcode
from fusefs.keeper import protocol
from fusefs.linux import libc

NAMES = {b"plain": 2, b"held": 3, b"through": 4}
CONTENT = {2: b"plain content", 3: b"held content"}
THROUGH = 4
TICK_S = 0.2


class Standin:
    def __init__(self, settings: dict) -> None:
        self.settings = settings
        self.behaviour = settings.get("behaviour", {})
        self.channel = socket.socket(fileno=int(os.environ[protocol.ENVIRONMENT]))
        self.facts: dict = {"pid": os.getpid(), "uid": os.getuid(), "registered": []}
        self.fuse = -1
        self.table: dict[int, tuple[int, int]] = {}
        self.held: list[tuple[int, bytes]] = []
        self.is_to_end = False

    def say(self, kind: int, *numbers: int, fd: int = -1) -> None:
        protocol.send(self.channel, protocol.pack(kind, *numbers), fd)

    def hear(self, *kinds: int) -> protocol.KeeperMessage:
        message = self.receive(*kinds)
        if message is None:
            sys.exit(0)
        if message.kind not in kinds:
            raise RuntimeError(f"unexpected message {message.kind}")
        return message

    def receive(self, *kinds: int) -> protocol.KeeperMessage | None:
        """The next message; ABLE, which follows SERVING at some time, only if it is expected."""
        while True:
            message = protocol.receive(self.channel, protocol.FROM_KEEPER)
            if message is None or message.kind in kinds or message.kind != protocol.ABLE:
                return message

    def tell_facts(self) -> None:
        path = Path(self.settings["facts"]) / str(os.getpid())
        path.with_suffix(".new").write_text(json.dumps(self.facts))
        path.with_suffix(".new").rename(path)

    def begin(self) -> None:
        self.say(protocol.HELLO, protocol.VERSION)
        welcome = self.hear(protocol.WELCOME)
        state = welcome.a
        self.facts |= {
            "state": state,
            "restarts": welcome.b,
            "last_death_ns": welcome.c,
            "is_privileged": bool(welcome.d),
        }
        self.tell_facts()
        self.misbehave({0: "fresh", 1: "take_over", 2: "prepare"}[state])
        if state == protocol.FRESH:
            self.mount(bool(welcome.d))
            self.misbehave("mounted")
        else:
            if state == protocol.PREPARE:
                self.say(protocol.PREPARED)
                self.misbehave("prepared")
            self.take()
            self.tell_facts()
            self.misbehave("taken")
            if self.has_resend:
                self.write(0, 7)  # FUSE_NOTIFY_RESEND
        self.say(protocol.SERVING, int(self.has_resend))
        os.write(1, b'{"ready": true}\n')
        os.close(1)
        if state == protocol.FRESH:
            self.tell_facts()
            self.misbehave("after_serving")
            self.attack()
        self.tell_facts()

    @property
    def has_resend(self) -> bool:
        return bool(self.behaviour.get("has_resend", True))

    def attack(self) -> None:
        name = self.behaviour.get("attack")
        if name:
            from tests.support.survival import standin_attacks

            self.facts["attack"] = getattr(standin_attacks, name)(self)

    def misbehave(self, moment: str) -> None:
        what = self.behaviour.get(moment)
        if what == "exit":
            sys.exit(5)
        if what == "cannot":
            sys.exit(protocol.CANNOT_TAKE_OVER)
        if what == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if what == "close":
            self.channel.close()
        if what in ("hang", "close"):
            while True:
                time.sleep(60)

    def mount(self, is_privileged: bool) -> None:
        if is_privileged:
            self.say(protocol.MOUNT)
            self.fuse = self.hear(protocol.MOUNTED).fd
            if self.fuse < 0:
                os.write(1, b'{"error": "not mounted"}\n')
                sys.exit(4)
        else:
            self.fuse = self.mount_alone()
            self.say(protocol.DEPOSIT, fd=self.fuse)
        poll = select.poll()
        poll.register(self.fuse, select.POLLIN)
        poll.poll()
        self.answer(os.read(self.fuse, 1 << 21))

    def mount_alone(self) -> int:
        path = self.settings["mountpoint"]
        if os.geteuid() != 0:
            from fusefs.linux.mount import MountRequest, mount_by_helper

            fd = mount_by_helper(MountRequest("standin", Path(path), allow_other=False))
        else:
            fd = os.open("/dev/fuse", os.O_RDWR | os.O_NONBLOCK)
            options = f"fd={fd},{self.settings['keeper']['mount_data']}"
            libc.mount("standin", path, "fuse.fusefs", 0, options)
        os.set_blocking(fd, False)
        return fd

    def take(self) -> None:
        message = self.hear(protocol.TAKE)
        self.fuse = message.fd
        self.facts["is_all_answered"] = bool(message.b)
        for _ in range(message.a):
            entry = self.hear(protocol.ENTRY)
            self.table[entry.a] = (entry.b, entry.c)
        self.facts["table"] = list(self.table.items())

    def register(self, fd: int) -> tuple[int, int]:
        """Returns the error and the id."""
        self.say(protocol.BACKING_OPEN, 77, 1, fd=fd)
        answer = self.receive()
        if answer is None:
            return errno.ECONNRESET, 0
        [(backing_id, error)] = answer.pairs
        return error, backing_id

    def write(self, unique: int, error: int, data: bytes = b"") -> None:
        header = wire.OUT_HEADER.pack(wire.OUT_HEADER.size + len(data), error, unique)
        try:
            os.write(self.fuse, header + data)
        except OSError as refusal:
            if refusal.errno not in (errno.ENOENT, errno.ENODEV):
                raise

    def run(self) -> None:
        next_tick = 0.0
        poll = select.poll()
        poll.register(self.fuse, select.POLLIN)
        while True:
            poll.register(self.channel, select.POLLIN)
            ready = [fd for fd, _ in poll.poll(50)]
            now = time.monotonic()
            if now >= next_tick:
                next_tick = now + TICK_S
                with contextlib.suppress(OSError):
                    self.say(protocol.TICK, len(self.held))
            if self.held and not os.path.exists(self.settings["hold"]):
                self.answer_held()
            if self.is_to_end and self.behaviour.get("on_sigterm") == "exit":
                self.end()
            if self.is_to_end:
                self.is_to_end = False
                self.say(protocol.UNMOUNT)
            if self.channel.fileno() in ready:
                self.hear_keeper()
            if self.fuse in ready:
                self.read_requests()

    def hear_keeper(self) -> None:
        message = protocol.receive(self.channel, protocol.FROM_KEEPER)
        if message is None:
            sys.exit(1)  # keeper and broker are dead
        if message.kind == protocol.QUIESCE:
            self.misbehave("quiesced")
            self.answer_held()
            self.end()

    def end(self) -> None:
        self.say(protocol.ENDING)
        sys.exit(0)

    def answer_held(self) -> None:
        for unique, data in self.held:
            self.write(unique, 0, data)
        self.held = []

    def read_requests(self) -> None:
        try:
            self.answer(os.read(self.fuse, 1 << 21))
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno == errno.ENODEV:
                self.end()
            elif error.errno != errno.ENOENT:
                raise

    def answer(self, request: bytes) -> None:
        _, opcode, unique, nodeid, *_ = wire.IN_HEADER.unpack_from(request)
        body = request[wire.IN_HEADER.size :]
        if opcode in (Opcode.FORGET, Opcode.BATCH_FORGET, Opcode.INTERRUPT):
            return
        try:
            data = self.reply(opcode, nodeid, body)
        except OSError as error:
            self.write(unique, -(error.errno or errno.EIO))
            return
        if opcode == Opcode.READ and nodeid == 3 and os.path.exists(self.settings["hold"]):
            self.held.append((unique, data))
        else:
            self.write(unique, 0, data)

    def reply(self, opcode: int, nodeid: int, body: bytes) -> bytes:
        if opcode == Opcode.INIT:
            return self.init(body)
        if opcode == Opcode.LOOKUP:
            found = NAMES.get(body.rstrip(b"\0"))
            if found is None:
                raise OSError(errno.ENOENT, "")
            return wire.ENTRY_OUT_HEAD.pack(found, 0, 3600, 3600, 0, 0) + self.attributes(found)
        if opcode == Opcode.GETATTR:
            return wire.ATTR_OUT_HEAD.pack(3600, 0, 0) + self.attributes(nodeid)
        if opcode == Opcode.OPEN and nodeid == THROUGH:
            return self.open_through()
        if opcode == Opcode.OPEN:
            return wire.OPEN_OUT.pack(1, Fopen.DIRECT_IO, 0)
        if opcode == Opcode.OPENDIR:
            return wire.OPEN_OUT.pack(1, 0, 0)
        if opcode == Opcode.READ:
            _, offset, size, *_ = wire.READ_IN.unpack_from(body)
            return CONTENT[nodeid][offset : offset + size]
        if opcode in (Opcode.RELEASE, Opcode.RELEASEDIR, Opcode.FLUSH, Opcode.READDIR):
            return b""
        raise OSError(errno.ENOSYS, "")

    def init(self, body: bytes) -> bytes:
        _, _, readahead, low, high, _ = wire.INIT_IN.unpack_from(body)
        wanted = Init.INIT_EXT | Init.PASSTHROUGH | Init.HAS_RESEND | Init.PARALLEL_DIROPS
        flags = wanted & (low | high << 32)
        return wire.INIT_OUT.pack(
            wire.MAJOR,
            wire.MINOR,
            readahead,
            flags & 0xFFFFFFFF,
            16,
            12,
            1 << 20,
            1,
            256,
            0,
            flags >> 32,
            self.settings["stack_depth"],
            0,
            b"",
        )

    def attributes(self, nodeid: int) -> bytes:
        if nodeid == wire.ROOT_ID:
            mode, size = stat.S_IFDIR | 0o755, 0
        elif nodeid == THROUGH:
            mode, size = stat.S_IFREG | 0o644, os.path.getsize(self.backing_path())
        else:
            mode, size = stat.S_IFREG | 0o644, len(CONTENT[nodeid])
        return wire.ATTR.pack(nodeid, size, 0, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)

    def backing_path(self) -> str:
        return os.path.join(self.settings["cache"], "through")

    def open_through(self) -> bytes:
        fd = os.open(self.backing_path(), os.O_RDWR)
        status = os.fstat(fd)
        known = [
            backing_id
            for backing_id, where in self.table.items()
            if where == (status.st_dev, status.st_ino)
        ]
        if known:
            backing_id = known[0]
        else:
            error, backing_id = self.register(fd)
            self.facts["registered"].append([error, backing_id])
            self.tell_facts()
            if error:
                raise OSError(error, "")
            self.table[backing_id] = (status.st_dev, status.st_ino)
        os.close(fd)
        return wire.OPEN_OUT.pack(2, Fopen.PASSTHROUGH | Fopen.NOFLUSH, backing_id)


def main() -> None:
    faulthandler.register(signal.SIGUSR1)
    standin = Standin(json.load(sys.stdin))

    def end(*_: object) -> None:
        standin.is_to_end = True

    signal.signal(signal.SIGTERM, end)
    standin.begin()
    standin.run()


if __name__ == "__main__":
    main()
