"""Who may import whom, and what an import costs: `pytest tests/test_layers.py`; `lint-imports` checks the rest."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "triton", "transformers", "matplotlib", "pandas")
# what a bare GPU box lacks: everything but torch, triton, transformers, safetensors, numpy and what they bring
ABSENT = (
    "gguf",
    "llguidance",
    "jinja2",
    "pandas",
    "matplotlib",
    "jupyterlab",
    "ipywidgets",
    "anywidget",
    "IPython",
    "peft",
    "pyarrow",
)


def run(code: str, cwd: Path) -> str:
    """Run `code` in a new interpreter in `cwd` and return what it prints."""
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "module", ["workbench", "workbench.instrument.trace", "workbench.ordering", "workbench.config", "workbench.hub"]
)
def test_import_is_light(module, tmp_path):
    loaded = run(f"import {module}, sys; print([name for name in {HEAVY} if name in sys.modules])", tmp_path)
    assert loaded == "[]"


def test_display_opens_a_saved_run_without_torch(tmp_path):
    code = "import workbench.display, sys; print([name for name in sys.modules if name in ('torch', 'transformers')])"
    assert run(code, tmp_path) == "[]"


def test_importing_workbench_takes_less_than_a_second(tmp_path):
    code = "import time; start = time.perf_counter(); import workbench; print(time.perf_counter() - start)"
    assert min(float(run(code, tmp_path)) for _ in range(3)) < 1


@pytest.mark.parametrize("module", ["workbench.engine", "lora_kernels.mix"])
def test_engine_and_kernels_import_on_a_bare_gpu_box(module, tmp_path):
    blocked = (
        "import importlib, sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] in {ABSENT}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Block())\n"
        f"importlib.import_module('{module}')\n"
        f"print([name for name in {ABSENT} if name in sys.modules])\n"
    )
    assert run(blocked, tmp_path) == "[]"


def test_kernels_folder_shadows_no_distribution(tmp_path):
    assert not (ROOT / "kernels" / "__init__.py").exists()
    code = "import importlib.util, lora_kernels; print(list(lora_kernels.__path__)[0]); {}"
    spec = "spec = importlib.util.find_spec('kernels'); print(spec is None or spec.origin)"
    folder, resolved = run(code.format(spec), tmp_path).splitlines()
    assert folder == str(ROOT / "kernels") and str(ROOT) not in resolved
    # in the repository itself the name is at most a namespace, which any installed distribution outranks
    real = tmp_path / "kernels"
    real.mkdir()
    (real / "__init__.py").write_text("found = 'the distribution'")
    code = f"import sys; sys.path.append({str(tmp_path)!r}); import kernels; print(kernels.found)"
    assert run(code, ROOT) == "the distribution"


def test_transformers_imports_from_the_repository_folder():
    assert run("from transformers import AutoModelForCausalLM as model; print(model.__name__)", ROOT).endswith(
        "CausalLM"
    )


def test_every_package_is_shipped():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {path.parent for path in (ROOT / "workbench").rglob("__init__.py")}
    packages = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    # folders of the repository that ship under a package's name: the kernels' code, and data
    elsewhere = {
        "lora_kernels": "kernels",
        "workbench.experiments": "experiments",
        "workbench.notebooks": "notebooks",
    }
    assert set(settings["packages"]) == packages | set(elsewhere) and settings["package-dir"] == elsewhere


def test_every_static_file_of_the_display_is_shipped():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    files = [path for path in (ROOT / "workbench" / "display").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    unshipped = [p.name for p in files if p.suffix != ".py" and not any(map(p.match, patterns["workbench.display"]))]
    assert not unshipped


@pytest.mark.parametrize("room", ["workbench", "kernels", "tests", "experiments"])
def test_files_stay_short(room):
    lengths = {path: len(path.read_text().splitlines()) for path in (ROOT / room).rglob("*.py")}
    assert not [f"{path.relative_to(ROOT)}: {length}" for path, length in lengths.items() if length > 400]
