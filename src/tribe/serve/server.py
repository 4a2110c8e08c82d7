"""A network as a server: ``with tribe.serve.Server(net, data="streams") as server: ...``."""

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

import torch
from torch import nn

from tribe.core.backbone import Backbone
from tribe.fields import is_whole, require
from tribe.filters import TimeFilter
from tribe.health import Calibration, Guard
from tribe.methods import AnyMethod
from tribe.serve.config import Limits, Policy
from tribe.serve.listener import Listener
from tribe.serve.protocol.messages import ModelInfo
from tribe.serve.protocol.names import NAME, RULE
from tribe.serve.security import Token
from tribe.serve.store import Store, open_store
from tribe.serve.worker import Worker
from tribe.streams import fleet


class Server(Listener):
    """Serves a trained classifier that adapts to each stream while it predicts.

    ``with`` starts it in a thread and stops it at the end; `run` serves in this thread until a signal. A server starts
    once: it stores and releases its streams when it stops.

    Args:
        model: as for `tribe.fleet`.
        method: as for `tribe.fleet`.
        name: what clients call the model.
        data: where streams are kept: a folder, or the address of a Redis server. None: in memory, until it stops.
        shape: of one image, such as (3, 32, 32); None stands for any size. Not given: the channels of the first layer,
            and any size.
        labels: names of the classes, for people.
        policy: how it trades latency, adaptation and safety.
        time: as for `tribe.fleet`.
        guard: as for `tribe.fleet`.
        health: as for `tribe.fleet`.
        classes: as for `tribe.fleet`.
        host: the address to listen on; the default is heard on this machine alone.
        port: of HTTP; 0 takes a free one.
        grpc_port: of gRPC, the extra `grpc`; None: no gRPC; 0 takes a free one.
        tokens: a file of tokens, or tokens; None: everybody may do everything.
        limits: how much is accepted.
        host_names: names under which a server without tokens may be called, beside those of this machine.
        certificate: a PEM file with the certificate chain; TLS is then required.
        key: a PEM file with its key.
        options: further ones of `tribe.fleet`, and hyper-parameters of the method.
    """

    def __init__(
        self,
        model: nn.Module | Backbone,
        method: str | AnyMethod = "tribe",
        *,
        name: str = "model",
        data: str | PathLike[str] | None = None,
        shape: Sequence[int | None] | None = None,
        labels: Sequence[str] = (),
        policy: Policy | None = None,
        time: str | TimeFilter | None = None,
        guard: bool | Guard = False,
        health: bool | Calibration | str | PathLike[str] = False,
        classes: int | None = None,
        host: str = "127.0.0.1",
        port: int = 8000,
        grpc_port: int | None = None,
        tokens: str | PathLike[str] | Sequence[Token] | None = None,
        limits: Limits | None = None,
        host_names: Sequence[str] = (),
        certificate: str | PathLike[str] | None = None,
        key: str | PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        fleet_options = {"time": time, "guard": guard, "health": health, "classes": classes, **options}
        worker, info, self.store = new_worker(model, method, name, data, shape, labels, policy, fleet_options)
        super().__init__(
            worker,
            info,
            host=host,
            port=port,
            grpc_port=grpc_port,
            tokens=tokens,
            limits=limits,
            host_names=host_names,
            certificate=certificate,
            key=key,
        )

    async def _serve(self, ready: Callable[[], None], signals: bool) -> None:
        try:
            await super()._serve(ready, signals)
        finally:
            if self.store is not None:
                self.store.close()


def new_worker(
    model: nn.Module | Backbone,
    method: str | AnyMethod,
    name: str,
    data: str | PathLike[str] | None,
    shape: Sequence[int | None] | None,
    labels: Sequence[str],
    policy: Policy | None,
    options: Mapping[str, Any],
) -> tuple[Worker, ModelInfo, Store | None]:
    """A worker, what clients read about its model, and its store; ``options`` are those of `tribe.fleet`."""
    require(NAME.fullmatch(name) is not None, f"the name of a model has {RULE}", name)
    net = model if isinstance(model, Backbone) else Backbone(model)
    streams = fleet(net, method, **options)
    require(len(labels) in (0, streams.classes), f"labels are the names of {streams.classes} classes", labels)
    built = streams.method
    info = ModelInfo(name, image_shape(net, shape), streams.classes, built.output, tuple(labels), built.name)
    store = None if data is None else open_store(data)
    return Worker(streams, store, policy=policy, model=name), info, store


def image_shape(net: Backbone, shape: Sequence[int | None] | None) -> tuple[int | None, ...]:
    """The shape of one image: the one that was given or, of the first layer, the channels and any size."""
    if shape is not None:
        fine = len(shape) > 0 and all(size is None or is_whole(size, least=1) for size in shape)
        require(fine, "shape is that of one image, such as (3, 32, 32) or (3, None, None)", shape)
        return tuple(shape)
    if net.rank is None:
        raise ValueError("the network has no convolution, so the shape of its images is not known: give shape=(...)")
    layers = [m for m in net.model.modules() if isinstance(m, torch.nn.Conv1d | torch.nn.Conv2d | torch.nn.Conv3d)]
    return (layers[0].in_channels, *[None] * (net.rank - 2))
