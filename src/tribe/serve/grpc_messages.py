"""The messages of the gRPC service of the Open Inference Protocol, made from a table when they are first used.

A table, and no generated file: protoc's output belongs to one version of protobuf and registers its messages in the
pool that all of a process shares, where the same messages of another package, such as tritonclient, would be refused.
The
numbers and types of the fields are those of the published protocol. Of a model's configuration only the fields that are
filled in are here; clients skip what they do not find.
"""

import functools
import importlib
from typing import Any

PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"
KINDS = {
    "bool": 8,
    "int32": 5,
    "int64": 3,
    "uint32": 13,
    "uint64": 4,
    "float": 2,
    "double": 1,
    "string": 9,
    "bytes": 12,
}
ENUM, MESSAGE = 14, 11
OPTIONAL, REPEATED = 1, 3

# message -> its fields: number, name, type. "*" before a type: repeated; "%": a map from text to this message; "|": one
# of several. A dotted name is a message inside another.
MESSAGES: dict[str, list[tuple[int, str, str]]] = {
    "ServerLiveRequest": [],
    "ServerLiveResponse": [(1, "live", "bool")],
    "ServerReadyRequest": [],
    "ServerReadyResponse": [(1, "ready", "bool")],
    "ModelReadyRequest": [(1, "name", "string"), (2, "version", "string")],
    "ModelReadyResponse": [(1, "ready", "bool")],
    "ServerMetadataRequest": [],
    "ServerMetadataResponse": [(1, "name", "string"), (2, "version", "string"), (3, "extensions", "*string")],
    "ModelMetadataRequest": [(1, "name", "string"), (2, "version", "string")],
    "ModelMetadataResponse": [
        (1, "name", "string"),
        (2, "versions", "*string"),
        (3, "platform", "string"),
        (4, "inputs", "*ModelMetadataResponse.TensorMetadata"),
        (5, "outputs", "*ModelMetadataResponse.TensorMetadata"),
    ],
    "ModelMetadataResponse.TensorMetadata": [(1, "name", "string"), (2, "datatype", "string"), (3, "shape", "*int64")],
    "InferParameter": [
        (1, "bool_param", "|bool"),
        (2, "int64_param", "|int64"),
        (3, "string_param", "|string"),
        (4, "double_param", "|double"),
        (5, "uint64_param", "|uint64"),
    ],
    "InferTensorContents": [
        (1, "bool_contents", "*bool"),
        (2, "int_contents", "*int32"),
        (3, "int64_contents", "*int64"),
        (4, "uint_contents", "*uint32"),
        (5, "uint64_contents", "*uint64"),
        (6, "fp32_contents", "*float"),
        (7, "fp64_contents", "*double"),
        (8, "bytes_contents", "*bytes"),
    ],
    "ModelInferRequest": [
        (1, "model_name", "string"),
        (2, "model_version", "string"),
        (3, "id", "string"),
        (4, "parameters", "%InferParameter"),
        (5, "inputs", "*ModelInferRequest.InferInputTensor"),
        (6, "outputs", "*ModelInferRequest.InferRequestedOutputTensor"),
        (7, "raw_input_contents", "*bytes"),
    ],
    "ModelInferRequest.InferInputTensor": [
        (1, "name", "string"),
        (2, "datatype", "string"),
        (3, "shape", "*int64"),
        (4, "parameters", "%InferParameter"),
        (5, "contents", "InferTensorContents"),
    ],
    "ModelInferRequest.InferRequestedOutputTensor": [(1, "name", "string"), (2, "parameters", "%InferParameter")],
    "ModelInferResponse": [
        (1, "model_name", "string"),
        (2, "model_version", "string"),
        (3, "id", "string"),
        (4, "parameters", "%InferParameter"),
        (5, "outputs", "*ModelInferResponse.InferOutputTensor"),
        (6, "raw_output_contents", "*bytes"),
    ],
    "ModelInferResponse.InferOutputTensor": [
        (1, "name", "string"),
        (2, "datatype", "string"),
        (3, "shape", "*int64"),
        (4, "parameters", "%InferParameter"),
        (5, "contents", "InferTensorContents"),
    ],
    "ModelStreamInferResponse": [(1, "error_message", "string"), (2, "infer_response", "ModelInferResponse")],
    "ModelConfigRequest": [(1, "name", "string"), (2, "version", "string")],
    "ModelConfigResponse": [(1, "config", "ModelConfig")],
    "ModelConfig": [
        (1, "name", "string"),
        (2, "platform", "string"),
        (17, "backend", "string"),
        (4, "max_batch_size", "int32"),
        (5, "input", "*ModelInput"),
        (6, "output", "*ModelOutput"),
        (14, "parameters", "%ModelParameter"),
    ],
    "ModelParameter": [(1, "string_value", "string")],
    "ModelInput": [(1, "name", "string"), (2, "data_type", "DataType"), (4, "dims", "*int64")],
    "ModelOutput": [(1, "name", "string"), (2, "data_type", "DataType"), (3, "dims", "*int64")],
}
DATA_TYPES = (
    "INVALID",
    "BOOL",
    "UINT8",
    "UINT16",
    "UINT32",
    "UINT64",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "FP16",
    "FP32",
)
CHOICE = "parameter_choice"  # the only choice between fields


@functools.cache
def message_classes() -> dict[str, Any]:
    """The class of each message, by its name."""
    google = "google.protobuf"
    parts = [
        importlib.import_module(f"{google}.{name}") for name in ("descriptor_pb2", "descriptor_pool", "message_factory")
    ]
    descriptor_pb2, descriptor_pool, message_factory = parts
    file = descriptor_pb2.FileDescriptorProto(name="tribe/serve/inference.proto", package=PACKAGE, syntax="proto3")
    kinds = file.enum_type.add(name="DataType")
    for number, name in enumerate(DATA_TYPES):
        kinds.value.add(name=f"TYPE_{name}", number=number)
    made: dict[str, Any] = {}
    for full, fields in MESSAGES.items():  # an outer message stands before those in it
        outer, _, name = full.rpartition(".")
        made[full] = (made[outer].nested_type if outer else file.message_type).add(name=name)
        for field in fields:
            _add_field(made[full], full, *field)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in MESSAGES}


def _add_field(message: Any, full: str, number: int, name: str, kind: str) -> None:
    mark, plain = (kind[0], kind[1:]) if kind[0] in "*%|" else ("", kind)
    field = message.field.add(name=name, number=number, label=REPEATED if mark in ("*", "%") and mark else OPTIONAL)
    if mark == "%":
        entry = message.nested_type.add(name="".join(part.title() for part in name.split("_")) + "Entry")
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, label=OPTIONAL, type=KINDS["string"])
        _typed(entry.field.add(name="value", number=2, label=OPTIONAL), plain)
        plain = f"{full}.{entry.name}"
    _typed(field, plain)
    if mark == "|":
        if not message.oneof_decl:
            message.oneof_decl.add(name=CHOICE)
        field.oneof_index = 0


def _typed(field: Any, kind: str) -> None:
    if kind in KINDS:
        field.type = KINDS[kind]
    else:
        field.type, field.type_name = ENUM if kind == "DataType" else MESSAGE, f".{PACKAGE}.{kind}"
