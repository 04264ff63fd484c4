"""Makes a copy of a model whose linear layers hold numbers that nf4 has (``actors/trainer/backends/torch/layers``).

    MODEL ─ loaded in DTYPE ─ round_linears ─▶ DIRECTORY: a Hugging Face directory, with MODEL's tokenizer

The module runs in its own process (``python -P -m supervisors.preparation.rounded_model MODEL DTYPE DIRECTORY``), so
that the head never imports torch, and the model's memory is free again before anything else loads it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from actors.host.import_guard import hide_broken_optionals
from actors.host.parent_death import die_with_parent


def make(model_path: Path, dtype: str, directory: Path) -> int:
    """Write the copy; returns how many layers were rounded.

    Raises:
        ModelNotLoadable: bitsandbytes is not installed.
        Exception: whatever transformers raises for a directory that it cannot load.
    """
    hide_broken_optionals()
    import torch
    from transformers import AutoModelForCausalLM

    from actors.models.whole_model import load_whole
    from actors.trainer.backends.torch.exported_files import as_it_was, copy_tokenizer
    from actors.trainer.backends.torch.layers.four_bits import round_linears

    model = load_whole(AutoModelForCausalLM, model_path, dtype=getattr(torch, dtype))
    layers = round_linears(model)
    with as_it_was(model):
        model.save_pretrained(directory, safe_serialization=True)
    copy_tokenizer(model_path, directory)
    return layers


if __name__ == "__main__":
    die_with_parent()
    print(f"rounded {make(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))} layers", flush=True)
