"""The small tree with which a model's packed forward pass is compared with its own when it is loaded.

It has what goes wrong most easily: three levels, a segment of one token with children, one-token segments below others
and at the end of a branch, and siblings of different lengths.

Shape suffixes: N tokens of the tree, B branches, T tokens of the longest.
"""

from __future__ import annotations

import numpy as np

from sharpen.learning.trainer.packing import IndexArray, Segment

SEGMENTS = (
    Segment(start=0, stop=4, subtree_stop=17, parent=None),
    Segment(start=4, stop=5, subtree_stop=9, parent=0),
    Segment(start=5, stop=8, subtree_stop=8, parent=1),
    Segment(start=8, stop=9, subtree_stop=9, parent=1),
    Segment(start=9, stop=13, subtree_stop=17, parent=0),
    Segment(start=13, stop=14, subtree_stop=14, parent=4),
    Segment(start=14, stop=17, subtree_stop=17, parent=4),
)
POSITIONS_N: IndexArray = np.array([0, 1, 2, 3, 4, 5, 6, 7, 5, 4, 5, 6, 7, 8, 8, 9, 10])
BRANCHES_BT: IndexArray = np.array(
    [
        [0, 1, 2, 3, 4, 5, 6, 7, 7, 7, 7],
        [0, 1, 2, 3, 4, 8, 8, 8, 8, 8, 8],
        [0, 1, 2, 3, 9, 10, 11, 12, 13, 13, 13],
        [0, 1, 2, 3, 9, 10, 11, 12, 14, 15, 16],
    ]
)
"""The tree's tokens along each branch, its last token repeated: what comes behind a token does not change it."""
FIRST_N: IndexArray = np.unique(BRANCHES_BT, return_index=True)[1]
"""Where each token of the tree is first in the flat `BRANCHES_BT`."""


def probe_ids(vocabulary: int) -> IndexArray:
    """Return the ids of the tree's tokens."""
    ids_N: IndexArray = np.arange(1, 1 + len(POSITIONS_N)) % vocabulary
    return ids_N
