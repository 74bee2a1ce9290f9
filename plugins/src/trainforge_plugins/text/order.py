"""The order in which an epoch visits its rows: a keyed permutation that needs no memory."""

from __future__ import annotations

import hashlib
import math

ROUNDS = 8
MASK = (1 << 64) - 1


class Permutation:
    """A bijection of `range(size)` keyed by (seed, epoch); any element is computed directly.

    So every rank, at any world size and any position, finds its rows without a list of them. A generalized Feistel
    network on pairs (left, right) with left < a and right < b, where a·b is just above `size`; a value outside the
    range is sent through the network again until it falls inside ("cycle walking"). Both ideas are from
    J. Black and P. Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002.
    """

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        self.size = size
        self._left = max(1, math.isqrt(max(0, size - 1)) + 1)
        self._right = max(1, -(-size // self._left))
        digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * ROUNDS).digest()
        self._keys = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(ROUNDS)]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        """The element at `index`.

        Raises:
            IndexError: it is outside of the permutation.
        """
        if not 0 <= index < self.size:
            raise IndexError(index)
        value = self._once(index)
        while value >= self.size:
            value = self._once(value)
        return value

    def _once(self, value: int) -> int:
        right, left = divmod(value, self._left)
        for i in range(0, ROUNDS, 2):
            left = (left + _mix(self._keys[i] ^ right)) % self._left
            right = (right + _mix(self._keys[i + 1] ^ left)) % self._right
        return right * self._left + left


def _mix(value: int) -> int:
    """Scramble 64 bits (the finalizer of SplitMix64, by G. Steele, D. Lea and C. Flood, 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)
