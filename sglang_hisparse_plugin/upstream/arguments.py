"""What a server was started with."""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any

from ..patching.source import SourceTree


def is_resolved(server_args: Any) -> bool:
    """Whether SGLang has made of arguments what they mean; from 0.5.19 on it does so after they are built."""
    return bool(getattr(server_args, "_resolution_finished", not hasattr(server_args, "resolve_once")))


def resolved(server_args: Any) -> Any:
    """What arguments mean to SGLang, which from 0.5.19 on keeps it beside what was given."""
    if not hasattr(server_args, "resolve_once"):
        return server_args
    return importlib.import_module("sglang.srt.arg_groups.overrides").resolved_view(server_args)


def draft_tokens() -> int:
    """Draft tokens of a step, the one that is known included; 0 without speculation."""
    arguments = sys.modules["sglang.srt.server_args"].get_global_server_args()
    asked = (arguments.speculative_algorithm or "NONE").upper() != "NONE"
    return int(arguments.speculative_num_draft_tokens or 0) if asked else 0


def finds_next_token_layer(architecture: str) -> bool:
    """Whether SGLang takes a model's own layer for its drafts; DeepSeek-V3.2's from 0.5.12."""
    config = sys.modules["sglang.srt.configs.model_config"].ModelConfig
    return architecture in inspect.getsource(config._config_draft_model)


def model_and_top_k(server_args: Any, tree: SourceTree, top_k: int) -> tuple[list[str], int]:
    """Architectures of the model that a server is started with, and tokens that a query selects.

    Args:
        top_k: of ``--hisparse-config``, by which SGLang goes to 0.5.11; later by the model.
    """
    if hasattr(server_args, "get_model_config"):
        model = server_args.get_model_config()
    else:  # from 0.5.19
        model = importlib.import_module("sglang.srt.arg_groups.overrides").model_config_of(server_args)
    if tree.mentions("sglang.srt.model_executor.model_runner", "hisparse_top_k"):
        top_k = getattr(model.hf_text_config, "index_topk", top_k)
    return list(model.hf_config.architectures or ()), int(top_k)


def is_on() -> bool:
    """Whether this process serves with HiSparse; for a function that sees neither scheduler nor coordinator."""
    return bool(sys.modules["sglang.srt.server_args"].get_global_server_args().enable_hisparse)
