"""The `sharpen` command line, with what `init` writes (`starter`) and `doctor` looks at.

In: arguments. Out: exit codes that tell the truth, and text that fits the terminal.
"""
