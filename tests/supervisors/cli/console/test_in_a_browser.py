"""The page in headless Chromium: what it shows of a run, how it follows one, and that a model's text is text."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from actors.metrics.trace import TraceFile
from actors.protocol.metrics import TraceSpan
from supervisors.cli.app import app
from supervisors.cli.console.export import page_file, sections_of
from tests.supervisors.cli.console.chromium import CHROMIUM, PATIENCE_S, Chromium
from tests.supervisors.cli.console.recorded_run import (
    SCRIPT,
    START_S,
    STEPS,
    event,
    record,
    row,
    sample,
    write_lines,
)

ROOT = Path(__file__).parents[4]

pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here")]


class Console(NamedTuple):
    url: str
    process: subprocess.Popen[str]


@contextmanager
def console(run_dir: Path) -> Iterator[Console]:
    with subprocess.Popen(
        [sys.executable, str(ROOT / "main.py"), "console", str(run_dir)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        try:
            yield Console(process.stdout.readline().strip(), process)
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def page(browser: Chromium, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    """A run that is over, with its samples loaded."""
    with console(record(tmp_path_factory.mktemp("over") / "demo")) as served:
        browser.open(served.url)
        browser.until("document.querySelectorAll('.sample').length === 2")
        yield browser


def test_a_finished_run_is_shown_without_a_feed(page: Chromium) -> None:
    assert page.value("document.body.dataset.shown") == "over" and page.value("document.title") == "12/12 demo"
    assert page.value("performance.getEntriesByType('resource').every(e => !e.name.endsWith('/feed'))")
    assert [page.text(f"#{name}") for name in ("job", "state", "feed")] == ["demo", "finished", "over"]
    assert page.text("#steps") == "12 of 12 steps" and page.text("#eta") == "all steps done"
    assert page.text("#about") == "models/small · sums · grpo, groups of 8 · mode async · engine torch"
    facts = page.text("#facts")
    assert "policy version12" in facts and "staleness1 of 2" in facts and "restarts1" in facts


def test_the_token_is_not_in_the_address_and_the_cookie_not_in_scripts_reach(page: Chromium) -> None:
    assert "token" not in page.value("location.href") and page.value("document.cookie") == ""


def test_charts_are_drawn(page: Chromium) -> None:
    assert page.value("document.querySelectorAll('.band').length") == 1
    assert page.text("#reward .value") == "0.650" and page.text("#throughput .value") == "3200 tokens/s"
    for title in ("Reward", "Response length", "Loss", "KL to the reference", "Entropy", "Gradient norm"):
        assert page.value(f"document.querySelectorAll('[aria-label=\"{title}, steps 0 to 11\"] path.line').length >= 1")


def test_lanes_show_steps_and_name_their_bubbles(page: Chromium) -> None:
    assert page.value("[...document.querySelectorAll('.lane-name')].map(e => e.textContent).join()") == (
        "trainer,rollout-0,rollout-1"
    )
    assert page.value("document.querySelectorAll('[data-activity=train]').length") == 6
    assert page.value("document.querySelectorAll('.bubble-name').length") >= 12
    assert page.text("#lane-legend") == "generatetrainpullbubble: idle, waiting"
    page.value("document.querySelector('#lane-choice button').click()")
    assert page.value("document.querySelectorAll('[data-activity=train]').length") == 3
    page.value(
        "document.querySelector('[data-activity=generate]')"
        ".dispatchEvent(new PointerEvent('pointermove', {clientX: 300, clientY: 300}))"
    )
    assert page.text("#tip") == "rollout-0: generate1.0 sstep 9version 9"


def test_workers_waits_and_events_are_listed(page: Chromium) -> None:
    assert page.text("#workers tbody tr:last-child").startswith("rollout-1endedhead")
    assert page.text("#stalls").startswith("3.5 shead.demo.trainer")
    events = page.text("#events")
    assert "8 of 64 samples had no verdict: KeyError" in events and "× 3" in events
    assert "child exited rollout-1: crashed, it was killed by signal 9" in events


def test_what_a_model_wrote_is_shown_and_not_obeyed(page: Chromium) -> None:
    assert page.text("#sample-step") == "of step 11"
    assert page.text(".sample .response pre") == SCRIPT and page.text(".sample .prompt_text pre") == "Say <b>this</b>:"
    assert page.value("document.querySelectorAll('#samples img, #samples script, #samples b').length") == 0
    assert page.value("document.title") == "12/12 demo"
    samples = page.text("#samples")
    assert "cut at max_tokens" in samples and "reward –" in samples and "rw.py:3" in samples
    assert page.text(".sample .environment") == "turn 2, tool sum, 1 tokens<b>4</b>"
    page.value("document.querySelector('#sample-back').click()")
    page.until("document.querySelector('#samples').textContent.includes('answer of 0')")


def test_the_page_that_plot_writes_is_the_same_and_needs_no_server(browser: Chromium, tmp_path: Path) -> None:
    run_dir = record(tmp_path / "demo")
    result = CliRunner().invoke(app, ["plot", str(run_dir)])
    assert result.exit_code == 0, result.output
    browser.open((run_dir / "plots" / "index.html").as_uri())
    browser.until("document.querySelectorAll('.sample').length === 2")
    assert [browser.text(f"#{name}") for name in ("job", "state", "feed")] == ["demo", "finished", "over"]
    assert browser.text("#steps") == "12 of 12 steps" and browser.text("#reward .value") == "0.650"
    assert browser.value("document.querySelectorAll('[data-activity=train]').length") == 6
    assert browser.text(".sample .response pre") == SCRIPT and browser.value("document.title") == "12/12 demo"
    browser.value("document.querySelector('#sample-back').click()")
    browser.until("document.querySelector('#samples').textContent.includes('answer of 0')")
    drawn = "[...document.querySelectorAll('.pictures img')].every(image => image.naturalWidth > 0)"
    assert browser.value(drawn) and "reward" in browser.text(".facts + .facts")
    assert browser.value("performance.getEntriesByType('resource').every(e => !e.name.startsWith('http'))")


def test_evaluations_parts_of_the_reward_and_metrics_of_the_job_s_own_are_shown(
    browser: Chromium, tmp_path: Path
) -> None:
    """And the lanes of those whom the trainer waits for. A reader chooses which further metrics have a chart."""
    run_dir = record(tmp_path / "demo")
    own = {"reward_true_mean": 0.5, "reward_form_mean": 0.25, "explained_variance": 0.75, "kl_per_response": 0.125}
    (run_dir / "metrics.jsonl").unlink()
    write_lines(run_dir / "metrics.jsonl", [row(step, **own, turns_mean=3.5) for step in range(STEPS)])
    rows = [{"version": v, "k": 4, "avg_at_k": v / 20, "pass_at_k": {"1": v / 20, "4": 0.5}} for v in (0, 6, 12)]
    write_lines(run_dir / "eval.jsonl", rows)
    trace = TraceFile(run_dir / "trace.json", "demo")
    for track, name in (("rewards", "score"), ("gateway", "answer"), ("environment-0", "episode")):
        trace.add(track, [TraceSpan(name=name, start_s=START_S + 1, end_s=START_S + 20, args={"running": 2})])
    trace.close()
    page = tmp_path / "page.html"
    page.write_text(page_file("demo", [], {}, sections=sections_of(run_dir)))
    browser.open(page.as_uri())
    browser.until("document.querySelectorAll('.sample').length === 2")
    assert browser.value("document.querySelectorAll('#evaluation path.line').length") == 3
    assert browser.text("#evaluation .value") == "0.600" and browser.text("#evaluation .keys") == "avg@4pass@1pass@4"
    learning = browser.text("#multiples")
    for shown in ("Critic: explained variance0.750", "KL of a response0.125 nats", "Rewards, part by part0.250"):
        assert shown in learning
    assert "true reward" in browser.text("#reward .keys") and "turns_mean" not in learning
    browser.value(
        "[...document.querySelectorAll('#more-choice label')].find(e => e.textContent === 'turns_mean').click()"
    )
    assert "turns_mean3.500" in browser.text("#multiples")
    assert browser.value("[...document.querySelectorAll('.lane-name')].map(e => e.textContent).join()") == (
        "trainer,rollout-0,rollout-1,gateway,rewards,environment-0"
    )


def test_nothing_is_wider_than_a_narrow_screen(browser: Chromium, tmp_path: Path) -> None:
    """And at the width of a laptop the table of workers is whole."""
    page = tmp_path / "page.html"
    page.write_text(page_file("demo", [], {}, sections=sections_of(record(tmp_path / "demo"))))
    workers = "(e => e.scrollWidth <= e.clientWidth)(document.querySelector('#workers'))"
    for width in (1280, 768, 400):
        browser.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        browser.open(page.as_uri())
        browser.until("document.querySelectorAll('.sample').length === 2")
        assert browser.value("document.documentElement.scrollWidth") == width
        assert browser.value(workers), width
    browser.call("Emulation.clearDeviceMetricsOverride")


def test_a_page_follows_its_run_and_says_when_the_console_does_not_answer(browser: Chromium, tmp_path: Path) -> None:
    run_dir = record(tmp_path / "demo", state="running", steps=STEPS - 3)
    with console(run_dir) as served:
        browser.open(served.url)
        browser.until("document.querySelector('#steps')?.textContent === '9 of 12 steps'")
        assert browser.text("#feed") == "from files"
        write_lines(run_dir / "metrics.jsonl", [row(9, reward_mean=0.875)])
        browser.until("document.querySelector('#steps').textContent === '10 of 12 steps'")
        browser.until("document.querySelector('#reward .value').textContent === '0.875'")
        write_lines(run_dir / "samples.jsonl", [sample(12, response="the newest")])
        browser.until("document.querySelector('#samples').textContent.includes('the newest')")
        served.process.terminate()
        browser.until("document.querySelector('#feed').textContent === 'console does not answer'")
        browser.until("document.querySelector('#banner').textContent.includes('Connecting again')")
        assert browser.text("#steps") == "10 of 12 steps", "what was known stays"


def test_a_run_that_ends_while_it_is_watched_ends_the_feed(browser: Chromium, tmp_path: Path) -> None:
    run_dir = record(tmp_path / "demo", state="running")
    with console(run_dir) as served:
        browser.open(served.url)
        browser.until("document.querySelector('#feed')?.textContent === 'from files'")
        write_lines(run_dir / "events.jsonl", [event(40, "job_state", state="failed", reason="no room on the disk")])
        browser.until("document.querySelector('#feed').textContent === 'over'")
        assert browser.text("#banner") == "The run has failed: no room on the disk"


def test_a_run_that_has_not_begun_says_what_is_awaited(browser: Chromium, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: young\nsteps: 5\n")
    with console(tmp_path) as served:
        browser.open(served.url)
        browser.until("document.querySelector('#job')?.textContent === 'young'")
        browser.until("document.querySelector('#samples').textContent.length > 0")
        assert "Waits for the first step to be committed" in browser.text("#reward")
        assert "Waits for the first second of work" in browser.text("#lanes")
        assert "Waits for the first rollout worker" in browser.text("#workers")
        assert "Waits for the first step with samples" in browser.text("#samples")
        assert browser.text("#steps") == "0 of 5 steps"
