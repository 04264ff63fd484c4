"""The tenants file, typed: who may use how much of a Tinker server.

    TENANTS.yaml ─▶ load_tenants ─▶ TenantsConfig ─▶ of(name): the tenant's quotas, else those of ``default``

    default: {models: 4}
    tenants:
      - {name: alice, training_tokens_per_s: 2000, saved_bytes: 20_000_000_000}

Invariants
- A tenant that the file does not name has the quotas of ``default``, and where that says nothing the server's limits.
- The file gives nobody a key (``headrace keys DIR --tenant NAME`` does), and leaving a tenant out takes none away.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

from pydantic import Field

from configs.errors import Found
from configs.section import PositiveFloat, PositiveInt, Section
from configs.validation import load_file

TENANT_NAME: Final = r"[a-z0-9_]{1,32}"
OPERATOR: Final = "operator"
"""Tenant whose keys may look at what all tenants use."""


class TenantQuotas(Section):
    """What one tenant may use. A key that is left out is as in ``default``; left out there, too, the server's limit
    holds.
    """

    models: PositiveInt | None = None
    """Models alive at once; unset: ``limits.tinker_models``."""
    training_tokens_per_s: PositiveFloat | None = None
    """Tokens of its calls ``forward`` and ``forward_backward`` in a second, averaged over ``limits.tinker_burst_s``.
    What is more waits in line; unset: any number."""
    saved_bytes: PositiveInt | None = None
    """Bytes on the disk of its states, saved weights and snapshots. A save begun below it is finished, one begun above
    it is refused; unset: any number."""
    requests: PositiveInt | None = None
    """Requests answered at once, polls that wait among them; unset: ``limits.tinker_tenant_requests``."""


class TenantConfig(TenantQuotas):
    """One tenant, and its quotas."""

    name: Annotated[str, Field(pattern=f"^{TENANT_NAME}$")]
    """As in its keys."""


class TenantsConfig(Section):
    """Quotas of the tenants of a Tinker server (``headrace serve … --tenants FILE``)."""

    default: TenantQuotas = TenantQuotas()
    """Quotas of tenants that are not named, and of those that are, where they say nothing else."""
    tenants: tuple[TenantConfig, ...] = ()
    """Tenants with quotas of their own."""

    def of(self, name: str) -> TenantQuotas:
        """The quotas of a tenant."""
        own = next((tenant for tenant in self.tenants if tenant.name == name), None)
        if own is None:
            return self.default
        return self.default.model_copy(update=own.model_dump(exclude_none=True, exclude={"name"}))


def load_tenants(path: str | Path) -> TenantsConfig:
    """The tenants file at ``path``.

    Raises:
        ConfigError: it cannot be read or does not fit; the message names line and field.
    """
    return load_file(
        TenantsConfig, path, holds="tenants keys", example="configs/shared/tenants.yaml", check=tenants_problems
    )


def tenants_problems(config: TenantsConfig) -> list[Found]:
    """Problems that the types of single fields do not exclude."""
    names = [tenant.name for tenant in config.tenants]
    return [
        (f"tenants.{index}.name", f"{name} is the name of two tenants", "Keep one of the two")
        for index, name in enumerate(names)
        if name in names[:index]
    ]
