"""Prompts, and how responses are scored: the sections ``data`` and ``reward`` of a job file.

    data      one source                      data.mix      several, each with a weight
    reward    one reward                      reward.parts  several, each with a weight; a list stands for them

Code that reads data uses ``DataConfig.sources``, code that scores ``RewardConfig.each``; both have one item if there
is one source or reward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import model_validator

from configs.reward_training import RewardTraining
from configs.section import PartName, PositiveFloat, PositiveInt, Section


class SourceConfig(Section):
    """One source of prompts."""

    source: Literal["file", "reasoning_gym", "jsonl", "hf_dataset"] = "file"
    """``file``: what ``path`` names, in the form that its name's ending says. ``reasoning_gym``: a generated task.
    ``jsonl`` and ``hf_dataset`` mean ``file``; with ``jsonl`` an ending that says nothing means JSON lines."""
    task: str | None = None
    """``reasoning_gym``: the data set's name, such as ``spell_backward``."""
    task_args: dict[str, Any] = {}
    """``reasoning_gym``: its parameters, such as ``{min_word_len: 3}``."""
    path: str | None = None
    """A ``.jsonl``, ``.json`` (each also with ``.gz``) or ``.parquet`` file, a directory written by ``save_to_disk``,
    or one laid out as on the Hugging Face hub (``data/train-*.parquet``); or a hub name such as ``openai/gsm8k``,
    fetched once into the run directory."""
    config: str | None = None
    """The configuration (subset) of a hub name, or of a directory as on the hub, such as ``main``."""
    split: str | None = None
    """The split of a hub name or of a directory, such as ``test``; of a hub name also a part, such as
    ``train[:1000]``. Unset: ``train``, or the only one."""
    revision: str | None = None
    """A branch, a tag or a commit of a hub name; unset: the default branch. A resumed run keeps what was fetched."""
    prompt_key: str = "prompt"
    """Column of the prompt: a string, or a list of chat messages."""
    answer_key: str = "answer"
    """Column of the right answer, of any type; all further columns reach a reward function by name."""
    template: str = "{prompt}"
    """Text around a string prompt; ``{prompt}`` stands for it."""
    size: PositiveInt = 10_000
    """``reasoning_gym``: distinct prompts before the stream repeats."""


class MixedSource(SourceConfig):
    """One of several sources."""

    name: PartName
    """What it is called in samples and metrics (``source_NAME_reward_mean``)."""
    weight: PositiveFloat = 1.0
    """Its share of the prompts is this by the sum of all weights, whatever its length."""


class DataConfig(SourceConfig):
    """Where prompts come from: one source, or several that ``mix`` names."""

    mix: list[MixedSource] = []
    """Several sources, in place of ``path`` or ``task``: a list of ``{name, weight, path, …}``, each with its own of
    the keys above. Prompts alternate between them by weight, in an order that ``seed`` fixes."""
    epochs: PositiveInt | None = None
    """How often the data may repeat; unset: for ever. With ``mix`` the job ends when the first source is through."""
    shuffle: bool = True
    """Visit the rows in an order that ``seed`` fixes, drawn anew for each epoch."""
    chat: bool = False
    """Wrap string prompts in the tokenizer's chat template."""
    chat_template_kwargs: dict[str, Any] = {}
    """Further arguments of ``apply_chat_template``, such as ``{enable_thinking: false}``, ``{tools: […]}`` or, where
    the tokenizer has several templates, ``{chat_template: NAME}``."""
    system_prompt: str | None = None
    """A first message of role ``system`` where the chat template is used and the prompt does not begin with its own."""
    max_prompt_tokens: PositiveInt = 512
    """Longer prompts are passed over, as are those that leave ``rollout.max_tokens`` no room in the model."""

    @property
    def sources(self) -> dict[str, DataConfig]:
        """Name → each source as if it were the only one; one that is the only one has an empty name."""
        if not self.mix:
            return {"": self}
        plain = self.model_copy(update={"mix": []})
        return {
            source.name: plain.model_copy(update={key: getattr(source, key) for key in SourceConfig.model_fields})
            for source in self.mix
        }

    def with_sources(self, sources: dict[str, DataConfig]) -> DataConfig:
        """The same data with other ``sources``, of the same names."""
        if not self.mix:
            return sources[""]
        changed = [
            source.model_copy(update={key: getattr(sources[source.name], key) for key in SourceConfig.model_fields})
            for source in self.mix
        ]
        return self.model_copy(update={"mix": changed})

    def key_of(self, name: str) -> str:
        """Where the source ``name`` stands in the job file."""
        return f"data.mix.{[source.name for source in self.mix].index(name)}" if self.mix else "data"


class Reward(Section):
    """One way to score a response."""

    kind: Literal["exact_match", "math_verify", "reasoning_gym", "function", "http", "model"] | None = None
    """Equal up to white space; equal as mathematics; the task's own scorer; your function; a scorer behind ``url``; a
    reward model in ``path``. The first two compare text: an answer that is a number stands for its text, and a null or
    missing one is refused."""
    function: str | None = None
    """``function``: ``package.module:name`` taking (prompt, response, answer, **context) and returning a float."""
    answer_pattern: str | None = None
    """Regular expression with one group; its last match in the response is the answer. Unset: the whole response.
    ``exact_match`` and ``math_verify`` cut the reference answer alike where it matches there, else take it as it is."""
    url: str | None = None
    """``http``: where ``{query, prompts, labels}`` is posted, each a list, and ``{"rewards": […]}`` comes back."""
    key_env: str | None = None
    """``http``: the environment variable that holds the key, which is sent as ``Authorization: Bearer KEY``."""
    batch_samples: PositiveInt = 64
    """``http``: responses in one request, at most."""
    path: str | None = None
    """``model``: a directory with a Hugging Face model for sequence classification, of one label, and its tokenizer; or
    a hub name such as ``Skywork/Skywork-Reward-V2-Qwen3-0.6B``, fetched into the Hugging Face cache."""
    revision: str | None = None
    """``model``: a branch, a tag or a commit of a hub name, in ``path`` or ``train.model``; unset: the default branch.
    A resumed run keeps its commit."""
    train: RewardTraining | None = None
    """``model``: in place of ``path``: the model is trained before the run starts."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``model``: where it computes; ``auto``: CUDA where there is a device."""
    batch_tokens: PositiveInt = 16_384
    """``model``: tokens of one batch, padding included; a single response may be longer."""
    max_tokens: PositiveInt | None = None
    """``model``: prompt and response as the model reads them; of what is longer the beginning is cut, with a warning.
    Unset: as many as the model takes."""

    @property
    def batched(self) -> bool:
        """Whether many responses are scored at once, in a process that scores nothing else."""
        return self.kind in ("http", "model")

    @property
    def compares(self) -> bool:
        """Whether the answer of a row is compared with the response, as text or as mathematics."""
        return self.kind in ("exact_match", "math_verify")


class WeightedReward(Reward):
    """One of several rewards."""

    name: PartName | None = None
    """What it is called in metrics (``reward_NAME_mean``) and samples; unset: the function's name, else the kind."""
    weight: float = 1.0
    """What it counts in the sum; below 0 it is a penalty, and with 0 it is only shown."""

    @property
    def called(self) -> str:
        """Name of the reward, given or derived."""
        return self.name or (self.function or "").rpartition(":")[2] or str(self.kind)


class RewardConfig(Reward):
    """How responses are scored: by one reward, or by the weighted sum of several. A list stands for ``parts``."""

    parts: list[WeightedReward] = []
    """Several rewards, in place of ``kind``: a list of ``{kind, weight, name, …}``. The reward
    of a sample is the sum of each times its weight; without one of them the sample has no result."""
    limit: PositiveFloat = 1e9
    """Magnitude above which a reward, or one of several, is taken for a mistake of its scorer: the sample has no
    result. It holds for the rewards of environments and agents, too."""
    special_tokens: bool = False
    """Show the tokenizer's special tokens in responses, the end token too; unset, they are left out of the text."""
    timeout_s: PositiveFloat = 10.0
    """One response, all rewards together; of ``http`` one request with its repeats, of ``model`` one batch. Beyond it
    the sample has no result, which is never a reward of 0."""
    workers: PositiveInt = 1
    """Scorer processes: of all rewards that are scored one by one, and of each ``http`` (requests at a time). A
    ``model`` has one of its own."""

    @model_validator(mode="before")
    @classmethod
    def _of_list(cls, value: Any) -> Any:
        """``reward: [{kind: …}, …]`` is short for ``reward: {parts: […]}``."""
        return {"parts": value} if isinstance(value, list) else value

    @property
    def each(self) -> list[tuple[str, Reward]]:
        """Every reward, and where it stands in the job file; none where the environment gives it."""
        if not self.parts:
            return [] if self.kind is None else [("reward", self)]
        return [(f"reward.parts.{i}", part) for i, part in enumerate(self.parts)]

    @property
    def names(self) -> list[str]:
        """Names of the parts; none where there is one reward only."""
        return [part.called for part in self.parts]

    def named(self, name: str) -> Reward | None:
        """The reward of that name; one that is the only one is called by its kind. None: there is none."""
        called = {one.called if isinstance(one, WeightedReward) else str(one.kind): one for _, one in self.each}
        return called.get(name)

    def with_each(self, change: Callable[[str, Reward], Mapping[str, Any]]) -> RewardConfig:
        """The same rewards, each with the keys that ``change`` gives for its place in the job file and itself."""
        if not self.parts:
            return self.model_copy(update=dict(change("reward", self)))
        parts = [part.model_copy(update=dict(change(f"reward.parts.{i}", part))) for i, part in enumerate(self.parts)]
        return self.model_copy(update={"parts": parts})
