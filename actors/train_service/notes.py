"""Notes of a training service on its jobs, kept in its directory so that its next life has them.

    begin ─▶ ``computing`` holds the job's name ─▶ end: it is empty ─▶ a burst is over: its deaths in a row are 0
                        └── the process dies: its next life finds the name, and counts a death for that job;
                            not if it was told to end
    committed ─▶ state of that many steps, or fewer, may be continued: those steps will not be trained differently

Invariants
- A job whose calls were under way in ``limits.service_deaths_isolated`` deaths computes alone from then on, for good.
- After ``limits.service_deaths_max`` deaths in a row, without a burst in between, a job is not served any more: its
  calls end the process, and with it every other job's slice.
- Kept state is of use to one run of a job only. Steps that were trained and not committed are of no use, since the next
  life of the trainer may get other samples for them.
- If the disk refuses a note, a death may not be counted, or kept state not be used, but the call succeeds.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import structlog

from actors.host.whole_file import write_whole
from configs.limits import Limits

log = structlog.get_logger("headrace.train_service")

_COMPUTING = "computing"
_JOBS = "jobs.json"


class JobNote(msgspec.Struct):
    """Holds the notes on one job."""

    run: str = ""
    committed: int = 0
    """Number of steps that the job has committed, as far as its present bundle knows."""
    deaths: int = 0
    """Number of the service's deaths during calls of the job."""
    deaths_in_a_row: int = 0


class Notes:
    """Keeps the notes in ``directory``, the service's own. Calls block while a small file is written."""

    def __init__(self, directory: Path, limits: Limits) -> None:
        self._directory = directory
        self._limits = limits
        self._jobs: dict[str, JobNote] = {}

    def open(self) -> str:
        """Read earlier lives' notes, before any call; returns the job during whose call the last life died, or ""."""
        self._directory.mkdir(parents=True, exist_ok=True)
        try:
            self._jobs = msgspec.json.decode((self._directory / _JOBS).read_bytes(), type=dict[str, JobNote])
        except (OSError, msgspec.DecodeError):
            self._jobs = {}
        try:
            blamed = (self._directory / _COMPUTING).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            blamed = ""
        if blamed:
            note = self._jobs.setdefault(blamed, JobNote())
            note.deaths += 1
            note.deaths_in_a_row += 1
            self._save()
            self._computing("")
        return blamed

    def close(self) -> None:
        """Note that the service was told to end, so that the job that it computes for is not blamed."""
        self._computing("")

    # ------------------------------------------------------------ who is to blame

    def begin(self, job: str) -> None:
        """Note that a call of ``job`` is about to be computed."""
        self._computing(job)

    def end(self, job: str, *, ends_burst: bool = False) -> None:
        """Note that the call of ``job`` has been computed, or has failed."""
        self._computing("")
        note = self._jobs.get(job)
        if ends_burst and note is not None and note.deaths_in_a_row:
            note.deaths_in_a_row = 0
            self._save()

    def is_isolated(self, job: str) -> bool:
        """Whether ``job`` has to compute alone."""
        return self._jobs.get(job, JobNote()).deaths >= self._limits.service_deaths_isolated

    def isolated(self) -> list[str]:
        """All jobs that have to compute alone."""
        return [job for job in self._jobs if self.is_isolated(job)]

    def is_refused(self, job: str) -> bool:
        """Whether ``job`` is not served any more, since its calls end the service."""
        return self._jobs.get(job, JobNote()).deaths_in_a_row >= self._limits.service_deaths_max

    # ------------------------------------------------------------ which state may be continued

    def may_go_on(self, job: str, run: str, steps: int) -> bool:
        """Whether state of ``job`` after ``steps`` steps belongs to ``run``, which has committed them."""
        note = self._jobs.get(job, JobNote())
        return note.run == run and steps <= note.committed

    def began(self, job: str, run: str, steps: int) -> None:
        """Note that a life of ``job``'s bundle has begun, from committed state of ``steps`` steps."""
        note = self._jobs.setdefault(job, JobNote())
        note.run, note.committed = run, steps
        self._save()

    def committed(self, job: str, steps: int) -> None:
        """Note that ``job`` has committed ``steps`` steps."""
        note = self._jobs.setdefault(job, JobNote())
        if steps > note.committed:
            note.committed = steps
            self._save()

    def forget(self, job: str) -> None:
        """Forget ``job``, which is over: another one of its name starts without notes."""
        if self._jobs.pop(job, None) is not None:
            self._save()

    # ------------------------------------------------------------ files

    def _computing(self, job: str) -> None:
        try:
            (self._directory / _COMPUTING).write_text(job, encoding="utf-8")
        except OSError as error:
            log.warning("who computes could not be noted", error=str(error))

    def _save(self) -> None:
        path = self._directory / _JOBS
        try:
            write_whole(path, msgspec.json.encode(self._jobs))
        except OSError as error:
            log.warning("what is known of the jobs could not be noted", error=str(error))
