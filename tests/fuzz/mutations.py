"""Ways to damage a file. Each is a function of random numbers and bytes: the same seed makes the same file."""

import functools
import io
import json
import pickletools
import random
import struct
import warnings
import zipfile
import zlib

import numpy as np
import torch
from PIL import Image

BOUNDARIES = (0, 1, 2, 127, 128, 255, 256, 2**15 - 1, 2**15, 2**16 - 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32)
BOUNDARIES += (2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
BOMB = 3 << 30  # bytes that a few megabytes unpack to


# -- bytes ------------------------------------------------------------------------------------------------------------


def position(rng: random.Random, data: bytes) -> int:
    """A position: half of them in the first 512 bytes, where headers are, some in the last ones."""
    if not data:
        return 0
    near = rng.random()
    if near < 0.5:
        return rng.randrange(min(len(data), 512))
    return rng.randrange(max(0, len(data) - 512), len(data)) if near < 0.7 else rng.randrange(len(data))


def flip_bits(rng, data):
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        if out:
            out[position(rng, data)] ^= 1 << rng.randrange(8)
    return bytes(out)


def set_bytes(rng, data):
    at, count = position(rng, data), rng.choice((1, 2, 4, 16))
    return data[:at] + rng.randbytes(count) + data[at + count :]


def truncate(rng, data):
    return data[: rng.choice((0, 1, position(rng, data), rng.randrange(len(data) + 1), max(0, len(data) - 1)))]


def insert(rng, data):
    at = position(rng, data)
    return data[:at] + rng.randbytes(rng.choice((1, 4, 100, 5000))) + data[at:]


def remove(rng, data):
    at = position(rng, data)
    return data[:at] + data[at + rng.choice((1, 4, 100, 5000)) :]


def duplicate(rng, data):
    start = position(rng, data)
    end = min(len(data), start + rng.choice((4, 64, 1000, len(data))))
    return data[:end] + data[start:end] * rng.choice((1, 2, 20)) + data[end:]


def zero(rng, data):
    at, count = position(rng, data), rng.choice((1, 4, 64, 1000))
    return data[:at] + bytes(min(count, len(data) - at)) + data[at + count :]


def ones(rng, data):
    at, count = position(rng, data), rng.choice((1, 2, 4, 8))
    return data[:at] + b"\xff" * min(count, len(data) - at) + data[at + count :]


def boundary(rng, data):
    """A whole number at the edge of its type, in either byte order."""
    value, size = rng.choice(BOUNDARIES), rng.choice((1, 2, 4, 8))
    number = (value % 256**size).to_bytes(size, rng.choice(("little", "big")))
    at = position(rng, data) // size * size
    return data[:at] + number + data[at + size :]


def digits(rng, data):
    """Another number where one is written in decimal digits."""
    places = [i for i, byte in enumerate(data[:100_000]) if 48 <= byte < 58]
    if not places:
        return set_bytes(rng, data)
    start = end = rng.choice(places)
    while end < len(data) and 48 <= data[end] < 58:
        end += 1
    text = rng.choice(("-1", "0", "9" * 30, "9" * 5000, "1e999", "1.5", *(str(value) for value in BOUNDARIES)))
    return data[:start] + text.encode() + data[end:]


def swap(rng, data):
    a, b = sorted((position(rng, data), position(rng, data)))
    size = min(b - a, len(data) - b, rng.choice((1, 16, 512)))
    return data[:a] + data[b : b + size] + data[a + size : b] + data[a : a + size] + data[b + size :]


def replace(rng, data):
    """Another file altogether."""
    noise = rng.randbytes(rng.choice((1, 100, 5000)))
    return rng.choice((b"", b"\x00" * 5000, noise, b"[" * 100_000, b"PK\x03\x04" + noise, b"\x93NUMPY" + noise))


ANY = (flip_bits, set_bytes, truncate, insert, remove, duplicate, zero, ones, boundary, digits, swap, replace)


# -- formats ----------------------------------------------------------------------------------------------------------


def npy_header(rng, data):
    """An npy file whose header says something else about the same bytes, or is not Python."""
    if data[:6] != b"\x93NUMPY":
        return set_bytes(rng, data)
    sizes = {1: (10, "<H", 8), 2: (12, "<I", 8)}.get(data[6])
    if sizes is None:
        return set_bytes(rng, data)
    start, code, at = sizes
    (length,) = struct.unpack_from(code, data, at)
    text = data[start : start + length].decode("latin1")
    number = rng.choice(BOUNDARIES)
    shape = rng.choice(
        (f"({number},)", f"({number}, {number})", "(-1,)", "()", f"({'1, ' * 70})", "('a',)", "1", "(1.5,)")
    )
    kind = rng.choice(("|O", "|V8", "<U9", "<f8", ">i4", "|b1", "<M8[s]", "|S0", "x", "<c16", "[('a', '<i4')]", "<i9"))
    dtype = kind if kind.startswith("[") else f"'{kind}'"
    order, broken = (
        rng.choice(("True", "False", "1", "None")),
        ("(" * rng.choice((1, 500)), "'" * 3, "\n\x00", "{}", "1 +"),
    )
    header = rng.choice(
        (
            f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {_between(text, '(', ')')}, }}",
            f"{{'descr': {_between(text, chr(39), chr(39), 2)}, 'fortran_order': False, 'shape': {shape}, }}",
            f"{{'descr': {dtype}, 'fortran_order': {order}, 'shape': {shape}, }}",
            text.strip() + rng.choice(broken),
            rng.choice(broken),
        )
    )
    body = header.encode("latin1") + b"\n"
    if data[6] == 1 and len(body) > 65535:
        body = body[:65535]
    return data[:at] + struct.pack(code, len(body)) + body + data[start + length :]


def _between(text, first, last, skip=0):
    """The part of a text from a character to the next; after the key if it occurs there."""
    at = 0
    for _ in range(skip):
        at = text.find(first, at) + 1
    start = text.find(first, at)
    end = text.find(last, start + 1)
    return text[start : end + 1] if start >= 0 and end >= 0 else "''"


def members(data):
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        return {info.filename: file.read(info) for info in file.infolist()}


def zipped(parts, method=zipfile.ZIP_DEFLATED):
    """A zip file with fixed dates."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as file:
        for name, content in parts:
            file.writestr(zipfile.ZipInfo(name, (2000, 1, 1, 0, 0, 0)), content, method)
    return buffer.getvalue()


def zip_member(rng, data):
    """A whole zip file with a member that is missing, damaged, named otherwise or there twice."""
    parts = list(members(data).items())
    i = rng.randrange(len(parts))
    name, content = parts[i]
    action = rng.choice(("drop", "header", "header", "header", "bytes", "rename", "twice", "swap"))
    if action == "drop":
        del parts[i]
    elif action == "rename":
        parts[i] = rng.choice(("other.npy", "../" + name, "/" + name, name + "\x1b[31m", "a" * 60_000)), content
    elif action == "swap":
        parts[i] = name, rng.choice(parts)[1]
    elif action == "twice":
        parts.append((rng.choice((name, "more.npy")), rng.choice(ANY)(rng, content)))
    else:
        parts[i] = name, (npy_header if action == "header" else rng.choice(ANY))(rng, content)
    method = rng.choice((zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
    return zipped(parts, method)


def zip_claims(rng, data):
    """A zip file whose directory lies about sizes, methods, flags and places."""
    out = bytearray(data)
    for signature, fields in (
        (b"PK\x01\x02", (8, 10, 16, 20, 24, 28, 30, 42)),
        (b"PK\x03\x04", (6, 8, 14, 18, 22, 26)),
    ):
        at = data.find(signature)
        places = []
        while at >= 0:
            places.append(at)
            at = data.find(signature, at + 1)
        if places and rng.random() < 0.8:
            field = rng.choice(places) + rng.choice(fields)
            size = 2 if field % 2 else rng.choice((2, 4))
            out[field : field + size] = (rng.choice(BOUNDARIES) % 256**size).to_bytes(size, "little")
    return bytes(out[: len(data)])


@functools.cache
def zeros_deflated(count):
    """A raw deflate stream of this many zero bytes (a multiple of 16 MiB), without compressing them all."""
    block = 1 << 24
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    piece = packer.compress(bytes(block)) + packer.flush(zlib.Z_FULL_FLUSH)
    return piece * (count // block) + zlib.compressobj(9, zlib.DEFLATED, -15).flush()


def gzip_bomb(rng, data):
    """A gzip file of some megabytes that unpacks to gigabytes."""
    first = zlib.compressobj(9, zlib.DEFLATED, -15)
    start = first.compress(zlib.decompress(data, 31)[: rng.choice((0, 16, 10**6))]) + first.flush(zlib.Z_FULL_FLUSH)
    return b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x02\xff" + start + zeros_deflated(BOMB) + struct.pack("<II", 0, 0)


def npz_bomb(rng, data):
    """An npz file of some megabytes whose arrays have gigabytes."""
    parts = members(data)
    name = rng.choice(sorted(parts))
    header = io.BytesIO()
    kind, size = rng.choice((("|u1", 1), ("<i8", 8), ("<f4", 4), ("<U16384", 65536)))
    shape = (BOMB // size,) if kind != "<U16384" or rng.random() < 0.5 else ()
    np.lib.format.write_array_header_1_0(header, {"descr": kind, "fortran_order": False, "shape": shape})
    first = zlib.compressobj(9, zlib.DEFLATED, -15)
    content = first.compress(header.getvalue()) + first.flush(zlib.Z_FULL_FLUSH) + zeros_deflated(BOMB)
    size = BOMB + len(header.getvalue())
    whole = zipped([(other, body) for other, body in parts.items() if other != name])
    with zipfile.ZipFile(io.BytesIO(whole)) as file:
        start, count = file.start_dir, len(file.infolist())
    central, local = whole[start : whole.rindex(b"PK\x05\x06")], whole[:start]
    encoded = name.encode()
    fields = struct.pack("<HHHHHIIIHH", 20, 0, 8, 0, 33, 0, len(content), min(size, 2**32 - 1), len(encoded), 0)
    entry = b"PK\x03\x04" + fields + encoded + content
    listed = b"PK\x01\x02" + struct.pack("<H", 20) + fields + struct.pack("<HHHII", 0, 0, 0, 0, len(local)) + encoded
    end = struct.pack("<HHHHIIH", 0, 0, count + 1, count + 1, len(central + listed), len(local + entry), 0)
    return local + entry + central + listed + b"PK\x05\x06" + end


def in_order(data):
    """A safetensors file with its header in the order of names: its writer has another order every time."""
    length = int.from_bytes(data[:8], "little")
    text = json.dumps(json.loads(data[8 : 8 + length]), sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def safetensors_header(rng, data):
    """A safetensors file whose header names other shapes, types and places of the same bytes."""
    if len(data) < 8:
        return set_bytes(rng, data)
    length = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8 : 8 + length])
    except ValueError:
        return set_bytes(rng, data)
    name = rng.choice([key for key in header if key != "__metadata__"] or ["__metadata__"])
    entry, number = header[name], rng.choice((-1, *BOUNDARIES))
    action = rng.choice(("shape", "dtype", "offsets", "drop", "add", "rename", "length", "metadata"))
    if action == "shape":
        entry["shape"] = rng.choice(([number], [number, number], [], [[1]], "x", None, [0, number], [1] * 5000))
    elif action == "dtype":
        entry["dtype"] = rng.choice(("F16", "F64", "I64", "U8", "BOOL", "BF16", "F8_E4M3", "F4", "X", 1, None))
    elif action == "offsets":
        entry["data_offsets"] = rng.choice(([0, number], [number, 0], [number, number], [0], None, [0, 1, 2]))
    elif action == "drop":
        del header[name]
    elif action == "add":
        header["more"] = {"dtype": "F32", "shape": [0, number], "data_offsets": [0, 0]}
    elif action == "rename":
        header[rng.choice(("other", "", "\x1b[31m", "a" * 10_000))] = header.pop(name)
    elif action == "metadata":
        header["__metadata__"] = rng.choice((None, {}, [], {"format": 1}, {"format": "pt"}, "x"))
    text = json.dumps(header).encode()
    claimed = rng.choice((len(text), number % 2**64)) if action == "length" else len(text)
    return claimed.to_bytes(8, "little") + text + data[8 + length :]


def torch_object(rng, data):
    """A state dict of torch.save that holds something unusual."""
    tensors = torch.load(io.BytesIO(data), weights_only=True)["state_dict"]
    name = rng.choice(sorted(tensors))
    value = tensors[name]
    loop = {}
    loop["state_dict"] = loop
    deep = {"state_dict": tensors}
    for _ in range(rng.choice((3, 90))):
        deep = {"model": deep}
    unusual = (
        value.to_sparse() if value.dim() else value,
        value.to("meta"),
        torch.zeros(1).expand(rng.choice((10, 10**6)), 10**5),
        torch.zeros(()).expand(value.shape),
        value.to(rng.choice((torch.complex64, torch.int8, torch.bool, torch.float64, torch.bfloat16))),
        torch.full_like(value, rng.choice((float("nan"), 1e30))) if value.is_floating_point() else value,
        rng.choice((None, "text", 1, [], {}, b"x", 10**400)),
    )
    changed = tensors | {rng.choice((name, name, "more", "\x1b[31m", 1)): rng.choice(unusual)}
    buffer = io.BytesIO()
    torch.save(rng.choice((loop, deep, {"state_dict": changed}, {"state_dict": changed}, changed, [], 1)), buffer)
    return buffer.getvalue()


OPERATIONS = (
    *(
        b"(",
        b"0",
        b"1",
        b"2",
        b"a",
        b"b",
        b"d",
        b"e",
        b"l",
        b"o",
        b"s",
        b"t",
        b"u",
        b"R",
        b"\x81",
        b"\x85",
        b"\x86",
        b"\x87",
    ),
    *(b"}", b"]", b")", b"N", b"\x88", b"\x93", b"\x94", b"h\x00", b"h\xff", b"q\x00", b"r\xff\xff\xff\x7f", b"."),
    *(
        b"\x8a\xff" + b"\x7f" * 255,
        b"\x8e" + b"\xff" * 8,
        b"B\xff\xff\xff\x7f",
        b"\x95" + b"\xff" * 8,
        b"J\xff\xff\xff\x7f",
    ),
    *(b"cos\nsystem\n", b"cnumpy\ndtype\n", b"cnumpy\nndarray\n", b"c_codecs\nencode\n", b"I" + b"9" * 5000 + b"\n"),
    *(b"X\x02\x00\x00\x00O8", b"X\x02\x00\x00\x00u1", b"U\x02f8", b"L" + b"9" * 99 + b"L\n", b"2" * 1000, b"(" * 1000),
)


def pickle_operations(rng, data):
    """A pickle with other operations between its own."""
    try:
        places = [place for _, _, place in pickletools.genops(data) if place]
    except ValueError:
        return set_bytes(rng, data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.choice(places)
        data = data[:at] + rng.choice(OPERATIONS) * rng.choice((1, 1, 3)) + data[at + rng.choice((0, 0, 1)) :]
    return data


def torch_pickle(rng, data):
    """A file of torch.save whose pickle has other operations."""
    parts = members(data)
    name = next(name for name in parts if name.endswith("data.pkl"))
    return zipped((parts | {name: pickle_operations(rng, parts[name])}).items(), zipfile.ZIP_STORED)


def picture(rng, data):
    """A valid image of an extreme size, shape or mode, in the format of the given one."""
    with Image.open(io.BytesIO(data)) as image:
        format = image.format
    width, height = rng.choice(((1, 20_000), (20_000, 1), (1, 1), (1, 60_000), (60_000, 1), (3, 9_000), (7_000, 7_000)))
    if format in ("WEBP",):
        width, height = min(width, 16_383), min(height, 16_383)
    modes = {"JPEG": ("L", "RGB", "CMYK"), "GIF": ("L", "P", "1"), "WEBP": ("RGB", "RGBA"), "BMP": ("1", "L", "RGB")}
    modes |= {"PPM": ("1", "L", "RGB", "I"), "PNG": ("1", "L", "LA", "RGBA", "P", "RGB", "I;16")}
    mode = rng.choice(modes.get(format, ("1", "L", "RGB", "RGBA", "CMYK", "I;16", "F")))
    if width * height > 10**6:
        mode = {"WEBP": "RGB"}.get(format, "L" if format in ("JPEG", "GIF", "PPM") else "1")
    buffer = io.BytesIO()
    Image.new(mode, (width, height)).save(buffer, format)
    return buffer.getvalue()


def picture_size(rng, data):
    """An image whose header claims another size, with a valid checksum where the format has one."""
    size = [rng.choice((0, 1, 5_000, 20_000, 65_535, 2**20, 2**31 - 1)) for _ in range(2)]
    out = bytearray(data)
    if data[:4] == b"\x89PNG":
        out[16:24] = struct.pack(">II", *size)
        out[29:33] = struct.pack(">I", zlib.crc32(out[12:29]))
    elif data[:2] == b"\xff\xd8" and (at := data.find(b"\xff\xc0")) > 0:
        out[at + 5 : at + 9] = struct.pack(">HH", *(side % 65_536 for side in size))
    elif data[:3] == b"GIF":
        out[6:10] = struct.pack("<HH", *(side % 65_536 for side in size))
    elif data[:2] == b"BM":
        out[18:26] = struct.pack("<ii", size[0], rng.choice((1, -1)) * size[1])
    elif data[:2] == b"P6":
        return b"P6\n%d %d\n%d\n" % (*size, rng.choice((255, 1, 65_535))) + data[13:]
    elif data[:4] == b"RIFF":
        at = data.find(b"\x9d\x01\x2a")
        out[at + 3 : at + 7] = struct.pack("<HH", *(side % 16_384 for side in size))
    elif data[:2] in (b"II", b"MM"):
        return tiff_tag(rng, data)
    return bytes(out)


def tiff_tag(rng, data):
    """A TIFF file with another value of one of its tags."""
    out, (start,) = bytearray(data), struct.unpack_from("<I", data, 4)
    count = int.from_bytes(data[start : start + 2], "little") if start + 2 <= len(data) else 0
    at = start + 2 + 12 * rng.randrange(max(1, min(count, 20))) + rng.choice((0, 2, 4, 8))
    value = rng.choice((0, 1, 2, 5, 7, 20_000, 65_535, 2**31 - 1, 2**32 - 1))
    out[at : at + 4] = struct.pack("<I", value)
    return bytes(out[: len(data)])


FORMATS = {
    "pickle": (pickle_operations,) * 6,
    "image": (picture, picture, picture_size, picture_size),
    "npy": (npy_header,) * 6,
    "npz": (zip_member,) * 6 + (zip_claims, zip_claims, npz_bomb),
    "torch": (torch_object,) * 6 + (torch_pickle,) * 3 + (zip_member, zip_claims),
    "gzip": (gzip_bomb, *ANY),
    "safetensors": (safetensors_header,) * 6,
}


def mutate(kind: str, data: bytes, seed: int | str) -> bytes:
    """The damaged file of a seed; ``kind`` is the format of the valid one."""
    rng = random.Random(seed)
    special = FORMATS.get(kind, ())
    if special and rng.random() < 0.4:
        with warnings.catch_warnings():  # of the same name twice in a zip file
            warnings.simplefilter("ignore")
            return rng.choice(special)(rng, data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        data = rng.choice(ANY)(rng, data)
    return data
