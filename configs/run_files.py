"""Names of the files of a run; no other module spells them out.

RUN_DIR/
    job.yaml  began_with.json  model.json  model_nf4/    what the run is made of, and began with
    journal.db  checkpoints/  summary.json          how far it came, and how it ended
    metrics.jsonl  eval.jsonl  events.jsonl         records of its steps, evaluations, events,
    samples.jsonl  trace.json  tensorboard/  wandb_id  logs/      samples, spans, diagrams, output of its processes
    control.endpoint  gateway.endpoint  gateway.key     where its head and its gateway listen
    memory.id  run.lock  machines.json              what it uses on its machines
    prompt_rows.jsonl  micro_batches.json           which rows of its data are prompts; the tokens of a micro-batch
"""

from __future__ import annotations

from typing import Final

JOB_FILE: Final = "job.yaml"
"""The resolved job, as of the newest start or resume of the run."""
BEGAN_WITH: Final = "began_with.json"
MODEL_RECORD: Final = "model.json"
"""File that says which commit of a hub's model the run uses."""
ROUNDED_MODEL: Final = "model_nf4"
"""Copy of the model with its linear layers rounded to 4 bits, for ``model.adapter.quantization``."""
JOURNAL: Final = "journal.db"
CHECKPOINTS: Final = "checkpoints"
SUMMARY: Final = "summary.json"
METRICS: Final = "metrics.jsonl"
EVALUATIONS: Final = "eval.jsonl"
EVENTS: Final = "events.jsonl"
SAMPLES: Final = "samples.jsonl"
TRACE: Final = "trace.json"
TENSORBOARD: Final = "tensorboard"
WANDB_ID: Final = "wandb_id"
"""File that holds the id of the run at Weights & Biases."""
LOGS: Final = "logs"
CONTROL_ENDPOINT: Final = "control.endpoint"
GATEWAY_ENDPOINT: Final = "gateway.endpoint"
GATEWAY_KEY: Final = "gateway.key"
MEMORY_ID: Final = "memory.id"
RUN_LOCK: Final = "run.lock"
MACHINES: Final = "machines.json"
PROMPT_ROWS: Final = "prompt_rows.jsonl"
MICRO_BATCHES: Final = "micro_batches.json"
"""File that says how many tokens a micro-batch has from which step on, where they were measured or memory ran out."""

JOBS_FILE: Final = "jobs.json"
"""File of a directory in which one command has run several jobs: their run directories, in the order given."""
HEAD_JOBS: Final = "head.jobs.json"
"""File of a head's directory of runs: which jobs its next life goes on with."""
HEAD_SERVICES: Final = "head.services.json"
"""File of a head's directory of runs: what its next life knows of shared services."""
