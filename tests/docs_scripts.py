"""The generators under docs/scripts as modules, for tests. They lie outside any package."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "scripts"


def load_script(name: str) -> ModuleType:
    """docs/scripts/{name}.py, run anew; what it imports from its own folder is found there."""
    path = FOLDER / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"docs_scripts_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(FOLDER))
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(FOLDER))
    return module
