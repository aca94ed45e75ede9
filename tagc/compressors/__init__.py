"""Compression methods by name. To add one: a class with a message, a line here, a file in conf/."""

from __future__ import annotations

from tagc.compressors.base import BucketSpec, BucketStats, Compressor, Kind, Part, Payload
from tagc.compressors.dense import Dense, DenseBf16, Noop
from tagc.compressors.packed import Packed
from tagc.compressors.quantize import Int4, Int8
from tagc.compressors.tagc import Tagc

COMPRESSORS: dict[str, type[Compressor]] = {
    "noop": Noop,
    "fsdp": Dense,
    "bf16": DenseBf16,
    "lhc": Tagc,
    "tagc": Tagc,
    "tagc2": Tagc,
    "packed": Packed,
    "int8": Int8,
    "int4": Int4,
}

__all__ = ["COMPRESSORS", "BucketSpec", "BucketStats", "Compressor", "Dense", "Kind", "Part", "Payload"]
