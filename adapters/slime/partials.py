"""Groups of slime samples as bytes: what a checkpoint needs besides the data source's cursor.

    magic b"RLSP" | schema u16 | 0 u16 | payload length u64 | MessagePack [[{field: value}]] | blake2b-128 of all before

Tensors and arrays are stored as type, shape and raw bytes. Whatever is not plain data is refused by name, never
dropped: a checkpoint either holds a sample as it was, or is not written.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from lifecycle.errors import ConfigurationError, SnapshotCorrupt, SnapshotTooNew

SCHEMA = 1
MAGIC = b"RLSP"
_HEADER = struct.Struct("<4sHHQ")
_DIGEST = 16
_ARRAY = 1

Groups = Sequence[Sequence[Any]]


def encode_groups(groups: Groups) -> bytes:
    """Encode. Raises ConfigurationError naming the sample and the field that is no plain data."""
    payload = msgspec.msgpack.encode([[_packed(sample) for sample in group] for group in groups])
    body = _HEADER.pack(MAGIC, SCHEMA, 0, len(payload)) + payload
    return body + blake2b(body, digest_size=_DIGEST).digest()


def decode_groups(data: bytes, where: str, from_dict: Callable[[dict[str, Any]], Any]) -> list[list[Any]]:
    """Decode; `from_dict` is slime's `Sample.from_dict`. Raises SnapshotCorrupt or SnapshotTooNew, naming `where`."""
    if len(data) < _HEADER.size + _DIGEST:
        raise SnapshotCorrupt(where, f"{len(data)} bytes are too few")
    magic, schema, _, length = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise SnapshotCorrupt(where, "not a file of partial samples")
    if schema > SCHEMA:
        raise SnapshotTooNew(where, schema, SCHEMA)
    body, digest = data[:-_DIGEST], data[-_DIGEST:]
    if len(body) != _HEADER.size + length or blake2b(body, digest_size=_DIGEST).digest() != digest:
        raise SnapshotCorrupt(where, "length or checksum does not fit")
    decoder = msgspec.msgpack.Decoder(ext_hook=_unpacked_array)
    groups: list[list[dict[str, Any]]] = decoder.decode(body[_HEADER.size :])
    return [[from_dict(fields) for fields in group] for group in groups]


def write_file(path: Path, data: bytes) -> None:
    """Write so that a crash leaves the old file or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def _packed(sample: Any) -> dict[str, Any]:
    fields = {}
    for name, value in sample.to_dict().items():
        try:
            packed = _plain(value)
            msgspec.msgpack.encode(packed)
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigurationError(
                f"slime sample {sample.index} of group {sample.group_index} cannot be saved: its {name} is "
                f"no plain data ({error})"
            ) from None
        fields[name] = packed
    return fields


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value] if _has_arrays(value) else list(value)
    if hasattr(value, "detach"):
        return _packed_array("torch", value.detach().cpu().contiguous().numpy())
    if hasattr(value, "tobytes") and hasattr(value, "dtype"):
        return _packed_array("numpy", value)
    return value


def _has_arrays(values: Sequence[Any]) -> bool:
    return any(isinstance(item, dict | list | tuple) or hasattr(item, "dtype") for item in values)


def _packed_array(kind: str, array: Any) -> msgspec.msgpack.Ext:
    content = (kind, str(array.dtype), list(array.shape), array.tobytes())
    return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode(content))


def _unpacked_array(code: int, data: memoryview) -> Any:
    if code != _ARRAY:
        raise SnapshotCorrupt("?", f"unknown extension {code}")
    kind, dtype, shape, raw = msgspec.msgpack.decode(data)
    array = import_module("numpy").frombuffer(raw, dtype=dtype).reshape(shape).copy()
    return import_module("torch").from_numpy(array) if kind == "torch" else array
