"""The pointer-chasing model: DeepSeek-V3.2 weights written down, not trained, and prompts whose continuation is known.

A prompt is a shuffled list of *edges*, most of them distractors. The last edge names the key to look up first. At each
step the model finds the one edge with that key, anywhere in the context, and repeats it; the edge's value is the next
key. After one lap around the cycle it looks the keys up in what it generated itself, not in the prompt. So every step
depends on one particular row of the KV cache, in each of two layers: the first contributes the high digit of the
answer, the second the low digit. A row that is lost, stale or in the wrong place gives another token.

The next-token layer (MTP, the draft of speculative decoding) does all of it in one layer, on a KV cache of its own,
from the last token alone: so it proposes what the model will find. `Draft` has versions of it that are wrong on
purpose; the model's answer does not depend on it.

The answer of a prompt is computed by a dictionary (`walk`), never by a model.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

# --- The language -----------------------------------------------------------------------------------------------------
STAGES, WIDTH = 64, 4  #: a cycle visits STAGES stages, one of WIDTH keys in each; a choice at a key picks the next one
KEYS = STAGES * WIDTH
CONTENTS = KEYS * WIDTH  #: (key, choice)
BASE = 32  #: the two digits of a content
PROMPT, FIRST_LAP, LATER_LAP = range(3)  #: who wrote a token; each lap looks its keys up in the one before
TAGS = 3
HOME = 0  #: the key every cycle passes and where a lap ends
RESERVED = 64  #: ids below are no edges (begin and end of sequence, padding)
VOCABULARY = RESERVED + TAGS * CONTENTS

assert BASE * BASE == CONTENTS


@dataclass(frozen=True)
class Edge:
    """A token: `key` and a `choice` of the next key, written by `tag`."""

    tag: int
    key: int
    choice: int

    @property
    def token(self) -> int:
        return RESERVED + (self.tag * KEYS + self.key) * WIDTH + self.choice

    @classmethod
    def of(cls, token: int) -> Edge:
        rest, choice = divmod(token - RESERVED, WIDTH)
        return cls(*divmod(rest, KEYS), choice)

    @property
    def content(self) -> int:
        return self.key * WIDTH + self.choice

    @property
    def address(self) -> int:
        """What a look-up finds this edge by."""
        return self.tag * KEYS + self.key

    @property
    def value(self) -> int:
        return (self.key // WIDTH + 1) % STAGES * WIDTH + self.choice

    @property
    def next_tag(self) -> int:
        return FIRST_LAP if self.tag == PROMPT else min(LATER_LAP, self.tag + (self.value == HOME))

    @property
    def wanted(self) -> int:
        """The address to look up next."""
        return (self.next_tag - 1) * KEYS + self.value


def prompt(length: int, seed: int) -> list[int]:
    """Token ids of a prompt with one random cycle, its edges in random places among distractors.

    Args:
        length: tokens, at least STAGES + 1.
    """
    rng = random.Random(seed)
    members = [HOME % WIDTH] + [rng.randrange(WIDTH) for _ in range(STAGES - 1)]
    cycle = [Edge(PROMPT, s * WIDTH + members[s], members[(s + 1) % STAGES]) for s in range(STAGES)]
    on_cycle = {edge.key for edge in cycle}
    off_cycle = [key for key in range(KEYS) if key not in on_cycle]
    fill = length - 1 - STAGES
    if fill < 0:
        raise ValueError(f"a prompt has at least {STAGES + 1} tokens, not {length}")
    edges = cycle + [Edge(PROMPT, rng.choice(off_cycle), rng.randrange(WIDTH)) for _ in range(fill)]
    rng.shuffle(edges)
    last = next(key for key in off_cycle if key // WIDTH == STAGES - 1)
    return [edge.token for edge in [*edges, Edge(PROMPT, last, HOME)]]


def walk(tokens: list[int], steps: int) -> list[int]:
    """The `steps` tokens that rightly follow a prompt, by dictionary look-up."""
    edges = [Edge.of(token) for token in tokens]
    written = {edge.address: edge for edge in edges}
    current, answer = edges[-1], []
    for _ in range(steps):
        found = written[current.wanted]
        current = Edge(current.next_tag, found.key, found.choice)
        written[current.address] = current
        answer.append(current.token)
    return answer


def needed_position(tokens: list[int], step: int) -> int:
    """The position (in prompt and answer) of the one row that step `step` (from 0) must read."""
    history = tokens + walk(tokens, step)
    wanted = Edge.of(history[-1]).wanted
    return max(i for i, token in enumerate(history) if Edge.of(token).address == wanted)


# --- The weights ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Dims:
    """Sizes that a device's kernels accept; the language and the answer do not depend on them."""

    heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    v_head_dim: int
    index_heads: int
    index_topk: int
    q_lora_rank: int = 128
    hidden: int = 384
    rope: int = 64
    index_head_dim: int = 128
    intermediate: int = 128
    layers: int = 2


CPU = Dims(heads=4, kv_lora_rank=128, qk_nope_head_dim=64, v_head_dim=64, index_heads=4, index_topk=32)
CUDA = Dims(
    heads=64, kv_lora_rank=512, qk_nope_head_dim=128, v_head_dim=128, index_heads=64, index_topk=2048, hidden=512
)  # the fused norm of a draft layer, from 0.5.15 on, takes multiples of 256 past 256


class Draft(Enum):
    """A next-token layer, by how many of the BASE low digits it gets wrong."""

    RIGHT = 0
    HALF = BASE // 2  #: drafts are accepted and rejected in turns that nobody can foresee
    WRONG = BASE  #: every draft is rejected


CODE = 64  #: length of an address code, entries +-1 that sum to zero
OVERLAP = 28  #: the largest dot product of two different codes (CODE with itself)
SHARPNESS = 8.0  #: of attention: exp(-SHARPNESS * (CODE - OVERLAP) * softmax scale) is what a wrong row weighs
EXPERTS = 16  #: of the next-token layer, all zero
DIGIT = 8.0  #: of a one-hot entry, so that it weighs in RMS norms as much as a code

# Subspaces of a KV cache row and of the hidden state, as slices.
ROW_CODE, ROW_DIGIT = slice(0, CODE), slice(CODE, CODE + BASE)  # the next-token layer has a second digit behind it
WANTED = slice(0, CODE)  # code of the address to look up
ADDRESS = slice(CODE, 2 * CODE)  # code of the token's own address
OWN = (slice(128, 160), slice(160, 192))  # the token's digits: high, low
FOUND = (slice(192, 224), slice(224, 256))  # digits found by layer 0, by layer 1
NEXT_TAG = slice(256, 258)  # one-hot, of the token to be written
EMBEDDING = 2 * CODE + 3 * DIGIT**2  # squared length of an edge's embedding


def address_codes(seed: int = 0) -> Any:
    """(TAGS * KEYS, CODE) float32 of +-1, each row summing to 0, any two rows with a dot product of at most OVERLAP."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    codes = torch.empty(0, CODE)
    half = torch.cat([torch.ones(CODE // 2), -torch.ones(CODE // 2)])
    while len(codes) < TAGS * KEYS:
        code = half[torch.randperm(CODE, generator=generator)]
        if not len(codes) or (codes @ code).max() <= OVERLAP:
            codes = torch.cat([codes, code[None]])
    return codes


def content_digits(seed: int = 0) -> list[tuple[int, int]]:
    """High and low digit of every content; shuffled, so that neither says anything about the key."""
    numbers = list(range(CONTENTS))
    random.Random(seed).shuffle(numbers)
    return [divmod(number, BASE) for number in numbers]


def halves(digit: Any) -> tuple[Any, Any]:
    """What the first half of the heads tells of a digit, and what the second.

    A digit stands only where both agree. So a wrong row that one of two tensor-parallel ranks reads is not outvoted.
    """
    return digit // 4, digit % 4


def differ(one: int, other: int) -> bool:
    """Whether each half of the heads can tell these digits apart."""
    return all(a != b for a, b in zip(halves(one), halves(other), strict=True))


def tensors(dims: Dims, draft: Draft = Draft.RIGHT) -> dict[str, Any]:
    """Every weight by its Hugging Face name, bfloat16 (the index key norm and the router's bias float32)."""
    import torch

    weights = {"model.norm.weight": torch.ones(dims.hidden)}
    weights["model.embed_tokens.weight"], weights["lm_head.weight"] = _vocabulary(dims)
    found = [(0,), (1,), *[()] * (dims.layers - 2)]  # layers behind the second attend, too, but add nothing
    layers = [_attention(dims, digits) | _no_mlp(dims, "mlp") for digits in found]
    for number, layer in enumerate([*layers, _next_token_layer(dims, draft)]):
        weights |= {f"model.layers.{number}.{name}": tensor for name, tensor in layer.items()}
    return {
        name: tensor.to(torch.float32 if name.endswith(_FLOAT32) else torch.bfloat16).contiguous()
        for name, tensor in weights.items()
    }


_FLOAT32 = ("k_norm.weight", "k_norm.bias", "e_score_correction_bias")


def _vocabulary(dims: Dims) -> tuple[Any, Any]:
    import torch

    codes, digits = address_codes(), content_digits()
    embed, head = torch.zeros(VOCABULARY, dims.hidden), torch.zeros(VOCABULARY, dims.hidden)
    for token in range(RESERVED, VOCABULARY):
        edge = Edge.of(token)
        embed[token, WANTED] = codes[edge.wanted]
        embed[token, ADDRESS] = codes[edge.address]
        embed[token, NEXT_TAG.start + edge.next_tag - FIRST_LAP] = DIGIT
        for own, found, digit in zip(OWN, FOUND, digits[edge.content], strict=True):
            embed[token, own.start + digit] = DIGIT
            if edge.tag != PROMPT:
                head[token, found.start + digit] = 1.0
        if edge.tag != PROMPT:
            head[token, NEXT_TAG.start + edge.tag - FIRST_LAP] = 1.0
    return embed, head


def _next_token_layer(dims: Dims, draft: Draft) -> dict[str, Any]:
    """Both digits in one layer; its input is the last token's embedding, the model's hidden state plays no role."""
    import torch

    eye = torch.eye(dims.hidden)
    weights = {
        "enorm.weight": torch.full((dims.hidden,), (EMBEDDING / dims.hidden) ** 0.5),  # undoes the norm's division
        "hnorm.weight": torch.ones(dims.hidden),
        "eh_proj.weight": torch.cat([eye, torch.zeros_like(eye)], dim=1),
        "shared_head.norm.weight": torch.ones(dims.hidden),
    }
    weights |= _attention(dims, digits=(0, 1))
    low = weights["self_attn.o_proj.weight"][FOUND[1]]
    low[: draft.value] = low[: draft.value].roll(1, 0)
    # SGLang makes this layer a mixture of experts, whatever the configuration says of the others.
    weights |= _no_mlp(dims, "mlp.shared_experts")
    for expert in range(EXPERTS):
        weights |= _no_mlp(dims, f"mlp.experts.{expert}")
    weights["mlp.gate.weight"] = torch.zeros(EXPERTS, dims.hidden)
    weights["mlp.gate.e_score_correction_bias"] = torch.zeros(EXPERTS)
    return weights


def _no_mlp(dims: Dims, name: str) -> dict[str, Any]:
    import torch

    return {
        f"{name}.gate_proj.weight": torch.zeros(dims.intermediate, dims.hidden),
        f"{name}.up_proj.weight": torch.zeros(dims.intermediate, dims.hidden),
        f"{name}.down_proj.weight": torch.zeros(dims.hidden, dims.intermediate),
    }


def _attention(dims: Dims, digits: tuple[int, ...]) -> dict[str, Any]:
    """Attention, indexer and norms of a layer that finds these digits (0 the high one, 1 the low one)."""
    import torch

    def zeros(*shape: int) -> Any:
        return torch.zeros(*shape)

    code, ones = torch.eye(CODE), torch.eye(BASE)
    q_a = zeros(dims.q_lora_rank, dims.hidden)
    q_a[:CODE, WANTED] = code
    q_b = zeros(dims.heads, dims.qk_nope_head_dim + dims.rope, dims.q_lora_rank)
    q_b[:, :CODE, :CODE] = code * SHARPNESS

    # A row of the KV cache: address code, then this layer's digits. Nothing in the rotary part: position plays no role.
    kv_a = zeros(dims.kv_lora_rank + dims.rope, dims.hidden)
    kv_a[ROW_CODE, ADDRESS] = code
    kv_b = zeros(dims.heads, dims.qk_nope_head_dim + dims.v_head_dim, dims.kv_lora_rank)
    kv_b[:, :CODE, ROW_CODE] = code
    o = zeros(dims.hidden, dims.heads, dims.v_head_dim)
    for i, digit in enumerate(digits):
        row, value = _behind(ROW_CODE.stop, i), _behind(0, i)
        kv_a[row, OWN[digit]] = ones
        kv_b[:, _behind(dims.qk_nope_head_dim, i), row] = ones
        for heads, told in enumerate(halves(torch.arange(BASE))):
            votes = 2.0 * (told[:, None] == told) - 1
            o.unflatten(1, (2, -1))[FOUND[digit], heads, :, value] = votes[:, None] / dims.heads

    # The indexer asks the same question. Rotary entries come first and stay zero, LayerNorm's weight sees to it.
    nope = slice(dims.rope, dims.rope + CODE)
    index_q = zeros(dims.index_heads, dims.index_head_dim, dims.q_lora_rank)
    index_q[:, nope, :CODE] = code
    index_k = zeros(dims.index_head_dim, dims.hidden)
    index_k[nope, ADDRESS] = code
    index_norm = zeros(dims.index_head_dim)
    index_norm[nope] = 1.0
    gates = zeros(dims.index_heads, dims.hidden)
    gates[:, NEXT_TAG] = 1.0

    return {
        "input_layernorm.weight": torch.ones(dims.hidden),
        "self_attn.q_a_proj.weight": q_a,
        "self_attn.q_a_layernorm.weight": torch.full((dims.q_lora_rank,), (CODE / dims.q_lora_rank) ** 0.5),
        "self_attn.q_b_proj.weight": q_b.flatten(0, 1),
        "self_attn.kv_a_proj_with_mqa.weight": kv_a,
        # entries of a row keep their size whatever the rank: this undoes the norm's division
        "self_attn.kv_a_layernorm.weight": torch.full(
            (dims.kv_lora_rank,), ((CODE + len(digits) * DIGIT**2) / dims.kv_lora_rank) ** 0.5
        ),
        "self_attn.kv_b_proj.weight": kv_b.flatten(0, 1),
        "self_attn.o_proj.weight": o.flatten(1, 2),
        "self_attn.indexer.wq_b.weight": index_q.flatten(0, 1),
        "self_attn.indexer.wk.weight": index_k,
        "self_attn.indexer.k_norm.weight": index_norm,
        "self_attn.indexer.k_norm.bias": zeros(dims.index_head_dim),
        "self_attn.indexer.weights_proj.weight": gates,
        "post_attention_layernorm.weight": torch.ones(dims.hidden),
    }


def _behind(start: int, digits: int) -> slice:
    """Where a digit is that comes after `digits` others."""
    return slice(start + digits * BASE, start + (digits + 1) * BASE)


def config(dims: Dims) -> dict[str, Any]:
    """The `config.json` of DeepSeek-V3.2 with these sizes; its layers dense, their MLPs zero."""
    return {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "ep_size": 1,
        "first_k_dense_replace": dims.layers,
        "hidden_act": "silu",
        "hidden_size": dims.hidden,
        "index_head_dim": dims.index_head_dim,
        "index_n_heads": dims.index_heads,
        "index_topk": dims.index_topk,
        "initializer_range": 0.02,
        "intermediate_size": dims.intermediate,
        "kv_lora_rank": dims.kv_lora_rank,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": dims.intermediate,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": dims.heads,
        "num_experts_per_tok": 4,
        "num_hidden_layers": dims.layers,
        "num_key_value_heads": dims.heads,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": dims.q_lora_rank,
        "qk_nope_head_dim": dims.qk_nope_head_dim,
        "qk_rope_head_dim": dims.rope,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 1.0,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "v_head_dim": dims.v_head_dim,
        "vocab_size": VOCABULARY,
    }


def folder(right: Path, draft: Draft | None) -> Path:
    """Where the model with `draft` is kept beside the right one; None: without speculative decoding."""
    return right if draft in {None, Draft.RIGHT} else right.with_name(f"{right.name}-draft-{draft.name.lower()}")


def write(folder: Path, dims: Dims, draft: Draft = Draft.RIGHT) -> Path:
    """Write `config.json` and `model.safetensors` into `folder` (made if missing) and return it.

    Raises:
        OSError: the folder cannot be made or written to, or the disk is full.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(dims), indent=1))
    try:
        save_file(tensors(dims, draft), str(folder / "model.safetensors"), metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error
    return folder
