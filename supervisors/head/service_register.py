"""Which training services a head has, and who has a place on them, in a file that its next life reads.

begin, add, drain, remove ─┐
admitted, left, over ──────┴─▶ head.services.json ─▶ a head that was started again: the same services, the same places

Invariants
- What heads of another machine process have left there, of an earlier run, counts as nothing.
- Services are changed only if the file says so. Places are changed, too, if the disk does not take them: nobody waits
  for a place because of it. People are told, and the next change, or step of a job, writes them all.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog
from pydantic import Field, ValidationError

from configs.errors import ConfigError
from configs.schema import Section
from configs.services import ServiceConfig, ServicesConfig

log = structlog.get_logger("headrace.services")

FILE: Final = "head.services.json"
"""File name, in the directory that holds those of the services."""


class Place(Section):
    """A place is what an admitted job has on a service until it is over."""

    service: str
    state_bytes: int
    """Bytes of its trained state, as they were reckoned when it was admitted."""
    since_s: float
    """Time of day at which it was admitted."""
    alone: bool = False
    """Whether nobody else may come to that service: it died again and again as it computed for this job."""


class Recorded(Section):
    """What is known of the services: what the file holds."""

    owner: str = ""
    """Machine process whose head wrote it."""
    rules: ServicesConfig = ServicesConfig(services=[])
    """The services file, with the services that there are now."""
    draining: tuple[str, ...] = ()
    """Services that take no further job."""
    places: dict[str, Place] = Field(default_factory=dict[str, Place])
    """Places by job."""
    over: dict[str, tuple[str, ...]] = Field(default_factory=dict[str, tuple[str, ...]])
    """Jobs by service that are over there, and of which it has not been told yet."""


class ServiceRegister:
    """It keeps the services of one head. ``owner``: the machine process of its lives."""

    def __init__(self, directory: Path, owner: str = "", *, on_news: Callable[[str], None] = lambda _: None) -> None:
        """``on_news``: told what those who share a service should know of the disk."""
        self._path = directory / FILE
        self._owner = owner
        self._on_news = on_news
        self._unwritten = False
        self.now = Recorded(owner=owner)

    def begin(self, rules: ServicesConfig) -> None:
        """A first life begins with the services of its file, and with no job on them."""
        self.now = Recorded(owner=self._owner, rules=rules)
        self._path.unlink(missing_ok=True)
        if rules.services:
            self._write(self.now)

    def read(self, *, of_anyone: bool = False) -> bool:
        """Go on with what a former life has written; False: it wrote nothing, as it died first or had no services.

        ``of_anyone``: also with what a run that is over has left.

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
        """What services that are no longer there had to be told is forgotten.

        Raises:
            OSError: it cannot be written, and nothing has changed.
        """
        rules = self.now.rules.model_copy(update={"services": services})
        names = {service.name for service in services}
        over = {name: jobs for name, jobs in self.now.over.items() if name in names}
        now = self.now.model_copy(update={"rules": rules, "draining": draining, "over": over})
        self._write(now)
        self.now = now

    def set_places(self, places: dict[str, Place]) -> None:
        self._keep(self.now.model_copy(update={"places": dict(places)}))

    def set_over(self, over: dict[str, tuple[str, ...]]) -> None:
        self._keep(self.now.model_copy(update={"over": over}))

    def try_again(self) -> None:
        """Write what the disk has not taken, if there is anything."""
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
        partial = self._path.with_name(self._path.name + ".partial")
        partial.write_text(now.model_dump_json(indent=1), encoding="utf-8")
        partial.replace(self._path)
        if self._unwritten:
            self._unwritten = False
            self._on_news(f"{self._path} is written again")
