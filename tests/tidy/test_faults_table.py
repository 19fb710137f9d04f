"""`tests/FAULTS.md` is true: every test of a held case exists, and every test named after a case is listed."""

from __future__ import annotations

import ast
import re
from collections import defaultdict

from tests.tidy.source_tree import ROOT

TESTS = ROOT / "tests"
NAMED = re.compile(
    r"test_(?P<kind>off|xfer|tier|store|pfx|evt|sch|met|api|val|cfg)_(?P<first>\d\d)(?P<more>(_and_\d\d)*)(_|$)"
)
ROW = re.compile(
    r"^\| (?P<case>[A-Z]+-\d\d) \| [^|]+ \| (?P<state>[^|]+) \| (?P<tests>[^|]*)\|", re.MULTILINE
)
Tests = set[tuple[str, str]]


def cases_of(name: str) -> list[str]:
    """The cases a test is named after."""
    found = NAMED.match(name)
    if found is None:
        return []
    numbers = [found["first"], *re.findall(r"\d\d", found["more"])]
    return [f"{found['kind'].upper()}-{number}" for number in numbers]


def written() -> dict[str, Tests]:
    """(file, function) of the tests of each case."""
    found: dict[str, Tests] = defaultdict(set)
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for case in cases_of(node.name):
                    found[case].add((path.relative_to(TESTS).as_posix(), node.name))
    return found


def listed() -> dict[str, tuple[str, Tests]]:
    """Per case its state, and the tests that the table names."""
    table = {}
    for row in ROW.finditer((TESTS / "FAULTS.md").read_text()):
        file, tests = "", set()
        for word in re.findall(r"`([^`]+)`", row["tests"]):
            if word.endswith(".py"):
                file = word
            else:
                tests.add((file, word))
        assert row["case"] not in table, f"{row['case']} is listed twice"
        table[row["case"]] = (row["state"], tests)
    return table


def test_the_table_of_fault_cases_is_true() -> None:
    table, tests = listed(), written()
    assert len(table) > 90
    assert sorted(set(tests) - set(table)) == [], "cases that the table does not know"
    for case, (state, named) in table.items():
        assert state == "held" or state.startswith(("open", "not applicable: ")), f"{case}: {state}"
        assert named - tests[case] == set(), f"{case}: these tests do not exist"
        assert tests[case] - named == set(), f"{case}: these tests are missing in the table"
        assert named or state != "held", f"{case} is held by no test"
