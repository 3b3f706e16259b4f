"""The demo model in vLLM: a stock checkpoint, and the same right answers, computed and from vLLM's prefix cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from hybridkv.demo import demo_document, demo_model, demo_questions

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
ASK = """
import json, sys
sys.path.append(sys.argv[2])
import stand_ins
from vllm import LLM, SamplingParams

stand_ins.install()
conversations = json.loads(sys.stdin.read())
engine = LLM(sys.argv[1], enforce_eager=True, max_model_len=4096, dtype="bfloat16", enable_prefix_caching=True)
for _ in range(2):
    outputs = engine.chat(conversations, SamplingParams(temperature=0, max_tokens=64), use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    print("ANSWERS", json.dumps({"texts": texts, "cached": [output.num_cached_tokens for output in outputs]}))
"""


def ask_vllm(conversations: list[list[dict[str, str]]]) -> list[Any]:
    done = subprocess.run(
        [sys.executable, "-c", ASK, str(demo_model()), str(Path(__file__).parent)],
        input=json.dumps(conversations),
        env={**os.environ, **SETTINGS},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.removeprefix("ANSWERS ") for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
    return [json.loads(line) for line in lines]


def test_it_answers_in_vllm() -> None:
    system = {"role": "system", "content": demo_document()}
    conversations = [[system, {"role": "user", "content": one.question}] for one in demo_questions()]
    conversations.append([{"role": "user", "content": "Who are you?"}])
    expected = [*(one.expected for one in demo_questions()), "hybridkv"]
    first, again = ask_vllm(conversations)
    for answers in (first, again):
        for text, wanted in zip(answers["texts"], expected, strict=True):
            assert wanted in text
    assert any(again["cached"])
