"""Every reader of the library: how to make a small valid file, and the call that a user reads it with."""

from fuzz import data_files, request_files, result_files, store_files, tensor_files
from fuzz.registry import NO_READERS, READERS, Reader

__all__ = [
    "NO_READERS",
    "READERS",
    "Reader",
    "data_files",
    "request_files",
    "result_files",
    "store_files",
    "tensor_files",
]
