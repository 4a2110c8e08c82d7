"""``tribe serve``: serve one network to many streams over HTTP and gRPC. Without options: real digits, locally."""

import logging
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

import tribe
from tribe.cli.app import app
from tribe.cli.custom import method_name
from tribe.cli.options import Device, custom_network, parse_shape
from tribe.cli.output import errors_as_messages, print_message
from tribe.cli.overrides import parse_overrides
from tribe.core.precision import choose_device
from tribe.serve.config import Limits, Policy

DIGITS = "compact", "mnist"  # the embedded network and what it was trained on
THUMBNAILS = 32 * 2**20  # bytes
NO_TOKENS = (
    "it listens beyond this machine and has no tokens: everybody who reaches it may do everything. --tokens FILE says "
    "who may do what"
)

ModelName = Annotated[
    str,
    typer.Option(
        help="Network: a name (`tribe list models`), timm/NAME, torchvision/NAME, or file.py:attribute.",
    ),
]
Weights = Annotated[
    Path | None, typer.Option(help="Weights of the network.", show_default="in the package for compact")
]
MethodName = Annotated[
    str,
    typer.Option(help="How it adapts: a name (`tribe list methods`) or file.py:Class; tribe+time adds a time filter."),
]
Data = Annotated[
    str | None,
    typer.Option(
        help="Where streams are kept: a folder, or redis://HOST:PORT.", show_default="in memory, until it stops"
    ),
]
Shape = Annotated[
    str | None, typer.Option(help="Shape of one image: 3,32,32.", show_default="the network's; any size if not known")
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="A field of the method: tribe.gamma=0.1. Repeatable.")
]
Health = Annotated[
    Path | None,
    typer.Option(
        help="Watch every stream, and estimate its accuracy: a calibration, `tribe source health`.",
        show_default="none; --method tribe+watch watches without an estimate",
    ),
]
Deadline = Annotated[
    float | None,
    typer.Option(help="Milliseconds until an answer, for requests that name no timeout.", show_default="none"),
]


@app.command()
def serve(
    model: ModelName = DIGITS[0],
    weights: Weights = None,
    method: MethodName = "tribe",
    data: Data = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is heard by other machines.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of HTTP; 0 takes a free one.")] = 8000,
    grpc_port: Annotated[
        int | None, typer.Option(help="Port of gRPC, the extra `grpc`; 0 takes a free one.", show_default="no gRPC")
    ] = None,
    name: Annotated[str | None, typer.Option(help="What clients call the model.", show_default="from --model")] = None,
    shape: Shape = None,
    settings: Settings = None,
    guard: Annotated[bool, typer.Option("--guard", help="Guard and watch every stream: see docs/health.md.")] = False,
    health: Health = None,
    deadline: Deadline = None,
    device: Device = "auto",
    tokens: Annotated[Path | None, typer.Option(help="JSON file that says who may do what.")] = None,
    host_name: Annotated[
        list[str] | None, typer.Option(help="A name of this server in its clients' URLs. Repeatable.")
    ] = None,
    ssl_certfile: Annotated[Path | None, typer.Option(help="TLS: certificate chain, PEM.")] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(help="TLS: its key, PEM.")] = None,
    max_body: Annotated[int, typer.Option(help="Most megabytes of a request.")] = 32,
    max_connections: Annotated[int, typer.Option(help="Most connections at the same time.")] = Limits().connections,
    thumbnails: Annotated[bool, typer.Option("--thumbnails", help="Show the last frame of each stream.")] = False,
    ray: Annotated[bool, typer.Option("--ray", help="Several workers on Ray Serve, the extra `ray-serve`.")] = False,
    workers: Annotated[int, typer.Option(help="How many workers --ray starts.")] = 2,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log what happens to streams, on stderr.")] = False,
) -> None:
    """Serve one network to many streams, each of which adapts: Open Inference Protocol and a plain API.

    Ctrl-C, or SIGTERM, finishes what was begun, stores every stream and exits; twice, it does not wait for clients.
    """
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(asctime)s %(levelname)s %(message)s"
    )
    with errors_as_messages():
        from tribe.serve import Server

        chosen = method_name(method)
        fields = parse_overrides(settings, [chosen])[chosen]
        net, known = _network(model, weights)
        common: dict[str, Any] = {
            "name": name or model.rpartition("/")[2].rpartition(":")[2].partition(".")[0],
            "data": data,
            "guard": guard,
            "health": False if health is None else health,
            "shape": known if shape is None else parse_shape(shape),
            "policy": None if deadline is None else Policy(deadline=deadline / 1000),
            "host": host,
            "tokens": tokens,
            "limits": Limits(
                body=max_body * 2**20, connections=max_connections, thumbnails=THUMBNAILS if thumbnails else 0
            ),
            "host_names": host_name or (),
            **fields,
        }
        place = choose_device(device)
        if ray:
            _refuse_with_ray(data, grpc_port, ssl_certfile, ssl_keyfile)
            _serve_on_ray(net, chosen, port, common | {"workers": workers, "device": place.type})
            return
        server = Server(
            net.to(place),
            chosen,
            port=port,
            grpc_port=grpc_port,
            certificate=ssl_certfile,
            key=ssl_keyfile,
            **common,
        )
        if server.is_open and not server.is_local:
            print_message("warning", NO_TOKENS)
        server.run(lambda: typer.echo(_where(server, data)))
    typer.echo("stopped" if data is None else "stopped; every stream is stored")


def _refuse_with_ray(data: str | None, grpc_port: int | None, *tls: Path | None) -> None:
    if data is None:
        raise ValueError("--ray needs --data: its workers share their streams there, in a folder or a Redis server")
    if grpc_port is not None or tls != (None, None):
        raise ValueError("with --ray, Ray listens: HTTP alone, without TLS. Put a proxy in front of it")


def _serve_on_ray(net: nn.Module, method: str, port: int, options: dict[str, Any]) -> None:
    """Serve on Ray until a signal."""
    from tribe.serve import replicas

    def ready(url: str) -> None:
        rest = f"with {options['workers']} workers on Ray; streams are in {options['data']}; Ctrl-C stops it"
        typer.echo(f"tribe serves {options['name']} on {url} {rest}")

    replicas.run(replicas.application(net, method, **options), options["host"], port, ready)
    typer.echo("stopped; every stream is stored")


def _network(name: str, weights: Path | None) -> tuple[nn.Module, tuple[int, ...] | None]:
    """The network, and the shape of its images if its design says so."""
    if ":" in name:
        return custom_network(name, weights), None
    if name.startswith(("timm/", "torchvision/")):
        net = tribe.models.create(name, pretrained=weights is None)
        return net if weights is None else tribe.models.load(net, weights), None
    shape = tribe.models.architecture(name).shape
    if weights is None and name != DIGITS[0]:
        raise ValueError(f"--model {name} needs --weights FILE; without both, the embedded network of digits is served")
    return tribe.models.load(name, tribe.models.find(*DIGITS) if weights is None else weights), shape


def _where(server: Any, data: str | None) -> str:
    """One line: what is served where."""
    grpc = "" if server.grpc_address is None else f", gRPC on {server.grpc_address}"
    kept = "streams live in memory until it stops (--data DIR keeps them)" if data is None else f"streams are in {data}"
    model = server.service.model
    return f"tribe serves {model.name} ({model.method}) on {server.url}{grpc}; {kept}; Ctrl-C stops it"
