"""Writes the reference pages that follow from code: ``python docs/reference/generate.py``.

    configs/schema.py ─▶ job_file.md          configs/*limits.py ─▶ limits.md
    configs/services.py ─▶ services.md        configs/tenants.py ─▶ tenants.md
    the command line  ─▶ command_line.md      every error class ─▶ errors.md
    configs/fault_plan.py ─▶ faults.md        configs/scenario.py ─▶ scenario.md
    the control protocol's verbs ─▶ a table of ../control_protocol.md
    benchmarks/papers/scenario.py, benchmarks/papers/setups ─▶ paper_scenario.md

``tests/docs/test_reference.py`` fails when a page is not what this file would write. Error classes are found in the
syntax trees of the sources, so that nothing heavy is imported.
"""

from __future__ import annotations

import ast
import json
import re
import types
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from annotated_types import Ge, Gt, Le, Lt
from msgspec import NODEFAULT, structs
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from actors.control.verbs import VERBS
from benchmarks.papers.scenario import Claim, PaperScenario, Study
from configs.fault_plan import KINDS, ChunkTarget, FaultBase, FaultPlan, Target
from configs.limits import Limits
from configs.provider_schema import SpotConfig
from configs.scenario import Costs, FaultsConfig, NetworkConfig, RandomFaults, Scenario, SimulatedJob, Variant
from configs.schema import JobConfig
from configs.services import QuotaConfig, ServiceConfig, ServicesConfig
from configs.tenants import TenantQuotas, TenantsConfig

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NOTE = "<!-- Written by docs/reference/generate.py; edit the code it reads, not this page. -->\n"

# ------------------------------------------------------------ job file and limits


def job_file() -> str:
    """Every key of a job file, section by section."""
    parts = [
        "# The job file",
        NOTE,
        "YAML. Unknown keys are errors, and so are wrong types: a quoted number is refused, not guessed. Any key can",
        "be set on the command line: `headrace run JOB.yaml --set rollout.workers=4`. Relative paths are",
        "taken from the working directory, else from beside the file. What contradicts itself, or what this machine",
        "lacks, is said before anything starts, with exit code 2.\n",
        "## Top level\n",
        _table(JobConfig, "", told_apart=[name for name, _ in _inner_sections(JobConfig)]),
    ]
    for name, section in _inner_sections(JobConfig):
        if section is Limits:
            continue
        parts += _section_pages(name, section, "##")
    parts += ["\n## limits\n", "Bounds and time-outs, all with defaults: [limits.md](limits.md).\n"]
    return "\n".join(part for part in parts if part)


def _section_pages(key: str, section: type[BaseModel], mark: str) -> list[str]:
    """The keys of a section, then those of the sections within it."""
    inner_ones = dict(_inner_sections(section))
    parts = [f"\n{mark} {key}\n", _own_docstring(section), _table(section, f"{key}.", told_apart=inner_ones)]
    for name, inner in inner_ones.items():
        parts += _section_pages(f"{key}.{name}", inner, "###")
    return parts + [text for name, item in _lists(section) for text in _items(f"{key}.{name}", item)]


def _lists(section: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """The keys that are lists of sections, and what their items are."""
    for key, info in section.model_fields.items():
        items = get_args(info.annotation) if get_origin(info.annotation) is list else ()
        if items and isinstance(items[0], type) and issubclass(items[0], BaseModel):
            yield key, items[0]


def _inner_sections(section: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """The keys that hold a section, or perhaps one."""
    for key, info in section.model_fields.items():
        if (whole := _section(info)) is not None:
            yield key, whole
        inner = [part for part in get_args(info.annotation) if isinstance(part, type) and issubclass(part, BaseModel)]
        if inner and get_origin(info.annotation) is types.UnionType:
            yield key, inner[0]


def _items(key: str, item: type[BaseModel]) -> list[str]:
    return [f"\n### {key}\n", f"Each item. {_own_docstring(item)}", _table(item, f"{key}[].")]


def _own_docstring(section: type[BaseModel]) -> str:
    doc = section.__dict__.get("__doc__") or ""
    return f"{_markdown(doc)}\n" if doc else ""


def _table(model: type[BaseModel], prefix: str, told_apart: Container[str] = ()) -> str:
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, info in model.model_fields.items():
        if _section(info) is not None or name in told_apart:
            continue
        kind, meaning = _type(info.annotation, info.metadata), _cell(info.description or "")
        rows.append(f"| `{prefix}{name}` | {kind} | {_default(info)} | {meaning} |")
    return "\n".join(rows)


def _section(info: FieldInfo) -> type[BaseModel] | None:
    kind = info.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _type(kind: Any, metadata: list[Any]) -> str:
    """A type as a person would say it, with its bounds."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _type(arguments[0], [*_constraints(arguments[1:]), *metadata])
    if origin in (Union, types.UnionType):
        parts = ["unset" if part is type(None) else _type(part, metadata) for part in arguments]
        return " or ".join(dict.fromkeys(parts))
    if origin is Literal:
        return " or ".join(f"`{choice}`" for choice in arguments)
    if origin in (list, tuple):
        fixed = origin is tuple and arguments[-1] is not Ellipsis
        return "list of " + _type(arguments[0], []) + (f", {len(arguments)} of them" if fixed else "")
    if origin is dict:
        return "map"
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "section"
    plain = {Any: "text", int: "whole number", float: "number", str: "text", bool: "true or false"}[kind]
    return " ".join([plain, *_bounds(metadata)])


def _constraints(items: tuple[Any, ...]) -> Iterator[Any]:
    for item in items:
        if isinstance(item, FieldInfo):
            yield from item.metadata
        else:
            yield item


def _bounds(metadata: list[Any]) -> Iterator[str]:
    for item in metadata:
        if isinstance(item, Ge):
            yield f"≥ {item.ge}"
        elif isinstance(item, Gt):
            yield f"> {item.gt}"
        elif isinstance(item, Le):
            yield f"≤ {item.le}"
        elif isinstance(item, Lt):
            yield f"< {item.lt}"
        elif getattr(item, "pattern", None):
            yield f"matching `{item.pattern}`"


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "**required**"
    value = info.get_default(call_default_factory=True)
    return "unset" if value is None else f"`{json.dumps(value)}`"


def limits() -> str:
    """Every limit, grouped as in the source."""
    parts = [
        "# Limits",
        NOTE,
        "Bounds of queues and deadlines of waits, with the reason for each. Set one for a job under `limits` in its",
        "file, or with `--set limits.ask_timeout_s=20`. Units are at the ends of the names.",
    ]
    groups = _limit_groups()
    for name, info in Limits.model_fields.items():
        if name in groups:
            parts += [f"\n## {groups[name]}\n", "| limit | default | why |", "|---|---|---|"]
        parts.append(f"| `{name}` | {info.default} | {_cell(info.description or '')} |")
    return "\n".join(parts)


def _limit_groups() -> dict[str, str]:
    """The first limit of each group → the group's comment."""
    found: dict[str, str] = {}
    heading = ""
    files = [ROOT / "configs" / name for name in ("process_limits.py", "limits.py")]
    for line in "\n".join(file.read_text(encoding="utf-8") for file in files).splitlines():
        if comment := re.fullmatch(r"    # (.+)", line):
            heading = comment[1]
        elif heading and (name := re.match(r"    (\w+): (?:int|float) = limit", line)):
            found[name[1]], heading = heading.capitalize(), ""
    return found


# ------------------------------------------------------------ services


def services() -> str:
    """Every key of a services file."""
    parts = [
        "# The services file",
        NOTE,
        "YAML, for `headrace run`, `headrace head` and `headrace check` with `--services FILE`:",
        "[how to use it](../guides/many_jobs.md). A job names a service in `trainer.service`.\n",
        "## Top level\n",
        _table(ServicesConfig, ""),
    ]
    for name, model in (("services", ServiceConfig), ("quotas", QuotaConfig)):
        parts += [f"\n## {name}\n", "A list; each of its items:\n", _own_docstring(model), *_section_tables(model, "")]
    return "\n".join(part for part in parts if part)


def tenants() -> str:
    """Every key of a tenants file."""
    parts = [
        "# The tenants file",
        NOTE,
        "YAML, for `headrace serve` with `--tenants FILE`: [how to use it](../guides/serve.md#a-teams-server).",
        "In a file for `headrace head --serve FILE` the same stands under `quotas`.\n",
        "## Top level\n",
        _table(TenantsConfig, ""),
        "\n## default\n",
        *_section_tables(TenantQuotas, ""),
        "\n## tenants\n",
        "A list. Each of its items has a `name`, as in the tenant's keys, and any of the keys of `default`.",
    ]
    return "\n".join(part for part in parts if part)


# ------------------------------------------------------------ scenarios


def scenario() -> str:
    """Every key of a scenario file."""
    sections: list[tuple[str, type[BaseModel]]] = [
        ("jobs", SimulatedJob), ("variants", Variant), ("spot", SpotConfig), ("costs", Costs),
        ("network", NetworkConfig),
        ("faults", FaultsConfig),
        ("faults.random", RandomFaults),
    ]  # fmt: skip
    parts = [
        "# The scenario file",
        NOTE,
        "YAML, for `headrace simulate`: [how to use it](../guides/simulation.md). Times are virtual seconds.",
        "`limits` may set any [limit](limits.md) for all jobs and processes.\n",
        "## Top level\n",
        _table(Scenario, ""),
    ]
    for name, model in sections:
        prefix = "" if name == "jobs" else f"{name}."
        parts += [f"\n## {name}\n", _own_docstring(model), _table(model, prefix)]
    return "\n".join(part for part in parts if part)


def paper_scenario() -> str:
    """Every key of the scenario of a published result, and of each kind of study."""
    parts = [
        "# The scenario file of a published result",
        NOTE,
        "YAML in `configs/papers/`, for `headrace simulate`:",
        "[how to use it](../guides/simulation.md#published-results).\n",
        "## Top level\n",
        _table(PaperScenario, ""),
        "\n## claims\n",
        _own_docstring(Claim),
        _table(Claim, ""),
    ]
    for model in get_args(get_args(Study)[0]):
        kind = get_args(model.model_fields["kind"].annotation)[0]
        parts += [f"\n## study of kind {kind}\n", _own_docstring(model), *_section_tables(model, "study.")]
    return "\n".join(part for part in parts if part)


def _section_tables(model: type[BaseModel], prefix: str) -> Iterator[str]:
    """The table of a section and those of the sections in it."""
    yield _table(model, prefix)
    for name, info in model.model_fields.items():
        if (section := _section(info)) is not None:
            yield f"\n### {prefix}{name}\n"
            yield _own_docstring(section)
            yield from _section_tables(section, f"{prefix}{name}.")


# ------------------------------------------------------------ faults


def faults() -> str:
    """The vocabulary of faults: each kind, what it can hit, and its keys."""
    parts = [
        "# Faults",
        NOTE,
        "What a fault plan, `headrace ctl inject` and a scenario of the simulator may do to a run. How to use it:",
        "[fault injection](../guides/fault_injection.md).\n",
        "## A plan\n",
        _table(FaultPlan, ""),
        "\n## Every fault\n",
        _table(FaultBase, ""),
        "\n## target\n",
        _own_docstring(Target),
        _table(Target, "target."),
        "\n### target.chunk\n",
        _own_docstring(ChunkTarget),
        _table(ChunkTarget, "target.chunk."),
    ]
    for name, kind in KINDS.items():
        parts += [f"\n## {name}\n", *_kind(kind)]
    return "\n".join(part for part in parts if part)


def _kind(kind: type[FaultBase]) -> list[str]:
    own = [name for name in kind.model_fields if name not in FaultBase.model_fields]
    hits = ", ".join(f"`{form}`" for form in kind.HITS)
    roles = ", ".join(f"`{role}`" for role in kind.ROLES) if "role" in kind.HITS else ""
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"] if own else []
    for name in own:
        info = kind.model_fields[name]
        cells = (_type(info.annotation, info.metadata), _default(info), _cell(info.description or ""))
        rows.append(f"| `{name}` | {' | '.join(cells)} |")
    paragraphs = (kind.__doc__ or "").split("\n\n")
    text = "\n\n".join(_markdown(paragraph) for paragraph in paragraphs)
    return [text, f"\nHits: {hits}{f'; roles {roles}' if roles else ''}.\n", *rows]


# ------------------------------------------------------------ command line


def command_line() -> str:
    """Every command with its arguments and options."""
    from supervisors.cli.app import app

    root: Any = typer.main.get_command(app)
    parts = [
        "# The command line",
        NOTE,
        "`headrace` after `make install`, or `python main.py` in a clone. Exit codes of `headrace run`: 0 finished;",
        "1 failed; 2 bad configuration or usage; 130 interrupted, after a checkpoint. Of `headrace ctl`: 0 done; 1 the",
        "server said no, or cannot be reached; 2 the request is wrong, or no run was found to ask.",
    ]
    for words, command in _commands(root, ["headrace"]):
        parts += _command(words, command)
    return "\n".join(parts) + "\n"


_VERB_TABLE = "| op | args | result | changes something |"


def control_protocol() -> str:
    """The page, with its table of verbs as they are declared."""
    before, _, rest = (HERE.parent / "control_protocol.md").read_text("utf-8").partition(_VERB_TABLE)
    rows: list[str] = []
    for op, verb in VERBS.items():
        arguments = ", ".join(map(_argument, structs.fields(verb)))
        rows.append(
            f"| `{op}` |{f' {arguments}' if arguments else ''} | {verb.gives} | {'yes' if verb.writes else 'no'} |"
        )
    return "\n".join([before + _VERB_TABLE, "|---|---|---|---|", *rows, "", rest.partition("\n\n")[2]])


def _argument(argument: structs.FieldInfo) -> str:
    if argument.default is None:
        return f"`{argument.name}?`"
    if argument.default is not NODEFAULT:
        return f"`{argument.name}` = {argument.default:g}"
    about = next((meta.description for meta in getattr(argument.type, "__metadata__", ())), "")
    return f"`{argument.name}`" + (f": {about[0].lower()}{about[1:].rstrip('.')}" if about else "")


def _commands(group: Any, words: list[str]) -> Iterator[tuple[list[str], Any]]:
    for name, command in group.commands.items():
        if command.hidden:
            continue
        yield [*words, name], command
        if hasattr(command, "commands"):
            yield from _commands(command, [*words, name])


def _command(words: list[str], command: Any) -> list[str]:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and "--help" not in p.opts]
    names = [(p.metavar or p.name.upper()) if p.required else f"[{p.metavar or p.name.upper()}]" for p in arguments]
    usage = " ".join([*words, *names])
    lines = [f"\n## {' '.join(words)}\n", f"`{usage}`\n", _markdown(command.help or "")]
    if arguments or options:
        lines += ["", "| argument or option | meaning |", "|---|---|"]
    lines += [f"| `{p.metavar or p.name.upper()}` | {_cell(p.help or '')} |" for p in arguments]
    lines += [f"| `{_option(p)}` | {_cell(p.help or '')}{_option_default(p)} |" for p in options]
    return lines


def _option(parameter: Any) -> str:
    flag = "/".join(parameter.opts)
    return flag if parameter.is_flag else f"{flag} {parameter.metavar or parameter.name.strip('_').upper()}"


def _option_default(parameter: Any) -> str:
    default = parameter.show_default if isinstance(parameter.show_default, str) else parameter.default
    shown = isinstance(default, str | int | float | Path) and not isinstance(default, bool)
    return f" Default: `{default}`." if shown else ""


# ------------------------------------------------------------ errors


@dataclass
class ErrorClass:
    """One exception class as its source tells of it."""

    name: str
    base: str
    file: str
    doc: str
    children: list[ErrorClass] = field(default_factory=list)


def errors() -> str:
    """The whole tree of exceptions, from the sources."""
    found = _error_classes()
    for item in found.values():
        if item.base in found:
            found[item.base].children.append(item)
    tree = _draw(found["HeadraceError"], "", "")
    parts = [
        "# Errors",
        NOTE,
        "What Headrace raises on purpose derives from `HeadraceError`; only `ConfigError` is a `ValueError`, since the",
        "package `configs` imports nothing of ours. How failures are judged:",
        "[typed failures](../concepts/typed_failures.md).\n",
        "```",
        *tree,
        "```",
        "",
        "| error | defined in | meaning |",
        "|---|---|---|",
    ]
    listed = [*_flat(found["HeadraceError"]), found["ConfigError"]]
    parts += [f"| `{item.name}` | `{item.file}` | {_cell(item.doc)} |" for item in listed]
    return "\n".join(parts)


def _error_classes() -> dict[str, ErrorClass]:
    found: dict[str, ErrorClass] = {}
    bases: list[tuple[str, ErrorClass]] = []
    for package in ("configs", "transport", "actors", "supervisors"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and node.bases:
                    base = ast.unparse(node.bases[0]).rpartition(".")[2]
                    doc = (ast.get_docstring(node) or "").split("\n\n")[0]
                    item = ErrorClass(node.name, base, str(path.relative_to(ROOT)), doc)
                    bases.append((node.name, item))
    known = {"HeadraceError", "ConfigError"}
    while True:
        new = {name: item for name, item in bases if name not in found and (name in known or item.base in found)}
        if not new:
            return found
        found |= new


def _draw(item: ErrorClass, lead: str, stem: str) -> list[str]:
    lines = [lead + item.name]
    for index, child in enumerate(item.children):
        last = index == len(item.children) - 1
        lines += _draw(child, stem + ("└── " if last else "├── "), stem + ("    " if last else "│   "))
    return lines


def _flat(item: ErrorClass) -> Iterator[ErrorClass]:
    yield item
    for child in item.children:
        yield from _flat(child)


# ------------------------------------------------------------ text


def _markdown(text: str) -> str:
    return " ".join(text.replace("``", "`").split())


def _cell(text: str) -> str:
    return _markdown(text).replace("|", "\\|")


PAGES = {
    "job_file.md": job_file,
    "faults.md": faults,
    "limits.md": limits,
    "services.md": services,
    "tenants.md": tenants,
    "scenario.md": scenario,
    "paper_scenario.md": paper_scenario,
    "command_line.md": command_line,
    "../control_protocol.md": control_protocol,
    "errors.md": errors,
}


def main() -> None:
    """Write every page."""
    for name, render in PAGES.items():
        (HERE / name).write_text(render().rstrip("\n") + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
