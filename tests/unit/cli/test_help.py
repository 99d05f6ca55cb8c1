import re
import subprocess
import sys

import pytest

from stretto.cli.main import COMMANDS


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stretto", *arguments], capture_output=True, text=True, check=False
    )


def test_help_imports_no_torch():
    code = (
        "import sys; from stretto.cli.main import main; main(['--help']);"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_imports_no_torch():
    code = "import sys, stretto; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_help_names_every_verb():
    text = run("--help").stdout
    assert all(re.search(rf"\b{verb}\b", text) for verb in COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["tarin"], "train"),
        (["train"], "RUN"),
        (["train", "x.toml", "--worker", "4"], "--workers"),
        (["bench", "stop"], "step"),
        (["lab", "--hosts", "many", "--", "true"], "many"),
    ],
)
def test_a_wrong_word_on_the_command_line_is_the_callers_mistake(arguments, expected):
    done = run(*arguments)
    assert done.returncode == 2
    assert expected in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


def test_an_unexpected_error_ends_a_process_that_has_used_gloo_with_1_and_its_traceback(tmp_path):
    """Threads of Gloo may abort a process whose interpreter ends by itself."""
    code = (
        "import sys; import stretto.comm.gloo; from stretto.cli import main\n"
        "def fail(): raise ValueError('the soup is cold')\n"
        "main.main = fail\n"
        "import atexit; atexit.register(print, 'exit handlers ran')\n"
        "class Late:\n"
        "    def __del__(self): print('the interpreter ended itself')\n"
        "late = Late()\n"
        "main.run()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 1
    assert "ValueError: the soup is cold" in done.stderr
    assert done.stdout == "exit handlers ran\n"
