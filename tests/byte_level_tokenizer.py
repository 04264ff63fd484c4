"""A byte-level BPE tokenizer made as SmolLM2's is: its special tokens, their roles, and its chat template.

Its merges are learned from a few sentences, so that most characters outside of ASCII are several tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<reponame>", "<file_sep>", "<filename>")
SPECIAL += ("<gh_stars>", "<issue_start>", "<issue_comment>", "<issue_closed>", "<jupyter_start>", "<jupyter_text>")
SPECIAL += ("<jupyter_code>", "<jupyter_output>", "<jupyter_script>", "<empty_output>")
"""As in SmolLM2, ids 0 … 16."""
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\n" + SYSTEM + "<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_SENTENCES = (SYSTEM, "What is 37 + 2? Answer with the number alone.", "user assistant system", "Größe, naïve, 東京")
_VOCABULARY = 400


def save_byte_level_tokenizer(directory: Path) -> Any:
    """Write the tokenizer to ``directory`` and return what AutoTokenizer makes of it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    core: Any = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(_SENTENCES, trainer)
    roles = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "pad_token": SPECIAL[2], "unk_token": SPECIAL[0]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **roles)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return AutoTokenizer.from_pretrained(directory)
