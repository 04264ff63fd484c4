"""The training services of a head, and which jobs have a place on them, in a file that its next life reads.

begin, add, drain, remove ─┐
admitted, left, over ──────┴─▶ head.services.json ─▶ a restarted head: the same services, the same places

Invariants
- Entries that the heads of another machine process wrote, in an earlier run, are ignored.
- A change of services counts only once it is in the file. A change of places counts even if the disk is full, so that
  no job waits for its place; users are told, and the next change, or the next step of a job, tries to write again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import structlog
from pydantic import Field, ValidationError

from actors.host.whole_file import write_whole
from configs.errors import ConfigError
from configs.run_files import HEAD_SERVICES
from configs.schema import Section
from configs.services import ServiceConfig, ServicesConfig

log = structlog.get_logger("headrace.services")


class ServicePlace(Section):
    """A job has this place on a service from its admission to its end."""

    service: str
    state_bytes: int
    """Bytes of its trained state, as estimated when it was admitted."""
    since_s: float
    """Time of day at which it was admitted."""
    alone: bool = False
    """Whether no other job may come to that service, because it died again and again while computing for this one."""


class Recorded(Section):
    """The file holds this, as JSON."""

    owner: str = ""
    """Machine process whose head wrote it."""
    rules: ServicesConfig = ServicesConfig(services=[])
    """The services file, with the services that there are now."""
    draining: tuple[str, ...] = ()
    """Services that take no further job."""
    places: dict[str, ServicePlace] = Field(default_factory=dict[str, ServicePlace])
    """Places by job."""
    over: dict[str, tuple[str, ...]] = Field(default_factory=dict[str, tuple[str, ...]])
    """Jobs that are over, by the service that has not been told so yet."""


class ServiceRegister:
    """The register keeps the services of one head, and their jobs. ``owner``: the machine process that starts heads."""

    def __init__(self, directory: Path, owner: str = "", *, on_news: Callable[[str], None] = lambda _: None) -> None:
        """``on_news``: called with a message for users when the disk cannot be written, and when it can again."""
        self._path = directory / HEAD_SERVICES
        self._owner = owner
        self._on_news = on_news
        self._unwritten = False
        self.now = Recorded(owner=owner)

    def begin(self, rules: ServicesConfig) -> None:
        """Begin the first life of a head, with the services of its file and no job on them."""
        self.now = Recorded(owner=self._owner, rules=rules)
        self._path.unlink(missing_ok=True)
        if rules.services:
            self._write(self.now)

    def read(self, *, of_anyone: bool = False) -> bool:
        """Take over what a former life wrote; False if there is nothing, as it died too early or had no services.

        ``of_anyone``: also take over the file of an earlier run.

        Raises:
            ConfigError: the file is damaged.
        """
        try:
            found = Recorded.model_validate_json(self._path.read_text("utf-8"))
        except FileNotFoundError:
            return False
        except (OSError, ValidationError) as error:
            why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
            wrong = f"cannot be read, so nobody knows which services there are: {why}"
            fix = "Remove it, and name the services with --services FILE"
            raise ConfigError.of(str(self._path), "", wrong, fix) from error
        if not of_anyone and found.owner != self._owner:
            return False
        self.now = found
        return True

    def set_services(self, services: list[ServiceConfig], draining: tuple[str, ...]) -> None:
        """Set which services there are, and forget what removed ones were still to be told.

        Raises:
            OSError: the file cannot be written, and nothing has changed.
        """
        rules = self.now.rules.model_copy(update={"services": services})
        names = {service.name for service in services}
        over = {name: jobs for name, jobs in self.now.over.items() if name in names}
        now = self.now.model_copy(update={"rules": rules, "draining": draining, "over": over})
        self._write(now)
        self.now = now

    def set_places(self, places: dict[str, ServicePlace]) -> None:
        self._keep(self.now.model_copy(update={"places": dict(places)}))

    def set_over(self, over: dict[str, tuple[str, ...]]) -> None:
        self._keep(self.now.model_copy(update={"over": over}))

    def try_again(self) -> None:
        """Write again if the last attempt has failed."""
        if self._unwritten:
            self._keep(self.now)

    def _keep(self, now: Recorded) -> None:
        self.now = now
        try:
            self._write(now)
        except OSError as error:
            if not self._unwritten:
                self._unwritten = True
                log.warning("the places of jobs cannot be written", file=str(self._path), error=str(error))
                self._on_news(
                    f"{self._path} cannot be written ({error.strerror}): jobs get their places on services all the "
                    "same, but should the head end now, its next life knows only what it wrote last. Make room there"
                )

    def _write(self, now: Recorded) -> None:
        write_whole(self._path, now.model_dump_json(indent=1))
        if self._unwritten:
            self._unwritten = False
            self._on_news(f"{self._path} is written again")
