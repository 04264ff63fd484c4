"""Model families that transformers makes tiny: does the torch engine sample the policy that is trained?

Each is made with random weights, in float32 on the CPU; the engine samples responses, and the trainer computes the
log-probabilities of the same tokens, with gradient checkpointing and without. The figure is the largest difference of
any token. A family that the product refuses appears with the reason. ``--markdown`` prints docs/reference/models.md.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from actors.host.import_guard import hide_broken_optionals
from benchmarks._command import Result, add_check_option, command_line, show_and_check
from benchmarks._jobs import hardware

APART_MAX: Final = 1e-5
"""Nats: rounding of float32 through two layers, whose logits are of the order of 10."""

_GPT: Final = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
_MOE: Final = {"num_experts": 4, "num_experts_per_tok": 2}
_LOCAL_MOE: Final = {"num_local_experts": 4, "num_experts_per_tok": 2}
_SHORT_WINDOW: Final = {"sliding_window": 16, "head_dim": 8}
_LATENT: Final = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "num_key_value_heads": 4,
}

FAMILIES: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama": {},
    "mistral": _SHORT_WINDOW,
    "ministral": {**_SHORT_WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "mixtral": {**_LOCAL_MOE, "router_jitter_noise": 0.1},
    "qwen2": {},
    "qwen2_moe": {**_MOE, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {**_MOE, "moe_intermediate_size": 32, "head_dim": 8},
    "qwen3_next": {**_MOE, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "head_dim": 8},
    "gemma": {"head_dim": 8},
    "gemma2": _SHORT_WINDOW,
    "gemma3_text": _SHORT_WINDOW,
    "phi": {"num_key_value_heads": 4, "resid_pdrop": 0.1},
    "phi3": {"resid_pdrop": 0.1},
    "phimoe": {**_LOCAL_MOE, "router_jitter_noise": 0.1},
    "gpt2": {**_GPT, "resid_pdrop": 0.3},
    "gpt_neo": {
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 16,
        "resid_dropout": 0.3,
    },
    "gpt_neox": {"hidden_dropout": 0.3},
    "gpt_bigcode": _GPT,
    "gptj": {**_GPT, "rotary_dim": 4},
    "codegen": {**_GPT, "n_ctx": 128, "rotary_dim": 4},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32, "layerdrop": 0.5},
    "bloom": {"n_layer": 2, "n_head": 4, "hidden_dropout": 0.3},
    "falcon": {"attention_dropout": 0.3},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "expansion_ratio": 2, "max_seq_len": 128},
    "xglm": {"d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4, "layerdrop": 0.5},
    "biogpt": {"layerdrop": 0.5},
    "stablelm": {"hidden_dropout": 0.3},
    "starcoder2": {"residual_dropout": 0.3, "embedding_dropout": 0.3},
    "olmo": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 16},
    "olmoe": _MOE,
    "cohere": {},
    "cohere2": {"sliding_window": 16},
    "granite": {"logits_scaling": 2.0},
    "granitemoe": _LOCAL_MOE,
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "helium": {"head_dim": 8},
    "nemotron": {"hidden_dropout": 0.3},
    "persimmon": {"hidden_dropout": 0.3},
    "smollm3": {},
    "deepseek_v3": _LATENT,
    "exaone4": {"sliding_window": 16},
    "ernie4_5": {},
    "hunyuan_v1_dense": {"head_dim": 8},
    "seed_oss": {"head_dim": 8, "residual_dropout": 0.3},
    "arcee": {},
    "apertus": {},
    "gpt_oss": {**_LOCAL_MOE, **_SHORT_WINDOW},
    "bitnet": {},
    "diffllama": {},
    "mamba": {"state_size": 4},
    "rwkv": {"attention_hidden_size": 32, "context_length": 128},
    "recurrent_gemma": {"head_dim": 8, "lru_width": 32, "block_types": ["recurrent", "attention"]},
    "jamba": {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}
"""Families by ``model_type``, with what each wants besides the usual sizes. Dropout and noise are set where there is
any, windows are shorter than the samples, so that what could differ does."""


def measure(names: list[str]) -> Result:
    """All of ``names``, one after the other, in this process."""
    hide_broken_optionals()
    from benchmarks.gpu._model_family import measure_family

    families: dict[str, Result] = {}
    for name in names:
        with tempfile.TemporaryDirectory(prefix="headrace-family-") as scratch:
            found = measure_family(name, FAMILIES[name], Path(scratch))
        families[name] = asdict(found)
        print(_line(name, families[name]), file=sys.stderr, flush=True)
    missed = [name for name, found in families.items() if max(found["plain"], found["checkpointed"]) > APART_MAX]
    return {"families": families, "missed": missed, "hardware": hardware()}


def _line(name: str, found: Result) -> str:
    return f"{name:<20} {found['plain']:.1e}  {found['checkpointed']:.1e}  {found['refused'][:160]}"


def markdown(result: Result) -> str:
    """The page docs/reference/models.md."""
    lines = [
        "# Model families",
        "",
        "Families that transformers makes tiny, with random weights, in float32 on a CPU. The figure is the largest",
        "difference of a token's log-probability, in nats, between the torch engine, which sampled it, and the",
        "trainer. Dropout, layer drop and router noise were on in each configuration that has them, and windows were",
        "shorter than the samples. What is refused is refused before anything is generated, with the sentence in the",
        "last column.",
        "",
        "`headrace bench model_families --markdown` prints this page, `--only llama,gpt2` measures some.",
        "",
        "| model type | trainer and engine apart | with `recompute: whole` | refused |",
        "|---|---|---|---|",
    ]
    for name, found in sorted(result["families"].items()):
        refused = str(found["refused"])
        sampled = not refused or found["plain"] > 0
        plain = f"{found['plain']:.1e}" if sampled else "–"
        lines.append(f"| `{name}` | {plain} | {'–' if refused else format(found['checkpointed'], '.1e')} | {refused} |")
    return "\n".join(lines) + "\n"


def print_table(result: Result) -> None:
    """A family a line."""
    for name, found in result["families"].items():
        print("  " + _line(name, found))


def main(args: list[str]) -> int:
    """Measure and print."""
    parser = command_line("model_families", __doc__)
    parser.add_argument("--only", default=",".join(FAMILIES), help="names, with commas")
    parser.add_argument("--markdown", action="store_true", help="the page of the documentation instead of a table")
    add_check_option(parser)
    options = parser.parse_args(args)
    names = str(options.only).split(",")
    if unknown := [name for name in names if name not in FAMILIES]:
        parser.error(f"--only: there is no {unknown[0]!r}; expected some of {', '.join(FAMILIES)}")
    result = measure(names)
    if options.markdown:
        print(markdown(result), end="")
        return 1 if options.check and result["missed"] else 0
    return show_and_check(result, options, print_table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
