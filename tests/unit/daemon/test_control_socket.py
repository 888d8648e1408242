"""The daemon's end of the control socket, with answers that are faults."""

from __future__ import annotations

from pathlib import Path

import trio

from fusefs.daemon import control_socket
from fusefs.launch import control


async def test_an_answer_that_is_no_json_is_an_error_and_the_next_is_answered(
    tmp_path: Path,
) -> None:
    answers = iter([{"status": {1, 2}}, {"status": "fine"}])
    path = tmp_path / "status.sock"

    def ask() -> control.Message | str:
        try:
            return control.request(path, "status", 30)
        except control.ControlError as error:
            return str(error)

    async with trio.open_nursery() as nursery:

        async def serve(task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
            await control_socket.serve(path, lambda _: next(answers), task_status=task_status)

        await nursery.start(serve)
        assert "TypeError" in str(await trio.to_thread.run_sync(ask))
        assert await trio.to_thread.run_sync(ask) == {"status": "fine"}
        nursery.cancel_scope.cancel()
