"""The tree that `errors.py` opens with is the tree that follows."""

import inspect
import re

from sharpen import errors


def test_the_tree_that_is_drawn_is_the_tree_that_follows():
    """Red for an error that is left out of the drawing, or drawn beneath another parent."""
    drawn, parents = {}, {0: "SharpenError"}
    for line in (errors.__doc__ or "").splitlines():
        if (found := re.match(r"([ │├└─]+)(\w+Error)\b(?: \((\w+)\))?", line)) and found.group(2) != "SharpenError":
            depth = len(found.group(1))
            parent = next(parents[above] for above in sorted(parents, reverse=True) if above < depth)
            parents = {above: name for above, name in parents.items() if above < depth} | {depth: found.group(2)}
            drawn[found.group(2)] = tuple(filter(None, (parent, found.group(3))))
    classes = {name: cls for name, cls in vars(errors).items() if inspect.isclass(cls) and name != "SharpenError"}
    assert drawn == {name: tuple(base.__name__ for base in cls.__bases__) for name, cls in classes.items()}
