"""Models for applications outside of any run: served, learning from what is said to them, or recorded by a proxy.

In: requests of applications, marks of their users. Out: answers, and groups that a trainer takes. It must not know of
tasks, workflows or judges.
"""
