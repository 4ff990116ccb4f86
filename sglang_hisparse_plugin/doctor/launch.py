"""Reads a pasted launch command: the flags that HiSparse depends on, and where the command would run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from ..sizing.amounts import count
from ..speculative import limits

#: The server's flags that are judged: name -> its spellings and how its value is read; None: it takes no value.
#: The first letters of a spelling do, as for SGLang. What `speculative.limits` judges has the server's own name.
FLAGS: dict[str, tuple[tuple[str, ...], Callable[[str], Any] | None]] = {
    "model": (("--model-path", "--model"), str),
    "revision": (("--revision",), str),
    "tp": (("--tp-size", "--tensor-parallel-size"), int),
    "dp": (("--dp-size", "--data-parallel-size"), int),
    "pp_size": (("--pp-size", "--pipeline-parallel-size"), int),
    "nnodes": (("--nnodes",), int),
    "dp_attention": (("--enable-dp-attention",), None),
    "base_gpu_id": (("--base-gpu-id",), int),
    "gpu_id_step": (("--gpu-id-step",), int),
    "device": (("--device",), str),
    "numa_node": (("--numa-node",), str),
    "context_length": (("--context-length",), count),
    "page_size": (("--page-size",), int),
    "kv_cache_dtype": (("--kv-cache-dtype",), str),
    "mem_fraction": (("--mem-fraction-static",), float),
    "max_total_tokens": (("--max-total-tokens",), count),
    "max_running_requests": (("--max-running-requests",), int),
    "hisparse": (("--enable-hisparse",), None),
    "hisparse_config": (("--hisparse-config", "--hierarchical-sparse-attention-extra-config"), str),
    "disable_radix_cache": (("--disable-radix-cache",), None),
    "hierarchical_cache": (("--enable-hierarchical-cache",), None),
    "enable_mixed_chunk": (("--enable-mixed-chunk",), None),
    "enable_streaming_session": (("--enable-streaming-session",), None),
    "prefill_backend": (("--dsa-prefill-backend", "--nsa-prefill-backend"), str),
    "decode_backend": (("--dsa-decode-backend", "--nsa-decode-backend"), str),
    "disaggregation_mode": (("--disaggregation-mode",), str),
    "disaggregation_transfer_backend": (("--disaggregation-transfer-backend",), str),
    "speculative_algorithm": (("--speculative-algorithm",), str),
    "draft_tokens": (("--speculative-num-draft-tokens",), int),
    "speculative_draft_model_path": (("--speculative-draft-model-path", "--speculative-draft-model"), str),
    "speculative_eagle_topk": (("--speculative-eagle-topk",), int),
    "speculative_num_steps": (("--speculative-num-steps",), int),
    "speculative_adaptive": (("--speculative-adaptive",), None),
    "enable_multi_layer_eagle": (("--enable-multi-layer-eagle",), None),
    "enable_two_batch_overlap": (("--enable-two-batch-overlap",), None),
    "attn_dp_size": (("--attn-dp-size",), int),
    "enable_pdmux": (("--enable-pdmux",), None),
    "enable_return_aux_hidden_states": (("--enable-return-aux-hidden-states",), None),
    "disable_overlap_schedule": (("--disable-overlap-schedule",), None),
    "overrides": (("--json-model-override-args",), str),
    "config_file": (("--config",), str),
    "plugin_mode": (("--hisparse-plugin",), str),
    "plugin_skip": (("--hisparse-plugin-skip",), str),
    "plugin_log_interval": (("--hisparse-plugin-log-interval",), str),
    "plugin_trace": (("--hisparse-plugin-trace",), str),
}
MOST = 1 << 40
CHOSEN_STEPS = 3  #: that SGLang takes for models with sparse attention, where nothing of the kind is given
#: Values that make sense, where those are not 1 to MOST.
RANGES = {"base_gpu_id": (0, MOST), "speculative_num_steps": (0, MOST), "mem_fraction": (0.01, 0.99)}
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
PYTHON = re.compile(r"(.*/)?python[0-9.]*")


@dataclass(frozen=True)
class Launch:
    """A launch command, as far as it could be read."""

    given: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    """By the names of `FLAGS`; only what was given."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """``NAME=value`` words before the command."""
    program: str = ""
    """The interpreter or console script that the command starts; empty when it was flags alone."""
    container: bool = False
    """It starts a container, which the doctor does not see into."""
    problems: tuple[str, ...] = ()
    """What SGLang's own parser would refuse."""

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a flag, or `default` where it was not given."""
        if name not in FLAGS:
            raise KeyError(name)
        return self.options.get(name, default)

    @property
    def drafts(self) -> int:
        """Draft tokens of a step; 0 where it does not speculate or does not say. SGLang goes by a chain's steps."""
        if not limits.asked(self.arguments):
            return 0
        given = (self.get("draft_tokens"), self.get("speculative_eagle_topk"))
        steps = self.get("speculative_num_steps", CHOSEN_STEPS if given == (None, None) else None)
        return int(steps + 1 if steps is not None else given[0] or 0)

    @property
    def attention_ranks(self) -> int:
        """Ranks of DP attention, which share the request slots; from 0.5.22 on one flag says both."""
        if self.count("attn_dp_size") > 1:
            return self.count("attn_dp_size")
        return self.count("dp") if self.get("dp_attention") else 1

    @property
    def replicas(self) -> int:
        """Groups of ranks beside each other; those of DP attention lie within one."""
        return 1 if self.attention_ranks > 1 else self.count("dp")

    @property
    def arguments(self) -> SimpleNamespace:
        """By the server's own names, for what judges those."""
        renamed = {
            "model_path": "model",
            "enable_dp_attention": "dp_attention",
            "speculative_num_draft_tokens": "draft_tokens",
        }
        return SimpleNamespace(**self.options, **{theirs: self.get(ours) for theirs, ours in renamed.items()})

    def spelled(self) -> str:
        """The flags as a shell would read them."""
        words = []
        for name, value in self.options.items():
            words.append(FLAGS[name][0][0])
            words += [] if FLAGS[name][1] is None else [shlex.quote(str(value))]
        return " ".join(words)

    def count(self, name: str) -> int:
        """A flag that counts something; 1 where it was not given or makes no sense."""
        value = self.get(name, 1)
        return value if isinstance(value, int) and value > 0 else 1


def read(words: Sequence[str], overrides: Mapping[str, Any] | None = None) -> Launch:
    """A launch command from its words; `overrides` are flags given to the doctor itself."""
    if len(words) == 1 and " " in words[0].strip():  # the whole command in quotes
        try:
            words = shlex.split(words[0])
        except ValueError as error:
            return Launch(given=True, problems=(f"the command cannot be split into words: {error}",))
    words = [word for word in words if word.strip() and word != "\\"]  # what is left of continued lines
    environment, head, flags = _split(words)
    options, problems = _flags(flags)
    if "model" not in options and "serve" in head[1:] and head[-1] != "serve":
        options["model"] = head[-1]  # sglang serve MODEL
    options.update(overrides or {})
    return Launch(
        given=bool(words) or bool(overrides),
        options=options,
        environment=environment,
        program=next((word for word in head if PYTHON.fullmatch(word) or word.endswith("/sglang")), ""),
        container=any(word.rpartition("/")[2] in ("docker", "podman", "nerdctl", "kubectl") for word in head[:2]),
        problems=tuple(problems),
    )


def _split(words: Sequence[str]) -> tuple[dict[str, str], list[str], list[str]]:
    """Assignments, the command itself, and the server's flags."""
    start = next((i for i, word in enumerate(words) if _starts_server(words, i)), None)
    if start is None:  # flags alone, or a wrapper of the user's own: from the first flag on
        start = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    head = list(words[:start])
    found = [match for word in head if (match := ASSIGNMENT.fullmatch(word))]
    return {m[1]: m[2] for m in found}, [w for w in head if not ASSIGNMENT.fullmatch(w)], list(words[start:])


def _starts_server(words: Sequence[str], i: int) -> bool:
    """Whether the server's own flags start at `i`."""
    before = words[i - 1] if i else ""
    if before.endswith(("sglang.launch_server", "launch_server.py")):
        return True
    if before == "serve":  # `sglang serve MODEL --flags` and `sglang serve --flags`
        return words[i].startswith("-")
    return i > 1 and words[i - 2] == "serve" and not before.startswith("-")


def _flags(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    options: dict[str, Any] = {}
    problems: list[str] = []
    i = 0
    while i < len(words):
        word, _, inline = words[i].partition("=")
        i += 1
        name = _name(word)
        if name is None:
            if "sparse" in word and word.startswith("--") and "backend" not in word:
                known = [s for spellings, _ in FLAGS.values() for s in spellings if "sparse" in s]
                problems.append(f"{word} is no flag of the server; there are {', '.join(known)}")
            continue
        convert = FLAGS[name][1]
        if convert is None:
            options[name] = True
            continue
        if "=" in words[i - 1]:
            text = inline
        elif i < len(words) and not _is_flag(words[i]):
            text, i = words[i], i + 1
        else:
            problems.append(f"{word} has no value")
            continue
        try:
            value = convert(text)
        except ValueError as error:
            kind = "no whole number" if convert is int else "no number"
            problems.append(f"{word}: {error}" if convert is count else f"{word} is {text!r}, which is {kind}")
            continue
        low, high = RANGES.get(name, (1, MOST))
        if convert in (int, float) and not low <= value <= high:
            problems.append(f"{word} is {text}, which makes no sense: it can be {low} to {high}")
        else:
            options[name] = value
    return options, problems


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not re.fullmatch(r"-\d+(\.\d+)?", word)


def _name(word: str) -> str | None:
    exact = [name for name, (spellings, _) in FLAGS.items() if word in spellings]
    if exact or not word.startswith("--") or len(word) < 4:
        return exact[0] if exact else None
    begun = {name for name, (spellings, _) in FLAGS.items() if any(s.startswith(word) for s in spellings)}
    return begun.pop() if len(begun) == 1 else None


def words_of(texts: Iterable[str]) -> list[str]:
    """The words after ``--``, without the separator itself."""
    words = list(texts)
    return words[1:] if words[:1] == ["--"] else words
