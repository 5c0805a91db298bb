"""A new policy version in; the same weights inside every engine out."""
