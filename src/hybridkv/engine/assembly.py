"""Builds an `EngineCore` from a loaded model and settings: plan, arena, cache, runner, streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec

from hybridkv.cache import Cache, CacheLayout, longest_fit, named_policy
from hybridkv.engine.adapters.adapters import NamedAdapter
from hybridkv.engine.core import EngineCore
from hybridkv.engine.linking.device_arena import DeviceArena
from hybridkv.engine.linking.linking import Linking
from hybridkv.engine.loading.checkpoint import LoadedModel
from hybridkv.engine.loading.host import allow_many_files, keep_freed_memory, plan_no_attention
from hybridkv.engine.runner import Runner
from hybridkv.engine.streaming.store_traffic import Streaming
from hybridkv.errors import InputError
from hybridkv.link.arena import Arena, HostArena
from hybridkv.link.geometry import Geometry
from hybridkv.link.link import Link, LinkOptions
from hybridkv.memory import Memory
from hybridkv.models.layers import with_all_taps
from hybridkv.plan import PlanOptions, make_plan
from hybridkv.plan.plan import DEFAULT_ROW_LAYERS
from hybridkv.store import Store, open_store
from hybridkv.stream import Catalogue, Streamer
from hybridkv.stream.torch_io import page_bytes
from hybridkv.units import parse_size

_MAX_NUM_BATCHED_TOKENS = {"cuda": 8192, "cpu": 1024}
"""Default token budget of a step: enough to keep the device busy, and small enough not to delay decoding requests."""

_UNUSED_KERNELS = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d", "mamba_ssm": "mamba-ssm"}
"""Packages whose kernels transformers' models take where they are installed; the engine's steps call none of them."""

_ROW_LAYERS = {"cpu": 1}
"""Number of layers that are loaded and stored together. 1 where small copies cost no more than large ones."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The checked options of `Engine`."""

    plan: PlanOptions
    policy: str
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int | None
    seed: int | None
    stream: str
    load_timeout_s: float
    compile: bool | None
    graphs: bool
    link: LinkOptions | None = None
    adapters: Mapping[str, NamedAdapter] = field(default_factory=dict)


def build_core(loaded: LoadedModel, settings: Settings, store: Store | None) -> EngineCore:
    """Build the core of a loaded model. Its streams own `store` from then on."""
    device = loaded.device
    if device.type == "cpu":
        keep_freed_memory()
    else:
        plan_no_attention()
    plan = make_plan(with_all_taps(loaded.spec), settings.plan)
    layout = CacheLayout.from_plan(plan)
    memory = Memory(plan, layout, device)
    policy = named_policy(settings.policy, lambda: loaded.compute().flops)
    cache = Cache(layout, policy=policy, run_operations=memory.run)
    runner = Runner(loaded.model, memory, layout)
    if settings.adapters:
        runner.use_adapters(settings.adapters)
    else:
        runner.compile(settings.compile)
    max_model_len = min(loaded.max_model_len, settings.max_model_len or loaded.max_model_len)
    if settings.graphs and device.type == "cuda":
        runner.use_decoder(max_rows=settings.max_num_seqs, max_tokens=longest_fit(layout, max_model_len))
        runner.capture()
    streaming = None
    if store is not None:
        allow_many_files()
        catalogue = Catalogue(plan, layout, loaded.store_identity)
        streamer = Streamer(store, catalogue, page_bytes(memory.buffer), load_timeout_s=settings.load_timeout_s)
        streaming = Streaming(streamer, cache, settings.stream)
        runner.observe(streaming, streaming.wants_step)
    linking = None
    if settings.link is not None:
        linking = _linked(settings.link, Catalogue(plan, layout, loaded.store_identity), loaded, memory, cache)
        if linking.prefills is not None:
            runner.observe(linking, linking.wants_step)
    return EngineCore(
        cache,
        runner,
        vocab_size=loaded.vocab_size,
        max_model_len=max_model_len,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        eos_ids=loaded.eos_ids,
        tokenizer=loaded.tokenizer,
        seed=settings.seed,
        streaming=streaming,
        linking=linking,
    )


def about_kernels(runner: Runner) -> str:
    """Whose kernels compute each kind of step, and which packages of kernels are installed but not used."""
    used = ", ".join(f"{kind} {maker}" for kind, maker in runner.kernels.items())
    beside = [name for package, name in _UNUSED_KERNELS.items() if find_spec(package) is not None]
    return f"{used}; not used: {', '.join(beside)}" if beside else used


def _linked(options: LinkOptions, catalogue: Catalogue, loaded: LoadedModel, memory: Memory, cache: Cache) -> Linking:
    buffer = memory.buffer
    arena: Arena = DeviceArena(buffer) if buffer.is_cuda else HostArena(memoryview(buffer.numpy()))
    geometry = Geometry.of(catalogue, arena_bytes=arena.place.nbytes, identity=loaded.store_identity)
    return Linking(Link(options, geometry, arena), cache, memory.device)


def memory_bytes(memory: str | int) -> int:
    if isinstance(memory, str):
        return parse_size(memory)
    if not isinstance(memory, int) or isinstance(memory, bool):
        raise InputError(f"memory {memory!r}: write a size such as '2GiB', or a whole number of bytes")
    return memory


def check_kinds(
    *,
    whole: Mapping[str, object],
    optional: Mapping[str, object],
    seed: int | None,
    policy: str,
    switches: Mapping[str, object],
) -> None:
    """Refuse options of the wrong kind before a model is loaded. `optional`: numbers that may be None."""
    for name, value in {**whole, **optional, "seed": seed}.items():
        may_lack = name not in whole
        if isinstance(value, bool) or not isinstance(value, int | None if may_lack else int):
            way_out = "pass a whole number, or None for a default" if may_lack else "pass a whole number"
            raise InputError(f"{name} {value!r}: {way_out}")
    if seed is not None and not -(2**63) <= seed < 2**64:
        raise InputError(f"a seed of {seed.bit_length()} bits: pass one that fits into 64")
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise InputError(f"{name} {value!r}: pass True or False")
    named_policy(str(policy))


def plan_options(
    device: str,
    *,
    memory: str | int,
    block_tokens: int,
    attn_pack_size: int | None,
    row_layers: int | None,
    row_order: str,
) -> PlanOptions:
    """Options for planning a model's cache. Refuses values that suit no model before a model is loaded."""
    options = PlanOptions(
        memory_bytes(memory),
        block_tokens,
        attn_pack_size,
        row_layers=_ROW_LAYERS.get(device, DEFAULT_ROW_LAYERS) if row_layers is None else row_layers,
        row_order=row_order,
    )
    options.check()
    return options


def check_limits(device: str, max_num_batched_tokens: int | None, max_num_seqs: int, max_model_len: int | None) -> int:
    """The token budget of a step. Refuses contradictory limits before a model is loaded."""
    if max_num_batched_tokens is None:
        max_num_batched_tokens = _MAX_NUM_BATCHED_TOKENS.get(device, _MAX_NUM_BATCHED_TOKENS["cpu"])
    if max_num_batched_tokens < 1:
        raise InputError(
            f"max_num_batched_tokens {max_num_batched_tokens}: a step has at least 1 token; leave it out for a default"
        )
    if not 1 <= max_num_seqs <= max_num_batched_tokens:
        raise InputError(
            f"max_num_seqs {max_num_seqs}: choose 1 to {max_num_batched_tokens}; each running sample needs one of the "
            f"tokens of a step (max_num_batched_tokens)"
        )
    if max_model_len is not None and max_model_len < 2:
        raise InputError(f"max_model_len {max_model_len}: a prompt and its reply have at least 2 tokens")
    return max_num_batched_tokens


def as_store(store: str | Sequence[str] | Store) -> Store:
    if isinstance(store, Store):
        return store
    if not isinstance(store, Sequence) or not all(isinstance(url, str) for url in store):
        raise InputError(f"a store of type {type(store).__name__}: pass a URL, a list of them, or an open store")
    return open_store(store)
