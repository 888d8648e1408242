"""The socket on which a daemon tells its status."""

import functools
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import trio

from fusefs.daemon import control_socket
from fusefs.keeper.exchange import exchange_fds
from fusefs.launch import control
from fusefs.linux import sockets


async def ask(path: Path, command: str = "status") -> dict[str, Any]:
    return await trio.to_thread.run_sync(control.request, path, command, 2.0)


async def test_a_request_is_answered(tmp_path: Path, nursery: trio.Nursery) -> None:
    path = tmp_path / ("long" * 30) / "status.sock"
    path.parent.mkdir()

    async def answer(request: dict[str, Any]) -> dict[str, Any]:
        await trio.lowlevel.checkpoint()
        return {"received": request["command"]}

    await nursery.start(functools.partial(control_socket.serve, path, answer))
    assert await ask(path, "hello") == {"received": "hello"}
    assert path.stat().st_mode & 0o777 == 0o600


async def test_a_fault_in_an_answer_ends_nothing(tmp_path: Path, nursery: trio.Nursery) -> None:
    path = tmp_path / "status.sock"

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        return {"value": {}[request["command"]]}

    await nursery.start(functools.partial(control_socket.serve, path, answer))
    for _ in range(2):
        with pytest.raises(control.ControlError, match="KeyError"):
            await ask(path)


@pytest.mark.parametrize(
    "line", [b"nonsense\n", b"[]\n", b"x" * 4097, b"", b'{"command": "status", "protocol": 99}\n']
)
async def test_nonsense_is_answered_with_an_error(
    tmp_path: Path, nursery: trio.Nursery, line: bytes
) -> None:
    path = tmp_path / "status.sock"
    await nursery.start(functools.partial(control_socket.serve, path, lambda request: request))
    stream = await trio.open_unix_socket(path)
    async with stream:
        await stream.send_all(line)
        await stream.send_eof()
        answer = b"".join([chunk async for chunk in stream])
    assert "error" in json.loads(answer)


async def test_only_the_owner_and_root_are_answered(
    tmp_path: Path, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "status.sock"
    await nursery.start(functools.partial(control_socket.serve, path, lambda request: request))
    for uid, is_answered in ((os.geteuid(), True), (0, True), (54321, False)):
        monkeypatch.setattr(sockets, "peer_of", lambda _, uid=uid: (1, uid))
        if is_answered:
            assert (await ask(path))["command"] == "status"
        else:
            with pytest.raises(control.ControlError, match="owner and root"):
                await ask(path)


async def test_the_socket_is_gone_when_its_server_is(tmp_path: Path) -> None:
    path = tmp_path / "status.sock"
    async with trio.open_nursery() as nursery:
        await nursery.start(functools.partial(control_socket.serve, path, lambda request: request))
        nursery.cancel_scope.cancel()
    assert not path.exists()


async def test_a_daemon_that_is_silent_is_not_waited_for(tmp_path: Path) -> None:
    listening = trio.socket.socket(trio.socket.AF_UNIX)
    with listening:
        await listening.bind(str(tmp_path / "status.sock"))
        listening.listen()
        began = time.monotonic()
        with pytest.raises(control.NotAnsweringError, match="timed out"):
            await trio.to_thread.run_sync(control.request, tmp_path / "status.sock", "status", 0.2)
        assert time.monotonic() - began < 2


@pytest.mark.parametrize(
    ("line", "count"), [(b'{"error": "no"}\n', 1), (b"nonsense\n", 1), (b"{", 1), (b"{}\n", 2)]
)
def test_descriptors_of_a_useless_answer_are_closed(
    tmp_path: Path, line: bytes, count: int
) -> None:
    path, (reader, writer) = tmp_path / "keeper.sock", os.pipe()

    def answer() -> None:
        sock, _ = listener.accept()
        with sock:
            sock.recv(1 << 16)
            socket.send_fds(sock, [line], [writer] * count)
        os.close(writer)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(path))
        listener.listen()
        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(control.ControlError):
            exchange_fds(path, {"do": "hand"}, 10.0)
        thread.join()
    assert os.read(reader, 1) == b""  # no copy of the other end is open
    os.close(reader)
