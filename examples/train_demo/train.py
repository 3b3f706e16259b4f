"""Trains the demo model on one GPU, in pieces that resume: run the same command until it says that it is done.

    python examples/train_demo/corpus.py data
    python examples/train_demo/train.py --data data --run run --minutes 8.5      # again and again

RUN keeps the tokenizer, the resume state (under 60 MiB, in files under 16 MiB), a log and, at the end, the model.
`--start MODEL` goes on from a published model, with its tokenizer, instead of random weights.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty
from typing import Any

import numpy as np
import torch
from evaluate import Probes, skill_table
from model import Trainer, Weights, dtype_for, initial_weights
from optimizer import Optimizer, pack, pack_weights, unpack, unpack_weight
from publish import TOKENIZER_FILES, draw_losses, publish
from safetensors.torch import load_file, save_file
from tokens import CHAT, EXACT, NEXT_STAGES, STAGES, TEXT, Rows, load_rows, read_corpus, save_tokenizer, train_tokenizer

SEED = 17
WARMUP_STEPS, DECAY_SHARE = 150, 0.40
SHARD_BYTES = 15 * 2**20
FORK = multiprocessing.get_context("fork")


def main() -> None:
    options = parse()
    run: Path = options.run
    run.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    if options.start:
        take_tokenizer(options.start, run)
    elif not (run / "tokenizer.json").is_file():
        save_tokenizer(train_tokenizer(read_corpus(options.data), SEED), run)
        print(f"tokenizer trained in {time.monotonic() - started:.0f} s", flush=True)
    piece = Piece(options, started)
    piece.train()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="what corpus.py wrote")
    parser.add_argument("--run", type=Path, required=True, help="where the state and the model go")
    parser.add_argument("--start", type=Path, metavar="MODEL", help="a published model to go on from (default: none)")
    parser.add_argument("--minutes", type=float, default=8.5, help="stop and save after so long (default 8.5)")
    parser.add_argument("--steps", type=int, default=15_000, help="steps of the whole training (default 15000)")
    parser.add_argument("--batch-tokens", type=int, default=65_536, help="tokens a step (default 65536)")
    parser.add_argument("--workers", type=int, default=13, help="processes that make batches (default 13)")
    parser.add_argument("--matrix-rate", type=float, default=0.02, help="learning rate of Muon (default 0.02)")
    parser.add_argument("--embed-rate", type=float, default=0.03, help="of the embeddings (default 0.03)")
    parser.add_argument("--head-rate", type=float, default=0.004, help="of the output head (default 0.004)")
    parser.add_argument(
        "--small-rate", type=float, default=0.005, help="of norms, gates and convolutions (default 0.005)"
    )
    parser.add_argument("--no-compile", action="store_true", help="run layers as they are written")
    parser.add_argument("--probes", type=int, default=64, help="questions a skill, length and wording in an evaluation")
    return parser.parse_args()


class Batches:
    """Batches in order, made by other processes, which share the corpus. Make it before anything touches a GPU."""

    def __init__(self, rows: Rows, workers: int, first: int) -> None:
        self._queues = [FORK.Queue(4) for _ in range(workers)]
        self._workers = [
            FORK.Process(target=_make_batches, args=(rows, queue, first + i, workers), daemon=True)
            for i, queue in enumerate(self._queues)
        ]
        for worker in self._workers:
            worker.start()

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        while True:
            for queue, worker in zip(self._queues, self._workers, strict=True):
                while True:
                    try:
                        yield queue.get(timeout=10)
                        break
                    except Empty:
                        if not worker.is_alive():
                            raise SystemExit("a process that makes batches has died") from None

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()


def _make_batches(rows: Rows, queue: Any, first: int, stride: int) -> None:
    for step in range(first, rows.total_steps + stride, stride):
        queue.put(rows.batch(step))


def take_tokenizer(model: Path, run: Path) -> None:
    """Bring the tokenizer of `model` to RUN: another one would give its weights other tokens."""
    for name in TOKENIZER_FILES:
        source, mine = model / name, run / name
        if not source.is_file():
            raise SystemExit(f"--start {model} has no {name}: name the directory of a published model")
        if mine.is_file() and mine.read_bytes() != source.read_bytes():
            raise SystemExit(f"{mine} is not the {name} of --start {model}: name an empty --run")
        mine.write_bytes(source.read_bytes())


def load_start(model: Path, like: Weights) -> Weights:
    """The weights of a published model, in float32. They must have the names and shapes of `like`."""
    file = model / "model.safetensors"
    if not file.is_file():
        raise SystemExit(f"--start {model} has no model.safetensors: name the directory of a published model")
    found = {name: weight.float() for name, weight in load_file(file).items()}
    odd = sorted(name for name in found.keys() | like.keys() if _shape(found, name) != _shape(like, name))
    if odd:
        raise SystemExit(f"--start {model} is not of the shape that model.py has: see {odd[0]}")
    return found


def _shape(weights: Weights, name: str) -> torch.Size | None:
    return weights[name].shape if name in weights else None


def load_state(run: Path) -> dict[str, torch.Tensor]:
    """What the last piece saved; empty before the first."""
    shards = sorted(run.glob("state-*.safetensors"))
    return {name: tensor for shard in shards for name, tensor in load_file(shard).items()}


class Piece:
    """One call: resumes, trains for its minutes, saves."""

    def __init__(self, options: argparse.Namespace, started: float) -> None:
        torch.set_float32_matmul_precision("high")
        torch._dynamo.config.recompile_limit = 64
        self.options, self.started = options, started
        tokenizer = options.run / "tokenizer.json"
        stages = NEXT_STAGES if options.start else STAGES
        self.rows = load_rows(options.data, tokenizer, SEED, options.batch_tokens, options.steps, stages)
        self.state = load_state(options.run)
        self.step = self.resumed_at = int(self.state.get("step", 0))
        self.batches = Batches(self.rows, options.workers, self.step)
        self.probes = Probes(self.rows, options.probes, options.workers, SEED)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        weights = initial_weights(self.rows.bpe.get_vocab_size(), SEED)
        if options.start:
            weights = load_start(options.start, weights)
        self.weights: Weights = {name: weight.to(self.device) for name, weight in weights.items()}
        rates = (options.matrix_rate, options.embed_rate, options.head_rate, options.small_rate)
        self.optimizer = Optimizer(self.weights, *rates)
        self.trainer = Trainer(compiled=not options.no_compile, dtype=dtype_for(self.device))
        self._resume()
        for weight in self.weights.values():
            weight.requires_grad_()

    def train(self) -> None:
        options, log = self.options, self.options.run / "log.jsonl"
        source = iter(self.batches)
        deadline = self.started + options.minutes * 60
        seen, waited, since, begun = torch.zeros(7, device=self.device), 0.0, time.monotonic(), self.step
        while self.step < options.steps and time.monotonic() < deadline:
            before = time.monotonic()
            tokens, importance = next(source)
            waited += time.monotonic() - before
            seen += self._take(tokens, importance)
            self.step += 1
            if self.step % 100 == 0 or self.step in (1, 10, 30):
                loss, text, n_text, chat, n_chat, right, n_exact = seen.tolist()
                now = time.monotonic()
                line = {
                    "step": self.step,
                    "row_tokens": tokens.shape[1] - 1,
                    "loss": round(loss / max(1, (self.step - begun)), 4),
                    "text_loss": round(text / max(1, n_text), 4),
                    "chat_loss": round(chat / max(1, n_chat), 4),
                    "exact_accuracy": round(right / max(1, n_exact), 4),
                    "tokens_per_s": round((self.step - begun) * options.batch_tokens / (now - since)),
                    "waited_s": round(waited, 1),
                    "s": round(now - self.started),
                }
                with log.open("a") as out:
                    out.write(json.dumps(line) + "\n")
                print(line, flush=True)
                seen.zero_()
                waited, since, begun = 0.0, now, self.step
        self.batches.close()
        self._save()
        self._evaluate()
        done = self.step >= options.steps
        publish(self.weights, self.rows.bpe, options.run)
        draw_losses(log, options.run / "loss.png")
        print("done" if done else f"step {self.step} of {options.steps}: run the same command again", flush=True)

    def _take(self, tokens: np.ndarray, importance: np.ndarray) -> torch.Tensor:
        """One step of training. Returns sums for the log."""
        ids = torch.from_numpy(tokens.astype(np.int64)).to(self.device, non_blocking=True)
        worth = torch.from_numpy(importance).to(self.device, non_blocking=True)
        weight = worth.float()
        targets = ids[:, 1:].contiguous()
        total, losses, chosen = self.trainer.loss(self.weights, ids[:, :-1].contiguous(), targets, weight)
        loss = total / weight.sum()
        names = list(self.weights)
        grads = torch.autograd.grad(loss, [self.weights[name] for name in names])
        self.optimizer.step(dict(zip(names, grads, strict=True)), self._scale(), self.step - self.resumed_at + 1)
        with torch.no_grad():
            kinds = [worth == kind for kind in (TEXT, CHAT, EXACT)]
            sums = [loss.detach(), (losses * kinds[0]).sum(), kinds[0].sum(), (losses * kinds[1]).sum(), kinds[1].sum()]
            return torch.stack([x.float() for x in (*sums, ((chosen == targets) & kinds[2]).sum(), kinds[2].sum())])

    def _scale(self) -> float:
        """Up, level, and down to nothing; after a resume up again over a few steps, while the moments settle."""
        rising = min(1.0, (self.step + 1) / WARMUP_STEPS, (self.step - self.resumed_at + 1) / 20)
        falling = (self.options.steps - self.step) / (self.options.steps * DECAY_SHARE)
        return float(min(rising, falling, 1.0))

    def _evaluate(self) -> None:
        dtype = dtype_for(self.device)
        table = skill_table(self.weights, self.probes, self.options.batch_tokens, self.rows.end, dtype)
        table["step"] = self.step
        (self.options.run / "skills.json").write_text(json.dumps(table, indent=1))
        print(json.dumps(table), flush=True)

    def _resume(self) -> None:
        if not self.state:
            return
        for name, weight in self.weights.items():
            weight.copy_(unpack_weight(self.state[name], weight))
            self.optimizer.first[name].copy_(unpack(self.state, f"first|{name}", weight))
            if name in self.optimizer.second:
                self.optimizer.second[name].copy_(unpack(self.state, f"second|{name}", weight).square())

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _save(self) -> None:
        state = pack_weights(self.weights)
        state |= pack((f"first|{name}", moment) for name, moment in self.optimizer.first.items())
        state |= pack((f"second|{name}", moment.sqrt()) for name, moment in self.optimizer.second.items())
        state["step"] = torch.tensor(self.step)
        shards: list[dict[str, torch.Tensor]] = [{}]
        for name, tensor in state.items():
            if sum(t.nbytes for t in shards[-1].values()) + tensor.nbytes > SHARD_BYTES:
                shards.append({})
            shards[-1][name] = tensor.cpu().contiguous()
        # Whole files under other names first: a process that is killed while it writes leaves the last state as it was.
        parts = [self.options.run / f"state-{i:02}.part" for i in range(len(shards))]
        for part, shard in zip(parts, shards, strict=True):
            save_file(shard, part)
        for part in parts:
            part.replace(part.with_suffix(".safetensors"))


if __name__ == "__main__":
    main()
