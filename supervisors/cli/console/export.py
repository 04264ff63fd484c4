"""The page of the console as one file that stands alone: its scripts, its style and all that it shows are inside.

    a run ─▶ Feed ─ sections, cards of samples ─┐
    facts, pictures, job.yaml ──────────────────┴─▶ index.html with all of it ─▶ opened from a disk, without a server

For what is no run (a study, services that jobs share) the page has only facts and pictures.
"""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from configs.limits import DEFAULT_LIMITS
from supervisors.cli.console.feed import Feed
from supervisors.cli.console.run_files import RunFiles
from supervisors.cli.console.server import PAGE, encode

_ALONE = '<noscript><p class="banner">What is no picture needs JavaScript.</p></noscript>'


def sections_of(run_dir: Path) -> dict[str, Any] | None:
    """All that the page shows of a run; None if its job file cannot be read."""
    limits = DEFAULT_LIMITS
    try:
        files = RunFiles(run_dir, limits)
    except ConfigError:
        return None
    sections = Feed(files, limits).snapshot()
    steps = sections["samples"]["steps"][-limits.console_lane_steps :]
    return sections | {"samples": {"steps": steps}, "cards": {step: files.samples[step] for step in steps}}


def page_file(
    title: str,
    facts: Sequence[tuple[str, str]],
    pictures: Mapping[str, tuple[bytes, str]],
    *,
    settings: str = "",
    sections: dict[str, Any] | None = None,
) -> str:
    """The text of the page. ``pictures``: name → PNG and caption. ``settings``: the text of a job file."""
    folder = resources.files("supervisors.cli.console") / "page"
    texts = {name: (folder / name).read_text("utf-8") for name in PAGE}
    modules = {  # they import each other by bare names, which the page's import map resolves
        name: _data("text/javascript", text.replace('"./', '"').encode())
        for name, text in texts.items()
        if name.endswith(".js")
    }
    listed = "".join(f"<div><dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd></div>" for k, v in facts)
    figures = "\n".join(
        f'<figure class="card"><img alt="{name}" src="{_data("image/png", png)}">'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
        for name, (png, caption) in pictures.items()
    )
    whole = f"<details><summary>Settings: job.yaml</summary><pre>{html.escape(settings)}</pre></details>"
    data = encode(sections).decode().replace("<", "\\u003c")
    shown = (
        f'<script type="importmap">{json.dumps({"imports": modules})}</script>\n'
        f'<script type="application/json" id="exported">{data}</script>\n'
        f'<script type="module" src="{modules["app.js"]}"></script>'
    )
    parts = {
        "<title>.*</title>": f"<title>{html.escape(title)}</title>",
        '<link rel="stylesheet".*>': f"<style>\n{texts['style.css']}</style>",
        "<script .*</script>": shown if sections else "",
        "<body>": "<body>" if sections else '<body class="still">',
        "<noscript>.*</noscript>": _ALONE if sections else "",
        '<h1 id="job">.*</h1>': f'<h1 id="job">{html.escape(title)}</h1>',
        "</header>": f'<dl class="facts more">{listed}</dl>\n</header>',
        "</main>": f'</main>\n<div class="pictures">{figures}\n{whole if settings else ""}</div>',
    }
    text = texts["index.html"]
    for place, part in parts.items():
        text, count = re.subn(place, lambda _, part=part: part, text)
        assert count == 1, f"the page has one {place}"
    return text


def _data(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
