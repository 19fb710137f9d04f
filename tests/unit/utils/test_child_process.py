"""Children with an interpreter of their own: what they are told, and that they end with their parent at any time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vllm.utils.child_process import start_python

PARENT = """
import sys, time
from vllm.utils.child_process import start_python
child = start_python(sys.argv[1], b"stay", {"COLOUR": "red"})
print(child.pid, flush=True)
time.sleep(60)
"""


def is_alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_child_gets_message_and_variables_and_its_status_is_known(capfd) -> None:
    child = start_python("tests.helpers.child_entry", b"go", {"COLOUR": "blue"})
    assert child.wait(20) == 7
    assert child.stdin is not None
    child.stdin.close()
    assert capfd.readouterr().out.split() == [str(child.pid), "go", "blue", "True"]


def test_a_child_that_cannot_be_imported_ends_and_the_parent_is_told(capfd) -> None:
    child = start_python("tests.helpers.no_such_entry", bytes(1 << 20), {})
    assert child.wait(20) == 1
    assert child.stdin is not None
    child.stdin.close()
    assert "ModuleNotFoundError" in capfd.readouterr().err


@pytest.mark.parametrize("entry", ["child_entry", "slow_entry"])
def test_a_child_ends_with_its_parent_also_while_it_imports(entry) -> None:
    command = [sys.executable, "-c", PARENT, f"tests.helpers.{entry}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ}) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        if entry == "child_entry":
            assert parent.stdout.readline().split()[1:] == ["stay", "red", "True"]
        assert is_alive(pid)
        parent.kill()
    deadline = time.monotonic() + 10
    while is_alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)
