"""One call before anything starts: what can only fail is refused with file and line, all else is a warning at most."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

from actors.environments.errors import RewardRefused, ScorerBroken, SourceUnreadable
from actors.environments.prompts.rows import Row
from actors.environments.prompts.sources import open_source
from actors.environments.scoring.examples import Example
from actors.environments.scoring.scorer_pool import ScorerPool
from actors.environments.scoring.scorers import Scorers, make_scorer
from actors.environments.scoring.trial import try_once
from configs.schema import JobConfig
from tests.smallest_job import smallest_job

Rows = list[dict[str, Any]]
ROWS: Rows = [{"answer": "4", "level": 1}, {"answer": "5", "level": 2}]


class Table:
    """Holds ``rows``, whose answers and further columns are all that a trial looks at."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, index: int) -> Row:
        extra = {name: value for name, value in self.rows[index].items() if name != "answer"}
        return Row("p", self.rows[index]["answer"], index, extra)


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """``trial(source)`` tries the function ``score`` of that source on ``rows``."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(source: str, rows: Rows = ROWS, timeout_s: float = 10.0) -> str:
        name = f"tried_{len(list(tmp_path.iterdir()))}"
        (tmp_path / f"{name}.py").write_text(source)
        reward = {"kind": "function", "function": f"{name}:score", "timeout_s": timeout_s}
        job = smallest_job(reward=reward, data={"source": "jsonl", "path": "unused.jsonl", "shuffle": False})
        try:
            return "; ".join(try_once(job, Scorers(job), {"": Table(rows)}))  # type: ignore[arg-type]
        finally:
            sys.modules.pop(name, None)

    return run


HEAD = "def score(prompt, response, answer, **columns):\n    "


def test_a_function_that_gives_a_number_is_said_nothing_of(trial: Callable[..., str]) -> None:
    assert trial(HEAD + "assert response == answer == '4'\n    return 1") == ""


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (HEAD + "return 1.0 / len(answr)", "NameError: name 'answr' is not defined (tried_0.py:2)"),
        (HEAD + "import no_such_module_here", "ModuleNotFoundError: No module named 'no_such_module_here'"),
        (HEAD + "return response.stripp()", "AttributeError: 'str' object has no attribute 'stripp' (tried_0.py:2)"),
        (HEAD + "return {'score': 1.0}", "(tried_0.py:1) returned a dict, {'score': 1.0}; expected one number"),
        (HEAD + "return (1.0, {})", "returned a tuple"),
        (HEAD + "return '0.5'", "returned a str"),
        ("async " + HEAD + "return 1.0", "is a coroutine function; write def, not async def"),
        (HEAD + "return late()\nasync def late(): return 1.0", "returned a coroutine; write def, not async def"),
        ("def score(completions, **columns): return [1.0]", "too many positional arguments"),
        ("def score(prompt, response): return 1.0", "too many positional arguments"),
        ("def score(prompt, response, answer, *, tests, level): return 1.0", "missing a required argument: 'tests'"),
        ("def score(prompt, response, answer): return 1.0", "got an unexpected keyword argument 'level'"),
        ("raise RuntimeError('no CUDA')\ndef score(*a, **k): return 1.0", "RuntimeError: no CUDA (tried_0.py:1)"),
        ("import sys\nsys.exit(3)", "SystemExit: 3 (tried_0.py:2)"),
        ("def score(:", "SyntaxError: invalid syntax (tried_0.py, line 1) (tried_0.py:1)"),
        ("score = 7", "is a int, expected a function"),
    ],
)
def test_a_function_that_can_only_fail_is_refused_with_file_and_line(
    trial: Callable[..., str], source: str, says: str
) -> None:
    with pytest.raises(RewardRefused) as refused:
        trial(source)
    assert says in str(refused.value) and RewardRefused.permanent


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (HEAD + "import json\n    return json.loads('{' + response)['x']", "JSONDecodeError"),
        (HEAD + "import re\n    return re.search('x', response).group(1)", "AttributeError: 'NoneType'"),
        (HEAD + "if response == 'x': y = 1\n    return y", "UnboundLocalError"),
        (HEAD + "return float('nan')", "expected a finite number"),
        (HEAD + "return None", "returned None; expected a number"),
        (HEAD + "import sys\n    sys.exit(3)", "SystemExit: 3 (tried_0.py:3)"),
        (HEAD + "return score(prompt, response, answer)", "RecursionError"),
    ],
)
def test_what_may_be_the_fault_of_the_response_is_a_warning(trial: Callable[..., str], source: str, says: str) -> None:
    warning = trial(source)
    assert says in warning and "called with the first row of the data and its own answer" in warning


def test_columns_that_only_some_rows_have_are_a_warning_with_the_first_such_row(trial: Callable[..., str]) -> None:
    source = "def score(prompt, response, answer, level): return 1.0"
    warning = trial(source, [{"answer": "4", "level": 1}, {"answer": "4"}, {"answer": "4", "level": 1}])
    assert "as row 1 of the data asks: missing a required argument: 'level'" in warning
    assert "1 of the first 3 rows" in warning


def test_a_first_call_that_is_slower_than_any_may_be_is_a_warning(trial: Callable[..., str]) -> None:
    warning = trial(HEAD + "import time\n    time.sleep(0.2)\n    return 1", timeout_s=0.1)
    assert "longer than reward.timeout_s (0.1 s)" in warning


@pytest.mark.parametrize("value", ["numpy.float32(0.5)", "numpy.array([0.5])", "numpy.bool_(True)", "True"])
def test_what_is_one_number_to_numpy_is_a_reward(trial: Callable[..., str], value: str) -> None:
    assert trial(f"import numpy\n{HEAD}return {value}") == ""


def test_an_error_of_a_library_is_located_where_the_users_code_called_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "in_library.py").write_text("import json\n\n\n" + HEAD + "return json.loads('')\n")
    scorer = make_scorer(smallest_job(reward={"kind": "function", "function": "in_library:score"}))
    with pytest.raises(json.JSONDecodeError) as error:
        scorer("", Example("p", "4", 0, {}))
    from actors.host.user_code import described

    assert described(error.value).endswith("(in_library.py:5)")


def tried(tmp_path: Path, prompts: list[Any], **reward: Any) -> str:
    """What a trial says of a verifier of ours, on sums as questions."""
    rows = [{"prompt": prompt, "answer": str(index + 1)} for index, prompt in enumerate(prompts)]
    (tmp_path / "sums.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    job = smallest_job(data={"path": str(tmp_path / "sums.jsonl"), "shuffle": False}, reward=reward)
    sources = {"": open_source(job.data, job.seed)}
    return "; ".join(try_once(job, Scorers(job, sources), sources))


SUMS = [f"What is {number} + 1? Answer with the number alone." for number in range(8)]


def test_full_marks_for_a_response_that_only_repeats_the_prompt_are_warned_of(tmp_path: Path) -> None:
    """``math_verify`` finds "What is 3 + 1, …" equal to 4."""
    warning = tried(tmp_path, SUMS, kind="math_verify")
    assert "reward.kind math_verify gives full marks to a response that only repeats the prompt" in warning
    assert "in 8 of the first 8 rows" in warning and "reward.answer_pattern" in warning


@pytest.mark.parametrize("kind", ["math_verify", "exact_match"])
def test_a_reward_that_looks_at_the_answer_alone_is_said_nothing_of(tmp_path: Path, kind: str) -> None:
    """That the first question ends in its own answer, 1, is chance."""
    assert tried(tmp_path, SUMS, kind=kind, answer_pattern=r"(-?\d+)") == ""


def test_prompts_that_are_messages_are_not_tried_as_responses(tmp_path: Path) -> None:
    assert tried(tmp_path, [[{"role": "user", "content": prompt}] for prompt in SUMS], kind="math_verify") == ""


# ------------------------------------------------------------ in its process


def pool_job(tmp_path: Path, source: str, **reward: Any) -> JobConfig:
    """One scorer process, a tokenizer that knows letters, and two rows."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    core: Any = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    core.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "pooled.py").write_text(source)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "first"}\n{"prompt": "a", "answer": "second"}\n')
    return smallest_job(
        data={"source": "jsonl", "path": str(tmp_path / "rows.jsonl"), "shuffle": False},
        reward={"kind": "function", "function": "pooled:score", "workers": 1, **reward},
    )


async def test_a_pool_does_not_start_with_a_function_that_can_only_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pool = ScorerPool(pool_job(tmp_path, HEAD + "return answr"), model=tmp_path)
    with pytest.raises(RewardRefused, match=r"NameError: name 'answr' is not defined \(pooled.py:2\)"):
        await pool.start()
    await pool.close()


async def test_data_that_cannot_be_read_is_the_datas_fault(tmp_path: Path) -> None:
    job = pool_job(tmp_path, "")
    (tmp_path / "rows.jsonl").write_text("{\n")
    pool = ScorerPool(job.model_copy(update={"reward": smallest_job().reward}), model=tmp_path)
    with pytest.raises(SourceUnreadable, match="line 1"):
        await pool.start()
    await pool.close()


async def test_a_function_that_hangs_in_its_trial_is_warned_of_and_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hangs on the first row's answer, which the data may be to blame for: others are scored."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    source = HEAD + "while response == 'first': pass\n    return 1.0"
    job = pool_job(tmp_path, source, timeout_s=0.5)
    pool = ScorerPool(
        job.model_copy(update={"limits": job.limits.model_copy(update={"first_verdict_s": 1.0})}), model=tmp_path
    )
    await pool.start()
    assert len(pool.warnings) == 1 and "no answer within 1.0 s" in pool.warnings[0]
    context = msgpack.packb(["p", "second", 1, {}])
    verdicts = await pool.score([("first", context), ("second", context)])
    await pool.close()
    assert [v.reward for v in verdicts] == [None, 1.0]
    assert verdicts[0].reason == "no verdict within reward.timeout_s (0.5 s)"


async def test_a_process_that_is_started_again_is_warm_before_it_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first call imports for longer than a verdict may take; after a kill it must not time out again and again."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    source = (
        "import os, time\nwarm = False\n"
        + HEAD
        + "global warm\n    if not warm: time.sleep(1.5)\n    warm = True\n"
        + "    if response == 'die': os._exit(9)\n    return 1.0"
    )
    pool = ScorerPool(pool_job(tmp_path, source, timeout_s=1.0), model=tmp_path)
    await pool.start()
    context = msgpack.packb(["p", "second", 1, {}])
    verdicts = await pool.score([("die", context), ("b", context)])
    await pool.close()
    assert verdicts[0].reward is None and "died (exit code 9)" in verdicts[0].reason
    assert verdicts[1].reward == 1.0


def test_a_real_data_set_is_one_that_can_be_tried(tmp_path: Path) -> None:
    job = pool_job(tmp_path, "").model_copy(update={"reward": smallest_job().reward})
    assert try_once(job, Scorers(job), {"": open_source(job.data, job.seed)}) == []


async def test_a_verifier_that_ends_its_process_says_so_in_its_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``sys.exit`` is an answer like any other exception; the process goes on."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pool = ScorerPool(pool_job(tmp_path, HEAD + "if response == 'x': raise SystemExit(3)\n    return 1"))
    await pool.start()
    context = msgpack.packb(["p", "a", 0, {}])
    verdicts = await pool.score([("x", context), ("y", context)])
    await pool.close()
    assert verdicts[0].reason == "SystemExit: 3 (pooled.py:2)" and verdicts[1].reward == 1.0
    assert issubclass(RewardRefused, ScorerBroken)
