"""The pages keep their word: links lead somewhere, what they name exists, job files and commands are valid."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import pytest
import typer
import yaml

from actors.environments.prompts.sources import open_source
from actors.environments.scoring.scorers import Example, make_scorer
from actors.trainer.checkpoint import checkpoint_path
from configs.checks.data_checks import check_data
from configs.fault_plan import FaultPlan
from configs.loader import read_job, schema_keys
from configs.scenario import Scenario
from configs.schema import JobConfig
from configs.services import ServicesConfig
from configs.tenants import TenantsConfig
from configs.validation import validate
from supervisors.cli.app import app
from supervisors.cli.looking.tables import COLUMNS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def names(page: Path) -> str:
    return str(page.relative_to(ROOT))


def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def prose(page: Path) -> str:
    return FENCE.sub("", text(page))


def fences(page: Path, *languages: str) -> Iterator[str]:
    yield from (body for language, body in FENCE.findall(text(page)) if language in languages)


def spans(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose(page))


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_every_link_leads_to_a_file(page: Path) -> None:
    targets = [target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", prose(page))]
    local = [target for target in targets if target and "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    seen, todo = set[Path](), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page in seen or page.suffix != ".md" or not page.exists():
            continue
        seen.add(page)
        targets = re.findall(r"\]\(([^)\s#]+)\)", prose(page))
        todo += [(page.parent / target).resolve() for target in targets if "://" not in target]
    assert [names(page) for page in PAGES if page not in seen] == []


def test_the_guides_tell_of_the_quickstart_as_its_job_file_has_it() -> None:
    """Its number of steps, and its checkpoints, the last of which is written at the end."""
    job = read_job(ROOT / "configs" / "quickstart.yaml")
    first_run, resume = (
        text(ROOT / "docs" / "guides" / f"{name}.md") for name in ("first_run", "resume_and_checkpoints")
    )
    told = re.findall(r"(\d+) steps|step 0 \(1 of (\d+)|step_0*(\d+)", first_run)
    assert {int(number) for found in told for number in found if number} == {job.steps}
    assert len(told) == 7
    kept = {checkpoint_path(Path("runs/quickstart"), step) for step in (job.steps, job.steps - job.checkpoint.every)}
    named = {Path(path) for path in re.findall(r"runs/quickstart/checkpoints/\w+", first_run + resume)}
    assert named <= kept
    assert named


def test_the_guide_to_many_jobs_shows_the_table_of_services_with_all_its_columns() -> None:
    page = ROOT / "docs" / "guides" / "many_jobs.md"
    (table,) = (body for body in fences(page, "text") if body.startswith("service"))
    assert re.split(r"  +", table.splitlines()[0]) == [column.replace("_", " ") for column in COLUMNS["services"]]


def test_the_guide_to_a_real_model_writes_prompts_that_its_job_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lines of the guide on a row as GSM8K has them; the right answer earns 1 from the job's own scorer."""
    row = {"question": "48 clips and half as many?", "answer": "48/2 = <<48/2=24>>24\n48+24 = <<48+24=72>>72\n#### 72"}

    def rows_of(*_: str, **__: str) -> list[dict[str, str]]:
        return [row]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", rows_of)
    (lines,) = fences(ROOT / "docs" / "guides" / "real_model.md", "python")
    exec(lines, {})
    job = validate(JobConfig, yaml.safe_load((ROOT / "configs" / "gpu_qwen.yaml").read_text()), lambda _: "the job")
    assert check_data(job) == []
    read = open_source(job.data, job.seed).row(0)
    assert (read.prompt, read.answer) == (row["question"], "72")
    example = Example(prompt=read.prompt, answer=read.answer, index=0, extra=read.extra)
    assert make_scorer(job)(r"Together \boxed{72}.", example) == 1.0
    assert make_scorer(job)(r"\boxed{24}", example) == 0.0


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_every_file_function_and_test_that_is_named_exists(page: Path) -> None:
    """`folder/file.py`, `folder/file.py::name`, `folder/`."""
    top = {path.name for path in ROOT.iterdir()}
    missing: list[str] = []
    for span in spans(page):
        path, _, name = span.partition("::")
        if not re.fullmatch(r"[\w./-]+", path) or "/" not in path or path.split("/")[0] not in top - {"runs"}:
            continue
        file = ROOT / path
        definition = rf"^\s*(async def|def|class) {name}\b"
        if not file.exists() or (name and not re.search(definition, text(file), re.MULTILINE)):
            missing.append(span)
    assert missing == []


def _job_snippets() -> list[Any]:
    found: list[Any] = []
    for page in PAGES:
        for number, body in enumerate(fences(page, "yaml")):
            if "\napiVersion: " in body:  # Kubernetes' own: tests/deploy/test_manifests.py
                continue
            found.append(pytest.param(body, id=f"{names(page)}-{number}"))
    return found


@pytest.mark.parametrize("snippet", _job_snippets())
def test_every_snippet_of_a_job_file_fits_the_schema(snippet: str, tmp_path: Path) -> None:
    """A part of a job file is tried in place of the quickstart's sections."""
    part = yaml.safe_load(snippet)
    if "jobs" in part:
        assert validate(Scenario, part, lambda _: "the snippet").jobs
        return
    if "services" in part:
        assert validate(ServicesConfig, part, lambda _: "the snippet").services
        return
    if "tenants" in part:
        assert validate(TenantsConfig, part, lambda _: "the snippet").tenants
        return
    if "faults" in part and set(part) <= {"seed", "faults"}:
        assert FaultPlan.model_validate(part).faults
        return
    assert set(part) <= set(JobConfig.model_fields)
    file = tmp_path / "job.yaml"
    whole = {"name", "steps", "model", "data", "reward"} <= set(part)
    rest = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    if not whole:
        for section, values in part.items():
            clash = isinstance(values, dict) and ("source" in values or "kind" in values)
            rest[section] = values if clash else rest.get(section, {}) | values if isinstance(values, dict) else values
    body = snippet if whole else yaml.safe_dump(rest)
    file.write_text(body, encoding="utf-8")
    assert read_job(file).name


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_every_key_and_limit_that_is_named_exists(page: Path) -> None:
    """`limits.x_s`, `rollout.workers`: whatever begins like a section of the job file."""
    known = {*schema_keys(), *(key.rpartition(".")[0] for key in schema_keys())}
    sections = {key.split(".")[0] for key in known if "." in key}
    named = [s for s in spans(page) if re.fullmatch(r"[a-z]+\.[a-z_0-9]+", s) and s.split(".")[0] in sections]
    files = {"metrics.jsonl", "eval.jsonl", "metrics.md", "limits.md", "model.json", "model.safetensors"}
    missing = [name for name in named if name not in known | files]
    assert [name for name in missing if not re.fullmatch(r"trainer\.rank\d", name)] == []  # a process's name


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_every_command_that_is_named_exists_with_its_options(page: Path) -> None:
    sources = [*spans(page), *(line for body in fences(page, "sh", "") for line in body.splitlines())]
    commands = [m for source in sources for m in re.findall(r"(?:^|[\s/(`])headrace ((?:[a-z-]|<)[^`#|)>]*)", source)]
    wrong = [f"headrace {command}" for command in commands if _problem(command.split())]
    assert wrong == []


@cache
def _headrace() -> Any:
    return typer.main.get_command(app)


def _problem(words: list[str]) -> str:
    """Why a command line as the pages write it could not be parsed; empty if it could."""
    group = _headrace()
    options = {"--help"}
    expect_value = False
    for word in words:
        flag = word.split("=")[0].strip("[],;.'\"")
        if group.context_settings.get("ignore_unknown_options"):
            return ""  # what follows belongs to somebody else: the benchmark that is named
        if expect_value:
            expect_value = False
        elif flag.startswith("--"):
            options |= {opt for param in group.params for opt in param.opts}
            param = next((p for p in group.params if flag in p.opts), None)
            if flag not in options:
                return f"no option {flag}"
            expect_value = param is not None and not param.is_flag
        elif hasattr(group, "commands"):
            options |= {opt for param in group.params for opt in param.opts}
            if word.strip(",.;:") not in group.commands:
                return f"no command {word}"
            group = group.commands[word.strip(",.;:")]
    return ""


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_every_make_target_that_is_named_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", text(ROOT / "Makefile"), re.MULTILINE))
    lines = [*spans(page), *(line for body in fences(page, "sh") for line in body.splitlines())]
    named = [match[1] for line in lines if (match := re.match(r"make ([a-z-]+)", line))]
    assert [name for name in named if name not in targets] == []
