"""Reads and writes without a pause, in a pod: `python load.py DIRECTORY`.

Prints a line of JSON each second: rounds, errors, the longest round in seconds. Ends at SIGTERM.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

ending = False


def end(*_: object) -> None:
    global ending
    ending = True


signal.signal(signal.SIGTERM, end)
place = Path(sys.argv[1]) / os.uname().nodename
seen: dict[str, float] = {"rounds": 0, "errors": 0, "longest": 0.0}
reader = None
told = 0.0
while not ending:
    begin = time.monotonic()
    try:
        place.mkdir(exist_ok=True)
        path = place / f"file-{int(seen['rounds']) % 20}"
        content = os.urandom(20_000)
        path.write_bytes(content)
        if path.read_bytes() != content:
            raise OSError("another content than was written")
        if reader is None:
            (place / "open").write_bytes(b"open" * 50_000)
            reader = (place / "open").open("rb")
        reader.seek(0)
        if reader.read() != b"open" * 50_000:
            raise OSError("an open file changed")
        os.listdir(place)
    except OSError as error:
        seen["errors"] += 1
        print(error, flush=True)
    now = time.monotonic()
    seen["rounds"] += 1
    seen["longest"] = round(max(seen["longest"], now - begin), 3)
    if now - told > 1 or ending:
        told = now
        print(json.dumps(seen), flush=True)
    time.sleep(0.05)
