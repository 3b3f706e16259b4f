"""`hybridkv plan`: what a model's cache needs, before anything is allocated."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from hybridkv.cli.cache_options import (
    ROW_LAYERS_HELP,
    AttnPackSizeOption,
    BlockSizeOption,
    KvCacheDtypeOption,
    RowOrderOption,
    StateDtypeOption,
)
from hybridkv.cli.output_file import check_file, write_file
from hybridkv.cli.plan_page import PlannedModel, plan_page, weight_bytes
from hybridkv.cli.tables import compare_table, console, plan_tables, write
from hybridkv.errors import ConfigError, InputError, PlanError
from hybridkv.models import compute_of, load_model
from hybridkv.plan import Plan, PlanOptions, make_plan
from hybridkv.plan.gpus import GPU_COUNTS, fits_on_gpus
from hybridkv.plan.plan import DEFAULT_BLOCK_TOKENS, DEFAULT_ROW_LAYERS, DEFAULT_ROW_ORDER
from hybridkv.plan.report import plan_report
from hybridkv.spec import DType, ModelSpec
from hybridkv.units import parse_size

_MOST_TOKENS = 2**40


def plan_command(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="A directory with a config.json, a config.json, or a name that 'hybridkv models' lists.",
        ),
    ],
    tensor_parallel_size: Annotated[
        int, typer.Option("--tensor-parallel-size", "-tp", help="Tensor-parallel ranks; the plan is for one of them.")
    ] = 1,
    memory: Annotated[str, typer.Option(help="Memory for the cache of one rank: 80GiB, 80G, 512M ...")] = "80GiB",
    kv_cache_dtype: KvCacheDtypeOption = None,
    state_dtype: StateDtypeOption = None,
    block_size: BlockSizeOption = DEFAULT_BLOCK_TOKENS,
    attn_pack_size: AttnPackSizeOption = None,
    row_layers: Annotated[int, typer.Option(help=ROW_LAYERS_HELP)] = DEFAULT_ROW_LAYERS,
    row_order: RowOrderOption = DEFAULT_ROW_ORDER,
    taps: Annotated[str | None, typer.Option(help="Layers whose hidden states may be asked for: 0,12,24.")] = None,
    mtp: Annotated[
        bool, typer.Option("--mtp", help="Include the KV of the layers for multi-token prediction (MTP).")
    ] = False,
    max_model_len: Annotated[int, typer.Option(help="Length of the requests to fit, in tokens.")] = 32768,
    compare: Annotated[bool, typer.Option("--compare", help="One table, one line a model.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: an object, or a list for several models.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page for design documents, with curves.")
    ] = None,
) -> None:
    """Plan the cache of one tensor-parallel rank of a model.

    Shows its groups, pages and rows, what a token and a checkpoint cost, how many requests fit, and what one uniform
    page size would cost instead.
    """
    if max_model_len < 1:
        raise PlanError(f"max_model_len {max_model_len}: a request has at least 1 token")
    if max_model_len > _MOST_TOKENS:
        raise PlanError(f"max_model_len {str(max_model_len)[:40]}: a request has at most {_MOST_TOKENS:,} tokens")
    if html is not None:
        check_file(html, "--html")
    options = PlanOptions(parse_size(memory), block_size, attn_pack_size, row_layers, row_order)
    asked = _Asked(tensor_parallel_size, kv_cache_dtype, state_dtype, _layer_numbers(taps), mtp)
    plans = [make_plan(asked.load(model), options) for model in models]
    if html is not None:
        pages = [_planned(model, plan, asked) for model, plan in zip(models, plans, strict=True)]
        write_file(html, plan_page(pages, max_model_len, compare=compare), "--html")
    if as_json:
        reports = [plan_report(plan, max_model_len) for plan in plans]
        write(json.dumps(reports if len(reports) > 1 else reports[0], indent=2))
    elif compare:
        console().print(compare_table(plans, max_model_len))
    else:
        for plan in plans:
            console().print(plan_tables(plan, max_model_len))


@dataclass(frozen=True, slots=True)
class _Asked:
    """How models are to be read."""

    tp: int
    kv_cache_dtype: str | None
    state_dtype: str | None
    taps: list[int]
    mtp: bool

    def load(self, model: str, tp: int | None = None) -> ModelSpec:
        """The spec of one rank, at another tensor-parallel size if `tp` is given."""
        return load_model(
            model,
            tp=self.tp if tp is None else tp,
            kv_cache_dtype=DType.parse(self.kv_cache_dtype) if self.kv_cache_dtype else None,
            state_dtype=DType.parse(self.state_dtype) if self.state_dtype else None,
            taps=self.taps,
            mtp=self.mtp,
        )


def _planned(model: str, plan: Plan, asked: _Asked) -> PlannedModel:
    """What the page tells of a model besides its plan."""
    try:
        compute = compute_of(model)
    except ConfigError:  # sizes are missing that the cache does not depend on: the page says so
        compute = None
    counts = {*GPU_COUNTS, plan.model.tp}
    fits = fits_on_gpus(partial(asked.load, model), plan.options, weight_bytes(plan, compute), counts)
    return PlannedModel(plan, compute, fits)


def _layer_numbers(text: str | None) -> list[int]:
    try:
        return [int(number) for number in text.split(",")] if text else []
    except ValueError:
        raise InputError(f"taps {text!r} is not a list of layers: write it as 0,12,24") from None
