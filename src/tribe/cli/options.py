"""Options that several commands take, said once."""

from typing import Annotated

import typer

Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")]
Precision = Annotated[
    str, typer.Option(help="tf32 (on a CPU float32), float32 for IEEE's, or bf16: a network of bfloat16.")
]
