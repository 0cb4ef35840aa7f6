"""Without this `pip install` lacks an extra, a file or a Python that the documents name."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")

ROOT = Path(__file__).parents[1]
METADATA = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = METADATA["project"]
EXTRAS = PROJECT["optional-dependencies"]
PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
MX_PYTHONS = PYTHONS[:-1]


def read(*parts):
    return ROOT.joinpath(*parts).read_text(encoding="utf-8")


def texts():
    """Yields all files that can name an extra: code, documents and build files."""
    folders = ("lbbsp_core", "lbbsp_tf", "lbbsp_mx", "tests", "docs", "examples", "benchmarks")
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.*"))]
    for path in (*files, ROOT / "README.md", ROOT / "Makefile", ROOT / "pyproject.toml"):
        if path.suffix in (".py", ".md", ".toml", "") and "site-packages" not in path.parts:
            yield path, path.read_text(encoding="utf-8")


# Pythons


def test_classifiers_and_requires_python_agree():
    prefix = "Programming Language :: Python :: "
    found = [each.removeprefix(prefix) for each in PROJECT["classifiers"] if prefix in each]
    assert found == PYTHONS
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"


def test_the_makefile_accepts_the_same_pythons():
    makefile = read("Makefile")
    found = re.search(r"for v in ([\d. ]+);", makefile).group(1).split()
    assert sorted(found) == PYTHONS
    oldest, end = re.search(r"\((3, \d+)\) <= sys.version_info < \((3, \d+)\)", makefile).groups()
    assert oldest == PYTHONS[0].replace(".", ", ")
    assert int(end.split(", ")[1]) == int(PYTHONS[-1].split(".")[1]) + 1


@pytest.mark.parametrize("parts", [("README.md",), ("Makefile",), ("docs", "install.md")])
def test_documents_name_the_same_pythons(parts):
    found = set(re.findall(r"3\.\d+ to 3\.\d+", read(*parts)))
    both = {f"{PYTHONS[0]} to {PYTHONS[-1]}", f"{MX_PYTHONS[0]} to {MX_PYTHONS[-1]}"}
    assert f"{PYTHONS[0]} to {PYTHONS[-1]}" in found
    assert found <= both


def test_the_pythons_of_mxnet_are_those_of_its_extra():
    [mxnet] = [each for each in EXTRAS["mx"] if each.startswith("mxnet")]
    first_without = re.search(r"python_version < '(3\.\d+)'", mxnet).group(1)
    assert first_without == PYTHONS[PYTHONS.index(MX_PYTHONS[-1]) + 1]
    words = first_without.replace(".", ", ")
    plugin = read("lbbsp_mx", "compat.py")
    assert f"_UNSUPPORTED_PYTHON = ({words})" in plugin
    assert f"Python {MX_PYTHONS[0]} to {MX_PYTHONS[-1]}" in plugin
    newest = MX_PYTHONS[-1].replace(".", ", ")
    assert f"newest_python=({newest})" in read("lbbsp_core", "demo", "comparison.py")


# Extras


def test_each_extra_that_a_file_names_exists():
    called = r"""(?:extra\(|reinstall\(error, )["']"""
    named = re.compile(rf"""(?:(?:lbbsp|'\.|whl)\[|EXTRAS := |{called})([a-z][a-z, -]*)[]\n"']""")
    found = {
        (path.relative_to(ROOT).as_posix(), extra.strip())
        for path, text in texts()
        for names in named.findall(text)
        for extra in names.split(",")
    }
    assert ("lbbsp_core/cli/__init__.py", "cli") in found  # the walk found them
    assert ("Makefile", "mx") in found
    found.remove(("tests/test_documents.py", "no-such-extra"))
    assert not {each for each in found if each[1] not in EXTRAS}


def test_the_extras_of_the_registry_and_the_demo_exist():
    code = read("lbbsp_core", "registry.py") + read("lbbsp_core", "demo", "comparison.py")
    found = set(re.findall(r'extra="([a-z-]+)"', code))
    found |= set(re.findall(r'Framework\("\w+", "\w+", "([a-z-]+)"', code))
    assert found
    assert found <= set(EXTRAS)


# Files


def test_the_files_of_the_manifest_exist():
    lines = [line.split() for line in read("MANIFEST.in").splitlines()]
    files = [file for kind, *files in lines if kind in ("include", "graft") for file in files]
    needed = {"tests", "docs", "examples", "benchmarks", "traces", "Makefile", "mkdocs.yml"}
    assert needed <= set(files)
    assert not [file for file in files if not (ROOT / file).exists()]
    packages = METADATA["tool"]["setuptools"]["package-data"]
    assert all(any((ROOT / name).glob(file)) for name in packages for file in packages[name])


def test_the_citation_is_of_this_version():
    assert f"\nversion: {PROJECT['version']}\n" in read("CITATION.cff")
    assert f"\nlicense: {PROJECT['license']}\n" in read("CITATION.cff")


@pytest.fixture(scope="module")
def setup():
    spec = importlib.util.spec_from_file_location("lbbsp_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_that_an_index_cannot_resolve_become_text(setup):
    picture = "![Plot](docs/a.png)\n\n*Caption.*\n\n"
    readme = f"# A\n\n{picture}B [c](d.md#e) [d.md](d.md) [f](https://g) [h](#i).\n"
    shown = setup.long_description(readme)
    assert shown == f"# A\n\n{setup.NOTE}B c: d.md d.md [f](https://g) [h](#i).\n"


def test_the_long_description_is_the_readme_with_absolute_links(setup):
    shown = setup.long_description(read("README.md"))
    links = re.findall(r"\]\(([^)]*)\)", shown)
    assert links
    assert all(link.startswith("https://") for link in links)
    for heading in re.findall(r"^#+ .*$", read("README.md"), re.MULTILINE):
        assert heading in shown
