"""`hybridkv replay`: what a deployment would see of a request trace."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hybridkv.cache import DEFAULT_POLICY, CacheLayout, named_policy
from hybridkv.cli.cache_options import BlockSizeOption, KvCacheDtypeOption, PolicyOption, StateDtypeOption
from hybridkv.cli.replay_plot import check_plot, save_plot
from hybridkv.cli.replay_sweep import KEYS, Combination, combinations
from hybridkv.cli.replay_tables import report_tables, sweep_table
from hybridkv.cli.tables import console, write
from hybridkv.errors import InputError
from hybridkv.models import compute_of, load_model
from hybridkv.plan import PlanOptions, make_plan
from hybridkv.plan.plan import DEFAULT_BLOCK_TOKENS
from hybridkv.replay import (
    ComputeModel,
    Conversations,
    ReplayReport,
    ServiceModel,
    Setting,
    Trace,
    load_tokenizer,
    load_trace,
    parse_tier,
    replay,
)
from hybridkv.replay.accelerators import accelerator as find_accelerator
from hybridkv.replay.tiers.spec import check_rule
from hybridkv.spec import DType
from hybridkv.stream import Catalogue

DEFAULT_ACCELERATOR = "h200"


def replay_command(
    trace: Annotated[
        Path, typer.Argument(help="A Mooncake trace, or JSON lines with token_ids, text or messages; or .gz.")
    ],
    model: Annotated[str, typer.Option(help="A directory with a config.json, or a name that 'hybridkv models' lists.")],
    tensor_parallel_size: Annotated[
        int,
        typer.Option("--tensor-parallel-size", "-tp", help="Tensor-parallel ranks; the memory is that of one of them."),
    ] = 1,
    memory: Annotated[str, typer.Option(help="Memory for the cache of one rank: 80GiB, 80G, 512M ...")] = "100GiB",
    kv_cache_dtype: KvCacheDtypeOption = None,
    state_dtype: StateDtypeOption = None,
    block_size: BlockSizeOption = DEFAULT_BLOCK_TOKENS,
    policy: PolicyOption = DEFAULT_POLICY,
    serial: Annotated[
        bool, typer.Option("--serial", help="One request at a time; arrival times do not count.")
    ] = False,
    prompts_only: Annotated[bool, typer.Option("--prompts-only", help="Leave out the replies.")] = False,
    limit: Annotated[int | None, typer.Option(help="Only the first requests.")] = None,
    speed: Annotated[float, typer.Option(help="Requests arrive that many times as fast.")] = 1.0,
    accelerator: Annotated[
        str, typer.Option(help="The device whose speed times requests, where no rate is given.")
    ] = DEFAULT_ACCELERATOR,
    prefill_rate: Annotated[
        float | None, typer.Option(help="Prompt tokens a second. Default: by the model's FLOPs on the accelerator.")
    ] = None,
    decode_rate: Annotated[
        float | None, typer.Option(help="Reply tokens a second of one request. Default: by the model's weights.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="For a trace of text or messages: a directory, or tokenizer.json.")
    ] = None,
    no_breakpoints: Annotated[
        bool,
        typer.Option(
            "--no-breakpoints", help="Keep no checkpoints for the ends of messages. Default: as the server does."
        ),
    ] = False,
    tier: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZE@BANDWIDTH",
            help="A store below the memory, of all ranks: 200GiB@2GB/s; with the latency of a load: 200GiB@2GB/s,1ms. "
            "Repeat it for slower ones.",
        ),
    ] = None,
    tier_loads: Annotated[
        str, typer.Option(help="What is loaded from tiers: all, as engines do; or faster: what is slower to compute.")
    ] = "all",
    tier_fill: Annotated[
        bool,
        typer.Option(
            "--tier-fill",
            help="The first tier is memory of the host: its idle room is filled with checkpoints, as engines do.",
        ),
    ] = False,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=V1,V2",
            help=f"Replay with each value; repeat it for every combination. Keys: {', '.join(KEYS)}.",
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Save a figure: .png or .svg.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: an object, or a list for a sweep.")] = False,
) -> None:
    """Replay a request trace through the cache of a model, without the model.

    Reports how many prompt tokens the cache supplies, why it does not supply the others, and what that costs.
    """
    if limit is not None and limit < 1:
        raise InputError(f"limit {limit}: replay at least 1 request")
    base = Combination(
        memory=memory,
        policy=policy,
        tensor_parallel_size=tensor_parallel_size,
        state_dtype=state_dtype,
        block_size=block_size,
        breakpoints=not no_breakpoints,
    )
    runs = combinations(base, sweep or ())
    given = [parse_tier(text) for text in tier or ()]
    check_rule(tier_loads)
    if tier_fill and not given:
        raise InputError("--tier-fill without --tier: give the host memory to fill, such as --tier 200GiB@20GB/s")
    tiers = [run.tiers(given) for run in runs]
    for run in runs:
        named_policy(run.policy)
    caches = [_cache(model, run, kv_cache_dtype, bool(given)) for run in runs]  # faults show before the long work
    services = [
        _service(
            model, run.tensor_parallel_size, accelerator, prefill_rate, decode_rate, is_timed=not serial or bool(given)
        )
        for run in runs
    ]
    if plot is not None:
        check_plot(plot)
    requests = _load(trace, tokenizer)
    requests = requests.head(limit) if limit else requests
    conversations = None if prompts_only else Conversations(requests)
    settings = [
        Setting(
            trace=requests.name,
            model=model,
            tp=run.tensor_parallel_size,
            memory_bytes=run.memory_bytes,
            block_tokens=run.block_size,
            kv_cache_dtype=kv_cache_dtype,
            state_dtype=run.state_dtype,
            policy=run.policy,
            serial=serial,
            prompts_only=prompts_only,
            speed=speed,
            accelerator=None if serial or (prefill_rate and decode_rate) else accelerator,
            tiers=run_tiers,
            tier_loads=tier_loads,
            tier_fill=tier_fill,
            breakpoints=run.breakpoints,
        )
        for run, run_tiers in zip(runs, tiers, strict=True)
    ]
    reports = _replay_all(requests, conversations, caches, settings, services)
    if plot is not None:
        save_plot(plot, reports)
    if as_json:
        found = [report.as_dict() for report in reports]
        write(json.dumps(found if sweep else found[0], indent=2))
    else:
        console().print(sweep_table(reports) if sweep else report_tables(reports[0]))


def _load(trace: Path, tokenizer: Path | None) -> Trace:
    tokenize = load_tokenizer(tokenizer) if tokenizer else None
    with _progress() as bar:
        return load_trace(trace, tokenize, progress=partial(bar.advance, bar.add_task("requests read", total=None)))


def _cache(
    model: str, run: Combination, kv_cache_dtype: str | None, has_tiers: bool
) -> tuple[CacheLayout, Catalogue | None]:
    """The layout of the memory, and what is stored of the model if there are tiers."""
    spec = load_model(
        model,
        tp=run.tensor_parallel_size,
        kv_cache_dtype=DType.parse(kv_cache_dtype) if kv_cache_dtype else None,
        state_dtype=DType.parse(run.state_dtype) if run.state_dtype else None,
    )
    plan = make_plan(spec, PlanOptions(run.memory_bytes, run.block_size))
    layout = CacheLayout.from_plan(plan)
    return layout, Catalogue(plan, layout, model) if has_tiers else None


def _service(
    model: str, tp: int, accelerator: str, prefill_rate: float | None, decode_rate: float | None, *, is_timed: bool
) -> tuple[ServiceModel | None, ComputeModel | None]:
    """How requests are timed, and their FLOPs counted. A decode step reads all active weights once."""
    compute, device = compute_of(model), find_accelerator(accelerator)
    if not is_timed:
        return None, compute
    service = ServiceModel(
        decode_tokens_per_s=device.decode_tokens_per_s(compute, tp) if decode_rate is None else decode_rate,
        prefill_tokens_per_s=prefill_rate,
        flops_per_s=tp * device.flops * device.utilisation,
        compute=compute,
    )
    return service, compute


def _replay_all(
    trace: Trace,
    conversations: Conversations | None,
    caches: Sequence[tuple[CacheLayout, Catalogue | None]],
    settings: Sequence[Setting],
    services: Sequence[tuple[ServiceModel | None, ComputeModel | None]],
) -> list[ReplayReport]:
    reports = []
    with _progress() as bar:
        runs = zip(caches, settings, services, strict=True)
        for number, ((layout, catalogue), setting, (service, compute)) in enumerate(runs, 1):
            name = f"replay {number} of {len(caches)}" if len(caches) > 1 else "replay"
            task = bar.add_task(name, total=len(trace))
            reports.append(
                replay(
                    trace,
                    layout,
                    setting,
                    service=service,
                    compute=compute,
                    conversations=conversations,
                    catalogue=catalogue,
                    progress=partial(bar.advance, task),
                )
            )
    return reports


@contextmanager
def _progress() -> Iterator[Progress]:
    """A bar on stderr, if that is a terminal."""
    screen = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=screen, disable=not screen.is_terminal, transient=True
    ) as bar:
        yield bar
