"""A package with Data-Juicer's interface, as far as it is used: written as files, so that it is imported as it is.

Its two filters and its mapper work on lists of rows.
"""

from pathlib import Path

OPS = '''
"""Operators by name, and what makes them."""


class Operator:
    def __init__(self, text_key="text", num_proc=1, auto_op_parallelism=True, **arguments):
        assert num_proc is None and not auto_op_parallelism, "in this process"
        self.text_key = text_key
        self.arguments = arguments


class TextLengthFilter(Operator):
    """Keeps texts of a least length, and says how long they are."""

    def run(self, rows):
        for row in rows:
            row["__dj__stats__"] = {**row.get("__dj__stats__", {}), "text_len": len(row[self.text_key])}
        return [row for row in rows if row["__dj__stats__"]["text_len"] >= self.arguments.get("min_len", 0)]


class QualityFilter(Operator):
    """Keeps all, and says a score and a text."""

    def run(self, rows):
        for row in rows:
            score = {"llm_quality_score": len(row[self.text_key]) / 10, "llm_quality_record": "fine"}
            row["__dj__stats__"] = {**row.get("__dj__stats__", {}), **score}
        return rows


class LowerCaseMapper(Operator):
    def run(self, rows):
        for row in rows:
            row[self.text_key] = row[self.text_key].lower()
        return rows


class RewardMapper(Operator):
    def run(self, rows):
        for row in rows:
            row["reward"] = 0.25
        return rows


class TwiceMapper(Operator):
    def run(self, rows):
        return rows + rows


class ServiceMapper(Operator):
    def __init__(self, **arguments):
        raise ConnectionError("no server at http://localhost:7070")


class LazyMapper(Operator):
    def __init__(self, **arguments):
        from data_juicer.utils.lazy_loader import LazyLoader

        LazyLoader._install_package("ray", None)


class OPERATORS:
    modules = {
        "text_length_filter": TextLengthFilter,
        "quality_filter": QualityFilter,
        "lower_case_mapper": LowerCaseMapper,
        "reward_mapper": RewardMapper,
        "twice_mapper": TwiceMapper,
        "service_mapper": ServiceMapper,
        "lazy_mapper": LazyMapper,
    }


def load_ops(process):
    return [OPERATORS.modules[name](**arguments) for item in process for name, arguments in item.items()]
'''

DATA = '''
"""A dataset that operators run on."""


class NestedDataset:
    def __init__(self, dataset):
        self.rows = dataset.to_list()

    def process(self, operators, *, open_monitor):
        for operator in operators:
            self.rows = operator.run(self.rows)
        return self

    def to_list(self):
        return self.rows
'''

LAZY = """
class LazyLoader:
    @classmethod
    def _install_package(cls, package_spec, pip_args=None):
        raise AssertionError(f"installs {package_spec}")
"""

LOGURU = '''
"""A logger without output."""


class logger:
    remove = add = staticmethod(lambda *sinks, **options: None)
'''


def write_stand_in(folder: Path) -> None:
    """Write the packages `data_juicer` and `loguru` into a folder."""
    files = {"ops.py": OPS, "core/data.py": DATA, "utils/lazy_loader.py": LAZY}
    files |= dict.fromkeys(("__init__.py", "core/__init__.py", "utils/__init__.py"), "")
    for name, text in files.items():
        path = folder / "data_juicer" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (folder / "loguru.py").write_text(LOGURU, encoding="utf-8")
