"""``headrace schema``: the job file as JSON Schema, so that an editor completes, explains and checks its keys."""

from __future__ import annotations

import json
from typing import Any


def schema() -> None:
    """Print the JSON Schema of the job file: headrace schema > job.schema.json."""
    print(json.dumps(job_schema(), indent=1), flush=True)


def job_schema() -> dict[str, Any]:
    """All keys, with types, ranges, choices, defaults and what they mean."""
    from configs.schema import JobConfig

    found = JobConfig.model_json_schema()
    section, parts = found["properties"]["reward"], found["$defs"]["RewardConfig"]["properties"]["parts"]
    found["properties"]["reward"] = {"anyOf": [section, {"type": "array", "items": parts["items"]}]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found, "title": "Headrace job file"}
