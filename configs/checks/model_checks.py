"""Checks that each model is a directory that looks like one, or a name that the hub or the cache knows."""

from __future__ import annotations

import os
import re
import urllib.error
import urllib.request
from pathlib import Path

from configs.checks.model_files import problem_of
from configs.errors import Found
from configs.hub_names import is_hub_name
from configs.limits import DEFAULT_LIMITS
from configs.model_files import ModelFileBroken, has_chat_template, why_too_long
from configs.schema import JobConfig

_REVISION = re.compile(r"[A-Za-z0-9][\w.+-]*(/[\w.+-]+)*")
_YES = ("1", "ON", "YES", "TRUE")


def check_model(job: JobConfig) -> list[Found]:
    """Problems of the policy's model, as (field, what is wrong, what to do)."""
    problems = _check_model_path(job)
    return [*problems, *_check_revision(job), *([] if problems else _check_model_files(job))]


def check_ranker_model(job: JobConfig) -> list[Found]:
    """Problems of the model that learns how long responses get."""
    given, ranking = job.rollout.ranker_model, job.rollout.length_ranking
    if given is None:
        return []
    if ranking != "learned":
        fix = "Remove it, or set rollout.length_ranking to learned"
        return [("rollout.ranker_model", f"is set, but rollout.length_ranking is {ranking}", fix)]
    if not (Path(given).expanduser() / "config.json").is_file():
        wrong = f"{given!r} is no Hugging Face model directory: it has no config.json"
        return [("rollout.ranker_model", wrong, "Name the directory that from_pretrained would load")]
    problem = problem_of(Path(given).expanduser(), given, weights=True)
    return [("rollout.ranker_model", *problem)] if problem else []


def _check_revision(job: JobConfig) -> list[Found]:
    revision = job.model.revision
    if revision is None:
        return []
    if job.model.source == "tiny" or (job.model.path and Path(job.model.path).expanduser().exists()):
        wrong = f"{revision!r} is set, but only a hub name has revisions, and the model is none"
        return [("model.revision", wrong, "Remove it, or set model.path to a hub name")]
    if _REVISION.fullmatch(revision) is None or ".." in revision:
        wrong = f"{revision!r} is no branch, tag or commit"
        return [("model.revision", wrong, "Use a name such as main, or a commit of 40 hexadecimal digits")]
    return []


def _check_model_path(job: JobConfig) -> list[Found]:
    if job.model.source == "tiny":
        return []
    if not job.model.path:
        return [
            (
                "model.path",
                "is missing, and model.source is hf",
                "Name a Hugging Face directory or hub name, or use source: tiny",
            )
        ]
    path = Path(job.model.path).expanduser()
    if path.exists():
        adapter = (path / "adapter_config.json").is_file()  # problem_of says how to make it a whole model
        if not (path / "config.json").is_file() and not adapter:
            wrong = f"{job.model.path!r} is no Hugging Face model directory: it has no config.json"
            return [("model.path", wrong, "Name the directory that from_pretrained would load")]
        loaded = job.trainer.backend != "simulated" or job.rollout.engine != "simulated"
        problem = problem_of(path, job.model.path, weights=loaded)
        return [("model.path", *problem)] if problem else []
    if not is_hub_name(job.model.path):
        wrong = f"{job.model.path!r} does not exist and is no hub name"
        return [("model.path", wrong, "Name an existing directory, or a hub name such as Qwen/Qwen3-0.6B")]
    problem = hub_problem(job.model.path)
    return [("model.path", *problem)] if problem else []


def _check_model_files(job: JobConfig) -> list[Found]:
    """Keys that the files of a local model contradict; a hub model's files are checked once they are fetched."""
    if job.data.chat and job.model.source == "tiny" and not job.model.path:
        wrong = "is set, but a tiny model that is made on the spot has no chat template"
        return [("data.chat", wrong, "Unset it, and write the form of the prompt into data.template")]
    path = Path(job.model.path or "").expanduser()
    if not job.model.path or not (path / "config.json").is_file():
        return []
    try:
        found = why_too_long(job, path)
        problems = [found] if found else []
        if job.data.chat and not has_chat_template(path):
            wrong = f"is set, but the tokenizer in {job.model.path!r} has no chat template"
            fix = "Unset it, or put the template beside the tokenizer as chat_template.jinja"
            problems.append(("data.chat", wrong, fix))
    except ModelFileBroken as error:
        return [("model.path", str(error), "Or name another directory")]
    return problems


def hub_problem(name: str) -> tuple[str, str] | None:
    """Why ``name`` cannot be loaded: it is neither cached nor on a hub that can be reached; None: it can."""
    if (_folder_in_cache(name) / "snapshots").is_dir():
        return None
    fix = "Name a local directory, or download the model where the hub can be reached"
    if (os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or "").upper() in _YES:
        return f"{name!r} is neither a directory nor in the cache, and HF_HUB_OFFLINE forbids the hub", fix
    hub = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    if not hub.startswith(("https://", "http://")):
        return f"HF_ENDPOINT is {hub!r}, which is no web address", "Mend it, or name a local directory"
    request = urllib.request.Request(f"{hub}/api/models/{name}", method="HEAD")  # noqa: S310  the scheme has been checked
    try:
        with urllib.request.urlopen(request, timeout=DEFAULT_LIMITS.hub_probe_s):  # noqa: S310
            return None
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):  # private or missing: the download itself sends the token
            token = (
                os.environ.get("HF_TOKEN") or (_hub_home() / "token").is_file()
            )  # the file is what `hf auth login` writes
            return None if token else (f"{name!r} does not exist on the hub, or needs HF_TOKEN", fix)
        return (f"the hub has no model {name!r}", "Check the name") if error.code == 404 else None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return f"{name!r} is neither a directory nor in the cache, and the hub cannot be reached ({reason})", fix


def _hub_home() -> Path:
    return Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")


def _folder_in_cache(name: str) -> Path:
    return Path(os.environ.get("HF_HUB_CACHE") or _hub_home() / "hub") / f"models--{name.replace('/', '--')}"


def check_optimizer(job: JobConfig) -> list[Found]:
    """Problems of a job whose optimizer needs all of a model in one process."""
    name, backend = job.trainer.optimizer, job.trainer.backend
    if name == "adamw":
        return []
    if backend == "fsdp":
        wrong = f"{name}, which needs whole matrices, and a rank of trainer.backend: fsdp has some rows of each"
        return [("trainer.optimizer", wrong, "Leave it out, or set trainer.backend to torch")]
    if job.model.adapter is not None:
        wrong = f"{name}, which is for whole models, and model.adapter is set"
        return [("trainer.optimizer", wrong, "Leave it out, or leave model.adapter out")]
    return []


def model_directory(path: str, revision: str) -> Path:
    """The directory of a model that is named by its ``path``: its own, or that in the cache of the hub."""
    directory = Path(path).expanduser()
    return _cached(path, revision) if is_hub_name(path) and not directory.exists() else directory


def _cached(name: str, revision: str) -> Path:
    """Where the cache of the hub has a model of that name."""
    folder = _folder_in_cache(name)
    named = folder / "refs" / revision
    return folder / "snapshots" / (named.read_text("utf-8").strip() if named.is_file() else revision)
