"""Jobs of the daemon: commands start them, and poll their state until they have ended."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

import trio

from fusefs.store.errors import StoreError

logger = logging.getLogger("fusefs.daemon.jobs")

# The number of ended jobs of each kind that are kept for `describe`.
MOST_ENDED = 100


@dataclass
class Job:
    """One job; `why` is the error that ended it, or None."""

    why: str | None = None

    def __post_init__(self) -> None:
        self.ended = trio.Event()

    @property
    def has_ended(self) -> bool:
        return self.ended.is_set()

    def describe(self) -> dict[str, Any]:
        """Return `has_ended` and all fields, as a dict for JSON; sizes are in bytes."""
        return {"has_ended": self.has_ended, **asdict(self)}


JobType = TypeVar("JobType", bound=Job)


class JobTable(Generic[JobType]):
    """The jobs of one kind, by `place`: a request's path and options. For the event loop."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._jobs: dict[Hashable, JobType] = {}

    def find_or_begin(
        self,
        place: Hashable,
        make: Callable[[], JobType],
        work: Callable[[JobType], Awaitable[None]],
        *,
        is_new: bool,
    ) -> JobType:
        """Return `place`'s job; if none, or an ended one and `is_new`: `make` one, run `work`."""
        job = self._jobs.get(place)
        if job is None or (is_new and job.has_ended):
            for old in [old for old, other in self._jobs.items() if other.has_ended][:-MOST_ENDED]:
                del self._jobs[old]
            job = self._jobs[place] = make()
            self._nursery.start_soon(self._run, place, job, work)
        return job

    async def _run(
        self, place: Hashable, job: JobType, work: Callable[[JobType], Awaitable[None]]
    ) -> None:
        try:
            await work(job)
        except (StoreError, OSError) as error:
            job.why = str(error)
        except Exception as error:  # a fault in a job must not end the mount
            logger.exception("%s of %r", type(job).__name__, place)
            job.why = f"a fault in fusefs, see the log: {error!r}"
        finally:
            job.ended.set()
