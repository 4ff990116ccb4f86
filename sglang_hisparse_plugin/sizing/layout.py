"""How ranks are spread over GPUs and nodes. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from .error import SizingError
from .shapes import ModelShape


@dataclass(frozen=True)
class Layout:
    """``--tp-size``, ``--dp-size``, ``--enable-dp-attention``, on nodes of so many GPUs.

    Raises:
        SizingError: SGLang would refuse it, or turn a part of it off.
    """

    tp: int = 1
    dp: int = 1
    dp_attention: bool = False
    """Whether the `dp` groups lie within the `tp` ranks, and not beside each other."""
    gpus_per_node: int = 8

    def __post_init__(self) -> None:
        if self.dp_attention and self.dp == 1:
            raise SizingError(
                "--dp-attention without --dp: SGLang turns it off where --dp-size is 1. Give --dp, a divisor of "
                f"--tp {self.tp}, or leave out --dp-attention"
            )
        if self.dp_attention and self.tp % self.dp:
            raise SizingError(f"--dp {self.dp} does not divide --tp {self.tp}: with --dp-attention it must")
        if self.nodes > 1 and not self.dp_attention and self.dp > 1:
            raise SizingError(
                f"--tp {self.tp} and --dp {self.dp} without --dp-attention take {self.ranks} GPUs, and a node has "
                f"{self.gpus_per_node}: SGLang takes --dp-size on more than one node only with --enable-dp-attention. "
                f"Give --dp {max(1, self.gpus_per_node // self.tp)} or less, and start a server on each node"
            )
        if self.nodes > 1 and self.tp % self.gpus_per_node:
            raise SizingError(
                f"--tp {self.tp} does not fill nodes of {self.gpus_per_node} GPUs: SGLang puts as many ranks on each "
                f"node. Give a multiple of {self.gpus_per_node}, or another --gpus-per-node"
            )

    @property
    def ranks(self) -> int:
        """GPUs."""
        return self.tp if self.dp_attention else self.tp * self.dp

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.gpus_per_node)

    @property
    def ranks_per_node(self) -> int:
        return min(self.ranks, self.gpus_per_node)

    @property
    def attention_dp(self) -> int:
        """Ranks of DP attention: these share --max-running-requests."""
        return self.dp if self.dp_attention else 1

    def check(self, model: ModelShape) -> None:
        """Raise what SGLang raises when it builds the model.

        Raises:
            SizingError: attention heads cannot be divided among the ranks.
        """
        ranks = self.tp // self.attention_dp
        if model.heads and model.heads % ranks:
            raise SizingError(
                f"{model.heads} attention heads cannot be divided among {ranks} ranks, and SGLang refuses that: "
                f"give a --tp that divides {model.heads}" + (f" times --dp {self.dp}" if self.dp_attention else "")
            )

    def flags(self) -> list[str]:
        """As SGLang takes them; none for a single GPU."""
        found = [f"--tp-size {self.tp}"] if self.tp > 1 else []
        found += [f"--dp-size {self.dp}"] if self.dp > 1 else []
        found += ["--enable-dp-attention"] if self.dp_attention else []
        found += [f"--nnodes {self.nodes}"] if self.nodes > 1 else []
        return found
