"""What the server says of itself and of its model, in the words of the Open Inference Protocol."""

from typing import Any

from tribe._version import __version__
from tribe.serve.protocol.messages import INPUT, VERSION, ModelInfo

SERVER = "tribe"
PLATFORM = "tribe_pytorch"
EXTENSIONS = ("binary_tensor_data", "sequence", "sequence(string_id)", "model_configuration", "parameters")


def server_metadata() -> dict[str, Any]:
    """What ``GET /v2`` answers."""
    return {"name": SERVER, "version": __version__, "extensions": list(EXTENSIONS)}


def model_metadata(model: ModelInfo) -> dict[str, Any]:
    """What ``GET /v2/models/{model}`` answers; -1 is any size."""
    return {
        "name": model.name,
        "versions": [VERSION],
        "platform": PLATFORM,
        "inputs": [{"name": INPUT, "datatype": "FP32", "shape": [-1, *sizes(model)]}],
        "outputs": [{"name": model.output, "datatype": "FP32", "shape": [-1, model.classes]}],
    }


def model_config(model: ModelInfo) -> dict[str, Any]:
    """What ``GET /v2/models/{model}/config`` answers: what clients of Triton read of a configuration."""
    return {
        "name": model.name,
        "platform": PLATFORM,
        "backend": SERVER,
        "max_batch_size": model.most_images,
        "input": [{"name": INPUT, "data_type": "TYPE_FP32", "dims": sizes(model)}],
        "output": [{"name": model.output, "data_type": "TYPE_FP32", "dims": [model.classes]}],
        "parameters": {"method": {"string_value": model.method}},
    }


def sizes(model: ModelInfo) -> list[int]:
    """The shape of one image; -1 is any size."""
    return [-1 if size is None else size for size in model.shape]
