"""The tenants file: whose quotas are which, and what is wrong with a file is said in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from configs.errors import ConfigError
from configs.serving import ServingConfig, address_of, problems_of
from configs.tenants import TenantQuotas, TenantsConfig, load_tenants

SHIPPED = Path(__file__).parents[2] / "configs" / "shared" / "tenants.yaml"


def loaded(tmp_path: Path, **content: Any) -> TenantsConfig:
    path = tmp_path / "tenants.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return load_tenants(path)


def test_a_tenant_has_its_own_quotas_then_those_of_default_then_none() -> None:
    config = load_tenants(SHIPPED)
    assert config.of("alice") == TenantQuotas(models=16, training_tokens_per_s=5000.0, saved_bytes=20_000_000_000)
    assert config.of("nobody_known") == config.default
    assert TenantsConfig().of("alice") == TenantQuotas()


@pytest.mark.parametrize(
    ("tenant", "says"),
    [
        (
            {"name": "a", "models": 0},
            "tenants.yaml:3: tenants.0.models: 0 is not allowed: expected greater than or equal",
        ),
        ({"name": "a", "training_tokens_per_s": -1}, "tenants.0.training_tokens_per_s: -1 is not allowed"),
        ({"name": "a", "training_tokens_per_s": 0}, "expected greater than 0"),
        ({"name": "a", "saved_bytes": 0.5}, "tenants.0.saved_bytes: 0.5 is not allowed"),
        ({"name": "a", "requests": 0}, "tenants.0.requests: 0 is not allowed"),
        ({"name": "a", "model": 3}, "there is no such key. Did you mean 'tenants.0.models'?"),
        ({"name": "A b"}, 'tenants.0.name: "A b" is not allowed'),
        ({"models": 3}, "tenants.0.name: is missing"),
    ],
)
def test_a_quota_that_cannot_be_is_refused_with_its_line(tmp_path: Path, tenant: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        loaded(tmp_path, tenants=[tenant])
    assert says in str(error.value)


def test_a_tenant_has_one_set_of_quotas(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tenants.1.name: a is the name of two tenants. Keep one of the two"):
        loaded(tmp_path, tenants=[{"name": "a"}, {"name": "a", "models": 2}])
    twice = TenantsConfig.model_validate({"tenants": [{"name": "a"}, {"name": "a"}]})
    assert "quotas.tenants.1.name" in [field for field, *_ in problems_of(ServingConfig(models=[], quotas=twice))]


@pytest.mark.parametrize("text", ["8900", ":8900", "localhost", "127.0.0.1:", "127.0.0.1:65536", "a:8_0", "a:-1", ""])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no address to listen at"):
        address_of(text)
    assert address_of("0.0.0.0:0") == ("0.0.0.0", 0)
    assert address_of("[::1]:8900") == ("::1", 8900)


def test_others_reach_a_server_with_tls_alone() -> None:
    def fields(**keys: Any) -> list[str]:
        return [field for field, *_ in problems_of(ServingConfig(models=[], **keys)) if field != "models"]

    assert fields(host="127.0.0.1") == fields(host="::1") == []
    assert fields(host="0.0.0.0") == ["host"]
    assert fields(tls_key=__file__) == ["tls_certificate"]
    assert fields(host="0.0.0.0", tls_certificate=__file__, tls_key="/no/such/file") == ["tls_key"]
    assert fields(host="0.0.0.0", tls_certificate=__file__, tls_key=__file__) == []
