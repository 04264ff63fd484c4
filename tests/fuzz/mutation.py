"""Inputs for a decoder without a fuzzer: its seeds, damaged as networks, disks and attackers damage things."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Final

_TELLING: Final = (
    b"\x00", b"\xff", b"\x7f", b"\x80", b"\xc0", b"\xc1", b"\xc7\xff", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff",
    b"\xcf" + b"\xff" * 8, b"\xd3\x80" + bytes(7), b"\xcb\x7f\xf8" + bytes(6), b"\x91" * 2000, b"\x81\xa1a" * 600,
    b"[" * 2000, b"{", b"&a [*a]", b"!!python/object:os.system", b"1e999", b"-0", b"\xef\xbb\xbf", b"\xed\xa0\x80",
    b",,,", b"\r\n",
)  # fmt: skip
"""Pieces of MessagePack, YAML, CSV and UTF-8 that decoders stumble over."""


def mutated(seeds: Sequence[bytes], count: int, seed: str) -> Iterator[bytes]:
    """The seeds themselves, then ``count`` inputs; the same ones each time."""
    rng = random.Random(seed)
    yield from seeds
    for _ in range(count):
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.randint(1, 4)):
            _damage(data, rng, seeds)
        yield bytes(data)


def _damage(data: bytearray, rng: random.Random, seeds: Sequence[bytes]) -> None:
    at = rng.randrange(len(data) + 1)
    match rng.randrange(7):
        case 0:
            del data[at:]
        case 1:
            del data[at : at + rng.randint(1, 8)]
        case 2:
            data[at:at] = rng.choice(_TELLING)
        case 3:
            data[at : at + rng.randint(1, 8)] = rng.randbytes(rng.randint(0, 8))
        case 4 if data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        case 5:
            other = rng.choice(seeds)
            data[at:] = other[rng.randrange(len(other) + 1) :]
        case _:
            data[at:at] = data[at : at + rng.randint(1, 16)]
