"""The demo model's training: its form of the model is the stock one, its data is what it says, its state survives."""

from __future__ import annotations

import random
from typing import Any

import optimizer
import pytest
import skills
import torch
import transformers
from model import Trainer, gated_delta_rule, initial_weights, linear, make_config, rms_norm
from skills import HELD_OUT, SKILLS, Material
from tokens import EXACT, PROMPT, Rows, Stage, probe, train_tokenizer

VOCABULARY = 512
WORDS = ["apple", "river", "stone", "window", "carpet", "engine", "yellow", "garden", "pepper", "silver"]
SENTENCES = ["The cat sat on the mat and looked at the rain.", "It was a long road.", "Nobody knew who had come first."]
MATERIAL = Material(WORDS, [" ".join(SENTENCES * 3), " ".join(SENTENCES)])


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    drawn = initial_weights(VOCABULARY, seed=0)
    return {name: w if w.any() else torch.randn(w.shape) * 0.1 for name, w in drawn.items()}


@pytest.fixture(scope="module")
def stock(weights: dict[str, torch.Tensor]) -> Any:
    """transformers' own model with the same weights: its experts lie in one tensor."""
    config = make_config(VOCABULARY, 2, 0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    state = model.state_dict()
    for name in state:
        if name in weights:
            state[name] = weights[name]
        else:
            at, kind = name.rsplit(".", 1)
            experts = [[f"{at}.{e}.{part}.weight" for part in PARTS[kind]] for e in range(config.num_experts)]
            state[name] = torch.stack([torch.cat([weights[part] for part in parts]) for parts in experts])
    model.load_state_dict(state)
    return model


PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def test_the_training_form_computes_what_the_stock_model_computes(stock: Any, weights: dict[str, torch.Tensor]) -> None:
    tokens = torch.randint(0, VOCABULARY, (2, 192))
    tokens[0, 60:110] = 7  # equal keys: the triangular systems are at their worst
    with torch.no_grad():
        expected = stock(tokens).logits
        x = Trainer(compiled=False, dtype=torch.float32).hidden(weights, tokens)
        logits = linear(rms_norm(x, weights["model.norm.weight"]), weights["lm_head.weight"])
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()


def test_its_gradients_are_the_stock_model_s(stock: Any, weights: dict[str, torch.Tensor]) -> None:
    tokens = torch.randint(0, VOCABULARY, (1, 129))
    mine = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    targets = tokens[:, 1:].contiguous()
    total, _, _ = Trainer(compiled=False, dtype=torch.float32).loss(mine, tokens[:, :-1], targets, torch.ones(1, 128))
    total.backward()
    stock.zero_grad()
    logits = stock(tokens[:, :-1]).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    compared = 0
    for name, parameter in stock.named_parameters():
        if name in mine:
            error = (parameter.grad - mine[name].grad).norm() / parameter.grad.norm()
            assert error < 1e-3, name
            compared += 1
    assert compared > 90


def test_the_state_is_carried_from_chunk_to_chunk() -> None:
    torch.manual_seed(0)
    q, k, v = torch.nn.functional.normalize(torch.randn(3, 1, 256, 2, 128), dim=-1)
    decay, beta = -torch.rand(1, 256, 2) * 0.01, torch.rand(1, 256, 2)
    whole = gated_delta_rule(q, k, v, decay, beta)
    v[:, 10] += 1
    changed = gated_delta_rule(q, k, v, decay, beta)
    assert torch.equal(whole[:, :10], changed[:, :10])
    assert (whole[:, 200:] - changed[:, 200:]).abs().max() > 1e-4


def test_weights_and_moments_survive_their_packing(weights: dict[str, torch.Tensor]) -> None:
    packed = optimizer.pack_weights(weights)
    assert sum(t.nbytes for t in packed.values()) == 3 * sum(w.numel() for w in weights.values())
    for name, weight in weights.items():
        back = optimizer.unpack_weight(packed[name], weight)
        assert (back - weight).abs().max() <= weight.abs().max() * 2**-15
    moment = torch.randn(64, 32) * torch.logspace(-6, 0, 64)[:, None]
    back = optimizer.unpack(optimizer.pack([("m", moment)]), "m", moment)
    assert ((back - moment).abs().amax(1) <= moment.abs().amax(1) / 8).all()


@pytest.fixture(scope="module")
def rows() -> Rows:
    documents = ["\n\n".join(MATERIAL.paragraphs)] * 3
    made = Rows(train_tokenizer(documents, seed=0), documents, seed=3, batch_tokens=2048, total_steps=10)
    made.__dict__["material"] = MATERIAL
    return made


def test_the_same_step_has_the_same_batch(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    shares = {"copy": 0.25, "text": 0.25, "chat": 0.25, "skill": 0.25}
    monkeypatch.setattr("tokens.STAGES", [Stage(1.0, 512, shares)])
    tokens, importance = rows.batch(4)
    assert tokens.shape == (4, 513)
    assert importance.shape == (4, 512)
    assert (rows.batch(4)[0] == tokens).all()
    assert (rows.batch(5)[0] != tokens).any()


def test_messages_are_encoded_as_the_chat_template_writes_them(rows: Rows) -> None:
    messages = SKILLS["recall"](random.Random(1), MATERIAL, 400, False)
    found, weights = rows.encode_messages(messages)
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages) + "<|endoftext|>"
    assert found == rows.encode(text)
    learned = rows.bpe.decode([t for t, w in zip(found, weights, strict=True) if w == EXACT])
    assert learned == "".join(m["content"] for m in messages if "exact" in m)
    assert PROMPT in weights


@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize("skill", SKILLS)
def test_a_probe_fits_and_its_reply_is_exact(rows: Rows, skill: str, held_out: bool) -> None:
    for seed in range(10):
        prompt, reply = probe(rows, skill, 600, held_out, random.Random(seed))
        assert len(prompt) + len(reply) <= 600
        assert rows.bpe.decode(prompt, skip_special_tokens=False).endswith("<|im_start|>assistant\n")
        assert reply[-1] == rows.bpe.token_to_id("<|im_end|>")


def test_training_never_asks_in_held_out_wordings() -> None:
    rng, label = random.Random(0), "secret word"
    held = {skills._fill(rng, wording, label=label).lower() for wording in HELD_OUT["questions"]}
    held |= {skills._fill(rng, wording, label=label, value="x").lower() for wording in HELD_OUT["statements"]}
    said = set()
    for name in ("statements", "questions", "vague"):
        for wording in skills.RECALL[name]:
            said |= {skills._fill(rng, wording, label=label, value="x").lower() for _ in range(100)}
    assert len(said) > 500
    assert not {text.rstrip(".?") for text in held} & {text.rstrip(".?") for text in said}
