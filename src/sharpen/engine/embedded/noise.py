"""Counter-based random numbers: one uniform number per (noise key, position), independent of other requests.

In: 64-bit keys and positions. Out: uniforms in [0, 1) as float64, computed by two rounds of the splitmix64 finalizer.

Array shape suffixes: R rows.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInt64Array = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)
_ONE = np.uint64(1)


def uniforms(noise_R: UInt64Array, position_R: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return uniforms in [0, 1 - 2^-52], shape R, a pure function of each row's (key, position).

    They have 52 bits so that `u * total` stays below `total` in float64.
    """
    counter_R = (position_R.astype(np.uint64) + _ONE) * _GOLDEN
    bits_R = _mix(_mix(noise_R) + counter_R)
    uniform_R: npt.NDArray[np.float64] = (bits_R >> np.uint64(12)).astype(np.float64) * 2.0**-52
    return uniform_R


def _mix(bits_R: UInt64Array) -> UInt64Array:
    """Apply the splitmix64 finalizer (Steele, Lea and Flood, 2014)."""
    bits_R = (bits_R ^ (bits_R >> np.uint64(30))) * _MIX_A
    bits_R = (bits_R ^ (bits_R >> np.uint64(27))) * _MIX_B
    return bits_R ^ (bits_R >> np.uint64(31))
