"""What a training service must know of its jobs after it has died: kept in its directory, since it forgets itself.

    begin ─▶ ``computing`` holds the job's name ─▶ end: it is empty ─▶ a burst is over: the row of deaths ends
                        └── the process dies: its next life finds the name, and counts a death for that job;
                            not if it was told to end
    committed ─▶ state of that many steps, or fewer, may be gone on from: nobody trains those steps in another way

Invariants
- A job that was computed for in ``limits.service_deaths_isolated`` deaths computes alone from then on, for good.
- After ``limits.service_deaths_max`` deaths in a row, without a burst in between, it is not served any more:
  whatever it has computed ends the process, and with it every other job's slice.
- What is kept of a job is of use to one run of it. Steps that were trained and not committed are of use to nobody: the
  next life of the trainer may be given other samples for them.
- A disk that does not take a note costs the suspicion, or the kept state, never the call.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import structlog

from configs.limits import Limits

log = structlog.get_logger("headrace.train_service")

_COMPUTING = "computing"
_JOBS = "jobs.json"


class JobNote(msgspec.Struct):
    """What is known of one job."""

    run: str = ""
    committed: int = 0
    """Steps that it has committed since its present bundle began."""
    deaths: int = 0
    """Deaths of the service in its calls."""
    deaths_in_a_row: int = 0


class Notes:
    """It keeps the notes in ``directory``, the service's own. Calls block for as long as a small file takes."""

    def __init__(self, directory: Path, limits: Limits) -> None:
        self._directory = directory
        self._limits = limits
        self._jobs: dict[str, JobNote] = {}

    def open(self) -> str:
        """Read what earlier lives have left, before any call; the job that the last one died for, if it did."""
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
        """The service was told to end: whoever it computes for is not to blame."""
        self._computing("")

    # ------------------------------------------------------------ who is to blame

    def begin(self, job: str) -> None:
        """A call of ``job`` is about to be computed."""
        self._computing(job)

    def end(self, job: str, *, ends_burst: bool = False) -> None:
        """It has been computed, or has failed."""
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
        """Whether ``job`` ends the service whenever it computes."""
        return self._jobs.get(job, JobNote()).deaths_in_a_row >= self._limits.service_deaths_max

    # ------------------------------------------------------------ what may be gone on from

    def may_go_on(self, job: str, run: str, steps: int) -> bool:
        """Whether state of ``job`` with so many steps belongs to this run, which has committed them."""
        note = self._jobs.get(job, JobNote())
        return note.run == run and steps <= note.committed

    def began(self, job: str, run: str, steps: int) -> None:
        """A life of the bundle of ``job`` has begun, from committed state of so many steps."""
        note = self._jobs.setdefault(job, JobNote())
        note.run, note.committed = run, steps
        self._save()

    def committed(self, job: str, steps: int) -> None:
        """``job`` has committed so many steps."""
        note = self._jobs.setdefault(job, JobNote())
        if steps > note.committed:
            note.committed = steps
            self._save()

    def forget(self, job: str) -> None:
        """``job`` is over: another one of its name starts without a past."""
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
            partial = path.with_suffix(".partial")
            partial.write_bytes(msgspec.json.encode(self._jobs))
            partial.replace(path)
        except OSError as error:
            log.warning("what is known of the jobs could not be noted", error=str(error))
