"""The demo model's training: its form of the model is the stock one, its data is what it says, its state survives."""

from __future__ import annotations

import itertools
import random
import re
from typing import Any

import optimizer
import pytest
import skills
import torch
import transformers
from model import Trainer, gated_delta_rule, initial_weights, linear, make_config, rms_norm
from skills import HELD_OUT, SKILLS, Material
from tokens import EXACT, PROMPT, Rows, Stage, probe

from tests.examples.conftest import MATERIAL, WORDS

VOCABULARY = 512


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


def test_the_same_step_has_the_same_batch(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    shares = {"copy": 0.25, "text": 0.25, "chat": 0.25, "skill": 0.25}
    monkeypatch.setattr(rows, "stages", [Stage(1.0, 512, shares)])
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


def all_wordings(templates: list[str]) -> set[str]:
    """Every text that templates can give, without capitals, marks and blanks: they do not make another wording."""
    found = set()
    for template in templates:
        parts = re.split(r"\[([^\[\]]*)\]", template)
        choices = [part.split("|") if i % 2 else [part] for i, part in enumerate(parts)]
        found |= {re.sub(r"[^a-z{}]", "", "".join(chosen).lower()) for chosen in itertools.product(*choices)}
    return found


@pytest.mark.parametrize("name", ["statements", "questions", "repeat", *HELD_OUT["document"]])
def test_training_never_has_held_out_wordings(name: str) -> None:
    asked = {attribute.name: attribute.asked for attribute in (*skills.PEOPLE, *skills.PLACES, *skills.TRAINS)}
    asked |= {"repeat": skills._DATA["repeat"]["asked"], "statements": skills.RECALL["statements"]}
    asked["questions"] = skills.RECALL["questions"] + skills.RECALL["vague"]
    held = all_wordings(HELD_OUT["document"].get(name) or HELD_OUT[name])
    assert len(asked[name]) > 15
    assert not held & all_wordings(asked[name])


@pytest.mark.parametrize(("name", "slots"), [("statements", "label value"), ("questions", "label")])
def test_recall_wordings_name_the_label_and_nothing_unknown(name: str, slots: str) -> None:
    filled = {slot: f"<{slot}>" for slot in slots.split()}
    assert len(set(skills.RECALL[name])) == len(skills.RECALL[name]) > 220
    for wording in skills.RECALL[name]:
        for seed in range(10):
            text = skills._fill(random.Random(seed), wording, **filled)
            assert all(f"<{slot}>" in text for slot in filled), wording
            assert not set("[]{") & set(text) - set("{" if "{{" in wording else ""), wording


@pytest.mark.parametrize(
    ("before", "template", "text", "said"),
    [
        ("Oh, one thing: ", "The {label}?", "The key?", "Oh, one thing: the key?"),
        ("Good. ", "The {label}?", "The key?", "Good. The key?"),
        ("Anyway, ", "{value} is the {label}.", "Xor is the key.", "Anyway, Xor is the key."),
        ("Anyway, ", "I'm giving you the {label}: {value}.", "I'm giving", "Anyway, I'm giving"),
        ("Right, so ", "FYI, the {label} is {value}.", "FYI, the", "Right, so FYI, the"),
    ],
)
def test_a_lead_in_keeps_the_capitals_of_values_and_names(before: str, template: str, text: str, said: str) -> None:
    assert skills._lead_in(before, text, template) == said


def test_a_fact_is_said_with_its_value_as_it_is_and_at_times_with_small_talk() -> None:
    rng, fact = random.Random(0), skills.Fact("harbour key", "Xo-47b", is_mine=True)
    said = [fact.say(rng, ["The {label} is {value}."]) for _ in range(1000)]
    assert all("y harbour key is" in text and "Xo-47b" in text for text in said)
    plain = sum(text.replace('"', "") == "My harbour key is Xo-47b." for text in said)
    assert 680 < plain < 820
    assert not any('""' in fact.say(rng, ['{label}: "{value}"']) for _ in range(200))
    assert fact.say(rng, ["THE {label} IS {value}!"]).count("MY harbour key") == 1


def test_words_are_also_rare_and_in_pairs() -> None:
    rng = random.Random(0)
    drawn = [skills.word(rng, MATERIAL).lower() for _ in range(1000)]
    assert sum(" " in text for text in drawn) > 50
    assert sum("-" in text for text in drawn) > 50
    assert 300 < sum(text in WORDS for text in drawn) < 700


def test_texts_to_repeat_are_often_a_few_words() -> None:
    texts = [skills.repeat(random.Random(seed), MATERIAL, 100)[1]["content"] for seed in range(300)]
    assert sum(len(text.split()) <= 4 for text in texts) > 100


def test_a_repeated_text_with_quotes_is_not_put_in_quotes() -> None:
    material = Material(WORDS, ['"Come in," he said, "and sit down by the fire." It was a long road.'])
    for seed in range(200):
        for asked, reply in zip(*[iter(skills.repeat(random.Random(seed), material, 100))] * 2, strict=True):
            assert reply["content"] in asked["content"]
            assert '""' not in asked["content"]
