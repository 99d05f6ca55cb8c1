"""The container's definition agrees with `make install`, and the wheel it installs is complete.

No image is built here: a build needs Apptainer and the network.
"""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEFINITION = (ROOT / "containers" / "stretto.def").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WHEEL = f"stretto-{PROJECT['version']}-py3-none-any.whl"


def sections() -> dict[str, str]:
    """Return the text of each section by name; the header's under the empty name."""
    _, *rest = re.split(r"^%(\w+)[^\n]*\n", f"%\n{DEFINITION}", flags=re.MULTILINE)
    return dict(zip(rest[::2], rest[1::2], strict=True))


def test_every_section_is_one_that_apptainer_knows():
    valid = {"labels", "files", "post", "environment", "runscript", "test"}
    assert set(sections()) == valid


def test_the_image_begins_with_a_plain_python_that_the_project_takes():
    assert re.search(r"^Bootstrap: docker$", DEFINITION, re.MULTILINE)
    image = re.search(r"^From: python:(\d+)\.(\d+)-slim\S*$", DEFINITION, re.MULTILINE)
    least = re.fullmatch(r">=(\d+)\.(\d+)", PROJECT["requires-python"])
    assert [int(part) for part in image.groups()] >= [int(part) for part in least.groups()]


@pytest.mark.parametrize("name", ["post", "environment", "runscript", "test"])
def test_a_section_of_commands_is_valid_shell(name):
    done = subprocess.run(
        ["sh", "-n"], input=sections()[name], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_every_file_that_is_copied_exists_or_is_the_wheel_of_this_version():
    sources = [line.split()[0] for line in sections()["files"].splitlines() if line.strip()]
    assert sources == [f"dist/{WHEEL}", "constraints.txt"]
    assert (ROOT / "constraints.txt").exists()


def test_the_image_installs_the_extras_of_make_install_except_dev():
    pattern = r"pip install .*?-c (\S+).*?'\S*\[([\w,]+)\]'"
    of_make = re.search(pattern, (ROOT / "Makefile").read_text(), re.DOTALL)
    of_image = re.search(pattern, sections()["post"], re.DOTALL)
    assert of_image[1] == of_make[1] == "constraints.txt"
    assert {*of_image[2].split(","), "dev"} == set(of_make[2].split(","))
    assert f"./{WHEEL}[" in sections()["post"]


def test_the_label_bears_the_version():
    assert f"image.version {PROJECT['version']}\n" in sections()["labels"]


def test_running_it_is_running_stretto():
    assert sections()["runscript"].strip() == 'exec stretto "$@"'
    assert sections()["test"].strip() == "stretto --version"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT))
    return folder / WHEEL


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_wheel_holds_every_file_of_the_package(wheel):
    source = ROOT / "src"
    files = {
        str(path.relative_to(source))
        for path in (source / "stretto").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("stretto/")}
    assert packed == files
    assert "stretto/report/templates/report.html.j2" in packed
    assert "stretto/recipes/small_runs.py" in packed


def test_the_wheel_runs_where_it_is_installed(wheel, tmp_path):
    pip("install", "--no-deps", "--target", str(tmp_path / "there"), str(wheel))
    for arguments, answer in [
        (
            ["-c", "import stretto; print(stretto.__file__)"],
            f"{tmp_path}/there/stretto/__init__.py",
        ),
        (["-m", "stretto", "--version"], PROJECT["version"]),
    ]:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path / "there")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout.strip() == answer, done.stderr
