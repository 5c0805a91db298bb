"""The programs that we run are the documents' own: every difference is an edit listed in tests/spec/EDITS.md."""

import ast
import difflib
import re
from collections import Counter
from pathlib import Path

import pytest

HERE = Path(__file__).parent
BLOCKS = {path.stem: path.read_text(encoding="utf-8") for path in (HERE / "blocks").glob("*.txt")}
PROGRAMS = HERE / "programs"
PAGE = (HERE / "EDITS.md").read_text(encoding="utf-8")
INDENTATION_LOST = ("second-edition", "trinity-zh")
PRINTED = {"first-edition": 14, "second-edition": 16, "trinity": 9, "trinity-zh": 9}
"""How many code blocks each document has."""

Edits = Counter[tuple[str, str]]
"""(line of the document, line of the program) with how often; "" where there is none."""

SECTIONS = re.findall(r"^### `(\S+\.py)` from (.+)$\n((?:.*\n)*?)(?=^##)", PAGE, re.MULTILINE)


def lines_of(text: str, *, indented: bool) -> list[str]:
    """The lines that count: not the blank ones, and without indentation (also in comments) where it was lost."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return lines if indented else [re.sub(r"^# +", "# ", line.strip()) for line in lines]


def listed_edits(table: str) -> Edits:
    """The edits of one table of tests/spec/EDITS.md, without indentation."""
    edits: Edits = Counter()
    for before, after in re.findall(r"^\| (nothing|`.+`) \| (nothing|`.+`) \| .+ \|$", table, re.MULTILINE):
        edits[tuple("" if cell == "nothing" else cell.strip("`") for cell in (before, after))] += 1  # type: ignore[index]
    return edits


def found_edits(document: list[str], program: list[str]) -> Edits:
    """The smallest set of changed lines between the two."""
    edits: Edits = Counter()
    for kind, a, b, c, d in difflib.SequenceMatcher(None, document, program, autojunk=False).get_opcodes():
        if kind == "equal":
            continue
        old, new = document[a:b], program[c:d]
        for i in range(max(len(old), len(new))):
            pair = (old[i] if i < len(old) else "", new[i] if i < len(new) else "")
            edits[pair[0].strip(), pair[1].strip()] += 1
    return edits


def blocks_named(text: str) -> list[str]:
    return re.findall(r"`([a-z-]+-\d\d-[a-z]+)`", text)


def test_every_block_is_there():
    counts = Counter(name.rsplit("-", 2)[0] for name in BLOCKS)
    assert counts == PRINTED


@pytest.mark.parametrize(("program", "sources", "table"), SECTIONS, ids=[section[0] for section in SECTIONS])
def test_a_program_is_its_blocks_but_for_the_listed_edits(program: str, sources: str, table: str):
    names = blocks_named(sources)
    assert names
    indented = not names[0].startswith(INDENTATION_LOST)
    document = [line for name in names for line in lines_of(BLOCKS[name], indented=indented)]
    written = lines_of((PROGRAMS / program).read_text(encoding="utf-8"), indented=indented)
    assert found_edits(document, written) == listed_edits(table)


def test_every_program_has_its_list_of_edits():
    assert {section[0] for section in SECTIONS} == {path.name for path in PROGRAMS.glob("*.py")}


def test_an_unlisted_edit_is_found():
    """Changing, adding, removing and only re-indenting a line are all edits."""
    document = ["a", "    b", "c"]
    assert found_edits(document, ["a", "    b", "c"]) == Counter()
    assert found_edits(document, ["a", "    B", "c"]) == Counter({("b", "B"): 1})
    assert found_edits(document, ["a", "    b", "c", "d"]) == Counter({("", "d"): 1})
    assert found_edits(document, ["a", "c"]) == Counter({("b", ""): 1})
    assert found_edits(document, ["a", "b", "c"]) == Counter({("b", "b"): 1})


@pytest.mark.parametrize(
    ("file", "document", "indented"), [("gsm8k.yaml", "trinity", True), ("gsm8k_zh.yaml", "trinity-zh", False)]
)
def test_the_yaml_file_holds_the_blocks_as_printed(file: str, document: str, indented: bool):
    """More settings may follow beneath a block's section; the block's own lines stay together."""
    written = lines_of((PROGRAMS / file).read_text(encoding="utf-8"), indented=indented)
    for name in sorted(name for name in BLOCKS if re.fullmatch(rf"{document}-\d\d-yaml", name)):
        block = lines_of(BLOCKS[name], indented=indented)
        starts = [i for i, line in enumerate(written) if line == block[0]]
        assert any(written[i : i + len(block)] == block for i in starts), name


@pytest.mark.parametrize("edition", ["first-edition", "second-edition"])
def test_steps_are_parts_of_the_complete_program(edition: str):
    """The blocks that explain workflow, judge and call of `tune` hold no code that the complete program lacks."""
    complete = {"first-edition": "first-edition-11-python", "second-edition": "second-edition-12-python"}[edition]
    steps = {"first-edition": ("07", "09", "10"), "second-edition": ("07", "09", "10")}[edition]
    known = {without_comment(line) for line in lines_of(BLOCKS[complete], indented=False)}
    # the second edition's step shows the argument with a default, which the complete program leaves out
    known.add("auxiliary_models: Dict[str, OpenAIChatModel] | None = None,")
    # and types an argument by its base class
    known.add("task: Dict, response: Msg, auxiliary_models: Dict[str, ChatModelBase]")
    for number in steps:
        code = [without_comment(line) for line in lines_of(BLOCKS[f"{edition}-{number}-python"], indented=False)]
        missing = [line for line in code if line not in known and line and not line.startswith(("from ", "import "))]
        assert not missing, (number, missing)


def without_comment(line: str) -> str:
    return line.partition("#")[0].strip()


def test_every_block_has_a_row():
    table = PAGE.partition("## Every code block")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([a-z-]+-\d\d-[a-z]+)` \| (.+) \| (.+) \|$", table, re.MULTILINE)
    assert sorted(row[0] for row in rows) == sorted(BLOCKS)
    for block, _, cover in rows:
        assert "::" in cover or cover.startswith(("not run", "not code", "not needed")), block


def test_every_test_that_the_page_names_exists():
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", PAGE)
    assert named
    for file, test in named:
        assert test in functions_in(HERE / file), f"{file}::{test} does not exist"


def functions_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
