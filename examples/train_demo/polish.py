"""A last, short stage on short rows: many wordings, few tokens, a low learning rate. It runs on a CPU.

    python examples/train_demo/polish.py --data data --run run --minutes 19

Understanding a question does not depend on how far back its answer stands: wordings are learned on short rows, and what
was learned on long ones stays.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import tokens
import torch
from model import Trainer, initial_weights
from optimizer import Optimizer, unpack_weight
from publish import publish
from train import SEED, Batches, load_state

ROW_TOKENS = 256
MIX = {"skill": 0.80, "chat": 0.17, "text": 0.03}
SHARES = {"recall": 0.46, "lookup": 0.03, "document": 0.30, "repeat": 0.16, "count": 0.05}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="what corpus.py wrote")
    parser.add_argument("--run", type=Path, required=True, help="where train.py left its state")
    parser.add_argument("--minutes", type=float, default=19, help="how long (default 19)")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="tokens a step (default 4096)")
    parser.add_argument("--rate", type=float, default=0.003, help="of Muon; the others are scaled alike")
    options = parser.parse_args()
    state = load_state(options.run)
    if not state:
        raise SystemExit(f"no state-*.safetensors in {options.run}: run train.py first")
    tokens.STAGES[:] = [tokens.Stage(1.0, ROW_TOKENS, MIX)]
    tokens.SKILL_SHARES.update(SHARES)
    rows = tokens.load_rows(options.data, options.run / "tokenizer.json", SEED + 1, options.batch_tokens, 10**6)
    batches = Batches(rows, 1, 0)
    fresh = initial_weights(rows.bpe.get_vocab_size(), 0)
    weights = {name: unpack_weight(state[name], weight).requires_grad_() for name, weight in fresh.items()}
    optimizer = Optimizer(weights, options.rate, 1.5 * options.rate, 0.2 * options.rate, 0.25 * options.rate)
    trainer = Trainer(compiled=True, dtype=torch.float32)
    started, step, names = time.monotonic(), 0, list(weights)
    totals = torch.zeros(3)
    source = iter(batches)
    while (done := (time.monotonic() - started) / 60 / options.minutes) < 1:
        ids, importance = (torch.from_numpy(part.astype("int64")) for part in next(source))
        targets, weight = ids[:, 1:].contiguous(), importance.float()
        total, _, chosen = trainer.loss(weights, ids[:, :-1].contiguous(), targets, weight)
        loss = total / weight.sum()
        grads = torch.autograd.grad(loss, [weights[name] for name in names])
        step += 1
        optimizer.step(dict(zip(names, grads, strict=True)), min(1.0, step / 20, 2 * (1 - done)), step)
        exact = importance == tokens.EXACT
        totals += torch.tensor([float(loss.detach()), float(((chosen == targets) & exact).sum()), float(exact.sum())])
        if step % 10 == 0:
            print(step, f"{done:.2f}", f"loss {totals[0] / 10:.4f}", f"exact {totals[1] / totals[2]:.4f}", flush=True)
            totals.zero_()
        if step % 50 == 0:
            publish(weights, rows.bpe, options.run)
    batches.close()
    publish(weights, rows.bpe, options.run)


if __name__ == "__main__":
    main()
