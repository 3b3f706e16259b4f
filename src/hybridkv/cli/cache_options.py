"""Options that shape a cache: the same spelling and help in every command that plans, replays or runs one."""

from __future__ import annotations

from typing import Annotated

import typer

from hybridkv.cache import POLICIES

KvCacheDtypeOption = Annotated[
    str | None, typer.Option(help="Type of K, V and latents: bf16, fp16, fp32, fp8 ... Default: the model's.")
]
StateDtypeOption = Annotated[
    str | None, typer.Option(help="Type of recurrent states. Default: what the config asks for, else fp32.")
]
BlockSizeOption = Annotated[int, typer.Option(help="Tokens in a block.")]
AttnPackSizeOption = Annotated[
    int | None, typer.Option(help="Full-attention layers that share a page. Default: all of them.")
]
RowOrderOption = Annotated[
    str, typer.Option(help="Order inside a row, outermost first: h heads, l layers, k K/V, t tokens.")
]
PolicyOption = Annotated[str, typer.Option(help=f"What is kept and evicted: {', '.join(POLICIES)}.")]

ROW_LAYERS_HELP = "Layers in a row, the unit of layerwise I/O."
