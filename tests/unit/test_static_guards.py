"""What no line of the server may do, read from its source: reach an engine beside the gate, import the SDK, wait in a submit."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tinsmith.protocol import native
from tinsmith.protocol.native import REQUESTS, StrictPart

SOURCE = Path(__file__).resolve().parents[2] / "src" / "tinsmith"

# Packages that never hold an engine, or are one.
NOT_SERVER = {"bench", "client", "conformance", "engines", "protocol"}
# Calls that take an engine's method and run it behind the gate.
GATED = {"self._gate.when_open", "self._gate", "self._call_backend", "self._call", "self._try"}
# Facts that an engine fixes when it is built; reading them runs nothing.
FACTS = {"capacity", "max_rows"}
# Functions that run in the engine's thread already, each handed to the gate by the ones above. File -> names.
IN_ENGINE_THREAD = {"deployments/sampling_backend.py": {"_exclusively", "_add_if_ready", "_add", "_step"}}


def server_files() -> list[tuple[str, ast.Module]]:
    files = [path for path in sorted(SOURCE.rglob("*.py")) if path.relative_to(SOURCE).parts[0] not in NOT_SERVER]
    return [(str(path.relative_to(SOURCE)), ast.parse(path.read_text())) for path in files]


# R9: every caller of an engine is covered by the gate


def direct_touches(file: str, module: ast.Module) -> Iterator[str]:
    """Each place where an engine is touched that no gate stands before, as `file:line expression`."""
    parents = {child: parent for parent in ast.walk(module) for child in ast.iter_child_nodes(parent)}
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and _is_engine(node.value) and not _is_covered(file, node, parents):
            yield f"{file}:{node.lineno} {ast.unparse(node)}"


def _is_engine(node: ast.expr) -> bool:
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name.lstrip("_") == "engine"


def _is_covered(file: str, node: ast.Attribute, parents: dict[ast.AST, ast.AST]) -> bool:
    parent = parents[node]
    if node.attr in FACTS and not (isinstance(parent, ast.Call) and parent.func is node):
        return True
    if isinstance(parent, ast.Call) and node in parent.args and ast.unparse(parent.func) in GATED:
        return True
    if isinstance(parent, ast.keyword) and parent.arg == "ping" and ast.unparse(parents[parent]).startswith("Gate("):
        return True
    return bool(set(_functions_around(node, parents)) & IN_ENGINE_THREAD.get(file, set()))


def _functions_around(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> Iterator[str]:
    while node in parents:
        node = parents[node]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name


@pytest.mark.proves("R9")
def test_no_server_code_touches_an_engine_beside_the_gate() -> None:
    assert [touch for file, module in server_files() for touch in direct_touches(file, module)] == []


@pytest.mark.proves("R9")
@pytest.mark.parametrize(
    "line",
    [
        "self._engine.run(jobs)",
        "engine.load(model, files)",
        "await asyncio.to_thread(self._engine.capture, lane)",
        "self.worker.engine.ping()",
        "call = self._engine.step",
        "self._gate.when_open(lambda: self._engine.run(jobs))",
        "engine.capacity()",
    ],
)
def test_a_direct_call_would_be_found(line: str) -> None:
    assert list(direct_touches("deployments/trainer.py", ast.parse(f"async def serve(self, engine):\n    {line}")))


@pytest.mark.proves("R9")
def test_what_runs_in_the_engines_thread_is_only_ever_handed_to_the_gate() -> None:
    for file, names in IN_ENGINE_THREAD.items():
        module = ast.parse((SOURCE / file).read_text())
        defined = {node.name for node in ast.walk(module) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert names <= defined, "an exemption that nothing uses"
        parents = {child: parent for parent in ast.walk(module) for child in ast.iter_child_nodes(parent)}
        for node in ast.walk(module):
            if isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "self":
                parent = parents[node]
                is_handed = isinstance(parent, ast.Call) and node in parent.args and ast.unparse(parent.func) in {*GATED, "partial"}
                assert is_handed or set(_functions_around(node, parents)) & names, f"{file}:{node.lineno}"


# R21: the SDK stays outside


def imported(module: ast.Module) -> set[str]:
    """Top-level names of everything that a module imports, also inside functions and by name."""
    names = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add((node.module or "").partition(".")[0])
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("importlib.import_module", "import_module", "__import__")
            and node.args
        ):
            names.add(ast.unparse(node.args[0]).strip("'\"").partition(".")[0])
    return names


@pytest.mark.proves("R21")
def test_no_module_but_the_conformance_suite_imports_the_sdk() -> None:
    modules = {path.relative_to(SOURCE): ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}
    assert [str(path) for path, module in modules.items() if path.parts[0] != "conformance" and "tinker" in imported(module)] == []


@pytest.mark.parametrize(
    "line", ["import tinker", "from tinker.types import Datum", "def f():\n    import tinker.lib", "import_module('tinker')"]
)
def test_an_import_of_the_sdk_would_be_found(line: str) -> None:
    assert "tinker" in imported(ast.parse(line))


# R4: one number for every gate and executor


@pytest.mark.proves("R4")
def test_every_gate_and_every_sampling_executor_take_their_bound_from_the_same_field() -> None:
    bounds: dict[str, list[str]] = {"Gate": [], "PoolExecutor": []}
    for _, module in server_files():
        for node in ast.walk(module):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in bounds:
                [bound] = [ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg in ("bound_s", "timeout_s")]
                bounds[node.func.id].append(bound)
    assert bounds == {"Gate": ["config.execution.timeout_s"] * 2, "PoolExecutor": ["config.execution.timeout_s"]}


# R30: nothing waits for a result on behalf of a submit, beyond the inline wait

WAITING = "gateway/waiting.py"
WINDOWS = {"settled": 3, "any_settled": 3}  # name -> place of its window among the arguments
LONG_POLLS = {"retrieve_future", "retrieve_futures", "_retrieve"}  # functions that are a long poll, and nothing else
TEXT = "gateway/rendering.py"  # waits for a thread that renders, and for its caller to leave: no result of a command
STREAMS = {
    "gateway/ndjson.py",
    "gateway/streams.py",
    "gateway/native/streams.py",
}  # waits for the tokens of a stream, which its caller asked for
NO_PROMISES = "gateway/openai/generation.py"  # its protocol knows no promise: an answer comes once its samples have ended


def waits_of(file: str, module: ast.Module) -> list[tuple[str, str]]:
    """(function, window) of each wait for a settled record."""
    parents = {child: parent for parent in ast.walk(module) for child in ast.iter_child_nodes(parent)}
    found = []
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in WINDOWS and file != WAITING:
            found.append((next(_functions_around(node, parents)), ast.unparse(node.args[WINDOWS[node.func.id]])))
    return found


@pytest.mark.proves("R30")
def test_a_submit_waits_for_its_result_no_longer_than_the_inline_wait() -> None:
    waits = [wait for file, module in server_files() if file.startswith("gateway/") for wait in waits_of(file, module)]
    windows = {
        "services.config.execution.long_poll_s": LONG_POLLS,
        "services.config.execution.inline_wait_s": {function for function, _ in waits} - LONG_POLLS,
    }
    assert {window for _, window in waits} == set(windows)
    assert [wait for wait in waits if wait[0] not in windows[wait[1]]] == []


@pytest.mark.proves("R30")
def test_nothing_in_the_gateway_waits_for_an_event_but_the_long_poll_and_the_streams() -> None:
    found = [
        f"{file}:{node.lineno} {ast.unparse(node)}"
        for file, module in server_files()
        if file.startswith("gateway/") and file not in {WAITING, TEXT, NO_PROMISES, *STREAMS}
        for node in ast.walk(module)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if node.func.attr in ("register", "subscribe") or ast.unparse(node.func) in ("asyncio.wait", "waiter.wait")
    ]
    assert found == []


# R27: one mapping from record to envelope


@pytest.mark.proves("R27")
def test_an_envelope_is_built_in_one_file_of_the_server() -> None:
    builders = {
        file
        for file, module in server_files()
        for node in ast.walk(module)
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("TaskEnvelope", "model_construct")
    }
    assert builders == {"gateway/native/envelopes.py"}


# R50: no flag relaxes parsing


@pytest.mark.proves("R50")
def test_requests_are_parsed_strictly_whatever_is_configured() -> None:
    relaxed = [
        f"{file}:{node.lineno} {ast.unparse(node)}"
        for file, module in server_files()
        if file.startswith("gateway/native/")
        for node in ast.walk(module)
        if isinstance(node, ast.Call) and "validate" in ast.unparse(node.func)
        if any(keyword.arg in ("strict", "extra", "by_alias") for keyword in node.keywords)
    ]
    assert relaxed == []
    for request in (*REQUESTS, *(kind for kind in vars(native).values() if isinstance(kind, type) and issubclass(kind, StrictPart))):
        assert (request.model_config["extra"], request.model_config["strict"]) == ("forbid", True), request
