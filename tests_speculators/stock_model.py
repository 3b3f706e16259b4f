"""Hidden states of the demo model from stock transformers, and samples to compute them of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridkv.demo import demo_document, demo_model

LAYERS = (2, 4, 8)
"""Layer 8 is the output of the last layer: what speculators takes for the verifier's last hidden state."""
DRAFT_LAYERS = LAYERS[:-1]
"""The layers that the draft reads."""
SAMPLE_TOKENS = 64


class Computed(NamedTuple):
    hidden_states: torch.Tensor
    """[tokens, layers, hidden]"""
    logits: torch.Tensor
    """[tokens, vocabulary]"""


class StockModel:
    def __init__(self) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(demo_model())
        self.model = AutoModelForCausalLM.from_pretrained(demo_model(), dtype=torch.bfloat16).eval()
        self.hidden_size: int = self.model.config.hidden_size
        self._computed: dict[tuple[int, ...], Computed] = {}

    def hidden_states(self, ids: Sequence[int]) -> torch.Tensor:
        return self.compute(ids).hidden_states

    def compute(self, ids: Sequence[int]) -> Computed:
        if tuple(ids) not in self._computed:
            self._computed[tuple(ids)] = self._forward(torch.tensor([list(ids)]))
        return self._computed[tuple(ids)]

    @torch.no_grad()
    def _forward(self, ids: torch.Tensor) -> Computed:
        """The last of transformers' hidden states is normalised. Ours is what enters the final norm."""
        entered: list[torch.Tensor] = []
        hook = self.model.model.norm.register_forward_pre_hook(lambda norm, args: entered.append(args[0]))
        output = self.model(ids, output_hidden_states=True)
        hook.remove()
        states = [*output.hidden_states[:-1], entered[0]]
        return Computed(torch.stack([states[layer][0] for layer in LAYERS], dim=1), output.logits[0])

    def samples(self, count: int) -> list[list[int]]:
        """Token ids of paragraphs of the document."""
        paragraphs = [line for line in demo_document().splitlines() if line.strip()]
        return [self.tokenizer(one).input_ids[:SAMPLE_TOKENS] for one in paragraphs[:count]]

    def chat_ids(self, messages: list[dict[str, str]]) -> list[int]:
        ids: list[int] = self.tokenizer.apply_chat_template(messages, add_generation_prompt=False, return_dict=False)
        return ids
