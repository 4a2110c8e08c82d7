"""Recognise errors that mean that there is not enough memory, on the host or on a device.

Torch raises a plain RuntimeError for the host, and its libraries another. They are neither faults of the images nor of
a file: the same call may succeed a moment later.
"""

import torch

TEXTS = (  # of RuntimeErrors
    "DefaultCPUAllocator",
    "std::bad_alloc",
    "could not create a memory",  # oneDNN
    "out of memory",
    "_STATUS_ALLOC_FAILED",  # cuBLAS, cuDNN
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory could not be allocated.

    >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("a size does not match"))
    (True, False)
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in TEXTS)
