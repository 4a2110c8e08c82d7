"""``tribe serve``: serve one network to many streams over HTTP and gRPC. Without options: real digits, locally."""

import logging
import re
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from torch import Tensor, nn

import tribe
from tribe.cli.commands import app
from tribe.cli.custom import method_name
from tribe.cli.networks import DIGITS, load_network, name_of_network
from tribe.cli.options import Device, parse_overrides
from tribe.cli.output import messages, note, print_message
from tribe.core.precision import choose_device
from tribe.data.images import image_size, is_image_file, read_images

MOST_CLEAN = 1000  # clean images that a guard is fitted to; a few hundred are enough
SHOWN = 10  # names of streams in a message
PARTS = "server", "policy", "limits", "guard"  # components of --set, beside the method
NO_TOKENS = (
    "it listens beyond this machine and has no tokens, as limits.open says: everybody who reaches it may do "
    "everything. --tokens FILE says who may do what"
)

MethodName = Annotated[
    str | None,
    typer.Option(
        help="How it adapts: a name (`tribe list methods`) or file.py:Class; tribe+time adds a time filter, "
        "tribe+guard+time also a guard.",
        show_default="tribe, or what the prepared file says",
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        help="Where streams are kept: a folder, or redis://HOST:PORT.", show_default="in memory, until it stops"
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="A field of the method (tribe.gamma=0.1), of the server (server.name=cam, server.shape=3,32,32, "
        "server.host_names=cameras.example), of its "
        "policy (policy.deadline=0.2), its limits (limits.body=67108864) or its guard (guard.lean_half=0.04, or "
        "guard.images=FOLDER: clean images to fit it to), see docs/serving.md. Repeatable.",
    ),
]
Versions = Annotated[
    list[str] | None,
    typer.Option(
        "--weights",
        help="Weights of the network, safetensors or a state dict. Repeated, with names, versions side by side, the "
        "first for new streams: 1=OLD.safetensors 2=NEW.safetensors, or 2=FILE,HEALTH with a calibration or a prepared "
        "file of its own; docs/deploying.md shows how streams move.",
        show_default="in the package, or those of a custom network",
    ),
]
Health = Annotated[
    Path | None,
    typer.Option(
        help="Watch every stream, and estimate its accuracy: a calibration, `tribe source health`.",
        show_default="none; --method tribe+watch watches without an estimate",
    ),
]


@app.command()
def serve(
    prepared: Annotated[
        Path | None,
        typer.Argument(
            help="A prepared file, `tribe prepare`: it says how the network adapts, and names it if it has a name.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Network: a name (`tribe list models`), timm/NAME or file.py:attribute.",
            show_default="the embedded network of digits",
        ),
    ] = None,
    weights: Versions = None,
    method: MethodName = None,
    data: Data = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: reached by other machines.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of HTTP; 0 takes a free one.")] = 8000,
    grpc_port: Annotated[
        int | None, typer.Option(help="Port of gRPC, the extra `grpc`; 0 takes a free one.", show_default="no gRPC")
    ] = None,
    settings: Settings = None,
    guard: Annotated[bool, typer.Option("--guard", help="Guard and watch every stream: see docs/health.md.")] = False,
    health: Health = None,
    shadow: Annotated[
        bool,
        typer.Option("--shadow", help="New streams begin in shadow: the source answers, until they are promoted."),
    ] = False,
    device: Device = "auto",
    tokens: Annotated[Path | None, typer.Option(help="JSON file that says who may do what.")] = None,
    tls: Annotated[
        tuple[Path, Path] | None, typer.Option(help="TLS: PEM files, the certificate chain and its key.")
    ] = None,
    ray: Annotated[
        int | None, typer.Option(help="Workers on Ray Serve, the extra `ray-serve`.", show_default="one, without Ray")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log events of streams, on stderr.")] = False,
) -> None:
    """Serve one network to many streams, each of which adapts: Open Inference Protocol and a plain API.

    Ctrl-C, or SIGTERM, finishes what was begun, stores every stream and exits; twice, it does not wait for clients.
    """
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(asctime)s %(levelname)s %(message)s"
    )
    with messages(redirect=False):
        from tribe.serve import Server
        from tribe.serve.config import Limits, Policy
        from tribe.serve.server import is_loopback
        from tribe.serve.versions import network_of

        ready = None if prepared is None else tribe.Prepared.load(prepared)
        if ready is not None and (method is not None or guard or health is not None):
            raise ValueError(f"{prepared} says how the network adapts: leave out --method, --guard and --health")
        model = model or DIGITS[0] if prepared is None or ready is None else name_of_network(prepared, ready, model)
        chosen = method_name(method or "tribe")
        fields = parse_overrides(settings, [chosen, *PARTS])
        first, *others = _named_weights(weights or [])
        net, image_shape = load_network(model, first.file)
        options: dict[str, Any] = {
            "name": model.rpartition("/")[2].rpartition(":")[2].partition(".")[0],
            "shape": image_shape,
            "data": data,
            "guard": _guard(net, chosen, guard, fields["guard"], image_shape),
            "health": health or first.health or False,
            "shadow": shadow,
            "policy": _build(Policy, "policy", fields["policy"]),
            "host": host,
            "tokens": tokens,
            "limits": _build(Limits, "limits", fields["limits"]),
            **fields["server"],
            **fields[chosen],
        }
        if ready is not None:
            options |= {"shape": ready.inputs.shape, "labels": ready.class_names} | fields["server"]
        versions = {first.name: net} | _further(model, others, ready or chosen, options, fields[chosen])
        if isinstance(names := options.get("host_names"), str):
            options["host_names"] = names.split(",")
        place = choose_device(device)
        if ray is not None:
            if grpc_port is not None or tls is not None:
                raise ValueError("with --ray, Ray listens: HTTP alone, without TLS. Put a proxy in front of it")
            _serve_on_ray(versions, ready or chosen, port, options | {"workers": ray, "device": place.type})
            return
        for each in versions.values():
            network_of(each).to(place)
        server = Server(versions, ready or chosen, port=port, grpc_port=grpc_port, tls=tls, **options)
        if server.service.access.is_open and not is_loopback(server.host):
            print_message("warning", NO_TOKENS)
        server.run(lambda: typer.echo(_where(server, data)))
    if unstored := server.service.worker.unstored:
        more = f" and {len(unstored) - SHOWN} more" if len(unstored) > SHOWN else ""
        words = f"stopped, and {len(unstored)} streams were not stored: {', '.join(unstored[:SHOWN])}{more}"
        print_message("error", f"{words}. They go on from their last stored states; the log above says why")
        raise typer.Exit(1)
    typer.echo("stopped" if data is None else "stopped; every stream is stored")


def _guard(
    net: nn.Module, method: str, guard: bool, fields: dict[str, Any], shape: tuple[int, ...] | None
) -> bool | tribe.Guard:
    """Return the guard of --guard, with the fields of --set guard.X; ``guard.images`` are clean images to fit it to."""
    if not fields:
        return guard
    if not guard:
        raise ValueError(f"--set guard.{next(iter(fields))} needs --guard")
    place = fields.pop("images", None)
    unfit: tribe.Guard = _build(tribe.Guard, "guard", fields)  # refuses wrong fields before images are read
    if place is None:
        return unfit
    made = tribe.Guard.fitted(net, _clean_images(Path(str(place)), shape), method, **fields)
    single = "" if made.lean_single is None else f" --set guard.lean_single={made.lean_single}"
    note(f"the guard was fitted: --set guard.lean_half={made.lean_half}{single} says the same")
    return made


def _clean_images(folder: Path, shape: tuple[int, ...] | None) -> Tensor:
    """Return pictures of one size in a folder and its folders, evenly of all: (N, C, H, W) in [0, 1]."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and is_image_file(path.name)]
    paths = paths[:: -(-len(paths) // MOST_CLEAN) or 1]
    size = image_size(paths[0]) if paths else None
    if size is None:
        raise ValueError(f"--set guard.images={folder}: no pictures are there; expected a folder of clean images")
    images = read_images(paths, size, hint="clean images have the size that the network takes", workers=None)
    return images.mean(1, keepdim=True) if shape is not None and shape[0] == 1 else images


class NamedWeights(NamedTuple):
    """A value of --weights."""

    name: str  # of the version
    file: Path | None
    health: Path | None = None  # its calibration


def _named_weights(given: list[str]) -> list[NamedWeights]:
    """Return the versions that --weights names; without a name, or without --weights, it is version 1."""
    found: list[NamedWeights] = []
    for each in given:
        match = re.fullmatch(r"([\w.-]+)=([^,]+)(?:,(.+))?", each)
        if match is None and len(given) > 1:
            raise ValueError(f"--weights {each}: several are versions, each NAME=FILE, such as 2=weights2.safetensors")
        if match is None:
            return [NamedWeights("1", Path(each))]
        name, file, health = match.groups()
        if name in [other.name for other in found]:
            raise ValueError(f"--weights {each}: each version has a name of its own, and {name} is taken")
        found.append(NamedWeights(name, Path(file), None if health is None else Path(health)))
    return found or [NamedWeights("1", None)]


def _further(
    model: str,
    given: list[NamedWeights],
    method: str | tribe.Prepared,
    options: dict[str, Any],
    fields: dict[str, Any],
) -> dict[str, Any]:
    """Return the versions after the first: networks, or fleets with a calibration of their own."""
    found, policy, prepared = dict[str, Any](), options["policy"], isinstance(method, tribe.Prepared)
    same = {"shadow": tribe.Shadow(begin=options["shadow"], demote=policy.demote), "exact": policy.exact}
    for name, file, health in given:
        if (health is None) == (prepared or bool(options["health"])):
            words = f"all versions have a calibration or a prepared file ({name}=FILE,HEALTH), or none has one"
            raise ValueError(f"--weights {name}={file}: {words}")
        net, _ = load_network(model, file)
        found[name] = net
        if health is not None and prepared:
            found[name] = tribe.fleet(net, health, **same)
        elif health is not None:
            found[name] = tribe.fleet(net, method, health=health, guard=options["guard"], **same, **fields)
    return found


def _build(kind: type[Any], part: str, fields: dict[str, Any]) -> Any:
    if unknown := sorted(fields.keys() - kind.__dataclass_fields__.keys()):
        raise ValueError(f"--set {part}.{unknown[0]}: expected one of {', '.join(kind.__dataclass_fields__)}")
    return kind(**fields)


def _serve_on_ray(versions: dict[str, Any], method: str | tribe.Prepared, port: int, options: dict[str, Any]) -> None:
    from tribe.serve import replicas
    from tribe.serve.store import shown_place

    if options["data"] is None:
        raise ValueError("--ray needs --data: its workers share their streams there, in a folder or a Redis server")

    def ready(url: str) -> None:
        place = shown_place(options["data"])
        rest = f"with {options['workers']} workers on Ray; streams are in {place}; Ctrl-C stops it"
        typer.echo(f"tribe serves {options['name']} on {url} {rest}")

    replicas.run(replicas.application(versions, method, **options), options["host"], port, ready)
    typer.echo("stopped; workers log the streams that they could not store")


def _where(server: Any, data: str | None) -> str:
    """Return one line about what is served where."""
    grpc = "" if server.grpc_address is None else f", gRPC on {server.grpc_address}"
    if data is None:
        place = "streams are in memory until it stops (--data DIR stores them)"
    else:
        from tribe.serve.store import shown_place

        place = f"streams are in {shown_place(data)}"
    model = server.service.model
    which = f", versions {', '.join(model.versions)}" if len(model.versions) > 1 else ""
    return f"tribe serves {model.name} ({model.method}{which}) on {server.url}{grpc}; {place}; Ctrl-C stops it"
