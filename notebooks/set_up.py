import importlib.metadata
import os
import pathlib
import shutil
import subprocess
import sys

# On Colab: the address of a git repository of calm_jax. Leave it empty if this notebook is in a clone.
REPOSITORY = ""

here = pathlib.Path.cwd()
clones = (
    path
    for path in (here, here.parent, here / "calm_jax")
    if (path / "configs/quickstart.py").exists()
)
root = next(clones, None)
if root is None:
    if not REPOSITORY:
        raise SystemExit(
            "This folder is not a clone of calm_jax: set REPOSITORY above to an address to clone it from."
        )
    subprocess.run(["git", "clone", "--quiet", REPOSITORY, "calm_jax"], check=True)
    root = here / "calm_jax"
os.chdir(root)
sys.path.insert(0, str(root))
try:
    importlib.metadata.version("calm_jax")
    import matplotlib  # noqa: F401
    import safetensors  # noqa: F401
except ImportError:
    accelerator = (
        ",cuda" if shutil.which("nvidia-smi") else ",tpu" if "TPU_NAME" in os.environ else ""
    )
    extras = f".[interop,plot{accelerator}]"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "-e", extras], check=True)

# A TPU belongs to one process. So this one leaves it to the commands that train, and uses it only after the last of them.
show_devices = """
import jax
print(f"jax {jax.__version__} on {jax.devices()[0].device_kind} ({jax.default_backend()}), {jax.device_count()} device(s)")
"""
done = subprocess.run(
    [sys.executable, "-c", show_devices], check=True, stdout=subprocess.PIPE, text=True
)
print(done.stdout, end="")
