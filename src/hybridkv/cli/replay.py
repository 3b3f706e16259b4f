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
    replay,
)
from hybridkv.replay.accelerators import accelerator as find_accelerator
from hybridkv.spec import DType

DEFAULT_ACCELERATOR = "h200"


def replay_command(
    trace: Annotated[Path, typer.Argument(help="A Mooncake trace, or JSON lines with token_ids or text; or .gz.")],
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
    tokenizer: Annotated[Path | None, typer.Option(help="For a trace of text: a directory, or tokenizer.json.")] = None,
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
    )
    runs = combinations(base, sweep or ())
    for run in runs:
        named_policy(run.policy)
    layouts = [_layout(model, run, kv_cache_dtype) for run in runs]  # faults show before the long work
    services = [
        _service(model, run.tensor_parallel_size, accelerator, prefill_rate, decode_rate, serial=serial) for run in runs
    ]
    if plot is not None:
        check_plot(plot)
    requests = load_trace(trace, load_tokenizer(tokenizer) if tokenizer else None)
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
        )
        for run in runs
    ]
    reports = _replay_all(requests, conversations, layouts, settings, services)
    if plot is not None:
        save_plot(plot, reports)
    if as_json:
        found = [report.as_dict() for report in reports]
        write(json.dumps(found if sweep else found[0], indent=2))
    else:
        console().print(sweep_table(reports) if sweep else report_tables(reports[0]))


def _layout(model: str, run: Combination, kv_cache_dtype: str | None) -> CacheLayout:
    spec = load_model(
        model,
        tp=run.tensor_parallel_size,
        kv_cache_dtype=DType.parse(kv_cache_dtype) if kv_cache_dtype else None,
        state_dtype=DType.parse(run.state_dtype) if run.state_dtype else None,
    )
    return CacheLayout.from_plan(make_plan(spec, PlanOptions(run.memory_bytes, run.block_size)))


def _service(
    model: str, tp: int, accelerator: str, prefill_rate: float | None, decode_rate: float | None, *, serial: bool
) -> tuple[ServiceModel | None, ComputeModel | None]:
    """How requests are timed, and their FLOPs counted. A decode step reads all active weights once."""
    compute, device = compute_of(model), find_accelerator(accelerator)
    if serial:
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
    layouts: Sequence[CacheLayout],
    settings: Sequence[Setting],
    services: Sequence[tuple[ServiceModel | None, ComputeModel | None]],
) -> list[ReplayReport]:
    reports = []
    with _progress() as bar:
        for number, (layout, setting, (service, compute)) in enumerate(zip(layouts, settings, services, strict=True)):
            name = f"replay {number + 1} of {len(layouts)}" if len(layouts) > 1 else "replay"
            task = bar.add_task(name, total=len(trace))
            reports.append(
                replay(
                    trace,
                    layout,
                    setting,
                    service=service,
                    compute=compute,
                    conversations=conversations,
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
