"""The project's own files agree with each other: what the README shows exists, what is generated is fresh, what is pinned is allowed."""

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.docs_scripts import load_script
from tests.mutants.harness import Mutant, read_mutants

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
TEXT = {".cfg", ".lua", ".md", ".proto", ".py", ".pyi", ".sh", ".toml", ".txt", ".yaml", ".yml", ".jsonl", ""}


def read(name: str) -> str:
    return (ROOT / name).read_text()


def our_files() -> list[Path]:
    """What a commit would hold: everything that is not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]


def project() -> dict[str, object]:
    return tomllib.loads(read("pyproject.toml"))["project"]


def requirements() -> list[Requirement]:
    extras = project()["optional-dependencies"]
    return [Requirement(text) for text in [*project()["dependencies"], *(text for group in extras.values() for text in group)]]


def pins() -> dict[str, str]:
    lines = [line for line in read("constraints.txt").splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.!]*", line) for line in lines), "one plain pin a line, no local version"
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


# README, CHANGELOG, CONTRIBUTING


def test_the_readme_shows_the_tree_as_it_is() -> None:
    blocks = re.findall(r"^```\w*\n(.*?)^```$", read("README.md"), re.DOTALL | re.MULTILINE)
    [tree] = [block for block in blocks if block.startswith("src/tinsmith/")]
    inside = re.findall(r"(?<!\S)([a-z_]+(?:/|\.py))(?=\s)", "\n".join(line for line in tree.splitlines() if line.startswith("  ")))
    package = ROOT / "src" / "tinsmith"
    packages = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    modules = {path.name for path in package.glob("*.py") if path.name != "__init__.py"}
    assert set(inside) == packages | modules
    beside = re.findall(r"^([a-z]+)/(?=\s)", tree, re.MULTILINE)
    assert {name for name in beside if (ROOT / name).is_dir()} == {"configs", "cookbook", "deploy", "docs", "tests"}


def test_the_readme_stays_short() -> None:
    assert 400 <= len(read("README.md").split()) <= 700


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(page: str) -> None:
    targets = [target for target in re.findall(r"\]\(([^)#]+)", read(page)) if "://" not in target]
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_the_changelog_keeps_its_form() -> None:
    headings = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", read("CHANGELOG.md"), re.MULTILINE)
    assert headings[0] == ("Unreleased", "")
    released = [(Version(version), date) for version, date in headings[1:]]
    assert all(date for _, date in released)
    assert released == sorted(released, reverse=True)
    kinds = set(re.findall(r"^### (.+)$", read("CHANGELOG.md"), re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_no_file_names_a_developers_machine_or_a_package_registry() -> None:
    machine = "|".join(["home", "root", "Users", "work", "opt"])
    forbidden = re.compile(rf"(?<![\w.])/(?:{machine})/|index[-]url|find[-]links|\bTO[D]O\b|\bFIX[M]E\b")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for path in our_files()
        if path.suffix in TEXT and path.name != "LICENSE"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if forbidden.search(line)
    ]
    assert found == []


# Dependencies


def test_every_direct_dependency_is_pinned_within_its_range() -> None:
    pinned = pins()
    assert {need.name: pinned.get(canonicalize_name(need.name)) for need in requirements() if not satisfied(need, pinned)} == {}


def satisfied(need: Requirement, pinned: dict[str, str]) -> bool:
    version = pinned.get(canonicalize_name(need.name))
    return version is not None and need.specifier.contains(version)


def test_the_pins_hold_no_cuda_package() -> None:
    assert [name for name in pins() if re.search(r"cuda|cu1\d|nvidia|triton|nccl", name)] == []


def test_the_base_install_is_light() -> None:
    base = {Requirement(text).name for text in project()["dependencies"]}
    assert base & {"torch", "ray", "transformers", "fastapi", "redis", "tinker"} == set()


def test_the_oldest_protobuf_allowed_can_run_the_generated_module() -> None:
    generated = re.search(r"# Protobuf Python Version: (\S+)", read("src/tinsmith/protocol/tinker_pb2.py"))
    [need] = [need for need in requirements() if need.name == "protobuf"]
    oldest = min(Version(spec.version) for spec in need.specifier if spec.operator == ">=")
    assert generated is not None
    assert oldest >= Version(generated.group(1)), "a runtime older than the generator refuses the module"


# Checks


def test_pre_commit_runs_what_make_check_runs() -> None:
    [prerequisites] = re.findall(r"^check: (.*?)\s*##", read("Makefile"), re.MULTILINE)
    hooks = [hook for repo in yaml.safe_load(read(".pre-commit-config.yaml"))["repos"] for hook in repo["hooks"]]
    assert [hook["entry"] for hook in hooks] == [f"make --silent {target}" for target in prerequisites.split()]


def test_ci_runs_check_then_test() -> None:
    assert re.findall(r"^make (.+)$", read(".ci/run"), re.MULTILINE) == ["check", "test"]
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


# Documentation


def test_the_configuration_reference_is_fresh() -> None:
    script = load_script("config_reference")
    assert script.render() == script.PAGE.read_text(), "run: python docs/scripts/config_reference.py"


def test_the_quickstart_lists_the_configurations() -> None:
    named = re.findall(r"^\| `configs/(.+?)` \|", read("docs/index.md"), re.MULTILINE)
    assert sorted(named) == sorted(path.name for path in (ROOT / "configs").glob("*.yaml"))


def test_each_decision_is_listed_and_complete() -> None:
    pages = sorted(path.name for path in (DOCS / "adr").glob("0*.md"))
    assert [name[:4] for name in pages] == [f"{number:04}" for number in range(1, len(pages) + 1)]
    assert re.findall(r"^\| \[\d{4}\]\((.+?)\)", read("docs/adr/index.md"), re.MULTILINE) == pages
    for name in pages:
        text = (DOCS / "adr" / name).read_text()
        assert text.startswith(f"# {name[:4]} ")
        assert re.findall(r"^\*\*(\w+)\.\*\*", text, re.MULTILINE) == ["Context", "Decision", "Consequences"], name


# Planted faults


@pytest.fixture(scope="module")
def mutants() -> list[Mutant]:
    return read_mutants(ROOT / "tests" / "mutants" / "mutants.toml")


def test_there_are_enough_planted_faults_and_none_is_stale(mutants: list[Mutant]) -> None:
    assert len(mutants) >= 30
    assert [mutant.name for mutant in mutants if read(mutant.file).count(mutant.old) != 1] == []


def test_each_planted_fault_names_a_test_that_exists(mutants: list[Mutant]) -> None:
    missing = []
    for mutant in mutants:
        file, _, function = mutant.test.partition("::")
        defined = {node.name for node in ast.walk(ast.parse(read(file))) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        if function.split("::")[-1].split("[")[0] not in defined:
            missing.append(mutant.test)
    assert missing == []
