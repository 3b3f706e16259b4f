"""How often the model gives exactly the right reply to a question about its context.

    python examples/train_demo/evaluate.py --data data --model run/model --probes 32

It prints one JSON line last: a share of right replies for each skill, wording and length, and for conversations with
questions in wordings that training did not have.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
from pathlib import Path
from typing import Any

import torch
from chat import held_out_questions
from model import Trainer, Weights
from safetensors.torch import load_file
from skills import SKILLS
from tokens import Rows, load_rows, probe

LENGTHS = (256, 512, 1024, 2048, 4096)
WORDINGS = {"seen": False, "held out": True}
Probe = tuple[list[int], list[int]]


class Probes:
    """Questions of every skill, wording and length, made by other processes meanwhile."""

    def __init__(self, rows: Rows, count: int, workers: int, seed: int) -> None:
        cases = [(skill, wording, length) for skill in SKILLS for wording in WORDINGS for length in LENGTHS]
        pool = multiprocessing.get_context("fork").Pool(workers, _share, (rows, seed))
        self._made = {case: pool.map_async(_make, [(*case, i) for i in range(count)]) for case in cases}

    def __iter__(self) -> Any:
        return ((case, made.get()) for case, made in self._made.items())


_shared: tuple[Rows, int]


def _share(rows: Rows, seed: int) -> None:
    global _shared
    _shared = rows, seed


def _make(case: tuple[str, str, int, int]) -> Probe:
    rows, seed = _shared
    skill, wording, length, _ = case
    return probe(rows, skill, length, WORDINGS[wording], random.Random(f"{seed} {case}"))


@torch.no_grad()  # type: ignore[untyped-decorator]
def skill_table(weights: Weights, probes: Probes, batch_tokens: int, end: int, dtype: torch.dtype) -> dict[str, Any]:
    """Share of right replies by skill, wording and length. A reply is right if each of its tokens is the model's
    first choice after the right ones before it: what greedy decoding would write."""
    trainer = Trainer(compiled=False, dtype=dtype)
    table: dict[str, Any] = {}
    for (skill, wording, length), found in probes:
        size = max(1, batch_tokens // length)
        groups = (found[i : i + size] for i in range(0, len(found), size))
        right = sum(_count_right(trainer, weights, group, length, end) for group in groups)
        table.setdefault(f"{skill}, {wording}", {})[length] = round(right / len(found), 3)
        print(skill, wording, length, f"{right} of {len(found)}", flush=True)
    return table


def _count_right(trainer: Trainer, weights: Weights, probes: list[Probe], width: int, end: int) -> int:
    tokens = torch.full((len(probes), width + 1), end)
    asked = torch.zeros(len(probes), width, dtype=torch.bool)
    for i, (prompt, reply) in enumerate(probes):
        tokens[i, : len(prompt) + len(reply)] = torch.tensor(prompt + reply)
        asked[i, len(prompt) - 1 : len(prompt) + len(reply) - 1] = True
    tokens, asked = (x.to(weights["lm_head.weight"].device) for x in (tokens, asked))
    targets = tokens[:, 1:].contiguous()
    _, _, chosen = trainer.loss(weights, tokens[:, :-1].contiguous(), targets, asked.float())
    return int(((chosen == targets) | ~asked).all(1).sum())


def conversation_share(model: Path) -> dict[str, Any]:
    """Ask every held-out question of chat.py. A reply is right if it matches the question's pattern."""
    from hybridkv import Engine, SamplingParams

    cases = held_out_questions()
    with Engine(str(model), memory="512MiB") as engine:
        prompts = [engine.render_chat([{"role": "user", "content": question}]) for _, question, _ in cases]
        results = engine.generate(prompts, SamplingParams(max_tokens=96, temperature=0))
    right = [bool(pattern.search(result.text)) for (_, _, pattern), result in zip(cases, results, strict=True)]
    identity = [ok for (name, _, _), ok in zip(cases, right, strict=True) if name.startswith("identity")]
    return {"questions": len(right), "right": sum(right) / len(right), "identity": sum(identity) / len(identity)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="what corpus.py wrote")
    parser.add_argument("--model", type=Path, required=True, help="a published checkpoint")
    parser.add_argument("--probes", type=int, default=32, help="questions a skill, wording and length (default 32)")
    parser.add_argument("--batch-tokens", type=int, default=16_384, help="tokens computed at a time (default 16384)")
    options = parser.parse_args()
    rows = load_rows(options.data, options.model / "tokenizer.json", 0, options.batch_tokens, 1)
    probes = Probes(rows, options.probes, 1, seed=1)
    weights = {name: weight.float() for name, weight in load_file(options.model / "model.safetensors").items()}
    table = skill_table(weights, probes, options.batch_tokens, rows.end, torch.float32)
    table["conversation"] = conversation_share(options.model)
    print(json.dumps(table))


if __name__ == "__main__":
    main()
